"""Other open planners, rules of thumb and this project choose among the same published layouts; nothing is asserted.

    python tests/benchmarks/compare_planners.py --sources FOLDER [--fetch] [--tables TABLE.csv...] [--groups] [--json]

FOLDER holds a git checkout of each planner (others/sources.py), named as its repository and at the commit that its
adapter states; --fetch clones what is missing. Each is imported from there, maps a row to its own options
(others/*.py say how, docs/validation/fidelity.md has the table), and predicts with its own description of an A100 80 GB
as it ships. Rows are asked that every planner is asked: dense decoders on that device, in groups of at least four timed
layouts among which `validate` tells regret (measurements/decisions.py).

A planner's own pick is the fastest that it says fits; one that ran out of memory is counted, then passed over.
Exit code 2: a table is wrong, or a planner could not be run, which is said.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from others.layout import Predict, Source
from others.score import Row, ask, ask_ours, follow_rules, list_asked
from others.sources import SOURCES, Missing, fetch, load

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.predict import predict_all, predict_uncalibrated

PUBLISHED = Path(__file__).parents[2] / "examples" / "published_measurements"
TABLES = ("aleph_alpha_llama_2k_a100.csv", "aleph_alpha_llama_8k_a100.csv", "bloom_network.csv")
DEVICE = "a100-80g"
"""Of which every planner ships a description."""


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True, help="folder of the planners' git checkouts")
    parser.add_argument("--fetch", action="store_true", help="clone the missing ones with git")
    parser.add_argument("--tables", type=Path, nargs="+", help="tables of measurements (default: the published sweeps)")
    parser.add_argument("--groups", action="store_true", help="show every planner's pick in every group too")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    tables = arguments.tables or [PUBLISHED / name for name in TABLES]
    try:
        cases = [case for table in tables for case in read_table(table)[0]]
    except PlannerError as failure:
        print(failure, file=sys.stderr)
        return 2
    asked, left_out = list_asked(cases, DEVICE)
    if not asked:
        print(f"no group of layouts that run on {DEVICE} in these tables: {dict(left_out)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    missing: list[str] = []
    for source in SOURCES:
        found = try_to_load(source, arguments.sources, arguments.fetch)
        if isinstance(found, Missing):
            missing.append(str(found))
        else:
            rows += [ask(name, of, asked) for name, of in found.items()]
    rows += follow_rules(asked)
    ours = [
        ask_ours("mm_autoparallel, uncalibrated", predict_uncalibrated, asked),
        ask_ours("mm_autoparallel, as it ships", lambda of: predict_all(of)[0], asked),
    ]
    if arguments.json:
        print(json.dumps(document([*rows, *ours], len(asked), left_out, missing)))
    else:
        print("\n".join(describe([*rows, *ours], len(asked), left_out)))
        print("\n".join(judge(row, rows) for row in ours))
        if arguments.groups:
            print("\n".join(describe_groups([*rows, *ours])))
    for reason in missing:
        print(f"not compared: {reason}", file=sys.stderr)
    return 2 if missing else 0


def try_to_load(source: Source, folder: Path, fetched: bool) -> Mapping[str, Predict] | Missing:
    """What predicts, or why it cannot be run."""
    try:
        if fetched:
            fetch(source, folder)
        return load(source, folder)
    except Missing as reason:
        return reason


def describe(rows: Sequence[Row], num_asked: int, left_out: Mapping[str, int]) -> list[str]:
    """The lines of a Markdown table, and what a reader should know of it."""
    total = next(row.total for row in rows if row.total)
    lines = [f"{num_asked} rows in {total.num_groups} groups"]
    lines += [f"  left out: {count} rows, {reason}" for reason, count in left_out.items()]
    lines += [
        "",
        "| planner | regret mean / worst | first pick out of memory | of those that ran | best of three | step error, "
        "as it is → one factor | out of memory missed / false | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in rows]
    for row in rows:
        for what, counted in (("cannot say", row.unsaid), ("failed on", row.crashed)):
            lines += [f"{row.name} {what} {count} rows: {why}" for why, count in (counted or {}).items()]
    return lines


def judge(ours: Row, others: Sequence[Row]) -> str:
    """Whether `ours` has less regret than each of `others`, and than planners no more failures and less error.

    Else who is ahead. Rules of thumb are told who ran out of memory, so failures are not compared with theirs.
    """
    total, error_fraction = ours.total, ours.error_fraction
    planners = [row for row in others if row.error_fraction is not None]
    ahead: dict[tuple[str, str], list[str]] = {}
    if total:
        scored = [(row.name, row.total) for row in others if row.total]
        ahead["less regret than", "no less regret than"] = [
            name for name, other in scored if other.mean_fraction <= total.mean_fraction
        ]
        ahead["no more failures than", "more failures than"] = [
            row.name for row in planners if row.total and row.total.num_failed < total.num_failed
        ]
    if error_fraction is not None:
        ahead["less error than", "no less error than"] = [
            row.name for row in planners if row.error_fraction is not None and row.error_fraction <= error_fraction
        ]
    said = [f"{worse} {'; '.join(names)}" if names else f"{better} each" for (better, worse), names in ahead.items()]
    return f"{ours.name}: {', '.join(said)}"


def _line(row: Row) -> str:
    total = row.total
    if total is None:
        return f"| {row.name} | no group |"
    cells = [
        row.name,
        _pair(total.mean_fraction, total.worst_fraction),
        f"{total.num_failed} of {total.num_groups}",
        _pair(total.ran_mean_fraction, total.ran_worst_fraction),
        _pair(total.three_mean_fraction, total.three_worst_fraction),
    ]
    if row.error_fraction is None or row.fitted_error_fraction is None or row.cpu_s is None:
        cells[2] = "–"
        cells += ["–", "–", "–"]
    else:
        cells += [
            f"{row.error_fraction:.1%} → {row.fitted_error_fraction:.1%}",
            f"{row.num_missed} of {row.num_out_of_memory} / {row.num_false} of {row.num_ran}",
            f"{row.cpu_s:.2g}",
        ]
    return f"| {' | '.join(cells)} |"


def _pair(mean_fraction: float, worst_fraction: float) -> str:
    return f"{mean_fraction:.1%} / {worst_fraction:.1%}"


def describe_groups(rows: Sequence[Row]) -> list[str]:
    """Of each group, what each planner picked and what it cost."""
    lines: list[str] = []
    for index, group in enumerate(rows[0].decisions):
        lines += ["", f"{group.name}: {group.num_layouts} ran, {group.num_failed} did not; best {group.best.name}"]
        for row in rows:
            found = row.decisions[index]
            failed = f", after {found.num_failed_picks} out of memory" if found.num_failed_picks else ""
            lines.append(
                f"  {found.regret_fraction:7.1%} {found.ran_regret_fraction:7.1%}  {row.name}: "
                f"{found.pick.name if found.pick else 'nothing fits'}{failed}"
            )
    return lines


def document(
    rows: Sequence[Row], num_asked: int, left_out: Mapping[str, int], missing: Sequence[str]
) -> dict[str, Any]:
    """What --json prints: fractions as they are, decisions by group."""
    return {
        "rows": num_asked,
        "left_out": dict(left_out),
        "not_compared": list(missing),
        "planners": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
