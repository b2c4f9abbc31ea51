"""`validate TABLE.csv...`: predict published measurements from their configurations alone, and score that."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.cli.output import print_document

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from mm_autoparallel.measurements.case import Refused
    from mm_autoparallel.measurements.score import Score, TableScore

HELP = "predict published measurements and score the predictions"
DESCRIPTION = (
    "Predict every row of tables of measurements from its configuration alone, and score step time and peak memory "
    "against what was measured. Errors are signed: predicted / measured - 1."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE.json",
        help="predict rows of its device with it, not with a shipped one",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read every table first, so that a malformed one costs no waiting; then predict, score and print."""
    from mm_autoparallel.measurements.catalog import read_table
    from mm_autoparallel.profiles.calibration import read_calibration

    calibration = None if arguments.calibration is None else read_calibration(arguments.calibration)
    read = [(path, *read_table(path)) for path in arguments.tables]

    from mm_autoparallel.measurements.predict import predict_all
    from mm_autoparallel.measurements.score import score_document, score_table
    from mm_autoparallel.simulate.compiled import announce_compilation

    announce_compilation("engine.play")
    scores = []
    for path, cases, refused in read:
        predicted, unpredictable = predict_all(cases, calibration)
        scores.append(score_table(path.name, predicted, sorted([*refused, *unpredictable], key=lambda r: r.row)))
    if arguments.json:
        print_document(score_document(scores))
    else:
        _print_scores(scores)
    return 0


def _print_scores(scores: Sequence[TableScore]) -> None:
    """A table of rows for each file, then one line of scores for each."""
    from rich.console import Group
    from rich.text import Text

    from mm_autoparallel.reports.console import print_rich

    parts: list[Table | Text] = []
    for found in scores:
        title = _rows_table(found) if found.predicted else Text(found.file, style="italic")
        parts += [title, *_refusals(found.refused), Text("")]
    print_rich(Group(*parts, _summary_table(scores)))


def _refusals(refused: Sequence[Refused]) -> list[Text]:
    """One line for each reason, with the rows it holds for: `rows 3, 7 to 9 refused: …`."""
    from rich.text import Text

    by_reason: dict[str, list[int]] = {}
    for refusal in refused:
        by_reason.setdefault(refusal.reason, []).append(refusal.row)
    lines = []
    for reason, rows in by_reason.items():
        firsts = [row for row in rows if row - 1 not in rows]
        lasts = [row for row in rows if row + 1 not in rows]
        runs = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(firsts, lasts, strict=True)]
        lines.append(Text(f"  {'row' if len(rows) == 1 else 'rows'} {', '.join(runs)} refused: {reason}"))
    return lines


def _rows_table(found: TableScore) -> Table:
    from rich.table import Table

    from mm_autoparallel.measurements.score import measured_peaks
    from mm_autoparallel.units import format_bytes, format_ms

    table = Table(title=found.file, title_justify="left", box=None, pad_edge=False)
    table.add_column("row", justify="right")
    table.add_column("case", overflow="fold")
    for column in ("measured", "predicted", "error", "expected between", "peak", "predicted", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("out of memory")
    table.add_column("calibration")
    for case, prediction in found.predicted:
        low_ms, high_ms = prediction.interval_ms
        time = ["", format_ms(prediction.step_ms), "", f"{format_ms(low_ms)} to {format_ms(high_ms)}"]
        if case.measured_ms is not None:
            error = _signed(prediction.step_ms / case.measured_ms - 1)
            time[0], time[2] = format_ms(case.measured_ms), f"({error})" if prediction.calibrated_on else error
        peaks = measured_peaks(case, prediction)
        memory = [
            "\n".join(format_bytes(measured) for _, measured, _ in peaks),
            "\n".join(format_bytes(expected) for _, _, expected in peaks)
            or format_bytes(max(prediction.peak_allocated_bytes)),
            "\n".join(_signed(expected / measured - 1) for _, measured, expected in peaks),
        ]
        outcome = {None: "", True: "yes", False: "no"}[case.out_of_memory]
        if outcome and case.out_of_memory == prediction.fits:
            outcome += ", predicted " + ("no" if prediction.fits else "yes")
        table.add_row(str(case.row), case.name, *time, *memory, outcome, prediction.calibration)
    return table


def _summary_table(scores: Sequence[TableScore]) -> Table:
    from rich.table import Table

    table = Table(title="predicted / measured - 1", title_justify="left", box=None, pad_edge=False)
    for column in ("table", "figure"):
        table.add_column(column)
    for column in ("rows", "refused", "calibrated on", "mean abs", "bias", "median abs", "p95 abs", "worst", "ordered"):
        table.add_column(column, justify="right", no_wrap=True)
    for found in scores:
        refused = str(len(found.refused))
        for figure, part in (
            ("step time", found.time),
            ("step time, strays aside", found.time_without_strays),
            ("peak memory", found.memory),
            ("peak memory, all stated", found.memory_stated),
        ):
            if part is not None:
                table.add_row(found.file, figure, str(part.num_rows), refused, *_score_cells(part))
        if found.outcomes is not None:
            right, missed, false = found.outcomes.right, found.outcomes.missed, found.outcomes.false
            told = f"right {right}, missed {missed}, false {false}"
            table.add_row(found.file, f"out of memory: {told}", str(right + missed + false), refused)
        if found.time is None and found.memory is None and found.outcomes is None:
            table.add_row(found.file, "nothing scored", "0", refused)
    return table


def _score_cells(part: Score) -> list[str]:
    ordered = part.pairs_ordered_fraction
    return [
        str(part.num_calibrated_on),
        f"{part.mean_abs_fraction:.2%}",
        _signed(part.bias_fraction),
        f"{part.median_abs_fraction:.2%}",
        f"{part.p95_abs_fraction:.2%}",
        f"{_signed(part.worst_fraction)} (row {part.worst_row})",
        "" if ordered is None else f"{ordered:.1%}",
    ]


def _signed(fraction: float) -> str:
    return f"{fraction:+.2%}"
