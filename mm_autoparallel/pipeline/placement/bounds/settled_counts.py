"""Settled counts: the step below which no counts of the main kind's layers are left, at any place of its first one.

An aim is refuted, or counts come up that no mixture known so far rules out below it; those get a mixture of their own.
Where that says less than the aim, the aim is out of reach and falls. Mixtures serve all places.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import Look
from mm_autoparallel.pipeline.placement.bounds.chunk_counts import Counts, Mixture, Place
from mm_autoparallel.pipeline.placement.bounds.stage_counts import MAX_WORK, ROUNDING_FRACTION, find_counts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Games of one problem at most: each takes some milliseconds (assumed).
MAX_GAMES = 60
#: Sums of costs after which no more games are played: some tenths of a second (assumed).
MOST_WORK = 200_000_000
#: How far above the bound of a place its next aim is (0.005, 0.01, 0.02 and 0.1 tried on 72B with 4 and 8 stages).
RISE_FRACTION = 0.01
#: An aim that is out of reach falls to this share of the way from the bound to what the counts take (assumed).
FALL_FRACTION = 0.75
#: Bounds end this close to what is out of reach.
CLOSE_FRACTION = 2e-4


class _Settling:
    """mixtures: known so far. num_games: played; work: sums of costs looked at. found: counts that may take less than
    what was not refuted last.
    """

    def __init__(self, counts: Counts, mixtures: Iterable[Mixture]) -> None:
        self._counts = counts
        self.mixtures = [*mixtures]
        self.num_games = self.work = 0
        self._tables: dict[Place, tuple[list[Floats], list[float]]] = {}
        self.found: Ints = np.zeros(0, dtype=np.int64)

    @property
    def is_tired(self) -> bool:
        """Whether it has worked enough."""
        return self.num_games >= MAX_GAMES or self.work >= MOST_WORK

    def refutes(self, place: Place, step_ms: float) -> bool:
        """Whether no counts take less than step_ms; else `found` is what may."""
        may_be = self._counts.allowed(place, step_ms)
        if may_be is None:
            return True
        costs_ms, fixed_ms = self._tables.setdefault(place, ([], []))
        for mixture in self.mixtures[len(costs_ms) :]:
            cost_ms, rest_ms = self._counts.costs_on(mixture, place)
            costs_ms.append(cost_ms)
            fixed_ms.append(rest_ms)
        self.found = np.zeros(len(may_be), dtype=np.int64)
        # nothing known yet: any counts that stages can take
        known_ms = np.array(costs_ms) if costs_ms else np.zeros((1, *may_be.shape))
        most_ms = np.array([step_ms * (1.0 + ROUNDING_FRACTION) - rest_ms for rest_ms in fixed_ms] or [step_ms])
        status, work = find_counts(known_ms, most_ms, may_be, MAX_WORK, self.found)
        self.work += work
        return status == 0

    def play(self, place: Place) -> float | None:
        """Find a mixture for what was found; what these counts take on it at least. None where there can be none."""
        mixture = self._counts.play(place, self.found, self.num_games)
        if mixture is None:
            return None
        self.num_games += 1
        self.mixtures.append(mixture)
        cost_ms, rest_ms = self._counts.costs_on(mixture, place)
        return float(cost_ms[np.arange(len(self.found)), self.found].sum()) + rest_ms

    def halve(self, place: Place, low_ms: float, high_ms: float, look: Look) -> float:
        """The largest step between that the mixtures known so far refute; low_ms is known to be one."""
        while high_ms - low_ms > CLOSE_FRACTION * low_ms:
            look()
            middle_ms = 0.5 * (low_ms + high_ms)
            if self.refutes(place, middle_ms):
                low_ms = middle_ms
            else:
                high_ms = middle_ms
        return low_ms


def settle_places(
    counts: Counts, mixtures: Iterable[Mixture], known_ms: dict[Place, float], enough_ms: float, look: Look
) -> float:
    """The least bound of all places, or enough_ms. mixtures: known before. known_ms: of each place. Raises what `look`
    does."""
    settling, low_ms = _Settling(counts, mixtures), dict(known_ms)
    most_ms = dict.fromkeys(low_ms, enough_ms)  # nothing above is of interest, or within reach
    while True:
        look()
        place = min(low_ms, key=lambda each: low_ms[each])
        low, most = low_ms[place], most_ms[place]
        if most <= low * (1.0 + CLOSE_FRACTION):
            return low
        aim_ms = min(most, low * (1.0 + RISE_FRACTION))
        if np.isfinite(most) and most < enough_ms:
            aim_ms = min(aim_ms, low + FALL_FRACTION * (most - low))
        if settling.refutes(place, aim_ms):
            low_ms[place] = aim_ms
            continue
        value_ms = None if settling.is_tired else settling.play(place)
        if value_ms is None:
            return settling.halve(place, low, aim_ms, look)
        if value_ms < aim_ms:
            most_ms[place] = max(low, value_ms)
