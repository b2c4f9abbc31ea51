"""A simulated step as an SVG picture: one row a stage, time to the right; forwards, backwards, recompute, passes of
encoders beside the pipeline, and the tail.

Tasks of one kind on one stage are one path of rectangles, so that a step of thousands of tasks stays a small file.
Neighbours too narrow to be seen apart are drawn as one, in a colour of their own. Nothing in it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.step import Timeline, part_pairs
from mm_autoparallel.reports.html import text
from mm_autoparallel.units import format_bytes, format_ms, format_percent

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 1200, 64, 200, 46, 22, 16
"""Pixels: of the picture, left and right of the step, above the first row, from row to row, and of a row's bars."""

_NARROW = 0.75
"""Pixels: what is narrower, beside another such task, is drawn together with it."""

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "recompute": "#e45756",
    "encoders beside the pipeline": "#54a24b",
    "forward and backward, too narrow to tell apart": "#b07d62",
    "after the last backward": "#72b7b2",
}
FORWARDS, BACKWARDS, RECOMPUTE, ENCODERS, MIXED, TAIL = COLOURS
"""What a stage does, as pictures call it."""

_TICKS = (1.0, 2.0, 5.0)

Bar = tuple[str, float, float]
"""What it is, and where it begins and ends, in pixels from the step's beginning."""


@dataclass(frozen=True, eq=False)
class StageTasks:
    """What one stage does, in its order: start_ms, end_ms, recompute_ms (the beginning of a backward), is_forward and
    of_encoder of each task, and tail_ms after the last. The parts of a backward count as backwards."""

    start_ms: NDArray[np.float64]
    end_ms: NDArray[np.float64]
    recompute_ms: NDArray[np.float64]
    is_forward: NDArray[np.bool_]
    of_encoder: NDArray[np.bool_]
    tail_ms: float


def tasks_of(timeline: Timeline, stage: int) -> StageTasks:
    """The tasks of `stage`, and passes of encoders on it."""
    graph, (start_ms, end_ms), passes = timeline.graph, part_pairs(timeline), timeline.passes
    mine, beside = graph.stage == stage, passes.stage == stage if passes else np.zeros(0, dtype=np.bool_)
    nothing = np.zeros(int(beside.sum()))
    of_passes = (passes.start_ms[beside], passes.end_ms[beside], passes.kind[beside]) if passes else (nothing,) * 3
    start_ms = np.concatenate([start_ms[mine], of_passes[0]])
    order = np.argsort(start_ms, kind="stable")
    return StageTasks(
        start_ms=start_ms[order],
        end_ms=np.concatenate([end_ms[mine], of_passes[1]])[order],
        recompute_ms=np.concatenate([timeline.recompute_ms[mine], nothing])[order],
        is_forward=np.concatenate([graph.kind[mine], of_passes[2]])[order] == FORWARD,
        of_encoder=(np.arange(len(order)) >= len(order) - len(nothing))[order],
        tail_ms=float(timeline.loads.tail_ms[stage]),
    )


def render_timeline(problem: Problem, timeline: Timeline) -> str:
    """The picture of `timeline`, which `simulate(problem, …)` made, as an SVG document that also stands inside HTML."""
    num_stages = problem.num_stages
    inside = _WIDTH - _LEFT - _RIGHT
    per_ms = inside / timeline.step_ms if timeline.step_ms else 0.0
    height = _TOP + num_stages * _ROW + 24
    bottom = _TOP + num_stages * _ROW
    drawn = [_list_bars(timeline, stage, per_ms) for stage in range(num_stages)]
    used = [name for name in COLOURS if any(bar[0] == name for bars in drawn for bar in bars)]
    bubble = format_percent(timeline.bubble_fraction)
    title = f"One step of {format_ms(timeline.step_ms)}, {num_stages} stages, bubble {bubble}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="100%" '
        f'style="max-width:{_WIDTH}px" role="img" font-family="sans-serif" font-size="11">',
        f"<title>{text(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="14" font-size="13">{text(title)}</text>',
        *_legend(used),
        *_axis(timeline.step_ms, per_ms, bottom),
    ]
    for stage, bars in enumerate(drawn):
        top = _TOP + stage * _ROW
        peak, limit = float(timeline.peak_memory_bytes[stage]), problem.memory_limit_bytes[stage]
        memory = f"{format_bytes(peak)} of {format_bytes(limit)}"
        colour = "#b00020" if peak > limit else "#333"
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{inside}" height="{_BAR}" fill="#f0f0f0"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 12}" text-anchor="end">stage {stage}</text>')
        parts += _paths(bars, top)
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{top + 12}" fill="{colour}">peak {text(memory)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _list_bars(timeline: Timeline, stage: int, per_ms: float) -> list[Bar]:
    """What is drawn of a stage, from left to right."""
    tasks = tasks_of(timeline, stage)
    starts, ends = (tasks.start_ms * per_ms).tolist(), (tasks.end_ms * per_ms).tolist()
    agains = (tasks.recompute_ms * per_ms).tolist()
    bars: list[Bar] = []
    whose = zip(tasks.of_encoder.tolist(), tasks.is_forward.tolist(), strict=True)
    for start, end, again, (of_encoder, is_forward) in zip(starts, ends, agains, whose, strict=True):
        if of_encoder:
            _append(bars, (ENCODERS, start, end))
        elif is_forward:
            _append(bars, (FORWARDS, start, end))
        elif again > 0 and end - start >= _NARROW:
            _append(bars, (RECOMPUTE, start, start + again))
            _append(bars, (BACKWARDS, start + again, end))
        else:
            _append(bars, (BACKWARDS, start, end))
    tail = tasks.tail_ms * per_ms
    if tail > 0 and ends:
        bars.append((TAIL, ends[-1], ends[-1] + tail))
    return bars


def _append(bars: list[Bar], bar: Bar) -> None:
    """Add `bar`, or widen the last one where both are too narrow to be seen apart."""
    kind, start, end = bar
    if bars and end - start < _NARROW and start - bars[-1][2] < _NARROW / 4:
        before, first, last = bars[-1]
        if before in (MIXED, kind) or last - first < _NARROW:
            bars[-1] = (before if before == kind else MIXED, first, end)
            return
    bars.append(bar)


def _paths(bars: list[Bar], top: float) -> Iterator[str]:
    """A path for each kind of bar; a gap of a fifth of a pixel keeps neighbours apart."""
    for kind, colour in COLOURS.items():
        boxes = []
        for name, start, end in bars:
            if name == kind:
                width = max(end - start - 0.2, 0.1)
                boxes.append(f"M{_LEFT + start:.1f} {top}h{width:.1f}v{_BAR}h-{width:.1f}z")
        if boxes:
            yield f'<path fill="{colour}" d="{"".join(boxes)}"/>'


def _legend(used: list[str]) -> Iterator[str]:
    left = float(_LEFT)
    for name in (*used, "idle"):
        colour = COLOURS.get(name, "#f0f0f0")
        yield f'<rect x="{left:.0f}" y="22" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{left + 16:.0f}" y="32">{text(name)}</text>'
        left += 36 + 6.2 * len(name)


def _axis(step_ms: float, per_ms: float, bottom: float) -> Iterator[str]:
    """Lines and times at round distances, at most ten."""
    if step_ms <= 0:
        return
    power = 10.0 ** np.floor(np.log10(step_ms / 10))
    distance_ms = next((power * tick for tick in _TICKS if step_ms / (power * tick) <= 10), power * 10)
    for number in range(int(step_ms / distance_ms) + 1):
        x = _LEFT + number * distance_ms * per_ms
        yield f'<path d="M{x:.1f} {_TOP - 4}V{bottom + 4}" stroke="#ccc"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text(format_ms(number * distance_ms))}</text>'
