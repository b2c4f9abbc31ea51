"""A simulated step as a small picture of characters: one row a stage, time to the right; below, peaks against limits.

Each column is a slice of the step. How high its block is says how much of the slice the stage works, its colour at
what; where the terminal has no colours, or no such blocks, a letter says at what it works most. The same step in the
same width is the same picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.step import Timeline
from mm_autoparallel.reports.timeline import BACKWARDS, COLOURS, ENCODERS, FORWARDS, MIXED, RECOMPUTE, TAIL, tasks_of
from mm_autoparallel.units import GIB, format_ms, format_percent

Floats = NDArray[np.float64]

_LEAST_WIDTH = 60
"""Columns of a terminal below which nothing is drawn. Assumed."""

_WIDEST_BAR = 60
"""Columns of a bar of memory, at most. Assumed."""

_CLEAR_FRACTION = 0.75
"""Of the time that a stage works in a column: what takes less does not give it its colour alone. Assumed."""

_KINDS = (FORWARDS, BACKWARDS, RECOMPUTE, ENCODERS, TAIL)
_LETTERS = {FORWARDS: "F", BACKWARDS: "B", RECOMPUTE: "R", ENCODERS: "E", MIXED: "+", TAIL: "T"}
_IDLE = "."
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_WIDTHS = " ▏▎▍▌▋▊▉█"
_OVER, _QUIET = "bold red", "dim"


@dataclass(frozen=True, eq=False)
class TerminalTimeline:
    """The picture of `timeline`, which `simulate(problem, …)` made, as wide as the console; nothing where that is
    narrow."""

    problem: Problem
    timeline: Timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        labels = [f" {stage:>{len(str(self.problem.num_stages - 1))}} " for stage in range(self.problem.num_stages)]
        if options.max_width < _LEAST_WIDTH or self.timeline.step_ms <= 0:
            return
        num_columns = options.max_width - len(labels[0])
        in_letters = options.ascii_only or console.no_color or console.color_system is None
        rows = [worked_in_columns(self.timeline, stage, num_columns) for stage in range(self.problem.num_stages)]
        drawn = [[_mark(column, in_letters) for column in row.T] for row in rows]
        used = [kind for kind in COLOURS if any(kind == one for row in drawn for one, _ in row)]
        slice_ms = self.timeline.step_ms / num_columns
        bubble = format_percent(self.timeline.bubble_fraction)
        yield Text(f"one step of {format_ms(self.timeline.step_ms)}, {format_ms(slice_ms)} a column, bubble {bubble}")
        for label, row in zip(labels, drawn, strict=True):
            runs = ((kind, "".join(mark for _, mark in run)) for kind, run in groupby(row, key=itemgetter(0)))
            yield _line(Text(label), *(Text(marks, COLOURS.get(kind, "")) for kind, marks in runs))
        yield from _legend(used, in_letters, options.max_width)
        yield Text("peak memory of its limit")
        yield from self._bars(labels, options)

    def _bars(self, labels: list[str], options: ConsoleOptions) -> Iterator[Text]:
        peaks, limits = self.timeline.peak_memory_bytes.tolist(), self.problem.memory_limit_bytes
        words = [_describe_peak(peak, limit) for peak, limit in zip(peaks, limits, strict=True)]
        width = min(_WIDEST_BAR, options.max_width - len(labels[0]) - 1 - max(map(len, words)))
        for label, peak, limit, said in zip(labels, peaks, limits, words, strict=True):
            is_over = peak > limit
            bar = _bar(min(1.0, peak / limit) if limit else 1.0, width, options.ascii_only)
            style = _OVER if is_over else COLOURS[FORWARDS]
            rest = ("-" if options.ascii_only else "░") * (width - len(bar))
            yield _line(Text(label), Text(bar, style), Text(rest, _QUIET), Text(f" {said}", _OVER if is_over else ""))


def worked_in_columns(timeline: Timeline, stage: int, num_columns: int) -> Floats:
    """Of each of `num_columns` equal slices of the step, the part in which `stage` is at a forward, a backward, at
    recompute, at encoders' passes and after its last backward: [5, num_columns]. What is left of a slice is idle."""
    tasks, edges = tasks_of(timeline, stage), np.linspace(0.0, timeline.step_ms, num_columns + 1)
    split_ms = tasks.start_ms + tasks.recompute_ms
    forward, backward = tasks.is_forward & ~tasks.of_encoder, ~tasks.is_forward & ~tasks.of_encoder
    last_ms = tasks.end_ms[-1:]
    spans = (
        (tasks.start_ms[forward], tasks.end_ms[forward]),
        (split_ms[backward], tasks.end_ms[backward]),
        (tasks.start_ms[backward], split_ms[backward]),
        (tasks.start_ms[tasks.of_encoder], tasks.end_ms[tasks.of_encoder]),
        (last_ms, last_ms + tasks.tail_ms),
    )
    return np.array([np.diff(_worked_until(edges, *span)) for span in spans]) * (num_columns / timeline.step_ms)


def _worked_until(times_ms: Floats, start_ms: Floats, end_ms: Floats) -> Floats:
    """How much of the spans from start_ms to end_ms, in order and apart, has passed at each of `times_ms`."""
    if not len(start_ms):
        return np.zeros_like(times_ms)
    passed_ms = np.concatenate([[0.0], np.cumsum(end_ms - start_ms)])
    knots = np.stack([start_ms, end_ms], axis=1).ravel()
    until_ms: Floats = np.interp(times_ms, knots, np.stack([passed_ms[:-1], passed_ms[1:]], axis=1).ravel())
    return until_ms


def _mark(worked: Floats, in_letters: bool) -> tuple[str, str]:
    """What a column shows, and the character that shows it. worked: [5], parts of the column."""
    busy, most = float(worked.sum()), int(np.argmax(worked))
    kind = _KINDS[most] if worked[most] >= _CLEAR_FRACTION * busy else MIXED
    if in_letters:
        return ("", _IDLE) if busy < 0.5 else (kind, _LETTERS[kind])
    height = _HEIGHTS[min(8, round(8 * busy))]
    return ("" if height == " " else kind, height)


def _legend(used: list[str], in_letters: bool, width: int) -> Iterator[Text]:
    """What marks stand for, in as many lines as that needs."""
    lines = [Text()]
    for kind in [*used, *([_IDLE] if in_letters else [])]:
        mark = _LETTERS.get(kind, _IDLE) if in_letters else "█"
        name = {MIXED: "several of them", _IDLE: "idle"}.get(kind, kind)
        entry = Text.assemble(" ", (mark, COLOURS.get(kind, "")), f" {name}")
        if len(lines[-1]) + len(entry) + 1 > width:
            lines.append(Text())
        lines[-1].append_text(Text.assemble(" " if len(lines[-1]) else "", entry))
    yield from lines


def _bar(fill: float, width: int, is_ascii: bool) -> str:
    """`fill` of `width` columns, to an eighth of one."""
    if is_ascii:
        return "#" * round(fill * width)
    whole, eighths = divmod(round(fill * width * 8), 8)
    return "█" * whole + (_WIDTHS[eighths] if eighths else "")


def _describe_peak(peak_bytes: float, limit_bytes: float) -> str:
    """`57.60 of 61.00 GiB, 94.4 %`."""
    share = format_percent(peak_bytes / limit_bytes) if limit_bytes else "-"
    over = " OVER" if peak_bytes > limit_bytes else ""
    return f"{peak_bytes / GIB:.2f} of {limit_bytes / GIB:.2f} GiB, {share}{over}"


def _line(*parts: Text) -> Text:
    """`parts` side by side, never broken."""
    line = Text(no_wrap=True, overflow="crop")
    for part in parts:
        line.append_text(part)
    return line
