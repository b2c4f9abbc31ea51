"""What few rows teach of a table whose rows ran on several devices, and how its gains are told.

    python tests/benchmarks/few_rows.py TABLE.csv --device NAME,NAME [--rows 0,1,2,4,12] [--spread 1.0] [--families]

prints the error and the regret of the other rows after fits to so many (chosen by what they tell); with --families the
error on each model that is left out of a fit to the others (24 of their rows, chosen alike); then the gains between
pairs of rows that differ in precision or in device alone, under the fit to most rows. Rows that do not state what they
ran are not fitted to, and are counted apart. Nothing is asserted. Exit code 2: the table or an option is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.decisions import decide, score_decisions
from mm_autoparallel.measurements.fit import FREE, begin_all, design, fit, log_steps, rates_of, sensitivities
from mm_autoparallel.measurements.predict import predict_all
from mm_autoparallel.model.profiles.calibration import Calibration, assume_calibration, together

FAMILY_ROWS = 24
"""Of the other models, that a fit without one is made to: as many as tell all rates within a few minutes."""

LEAST_LAYOUTS = 2
"""Of a job, from which on choosing is scored: performance pages have two or three."""

Cases = list[MeasuredCase]


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--device", required=True, metavar="NAME,...")
    parser.add_argument("--rows", default="0,1,2,4,12", metavar="N,...")
    parser.add_argument("--spread", type=float, default=1.0)
    parser.add_argument("--families", action="store_true")
    arguments = parser.parse_args()
    try:
        found, _ = read_table(arguments.table)
        names = arguments.device.split(",")
        cases = [case for case in found if case.measured_ms and case.job.cluster.device.name in names]
        start = together([assume_calibration(name, cases[0].software) for name in names])
        teacher = Teacher(cases, start, arguments.spread)
        fitted = start
        for count in map(int, arguments.rows.split(",")):
            chosen = teacher.choose(cases, count)
            fitted = teacher.teach(chosen)
            print(f"{count} rows: {describe([case for case in cases if case not in chosen], fitted)}", flush=True)
        for name, pairs in list_pairs(cases).items():
            print(f"{name}: {describe_gains(pairs, fitted)}", flush=True)
        families = dict.fromkeys(case.content.get("model", "") for case in cases) if arguments.families else ()
        for family in families:
            others = [case for case in cases if case.content.get("model", "") != family]
            taught = teacher.teach(teacher.choose(others, FAMILY_ROWS))
            left_out = [case for case in cases if case not in others]
            print(f"without {family}: {describe(left_out, taught)}", flush=True)
    except PlannerError as failure:
        print(failure, file=sys.stderr)
        return 2
    return 0


class Teacher:
    """Fits of rates to rows, chosen by slopes that are worked out once, of those rates that any row hangs on."""

    def __init__(self, cases: Cases, start: Calibration, spread_factor: float) -> None:
        names = rates_of(start.figures, [case.job for case in cases])
        self.cases, self.start, self.spread_factor = cases, begin_all(start, names), spread_factor
        slopes = sensitivities(cases, self.start, names, log_steps(cases, self.start))
        matters = np.abs(slopes).max(axis=0) > 1e-6
        self.names = [name for name, used in zip(names, matters, strict=True) if used]
        self.slopes = slopes[:, matters]

    def choose(self, cases: Cases, count: int) -> Cases:
        """`count` of `cases` that state what they ran, those that tell most first."""
        stated = [case for case in cases if not case.is_open]
        slopes = self.slopes[[self.cases.index(case) for case in stated]]
        spreads = [FREE[name].log_spread_fraction for name in self.names]
        return [stated[index] for index in design(slopes, spreads, count)]

    def teach(self, cases: Cases) -> Calibration:
        """The calibration fitted to `cases`; what it began with where there are none."""
        return fit(cases, self.start, self.names, self.spread_factor)[0] if cases else self.start


def describe(cases: Cases, calibration: Calibration) -> str:
    """Errors of the rows that state all and of all rows, then the regret of choosing among layouts of one job."""
    predicted, _ = predict_all(cases, calibration)
    errors = np.array([found.step_ms / (case.measured_ms or 1.0) - 1 for case, found in predicted])
    stated = np.array([not case.is_open for case, _ in predicted])
    words = [
        f"{name} {100 * np.abs(part).mean():.2f} % (bias {100 * part.mean():+.2f}, {len(part)} rows)"
        for name, part in (("stated", errors[stated]), ("all", errors))
        if len(part)
    ]
    regret = score_decisions(decide(predicted, LEAST_LAYOUTS))
    if regret:
        mean, worst = 100 * regret.ran_mean_fraction, 100 * regret.ran_worst_fraction
        words.append(f"regret of those that ran {mean:.2f} %, worst {worst:.1f} ({regret.num_groups} jobs)")
    return "; ".join(words)


_PAIRS = {
    "precision": (("fp8_cs", "mxfp8"), ("mxfp8", "nvfp4"), ("fp8_cs", "nvfp4"), ("bf16", "mxfp8"), ("bf16", "fp8_cs")),
    "device": (("H100", "GB200"), ("GB200", "GB300"), ("B200", "B300"), ("B200", "GB200"), ("B300", "GB300")),
}
_SAME = ("model", "variant", "kind", "release", "precision", "device")


def list_pairs(cases: Cases) -> dict[str, list[tuple[MeasuredCase, MeasuredCase]]]:
    """Gain → pairs of rows of one release that differ in it and in their layout alone."""
    found: dict[str, list[tuple[MeasuredCase, MeasuredCase]]] = {}
    for column, pairs in _PAIRS.items():
        same = [name for name in _SAME if name != column]
        for one, other in combinations([case for case in cases if not case.is_open], 2):
            if all(one.content.get(name) == other.content.get(name) for name in same):
                for before, after in pairs:
                    for a, b in ((one, other), (other, one)):
                        if (a.content.get(column), b.content.get(column)) == (before, after):
                            found.setdefault(f"{before} -> {after}", []).append((a, b))
    return found


def describe_gains(pairs: Sequence[tuple[MeasuredCase, MeasuredCase]], calibration: Calibration) -> str:
    """Measured gain in tokens a second and device, and the mean error and bias of what is predicted."""
    cases = list({id(case): case for pair in pairs for case in pair}.values())
    predicted = {id(case): found.step_ms for case, found in predict_all(cases, calibration)[0]}

    def speed(case: MeasuredCase, step_ms: float) -> float:
        return case.job.workload.global_batch_size / step_ms / case.plan.strategy.world_size

    known = [pair for pair in pairs if all(id(case) in predicted for case in pair)]
    measured = np.array([speed(b, b.measured_ms or 1.0) / speed(a, a.measured_ms or 1.0) for a, b in known])
    told = np.array([speed(b, predicted[id(b)]) / speed(a, predicted[id(a)]) for a, b in known])
    errors = told / measured - 1
    return (
        f"{len(known)} pairs, measured {measured.mean():.2f} ({measured.min():.2f} to {measured.max():.2f}), error of "
        f"the gain {100 * np.abs(errors).mean():.1f} % (bias {100 * errors.mean():+.1f})"
    )


if __name__ == "__main__":
    sys.exit(main())
