"""Trimming: plans of a free order that are no fuller than they need be, looked for between the slices of a level.

Placing knows steps and limits, and fills what it may: a plan that is as fast and less full ranks before the one that it
finds. And a level counts less than some stages hold (search/caution.py), so what it finds may be fuller than the level.
So another problem is placed: of the emptiest fill at which the bound is what it is at the level's, or of one of those
up to which plans may rank least (search/floors.py), its limits lowered by what the stages of all plans known of it were
fuller than counted. Before them comes that of the best plan's own fill, for one that is as full and faster. It bounds
nothing; its plans are plans of the level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.catalog import FREE
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.search.level import list_counted

if TYPE_CHECKING:
    from mm_autoparallel.planner.search.pipeline import Pipeline

#: The emptiest fill is looked for above this part of the level's, so closely; a bound is the same within such a part.
LEAST_PART, CLOSE_FRACTION, SAME_FRACTION = 0.8, 5e-4, 2e-4
#: How many others are tried, and how often each is.
NUM_OTHERS, MOST_TRIES = 1, 2
#: By how much more than a plan fills its own fill is, for sums that are rounded.
ROUNDING_FRACTION = 1e-9


class Trimming:
    """That of one pipeline. problem: what is to be placed while it is on; cutoff_ms: what its step is to be below."""

    def __init__(self) -> None:
        self.problem: Problem | None = None
        self.cutoff_ms = math.inf
        self._seen = math.inf, 0
        self._fills: dict[float, float] = {}
        self._num_tries: dict[float, int] = {}
        self._num_polished: dict[float, int] = {}

    def begin(self, pipeline: Pipeline, cutoff_ms: float, should_stop: Callable[[], bool]) -> bool:
        """After each slice of a level whose order is to be found: whether an emptier plan may rank below cutoff_ms, and
        is looked for now."""
        level, strategy, caution = pipeline.level, pipeline.strategies[0], pipeline.caution
        seen = level.fill_fraction, level.num_slices
        if strategy.schedule != FREE or pipeline.has_chunks or math.isinf(level.fill_fraction) or seen == self._seen:
            return False
        self._seen = seen
        if not level.num_slices or level.problem is None or pipeline.problem is None:
            return False
        if pipeline.rank_ms <= cutoff_ms and self._polish(pipeline):
            return True
        fills = self._list_fills(pipeline, level.problem, should_stop)
        fill = min(fills, key=lambda each: self._num_tries.get(each, 0))
        self._num_tries[fill] = self._num_tries.get(fill, 0) + 1
        self.cutoff_ms = min(cutoff_ms, pipeline.rank_ms) / caution.factor(fill)
        least_ms = max(pipeline.within_ms, pipeline.floors.of(fill))
        if least_ms >= self.cutoff_ms or self._num_tries[fill] > MOST_TRIES:
            return False
        known = [placement for placement in (level.placement, pipeline.placement) if placement is not None]
        over = np.min([self._excess(pipeline, each) for each in known], axis=0) if known else 0.0
        problem = pipeline.problem_at(fill)
        limits = np.array(problem.memory_limit_bytes) * (1.0 - over / fill)
        self.problem = replace(problem, memory_limit_bytes=tuple(limits.tolist()))
        return True

    def _polish(self, pipeline: Pipeline) -> bool:
        """Look for a faster plan that is as full as the best of all, of this pipeline, where that is new."""
        placement = pipeline.placement
        if placement is None:
            return False
        fill = pipeline.count_fill(placement) * (1.0 + ROUNDING_FRACTION)
        if self._num_polished.get(fill, 0) == MOST_TRIES or pipeline.floors.of(fill) >= pipeline.step_ms:
            return False
        self._num_polished[fill] = self._num_polished.get(fill, 0) + 1
        self.problem, self.cutoff_ms = pipeline.problem_at(fill), pipeline.step_ms
        return True

    def end(self) -> bool:
        """It was placed; whether it was on."""
        was_on, self.problem = self.problem is not None, None
        return was_on

    def _list_fills(self, pipeline: Pipeline, problem: Problem, should_stop: Callable[[], bool]) -> list[float]:
        """The emptiest fill with the bound of the level, and those up to which plans may rank least."""
        most = pipeline.level.fill_fraction
        pieces = sorted(pipeline.floors.pieces(most, pipeline.within_ms), key=lambda piece: piece.rank_ms)
        emptiest = self._emptiest_fill(pipeline, problem, most, should_stop)
        return [emptiest, *(piece.fill for piece in pieces[:NUM_OTHERS])]

    def _emptiest_fill(self, pipeline: Pipeline, problem: Problem, most: float, stop: Callable[[], bool]) -> float:
        """The least fill at which the bound is that of the level."""
        bound_ms = bound_step(problem, should_stop=stop).step_ms
        if bound_ms in self._fills:
            return min(most, self._fills[bound_ms])
        low, high = LEAST_PART * most, most
        while high - low > CLOSE_FRACTION * most and not stop():
            middle = 0.5 * (low + high)
            bound = bound_step(pipeline.problem_at(middle), should_stop=stop)
            if bound.reason or bound.step_ms > bound_ms * (1.0 + SAME_FRACTION):
                low = middle
            else:
                high = middle
        self._fills[bound_ms] = high
        return high

    def _excess(self, pipeline: Pipeline, placement: Placement) -> NDArray[np.float64]:
        """[P] by how much each stage is fuller than a level counts it."""
        problem, strategy, caution = pipeline.problem, pipeline.strategies[0], pipeline.caution
        assert problem is not None
        timeline = simulate(problem, placement)
        fills = caution.list_fills(problem, placement, strategy, timeline.graph, timeline.peak_memory_bytes)
        excess: NDArray[np.float64] = np.maximum(
            np.array(fills) - list_counted(pipeline.problem_at(1.0), placement), 0.0
        )
        return excess
