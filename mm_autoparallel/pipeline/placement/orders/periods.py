"""Periods: how long that of the steady part is which is looked for next, and of how many micro-batches together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

#: Micro-batches that pass together in a period, by turns; the first period beside the least, and how much more is asked
#: for where nothing was found, each time twice as much; where found and not found are that near, all begins again with
#: more effort, up to the most. Assumed.
TOGETHER, BESIDE, NEAR, MOST_EFFORT = (2, 1, 2, 3), 0.002, 0.001, 3


@dataclass
class Asked:
    """What is known of periods of so many micro-batches together: of one micro-batch each."""

    least_ms: float
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

    def take(self, period_ms: float, is_found: bool) -> None:
        if is_found:
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

    def next(self) -> tuple[int, Asked]:
        """How many micro-batches together, and what is known of these."""
        together = TOGETHER[self.turn % len(TOGETHER)]
        self.turn += 1
        return together, self.asked.setdefault(together, Asked(self.least_ms))
