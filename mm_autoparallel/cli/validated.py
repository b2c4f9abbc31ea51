"""What `validate` prints: what choosing by prediction costs, the rows, then errors and what they hide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mm_autoparallel.measurements import score
from mm_autoparallel.measurements.breakdown import STATED
from mm_autoparallel.measurements.decisions import Decision, DecisionScore, Layout, score_decisions
from mm_autoparallel.reports.console import print_rich
from mm_autoparallel.units import format_bytes, format_ms

if TYPE_CHECKING:
    from mm_autoparallel.measurements.case import Refused

MOST_ROWS = 60
"""Rows that are listed without being asked for; more would hide the scores."""

_ALL = "all tables"


def print_scores(scores: Sequence[score.TableScore], rows: bool) -> None:
    """Choices, rows (however many where `rows` asks for them), then scores, biases and chances of each table."""
    listed = rows or sum(len(found.predicted) for found in scores) <= MOST_ROWS
    judged = list(_judge(scores))
    parts: list[Table | Text] = [_decisions_table(judged), Text("")]
    if listed:
        parts += _choices(judged)
    for found in scores:
        title = _rows_table(found) if listed and found.predicted else Text(found.file, style="italic")
        refusals = _refusals(found.refused)
        refusals += _fingerprints(found)
        parts += [title, *refusals, Text("")] if listed or refusals else []
    parts += [_summary_table(scores, judged), Text("")]
    detailed = [one for one in judged if listed or one[0] == _ALL or len(scores) == 1]
    parts += [*_intervals_table(judged), *_biases_table(detailed), *_chances_tables(detailed)]
    if not listed:
        parts.append(Text("--rows lists every group of layouts, every row, and biases table by table"))
    print_rich(Group(*parts))


Judged = tuple[str, str, score.Fidelity]
"""A table's file, the kind of figures of KINDS, and what it is worth by these."""


def _judge(scores: Sequence[score.TableScore]) -> Iterator[Judged]:
    """Each table under each set of figures that it has rows of; then all together."""
    parts = [(found.file, {kind: getattr(found, kind) for kind in score.KINDS}) for found in scores]
    if len(scores) > 1:
        parts.append((_ALL, score.score_all(scores)))
    for file, by_kind in parts:
        yield from ((file, kind, judged) for kind, judged in by_kind.items() if judged)


def _table(title: str, words: Sequence[str], figures: Sequence[str]) -> Table:
    """An empty table whose columns of `words` are left and of `figures` right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in words:
        table.add_column(column, overflow="fold")
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True)
    return table


# ------------------------------------------------------------------------------------------------------------ choices


def _decisions_table(judged_tables: Sequence[Judged]) -> Table | Text:
    """A line for each table and set of figures with groups to choose in, and one for all tables together."""
    lines = [(file, kind, score_decisions(judged.decisions)) for file, kind, judged in judged_tables]
    known = [(file, kind, found) for file, kind, found in lines if found]
    if not known:
        return Text("nothing to choose between: no job here ran in four layouts or more")
    table = _table(
        "regret: measured step of the planner's pick / measured best - 1, by groups of layouts of one job",
        ("table", "figures"),
        (
            *("groups", "rows", "mean", "worst", "exact", "picks out of memory"),
            *("of those that ran", "worst", "best of three", "worst", "random fives"),
        ),
    )
    for file, kind, found in known:
        table.add_row(file, kind, *_decision_cells(found))
    return table


def _decision_cells(found: DecisionScore) -> list[str]:
    fractions = (
        found.ran_mean_fraction,
        found.ran_worst_fraction,
        found.three_mean_fraction,
        found.three_worst_fraction,
        found.subset_mean_fraction,
    )
    return [
        str(found.num_groups),
        str(found.num_rows),
        f"{found.mean_fraction:.1%}",
        f"{found.worst_fraction:.1%}",
        f"{found.exact_fraction:.0%}",
        str(found.num_failed),
        *(f"{fraction:.1%}" for fraction in fractions),
    ]


def _choices(judged_tables: Sequence[Judged]) -> Iterator[Table | Text]:
    """For each table with groups: what was picked in each, and what was best."""
    for file, kind, judged in judged_tables:
        if not judged.decisions or file == _ALL:
            continue
        table = _table(
            f"{file}, {kind}: what is picked",
            ("group", "picked", "measured best"),
            ("ran", "out of memory", "regret", "of those that ran", "best of three", "random fives"),
        )
        for found in judged.decisions:
            table.add_row(*_choice_cells(found))
        yield table
        yield Text("")


def _choice_cells(found: Decision) -> list[str]:
    fractions = (
        found.regret_fraction,
        found.ran_regret_fraction,
        found.three_regret_fraction,
        found.subset_regret_fraction,
    )
    return [
        found.name,
        "nothing is predicted to fit" if found.pick is None else _layout_words(found.pick),
        _layout_words(found.best),
        str(found.num_layouts),
        str(found.num_failed),
        *(f"{fraction:.1%}" for fraction in fractions),
    ]


def _layout_words(layout: Layout) -> str:
    measured = "out of memory" if layout.measured_ms is None else format_ms(layout.measured_ms)
    return f"{layout.name}: {measured}, predicted {format_ms(layout.predicted_ms)}"


# --------------------------------------------------------------------------------------------------------------- rows


def _refusals(refused: Sequence[Refused]) -> list[Text]:
    """One line for each reason, with the rows it holds for: `rows 3, 7 to 9 refused: …`."""
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


def _fingerprints(found: score.TableScore) -> list[Text]:
    """What memory says of rows that it contradicts, or that do not say what is frozen."""
    telling = ((row, one) for row, one in sorted(found.fingerprints.items()) if one.contradicted or one.assumed)
    return [Text(f"  row {row}: {one.words}") for row, one in telling]


def _rows_table(found: score.TableScore) -> Table:
    table = Table(title=found.file, title_justify="left", box=None, pad_edge=False)
    table.add_column("row", justify="right")
    table.add_column("case", overflow="fold")
    columns = ("measured", "predicted", "error", "uncalibrated", "expected between", "peak", "predicted", "error")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("out of memory")
    table.add_column("calibration")
    uncalibrated_ms = {case.row: prediction.step_ms for case, prediction in found.uncalibrated_predicted}
    for case, prediction in found.predicted:
        low_ms, high_ms = prediction.interval_ms
        time = ["", format_ms(prediction.step_ms), "", "", f"{format_ms(low_ms)} to {format_ms(high_ms)}"]
        if case.measured_ms is not None:
            error = _signed(prediction.step_ms / case.measured_ms - 1)
            time[0], time[2] = format_ms(case.measured_ms), f"({error})" if prediction.calibrated_on else error
            if case.row in uncalibrated_ms:
                time[3] = _signed(uncalibrated_ms[case.row] / case.measured_ms - 1)
        peaks = score.measured_peaks(case, prediction)
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


# ------------------------------------------------------------------------------------------------------------- scores


def _summary_table(scores: Sequence[score.TableScore], judged_tables: Sequence[Judged]) -> Table:
    figures = ("rows", "refused", "calibrated on", "mean abs", "bias", "median abs", "p95 abs", "worst", "ordered")
    table = _table("predicted / measured - 1", ("table", "figure"), (*figures, "inside", "half-width"))
    for found in scores:
        refused = str(len(found.refused))
        uncalibrated_time = found.uncalibrated.time if found.uncalibrated else None
        for figure, part, judged in (
            ("step time, uncalibrated", uncalibrated_time, found.uncalibrated),
            ("step time", found.time, found.calibrated),
            ("step time, outliers aside", found.time_without_outliers, None),
            ("allocated memory", found.resting, None),
            ("peak memory", found.memory, None),
            ("peak memory, all stated", found.memory_stated, None),
            ("peak memory, contradicted rows aside", found.memory_consistent, None),
        ):
            if part is not None:
                cells = _score_cells(part) + _coverage_cells(judged)
                table.add_row(found.file, figure, str(part.num_rows), refused, *cells)
        if found.outcomes is not None:
            figure, num_rows = _outcomes_words(found.outcomes)
            table.add_row(found.file, figure, num_rows, refused)
        if found.time is None and found.memory is None and found.outcomes is None:
            table.add_row(found.file, "nothing scored", "0", refused)
    for file, kind, judged in judged_tables:
        if file == _ALL and judged.time is not None:
            cells = _score_cells(judged.time) + _coverage_cells(judged)
            table.add_row(file, f"step time, {kind}", str(judged.time.num_rows), "", *cells)
        if file == _ALL and judged.outcomes is not None:
            figure, num_rows = _outcomes_words(judged.outcomes)
            table.add_row(file, f"{figure}, {kind}", num_rows)
    return table


def _outcomes_words(found: score.MemoryOutcomes) -> tuple[str, str]:
    """What predictions said of how many rows."""
    told = f"out of memory: right {found.right}, missed {found.missed}, false {found.false}"
    return told, str(found.right + found.missed + found.false)


def _coverage_cells(judged: score.Fidelity | None) -> list[str]:
    """Share of steps inside their interval, and its mean half-width."""
    if judged is None or judged.coverage is None:
        return []
    return [f"{judged.coverage.covered_fraction:.1%}", f"{judged.coverage.half_width_fraction:.1%}"]


def _score_cells(part: score.Score) -> list[str]:
    ordered = part.pairs_ordered_fraction
    return [
        str(part.num_calibrated_on),
        f"{part.mean_abs_fraction:.2%}",
        _signed(part.bias_fraction),
        f"{part.median_abs_fraction:.2%}",
        f"{part.p95_abs_fraction:.2%}",
        _signed(part.worst_fraction) + ("" if part.worst_row is None else f" (row {part.worst_row})"),
        "" if ordered is None else f"{ordered:.1%}",
    ]


def _biases_table(judged_tables: Sequence[Judged]) -> Iterator[Table | Text]:
    """Biases of each table by TP, PP and so on, under both sets of figures; only where rows differ in it."""
    table = _table("bias of step times, and rows", ("table", "figures", "by", ""), ())
    for file, kind, judged in judged_tables:
        for axis, by_value in judged.biases.items():
            if len(by_value) > 1:
                values = [
                    f"{value}: {_signed(bias.bias_fraction)} ({bias.num_rows})" for value, bias in by_value.items()
                ]
                table.add_row(file, kind, axis, "  ".join(values))
    if table.row_count:
        yield table
        yield Text("")


def _intervals_table(judged_tables: Sequence[Judged]) -> Iterator[Table | Text]:
    """How intervals held of each table where some are wider than others, by what is not known of their rows."""
    table = _table(
        "intervals, by what widens them", ("table", "figures", "not known"), ("rows", "inside", "half-width")
    )
    for file, kind, judged in judged_tables:
        if set(judged.coverages) - {STATED}:
            for doubt, found in judged.coverages.items():
                shares = (f"{found.covered_fraction:.1%}", f"{found.half_width_fraction:.1%}")
                table.add_row(file, kind, "" if doubt == STATED else doubt, str(found.num_rows), *shares)
    if table.row_count:
        yield table
        yield Text("")


def _chances_tables(judged_tables: Sequence[Judged]) -> Iterator[Table | Text]:
    """For each table with told chances to run out of memory: what came of them, by tenths."""
    for file, kind, judged in judged_tables:
        if not judged.chances:
            continue
        table = _table(f"{file}, {kind}: chance to run out of memory", ("told",), ("rows", "mean told", "ran out"))
        for found in judged.chances:
            mean, share = (f"{found.told_fraction:.0%}", f"{found.failed_fraction:.0%}") if found.num_rows else ("", "")
            table.add_row(f"{found.low_fraction:.0%} to {found.high_fraction:.0%}", str(found.num_rows), mean, share)
        yield table
        yield Text("")


def _signed(fraction: float) -> str:
    return f"{fraction:+.2%}"
