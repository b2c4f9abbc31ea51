"""Patterns of stages whose layers may run in several layouts, one chunk each.

What the other stages take at least bounds what is left for a stage in a step below a known one. These bounds come
first, of mixes compared by load and bytes; the patterns are then the mixes that such a step has room for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.one_chunk import count_in_order
from mm_autoparallel.pipeline.placement.patterns.intervals import Intervals, list_intervals
from mm_autoparallel.pipeline.placement.patterns.layout_mixes import (
    BACKWARD,
    FORWARD,
    ROUNDING_FRACTION,
    TAIL,
    Compare,
    Rows,
    StageMixes,
    join_rows,
)
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import StagePatterns, load_limits
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.simulate.graph import TaskGraph, full_graph
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes

Floats = NDArray[np.float64]

#: Loads of stages beyond this many times the average are bounded by it. Assumed: no good placement has them.
MOST_LOAD = 1.6


@dataclass(frozen=True, eq=False)
class Beside:
    """What a step has beside one stage: it takes less than step_ms, and stages before and after the segment at which
    this one begins or ends, before_ms, after_ms [N + 1], take that for one micro-batch at least, both ways.
    """

    step_ms: float
    before_ms: Floats
    after_ms: Floats


def list_light_patterns(segments: Segments, graph: TaskGraph, stage: int, max_load_ms: float) -> StagePatterns:
    """Patterns of `stage` that take at most max_load_ms forward and backward for one micro-batch: of each interval that
    of least load, but for what the largest passing bytes leave out. Raises TooManyPatterns.
    """
    held = list_intervals(segments, (stage,), max_load_ms)
    return _patterns_of(segments, held, stage, _mixes(segments, graph, held, stage, max_load_ms, None, "load"))


def list_small_patterns(segments: Segments, graph: TaskGraph, stage: int) -> StagePatterns:
    """Patterns of `stage` that hold least, of each interval one at least where any fits. Raises TooManyPatterns."""
    held = list_intervals(segments, (stage,), np.inf)
    return _patterns_of(segments, held, stage, _mixes(segments, graph, held, stage, np.inf, None, "bytes"))


def list_mixed_patterns(
    segments: Segments, graph: TaskGraph, step_ms: float, should_stop: Callable[[], bool]
) -> list[StagePatterns]:
    """Of each stage all patterns that a step below step_ms can use. Raises TooManyPatterns, when stopped too."""
    problem = segments.problem
    held, most_ms = [], step_ms / problem.num_microbatches
    for stage in range(problem.num_stages):
        _, min_load_ms = load_limits(problem, segments, stage, step_ms)
        within = list_intervals(segments, (stage,), most_ms)
        held.append(within.select(within.forward_ms + within.backward_ms >= min_load_ms))
    loads_ms = []
    for stage, of_stage in enumerate(held):
        if should_stop():
            raise TooManyPatterns
        mixes = _mixes(segments, graph, of_stage, stage, most_ms, None, "load")
        loads_ms.append(problem.time_factors[stage] * mixes.least_loads() * (1.0 - ROUNDING_FRACTION))
    patterns = []
    for stage, (of_stage, beside) in enumerate(zip(held, _find_beside(segments, held, loads_ms, step_ms), strict=True)):
        if should_stop():
            raise TooManyPatterns
        mixes = _mixes(segments, graph, of_stage, stage, most_ms, beside, "all")
        patterns.append(_patterns_of(segments, of_stage, stage, mixes))
    return patterns


def least_mixed_loads(segments: Segments, is_exact: bool) -> Floats:
    """[P, N + 1, N + 1] the least forward and backward in ms, for one micro-batch, of a stage that holds segments begin
    to end, as far as that is below MOST_LOAD times the average, and less where it is more. is_exact: of whole layers;
    else of parts of them, in a small part of the time.
    """
    problem = segments.problem
    graph = full_graph(problem.schedule, problem.num_stages, 1, problem.num_microbatches)
    average_ms = float(segments.forward_ms[-1] + segments.backward_ms[-1]) / sum(
        1.0 / each for each in problem.time_factors
    )
    most_ms = MOST_LOAD * average_ms
    loads_ms = np.zeros((problem.num_stages, segments.num_segments + 1, segments.num_segments + 1))
    with suppress(TooManyPatterns):
        for stage, factor in enumerate(problem.time_factors):
            held = list_intervals(segments, (stage,), most_ms)
            mixes = _mixes(segments, graph, held, stage, most_ms, None, "load")
            least_ms = factor * (mixes.least_loads() if is_exact else mixes.relaxed_loads())
            loads_ms[stage, held.begin, held.end] = np.minimum(least_ms, most_ms) * (1.0 - ROUNDING_FRACTION)
    return loads_ms


def _find_beside(
    segments: Segments, held: Sequence[Intervals], loads_ms: Sequence[Floats], step_ms: float
) -> list[Beside]:
    """Of each stage what a step below step_ms has beside it. loads_ms: what each interval of a stage takes at least."""
    num_stages, size = segments.problem.num_stages, segments.num_segments + 1
    before_ms, after_ms = np.full((num_stages + 1, size), np.inf), np.full((num_stages + 1, size), np.inf)
    before_ms[0, 0] = after_ms[num_stages, segments.num_segments] = 0.0
    for stage, of in enumerate(held):
        np.minimum.at(before_ms[stage + 1], of.end, before_ms[stage, of.begin] + loads_ms[stage])
    for stage in range(num_stages - 1, -1, -1):
        of = held[stage]
        np.minimum.at(after_ms[stage], of.begin, after_ms[stage + 1, of.end] + loads_ms[stage])
    return [Beside(step_ms, before_ms[stage], after_ms[stage + 1]) for stage in range(num_stages)]


def _mixes(
    segments: Segments,
    graph: TaskGraph,
    held: Intervals,
    stage: int,
    max_load_ms: float,
    beside: Beside | None,
    compare: Compare,
) -> StageMixes:
    problem = segments.problem
    room_bytes = float(allowed_bytes(problem)[stage]) - problem.stage_static_bytes[stage]
    in_flight = float(graph.in_flight[stage].max())
    weights, budgets = _list_paths(segments, held, stage, max_load_ms, beside)
    factor = problem.time_factors[stage]
    return StageMixes(segments, held, stage, in_flight, room_bytes, weights, budgets / factor, compare)


def _list_paths(
    segments: Segments, held: Intervals, stage: int, max_load_ms: float, beside: Beside | None
) -> tuple[Floats, Floats]:
    """Paths through one stage: forwards and backwards of it that lie on each [paths, 2], and what is left for them in a
    step where the stage holds an interval [intervals, paths] (placement/bounds/step.py has the paths).
    """
    problem = segments.problem
    num_microbatches = float(problem.num_microbatches)
    weights = [(1.0, 1.0)]
    budgets = [np.full(len(held.begin), max_load_ms)]
    if beside is not None:
        _, warmups, cooldowns = count_in_order(problem.schedule, problem.num_stages, problem.num_microbatches)
        before_ms, after_ms = beside.before_ms[held.begin], beside.after_ms[held.end]
        weights.append((num_microbatches, num_microbatches))
        budgets.append(beside.step_ms - before_ms)
        if np.isfinite(warmups[stage]):
            weights.append((num_microbatches - warmups[stage], num_microbatches))
            weights.append((num_microbatches, num_microbatches - cooldowns[stage]))
            budgets += [beside.step_ms - before_ms - after_ms] * 2
    return np.array(weights), np.stack(budgets, axis=1)


def _patterns_of(segments: Segments, held: Intervals, stage: int, mixes: StageMixes) -> StagePatterns:
    problem = segments.problem
    factor, found = problem.time_factors[stage], mixes.list_rows()
    number = np.repeat(np.arange(len(found)), [rows.num_rows for rows in found])
    rows = join_rows([Rows(np.zeros((0, 8)), np.zeros((0, segments.num_lanes), dtype=np.int64)), *found])
    times_ms = np.column_stack(
        [
            factor * rows.values[:, [FORWARD, BACKWARD]],
            held.hop_forward_ms[number],
            held.hop_backward_ms[number],
            problem.stage_tail_ms[stage] + rows.values[:, TAIL],
        ]
    )
    return StagePatterns(
        held.begin[number, None], held.end[number, None], rows.counts[:, None], held.used[number], times_ms
    )
