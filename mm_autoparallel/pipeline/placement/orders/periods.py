"""Periods: how long that of the steady part is which is looked for next, and of how many micro-batches together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

#: Micro-batches that pass together in a period, by turns, and in one of how many turns after the first ones; else those
#: of the best step. The first period beside the least, and how much more is asked for where nothing was found, each
#: time twice as much; where found and not found are that near, all begins again with more effort, up to the most.
#: Assumed.
TOGETHER, EVERY, BESIDE, NEAR, MOST_EFFORT = (2, 1, 3, 4), 3, 0.002, 0.001, 3


@dataclass
class Asked:
    """What is known of periods of so many micro-batches together, of one micro-batch each; and the best step."""

    together: int
    least_ms: float
    step_ms: float = np.inf
    failed_ms: float = 0.0
    found_ms: float = np.inf
    growth: float = BESIDE
    effort: int = 1

    def next_ms(self) -> float:
        if self.failed_ms == 0.0:
            return self.least_ms * (1.0 + BESIDE)
        if not np.isfinite(self.found_ms):
            return self.failed_ms * (1.0 + self.growth)
        return 0.5 * (self.failed_ms + self.found_ms)

    def take(self, period_ms: float, step_ms: float) -> None:
        """step_ms: infinite where nothing was found."""
        self.step_ms = min(self.step_ms, step_ms)
        if np.isfinite(step_ms):
            self.found_ms = min(self.found_ms, period_ms)
        else:
            self.failed_ms, self.growth = max(self.failed_ms, period_ms), 2.0 * self.growth
        if self.found_ms <= max(self.failed_ms, self.least_ms) * (1.0 + NEAR) or self.growth > 1.0:
            self.failed_ms, self.growth, self.effort = 0.0, BESIDE, min(self.effort + 1, MOST_EFFORT)


@dataclass
class Periods:
    """least_ms: no stage of any placement has less work than its fullest one."""

    least_ms: float
    turn: int = 0
    asked: dict[int, Asked] = field(default_factory=dict)

    def next(self) -> Asked:
        """What is asked for next, and known of it."""
        number, turn = self.turn // EVERY, self.turn % EVERY
        is_first = self.turn < len(TOGETHER)
        self.turn += 1
        if is_first or turn == 0:
            together = TOGETHER[(self.turn - 1 if is_first else number) % len(TOGETHER)]
            return self.asked.setdefault(together, Asked(together, self.least_ms))
        return min(self.asked.values(), key=lambda asked: asked.step_ms)
