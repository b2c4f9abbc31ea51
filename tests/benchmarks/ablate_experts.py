"""What each fact of layers with experts buys: errors of a table of performance pages without it, nothing fitted.

    python tests/benchmarks/ablate_experts.py TABLE.csv

prints, for each fact left out, the mean error of all rows with its bias, that of rows whose layout is a recipe's, and
that of those with experts among them, in %; then the regret of choosing by prediction among layouts of one job that ran
(of two or more), mean and worst.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.decisions import decide, score_decisions
from mm_autoparallel.measurements.predict import predict_uncalibrated
from mm_autoparallel.model.job.workload import Workload

Change = Callable[[Workload], Workload]
LEAST_LAYOUTS = 2
"""Of a job, from which on choosing is scored: performance pages have two or three."""


def state(**facts: Any) -> Change:
    """A workload with these facts in place of its own."""

    def change(workload: Workload) -> Workload:
        told = workload.known_facts
        has_experts = bool(told.dispatcher)
        kept = {name: value for name, value in facts.items() if name != "dispatcher" or has_experts}
        stated = (workload.facts or told).model_copy(update=kept)
        return workload.model_copy(update={"facts": stated})

    return change


def hide_nothing(kind: str) -> Change:
    """A workload whose exchange nothing of `kind` hides."""

    def change(workload: Workload) -> Workload:
        hidden = workload.overlap_all_to_all
        return workload.model_copy(update={"overlap_all_to_all": "none" if hidden == kind else hidden})

    return change


NOTHING_STATED = {"dispatcher": "", "graphs": "", "drops_tokens": False, "grouped_activation": False}
WITHOUT: dict[str, Change] = {
    "nothing": lambda workload: workload,
    "dispatcher, graphs and kernels stated": state(**NOTHING_STATED, joined_heads=False, early_experts=False),
    "hosts (all graphs full)": state(graphs="full"),
    "dispatcher stated": state(dispatcher=""),
    "once to each domain (all alltoall)": state(dispatcher="alltoall"),
    "overlap of micro-batches": hide_nothing("micro_batches"),
    "shared expert beside the exchange": hide_nothing("shared_experts"),
    "dropped tokens": state(drops_tokens=False),
    "early releases": state(early_experts=False),
    "joined heads": state(joined_heads=False),
    "fused activation": state(grouped_activation=False),
}


def score(cases: list[MeasuredCase], change: Change) -> str:
    """Errors in % of `cases` whose workloads are changed so."""
    changed = [replace(case, job=replace(case.job, workload=change(case.job.workload))) for case in cases]
    predicted = predict_uncalibrated(changed)
    found = [
        (prediction.step_ms / case.measured_ms - 1, not case.remarks, case.job.model.text.layers.experts is not None)
        for case, prediction in predicted
        if case.measured_ms
    ]
    errors, of_recipes, of_experts = (np.array(column) for column in zip(*found, strict=True))
    parts = errors, errors[of_recipes], errors[of_recipes & of_experts]
    means = "  ".join(f"{100 * np.abs(part).mean():5.2f}" for part in parts)
    # jobs stay those of the table: what is left out of them is no choice
    original = {case.row: case for case in cases}
    regret = score_decisions(decide([(original[case.row], told) for case, told in predicted], LEAST_LAYOUTS))
    told = f"  regret {100 * regret.ran_mean_fraction:.1f}, {100 * regret.ran_worst_fraction:.1f}" if regret else ""
    counts = ", ".join(str(len(part)) for part in parts) + (f"; {regret.num_groups} jobs" if regret else "")
    return f"{means}  bias {100 * errors.mean():+.1f}{told}  rows {counts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    cases, _ = read_table(parser.parse_args().table)
    for name, change in WITHOUT.items():
        print(f"{name:40s}{score(cases, change)}", flush=True)


if __name__ == "__main__":
    main()
