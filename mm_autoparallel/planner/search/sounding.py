"""Sounding: fills at which a free order is placed in turn, because what it takes falls with them in leaps.

Bounds hardly tell how fast a free order can be at a fill (search/floors.py), and what was found does: a plan fuller
than one fill and no fuller than another takes about what was found at the fuller one, or more, and ranks by the price
of the emptier one at least (search/caution.py). Where that leaves the widest stretch of prices that may hold a better
plan, its middle is tried.
"""

from __future__ import annotations

import math
from itertools import pairwise

from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.planner.search.caution import Caution

#: So many fills are tried at most; a stretch narrower than this is not worth one. Assumed.
MOST_SOUNDINGS, NARROW_FRACTION = 4, 4e-3
#: What was found may be so much fuller than the fill that was asked for, which counts less than some stages hold.
FULLER_FRACTION = 5e-3


class Sounding:
    """That of one pipeline. is_due: whether a fill is to be tried, by what was known when it was last looked at; is_on:
    whether one is being tried."""

    def __init__(self, caution: Caution) -> None:
        self.is_due, self.is_on = False, False
        self._caution = caution
        self._step_ms: dict[float, float] = {}
        self._plans: dict[float, Placement] = {}
        self._tried: list[float] = []

    def note(self, fill: float, step_ms: float, placement: Placement | None = None) -> None:
        """A plan was found that is so full; infinite: it does not keep the limits, and is none."""
        if not math.isfinite(fill) or step_ms >= self._step_ms.get(fill, math.inf):
            return
        is_best = all(ms > step_ms for at, ms in self._step_ms.items() if at <= fill)
        self._step_ms[fill] = step_ms
        if placement is not None and is_best:
            worse = [at for at in self._plans if at >= fill and self._step_ms[at] >= step_ms]
            for at in worse:
                del self._plans[at]
            self._plans[fill] = placement

    def plan_within(self, fill: float) -> Placement | None:
        """The fastest plan that is no fuller; None where none is known."""
        known = [at for at in self._plans if at <= fill]
        return self._plans[min(known, key=self._step_ms.__getitem__)] if known else None

    def look(self, best_ms: float, most_fill: float) -> float | None:
        """The fill to try where best_ms is the best known rank and nothing fuller than most_fill is of interest; None
        where none is worth it."""
        fill = self._middle(best_ms, most_fill)
        self.is_due = fill is not None
        return fill

    def begin(self, best_ms: float, most_fill: float) -> float | None:
        """The same, and it is tried now."""
        fill = self.look(best_ms, most_fill)
        if fill is not None:
            self._tried.append(fill)
            self.is_on = True
        return fill

    def end(self) -> bool:
        """It was tried; whether one was being tried."""
        was_on, self.is_on = self.is_on, False
        return was_on

    def _middle(self, best_ms: float, most_fill: float) -> float | None:
        if not self._step_ms or len(self._tried) >= MOST_SOUNDINGS or math.isinf(best_ms):
            return None
        known = sorted(fill for fill in {*self._step_ms, *self._tried, most_fill} if fill <= most_fill)
        widest, middle = math.log1p(NARROW_FRACTION), None
        for above, fill in pairwise([0.0, *known]):
            least_ms = min(
                (ms for at, ms in self._step_ms.items() if at <= fill * (1.0 + FULLER_FRACTION)), default=0.0
            )
            low = self._caution.factor(above) if above else 1.0
            high = min(self._caution.factor(fill), best_ms / least_ms if least_ms else math.inf)
            if math.isfinite(high) and math.log(high / low) > widest:
                widest, middle = math.log(high / low), self._caution.fill_at(math.sqrt(low * high))
        return middle
