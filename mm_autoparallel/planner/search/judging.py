"""Judging: the placements of a level that may rank before the best plan, each by itself.

A level counts what a device holds at least (search/caution.py), so its fastest placement may be fuller than it counts,
and what other placements rank at is not known until they are looked at. With one chunk a stage, how full a stage is
depends on what it holds alone, and so does the least that a step takes with it: few ways to fill stages remain by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.laid_out import has_layouts
from mm_autoparallel.pipeline.placement.every import MayHold, has_known_order, list_placements, steps_with
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.simulate.loads import (
    find_misfits,
    graph_of,
    peak_bytes,
    peak_host_bytes,
    sum_loads,
)
from mm_autoparallel.pipeline.simulate.step import simulate

if TYPE_CHECKING:
    from mm_autoparallel.planner.search.pipeline import Pipeline

#: How often placements of a pipeline may be too many before they are not listed again. Assumed.
MOST_IN_VAIN = 2


class Judging:
    """That of one pipeline."""

    def __init__(self) -> None:
        self._num_in_vain = 0

    def judge(self, pipeline: Pipeline, cutoff_ms: float, should_stop: Callable[[], bool]) -> bool:
        """Judge the placements of the pipeline's level that may rank below cutoff_ms and its best plan, where these are
        few: nothing is left of the level then. Whether that was done."""
        aim_ms = min(cutoff_ms, pipeline.rank_ms)
        played = self._play_each(pipeline, aim_ms, should_stop)
        for placement, step_ms in played or ():
            if step_ms < min(cutoff_ms, pipeline.rank_ms):
                pipeline.offer(placement, step_ms, is_last=False)
        if played is not None:
            pipeline.elsewhere_ms = min(pipeline.elsewhere_ms, aim_ms, pipeline.rank_ms)
            pipeline.end_level(f"each of {len(played)} placements that could be better was looked at", 0.0)
        return played is not None

    def _play_each(
        self, pipeline: Pipeline, aim_ms: float, should_stop: Callable[[], bool]
    ) -> list[tuple[Placement, float]] | None:
        """Every placement that may rank below aim_ms, with its step, infinite where it does not keep the level's
        limits; None where they are too many, and on should_stop."""
        limited = pipeline.level.problem
        assert limited is not None
        if self._num_in_vain == MOST_IN_VAIN or not has_known_order(limited):
            return None
        is_by_stage = limited.num_chunks == 1 and not has_layouts(limited)
        may_hold = list_holdable(pipeline, aim_ms) if is_by_stage else None
        placements = list_placements(limited, most_ms=aim_ms, may_hold=may_hold, should_stop=should_stop)
        if placements is None:
            self._num_in_vain += 1
            return None
        played = []
        for placement in placements:
            if should_stop():
                return None
            timeline = simulate(limited, placement)
            misfits = find_misfits(limited, timeline.peak_memory_bytes, timeline.peak_host_bytes)
            played.append((placement, math.inf if misfits else timeline.step_ms))
        return played


def list_holdable(pipeline: Pipeline, aim_ms: float) -> MayHold:
    """Which stages of a placement may be part of one of the pipeline's level that ranks below aim_ms: those that keep
    all limits and, with the least step that may be, do not cost as much by how full they are."""
    problem, limited, caution = pipeline.problem, pipeline.level.problem, pipeline.caution
    assert problem is not None
    assert limited is not None
    graph, within_ms, strategy = graph_of(problem), pipeline.within_ms, pipeline.strategies[0]
    stages = np.arange(problem.num_stages)

    def may_hold(placement: Placement) -> NDArray[np.bool_]:
        loads = sum_loads(problem, placement)
        peaks = peak_bytes(problem, loads, graph)
        forward_ms, backward_ms, more_ms = (
            of[:, 0] for of in (loads.forward_ms, loads.backward_ms, loads.recompute_ms)
        )
        least_ms = np.maximum(within_ms, steps_with(problem, stages, forward_ms, backward_ms, more_ms))
        may = least_ms < aim_ms
        may[find_misfits(problem, peaks, peak_host_bytes(problem, loads, graph))] = False
        loads = sum_loads(limited, placement)
        may[find_misfits(limited, peak_bytes(limited, loads, graph), peak_host_bytes(limited, loads, graph))] = False
        if may.any():
            fills = caution.list_fills(problem, placement, strategy, graph, peaks)
            may &= least_ms * np.array([caution.factor(fill) for fill in fills]) < aim_ms
        return may

    return may_hold
