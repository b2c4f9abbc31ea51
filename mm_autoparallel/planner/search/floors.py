"""Floors: what a pipeline's placements take at least, by how full they are at most, and so what they rank at.

A placement filled to x of step T ranks at T * g(x) (search/caution.py), and the emptier placements must be the longer
the least of them takes. Where fills f_1 < ... < f_n are known, with least steps T(f_1) >= ... >= T(f_n), what is fuller
than f_i and not than f_(i+1) ranks at T(f_(i+1)) * g(f_i) at least, and what is no fuller than f_1 at T(f_1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.schedules.catalog import FREE
from mm_autoparallel.planner.search.caution import Caution

if TYPE_CHECKING:
    from mm_autoparallel.planner.search.pipeline import Pipeline

#: Pieces between two fills are parted until g of both is this close; so many fills are asked for at most. Assumed.
CLOSE_FRACTION, MOST_ASKED = 5e-4, 24


class Piece(NamedTuple):
    """Placements fuller than `above` and no fuller than `fill`; rank_ms: what they rank at, at least."""

    above: float
    fill: float
    rank_ms: float


class Floors:
    """Those of one pipeline."""

    def __init__(self, caution: Caution) -> None:
        self._caution = caution
        self._step_ms: dict[float, float] = {}
        self._asked: set[float] = set()

    def __contains__(self, fill: float) -> bool:
        return fill in self._step_ms

    def raise_to(self, fill: float, step_ms: float) -> None:
        """No placement that is filled to at most `fill` takes less than step_ms; infinite where there is none."""
        self._step_ms[fill] = max(step_ms, self._step_ms.get(fill, 0.0))

    def of(self, fill: float) -> float:
        """What no placement filled to at most `fill` is below."""
        return max((step_ms for known, step_ms in self._step_ms.items() if known >= fill), default=0.0)

    def fill_beyond(self, aim_ms: float, within_ms: float) -> float:
        """What is fuller ranks above aim_ms, where no step is below within_ms."""
        lower, known_ms = math.inf, within_ms
        while (better := self._caution.fill_at(aim_ms / known_ms)) < lower:
            lower, known_ms = better, max(known_ms, self.of(better))
        return lower

    def pieces(self, fill: float, within_ms: float) -> list[Piece]:
        """All placements that are filled to at most `fill`, of which no step is below within_ms, the emptiest first."""
        above, found = 0.0, []
        for each in (*sorted(known for known in self._step_ms if known < fill), fill):
            step_ms = max(within_ms, self.of(each))
            found.append(Piece(above, each, step_ms * (self._caution.factor(above) if above else 1.0)))
            above = each
        return found

    def rank_ms(self, fill: float, within_ms: float) -> float:
        """What none of those placements ranks below."""
        if not self._step_ms or math.isinf(within_ms):
            return within_ms
        return min(piece.rank_ms for piece in self.pieces(fill, within_ms))

    def climb(self, pipeline: Pipeline, aim_ms: float, should_stop: Callable[[], bool]) -> bool:
        """Ask for the fill that would raise what the pipeline's level ranks at most, where that is below aim_ms and
        bounds cost little; whether one was asked for."""
        level, within_ms = pipeline.level, pipeline.within_ms
        is_cheap = pipeline.strategies[0].schedule == FREE or not pipeline.is_dear
        if self._caution.is_off or not is_cheap or not math.isfinite(level.fill_fraction + within_ms):
            return False
        least = min(self.pieces(level.fill_fraction, within_ms), key=lambda piece: piece.rank_ms)
        low, high = self._caution.factor(least.above) if least.above else 1.0, self._caution.factor(least.fill)
        fill = self._caution.fill_at(math.sqrt(low * high)) if math.isfinite(high) else math.inf
        if high <= low * (1.0 + CLOSE_FRACTION):
            fill = least.fill  # which was tried, and may have a better bound
        is_new = fill < level.fill_fraction and fill not in self._asked
        if least.rank_ms >= aim_ms or len(self._asked) == MOST_ASKED or not is_new:
            return False
        self._asked.add(fill)
        problem, tries = pipeline.problem_at(fill), not pipeline.has_chunks
        self.raise_to(fill, bound_step(problem, tries, should_stop, enough_ms=aim_ms / low).step_ms)
        return True
