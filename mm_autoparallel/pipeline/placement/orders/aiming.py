"""Aiming: CP-SAT asked for an order of the best placement that is well below the best step.

Close to what is possible CP-SAT takes long either way, and local search gets stuck some tenths of a percent above. In
between, where the orders of two actions are literals (`leaf.has_literals`), CP-SAT often finds an order in a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import NUM_KINDS
from mm_autoparallel.pipeline.placement.orders.justify import justify_words
from mm_autoparallel.pipeline.placement.orders.leaf import has_literals, solve_leaf
from mm_autoparallel.pipeline.placement.orders.local import Found

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Where between a bound and the best step goals lie, by turns; CP-SAT's deterministic time for one, for each pair of
#: actions, and how many times as long it has in the next turn; turns that may come to nothing. Assumed.
PARTS, EFFORT_S, GROWTH, MOST_TURNS = (0.5, 0.75, 0.875), 4e-6, 2.0, 2
#: Seconds that it may take beyond so many times that: where bounds creep, its deterministic time tells little.
SPARE_S, SPARE_FACTOR = 1.0, 2.0


class Aiming:
    """What was asked for the best words of a search."""

    def __init__(self) -> None:
        self._rows: Ints | None = None
        self._step_ms, self._low_ms, self._turn = np.inf, 0.0, 0

    def can(self, best: Found | None) -> bool:
        """Whether there is a goal left to be asked for."""
        if best is None:
            return False
        num_stages, length = best.words.shape
        is_new = best.step_ms != self._step_ms or self._rows is None or not np.array_equal(best.rows, self._rows)
        return has_literals(num_stages, length // NUM_KINDS) and (is_new or self._turn < MOST_TURNS * len(PARTS))

    def improve(
        self, best: Found, figures: Floats, lower_ms: float, should_stop: Callable[[], bool], seed: int
    ) -> Found | None:
        """An order of the best placement, whose stages have `figures` [P, NUM_FIGURES], if the next goal finds one. No
        step is below lower_ms."""
        if not self.can(best):
            return None
        if self._rows is None or not np.array_equal(best.rows, self._rows):
            self._rows, self._low_ms, self._step_ms = best.rows.copy(), 0.0, np.inf
        if best.step_ms != self._step_ms:
            self._step_ms, self._turn = best.step_ms, 0
        low_ms, number = max(self._low_ms, lower_ms), self._turn // len(PARTS)
        goal_ms = low_ms + PARTS[self._turn % len(PARTS)] * (best.step_ms - low_ms)
        self._turn += 1
        count, effort_s = best.words.shape[1] // NUM_KINDS, EFFORT_S * best.words.size**2 * GROWTH**number
        until_s = time.monotonic() + SPARE_S + SPARE_FACTOR * effort_s
        leaf = solve_leaf(figures, count, goal_ms, effort_s, lambda: should_stop() or time.monotonic() > until_s, seed)
        if leaf.answer == "infeasible":
            self._low_ms = goal_ms
        if leaf.words is None:
            return None
        words = leaf.words.copy()
        return Found(justify_words(words, figures), best.boundaries, best.rows, words)
