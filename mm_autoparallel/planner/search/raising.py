"""Raising: fills at which a free order is placed because bounds say no more of them.

Where orders are to be found a bound may stay one and two percent below what is found, and what holds the search down is
then a piece of fills (search/floors.py) of one pipeline. Placing at such a fill, for nothing but what would rank before
the best plan, raises what all emptier ones take at least, or finds a better plan.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mm_autoparallel.pipeline.schedules.catalog import FREE
from mm_autoparallel.pipeline.solve.task import Answer
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.trimming import ROUNDING_FRACTION

if TYPE_CHECKING:
    from mm_autoparallel.planner.search.pipeline import Pipeline

#: How often a fill is placed at most, and how many may come to nothing in a row; steps are the same within such a part.
#: Assumed.
MOST_PLACED, MOST_IDLE, SAME_FRACTION = 2, 2, 5e-4
#: By how much less full the next emptier plan is than one that is known.
BELOW_FRACTION = 1e-6


class Raising:
    """That of one pipeline. cutoff_ms: what a step is to be below at the fill that is being placed; num_placed: how
    often it was before; infinite and 0 where none is."""

    def __init__(self, caution: Caution) -> None:
        self.cutoff_ms, self.num_placed = math.inf, 0
        self._caution = caution
        self._num_placed: dict[float, int] = {}
        self._just_below: dict[float, float] = {}
        self._least_ms, self._num_idle = 0.0, 0

    @property
    def is_on(self) -> bool:
        """Whether a fill is being placed."""
        return math.isfinite(self.cutoff_ms)

    def begin(self, pipeline: Pipeline, aim_ms: float) -> bool:
        """Place at a fill where bounds say no more and the pipeline's level ranks below aim_ms; whether there is one.

        It is the middle one of those from the piece on that ranks least whose least step is the same, so that few turns
        raise all; or that of the best plan, where its step is not known to be the least.
        """
        level, within_ms, floors = pipeline.level, pipeline.within_ms, pipeline.floors
        is_free = pipeline.strategies[0].schedule == FREE and not pipeline.has_chunks
        if not is_free or not pipeline.num_slices or not math.isfinite(level.fill_fraction + within_ms):
            return False
        below = [piece for piece in floors.pieces(level.fill_fraction, within_ms) if piece.rank_ms < aim_ms]
        if not below or self._num_idle == MOST_IDLE:
            return False
        least = min(below, key=lambda piece: piece.rank_ms)
        same_ms = max(within_ms, floors.of(least.fill)) * (1.0 - SAME_FRACTION)
        same = [
            piece for piece in below if piece.fill >= least.fill and max(within_ms, floors.of(piece.fill)) >= same_ms
        ]
        middle = same[len(same) // 2]
        fills = {self._just_below.get(middle.fill, middle.fill): middle.above}
        if pipeline.placement is not None:
            own = pipeline.count_fill(pipeline.placement) * (1.0 + ROUNDING_FRACTION)
            if least.fill < own < middle.fill and floors.of(own) < (1.0 - SAME_FRACTION) * pipeline.step_ms:
                fills[own] = max(piece.above for piece in below if piece.above < own)
        fill = min(fills, key=lambda each: (self._num_placed.get(each, 0), each))
        above, num_placed = fills[fill], self._num_placed.get(fill, 0)
        if num_placed == MOST_PLACED or fill <= above:
            return False
        self._num_placed[fill] = num_placed + 1
        self.num_placed, self.cutoff_ms = num_placed, aim_ms / (self._caution.factor(above) if above else 1.0)
        pipeline.is_probing, pipeline.probe_fill_fraction = True, fill
        self._least_ms = max(within_ms, floors.of(fill))
        return True

    def end(self, pipeline: Pipeline, answer: Answer) -> bool:
        """A fill was placed; whether by `begin`. Where what it takes is known, emptier ones than what was found may
        take more."""
        was_on, self.cutoff_ms, self.num_placed = self.is_on, math.inf, 0
        if not was_on:
            return False
        is_idle = answer.placement is None and answer.lower_bound_ms < self._least_ms * (1.0 + SAME_FRACTION)
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if answer.placement is not None and answer.lower_bound_ms >= (1.0 - SAME_FRACTION) * answer.step_ms:
            just_below = (1.0 - BELOW_FRACTION) * pipeline.count_fill(answer.placement)
            self._just_below[pipeline.probe_fill_fraction] = just_below
        return True
