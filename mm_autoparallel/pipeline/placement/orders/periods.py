"""Periods: how long that of the steady part is which is looked for next, and of how many micro-batches together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import NUM_KINDS
from mm_autoparallel.pipeline.placement.orders.local import Found, Run

#: Micro-batches that pass together in a period, by turns, and in one of how many turns after the first ones; else those
#: of the best step. Assumed.
TOGETHER, EVERY = (2, 1, 3, 4), 2
#: The first period beside the least, where others have none, and how much more is asked for where nothing was found,
#: each time twice as much; where found and not found are that near, others up to so far beyond are asked for, with
#: efforts by turns. Assumed.
BESIDE, NEAR, BEYOND, EFFORTS = 0.002, 0.002, 0.003, (1, 2)
#: So many periods at most are asked for at once where others have one; and none at which all micro-batches take so many
#: times the best step, for what is found passes in less. Assumed.
MOST_KNOWN, MOST_FACTOR = 2, 1.02
#: Steps through what is left to be asked for, which come near none before.
GOLDEN = 0.618033988749895
#: So often at most something is asked for until it is found: nothing takes a hundredth of what is found. Assumed.
MOST_ASKED = 12


@dataclass
class Asked:
    """What is known of periods of so many micro-batches together, of one micro-batch each; and the best step."""

    together: int
    least_ms: float
    first_ms: float
    failed_ms: float = 0.0
    found_ms: float = np.inf
    step_ms: float = np.inf
    num_near: int = 0
    growth_fraction: float = BESIDE

    def next(self) -> tuple[float, int]:
        """The period that is asked for, and with how much effort."""
        if not np.isfinite(self.found_ms):
            return self.failed_ms * (1.0 + self.growth_fraction) if self.failed_ms else self.first_ms, EFFORTS[0]
        low_ms = max(self.failed_ms, self.least_ms)
        if self.found_ms > low_ms * (1.0 + NEAR):
            return 0.5 * (low_ms + self.found_ms), EFFORTS[0]
        self.num_near += 1
        width_ms = self.found_ms * (1.0 + BEYOND) - low_ms
        return low_ms + width_ms * (self.num_near * GOLDEN % 1.0), EFFORTS[self.num_near % len(EFFORTS)]

    def take(self, period_ms: float, step_ms: float) -> None:
        """step_ms: infinite where nothing was found."""
        self.step_ms = min(self.step_ms, step_ms)
        if np.isfinite(step_ms):
            self.found_ms = min(self.found_ms, period_ms)
        elif period_ms < self.found_ms:
            self.failed_ms, self.growth_fraction = max(self.failed_ms, period_ms), 2.0 * self.growth_fraction


@dataclass
class Periods:
    """least_ms: work of one micro-batch in the fullest stage, where that is least."""

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
            first_ms = min((asked.found_ms for asked in self.asked.values()), default=np.inf)
            first_ms = first_ms if np.isfinite(first_ms) else self.least_ms * (1.0 + BESIDE)
            return self.asked.setdefault(together, Asked(together, self.least_ms, first_ms))
        return min(self.asked.values(), key=lambda asked: asked.step_ms)

    def look(
        self,
        runs: Sequence[Run],
        rows_below: Callable[[float], NDArray[np.bool_]],
        low_ms: float,
        most_ms: float,
        should_stop: Callable[[], bool],
    ) -> Found | None:
        """What the first of these runs finds that finds a steady part of the period it is asked for. It goes on from
        steps near most_ms. One call at a time: it notes which are found.

        rows_below: [R'] which rows of the table a step below may be made of; low_ms: none is. Where a period is known,
        rows of a step that is drawn between low_ms and most_ms are tried first, then all below most_ms: short ends and
        a short period are different wishes.
        """
        for _ in range(MOST_ASKED):
            asked, found = self.next(), None
            is_known = any(np.isfinite(of.found_ms) for of in self.asked.values())
            for run in runs[: MOST_KNOWN if is_known else len(runs)]:
                period_ms, effort = asked.next()
                longest_ms = MOST_FACTOR * most_ms / run.num_microbatches
                if period_ms > longest_ms:
                    period_ms = 0.5 * (asked.failed_ms + longest_ms)
                    if np.isfinite(asked.found_ms) or period_ms < asked.failed_ms * (1.0 + NEAR):
                        break
                if is_known:
                    drawn_ms = most_ms - (most_ms - low_ms) * (self.turn * GOLDEN % 1.0)
                    found = run.from_period(asked.together, period_ms, effort, most_ms, rows_below(drawn_ms))
                if found is None:
                    found = run.from_period(asked.together, period_ms, effort, most_ms, rows_below(most_ms))
                asked.take(period_ms, np.inf if found is None else found.step_ms)
                if found is not None or should_stop():
                    return found
        return None

    def know(self, words: NDArray[np.int8], starts_ms: NDArray[np.float64], step_ms: float) -> None:
        """Begin with the period of known words [P, 3M], if they have one; starts_ms: [P, 3M] of their letters."""
        length = words.shape[1]
        first, last = length // 3, 2 * length // 3
        for together in sorted(TOGETHER):
            shift = NUM_KINDS * together
            if last + shift <= length and np.array_equal(words[:, first:last], words[:, first + shift : last + shift]):
                num_periods = (last - first) // shift
                passed_ms = starts_ms[:, first + num_periods * shift] - starts_ms[:, first]
                period_ms = max(self.least_ms, float(passed_ms.max()) / (num_periods * together))
                failed_ms = period_ms * (1.0 - NEAR)
                self.asked[together] = Asked(together, self.least_ms, period_ms, failed_ms, period_ms, step_ms)
                self.turn = len(TOGETHER)
                return
