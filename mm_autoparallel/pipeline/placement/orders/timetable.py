"""Timetables: when a stage runs what in the steady part of a step, where K micro-batches pass in every period.

Micro-batch n · K + j runs as micro-batch j does, n periods later. A stage runs its forwards as late as the next stage
allows and its gradients of inputs as soon as that hands them back: what passes between both is what memory holds.
Weight gradients go into the gaps. Times may be negative: stages before begin earlier.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD,
    FORWARD_MS,
    INPUT,
    INPUT_MS,
    KEPT,
    MOST_IN_FLIGHT,
    PENDING,
    ROOM,
    WEIGHT,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.words import Words
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Times that differ by less, in parts of a period, are one.
SAME = 1e-7
#: The nearest free times that an action may take, beside the first.
FURTHER = 3
#: Periods after which pending weight gradients come and go as in all that follow.
SETTLED = 4


@kernel
def wrap(time_ms: float, period_ms: float) -> float:
    """The time within its period."""
    left = time_ms - np.floor(time_ms / period_ms) * period_ms
    return 0.0 if left >= period_ms * (1.0 - SAME) else left


@kernel
def _is_free(time_ms: float, length_ms: float, begins: Floats, lengths: Floats, count: int, period_ms: float) -> bool:
    for x in range(count):
        if wrap(begins[x] - time_ms, period_ms) < length_ms - SAME * period_ms:
            return False
        if wrap(time_ms - begins[x], period_ms) < lengths[x] - SAME * period_ms:
            return False
    return True


@kernel
def draw_timetable(
    period_ms: float, latest: Floats, earliest: Floats, figures: Floats, greed: float, forwards: Floats, inputs: Floats
) -> bool:
    """Draw when a stage begins K forwards, no later than latest [K], and K gradients of inputs, no earlier than
    earliest [K], one after another in a drawn order; whether all found their place.

    Each takes the nearest free time with probability greed, else one of the next: the time that it wants, or one that
    leaves whole weight gradients between it and what is placed. Overwrites forwards [K] and inputs [K].
    """
    together = latest.shape[0]
    order = np.arange(2 * together)
    for x in range(2 * together - 1, 0, -1):
        y = int(np.random.random() * (x + 1))
        order[x], order[y] = order[y], order[x]
    begins, lengths = np.empty(2 * together), np.empty(2 * together)
    delays = np.empty(1 + 4 * together * (together + 1))
    weight_ms = figures[WEIGHT_MS]
    most_weights = together if weight_ms > 0.0 else 0
    for count in range(2 * together):
        is_forward, j = order[count] < together, order[count] % together
        length_ms = figures[FORWARD_MS] if is_forward else figures[INPUT_MS]
        wanted_ms, sign = (latest[j], -1.0) if is_forward else (earliest[j], 1.0)
        delays[0] = 0.0
        num_delays = 1
        for x in range(count):
            for weights in range(most_weights + 1):
                after_ms = begins[x] + lengths[x] + weights * weight_ms
                before_ms = begins[x] - weights * weight_ms - length_ms
                delays[num_delays] = wrap(sign * (after_ms - wanted_ms), period_ms)
                delays[num_delays + 1] = wrap(sign * (before_ms - wanted_ms), period_ms)
                num_delays += 2
        skipped = 0
        while skipped < FURTHER and np.random.random() > greed:
            skipped += 1
        chosen = before = -1.0
        for delay_ms in np.sort(delays[:num_delays]):
            if delay_ms <= before + SAME * period_ms and before >= 0.0:
                continue
            before = delay_ms
            if _is_free(wanted_ms + sign * delay_ms, length_ms, begins, lengths, count, period_ms):
                chosen = delay_ms
                if skipped == 0:
                    break
                skipped -= 1
        if chosen < 0.0:
            return False
        begins[count], lengths[count] = wanted_ms + sign * chosen, length_ms
        if is_forward:
            forwards[j] = begins[count]
        else:
            inputs[j] = begins[count]
    return _in_turn(period_ms, forwards) and _in_turn(period_ms, inputs)


@kernel
def _in_turn(period_ms: float, begins: Floats) -> bool:
    """Whether micro-batches are taken in order."""
    for j in range(1, begins.shape[0]):
        if begins[j] < begins[j - 1]:
            return False
    return bool(begins[0] + period_ms * (1.0 + SAME) >= begins[-1])


@kernel
def _fill_gaps(period_ms: float, forwards: Floats, inputs: Floats, figures: Floats, order: Ints, rooms: Ints) -> int:
    """Overwrite order [2K] with the actions of a period as they follow one another, j of forwards and K + j of
    gradients of inputs, and rooms [2K] with how many weight gradients run after each at most; how many in all."""
    together = forwards.shape[0]
    begins = np.empty(2 * together)
    for j in range(together):
        begins[j], begins[together + j] = wrap(forwards[j], period_ms), wrap(inputs[j], period_ms)
    order[:] = np.argsort(begins)
    total = 0
    for x in range(2 * together):
        action = order[x]
        until_ms = begins[order[x + 1]] if x + 1 < 2 * together else begins[order[0]] + period_ms
        gap_ms = until_ms - begins[action] - (figures[FORWARD_MS] if action < together else figures[INPUT_MS])
        rooms[x] = together
        if figures[WEIGHT_MS] > 0.0:
            rooms[x] = min(together, max(0, int(np.floor(gap_ms / figures[WEIGHT_MS] + SAME * together))))
        total += rooms[x]
    return total


@kernel
def fits_timetable(period_ms: float, forwards: Floats, inputs: Floats, figures: Floats) -> bool:
    """Whether the gaps of a stage's timetable take its weight gradients, and its memory what passes."""
    together = forwards.shape[0]
    order, rooms = np.empty(2 * together, np.int64), np.empty(2 * together, np.int64)
    if _fill_gaps(period_ms, forwards, inputs, figures, order, rooms) < together:
        return False
    in_flight = pending = 0
    for j in range(together):
        in_flight += int(np.round((inputs[j] - wrap(inputs[j], period_ms)) / period_ms))
        in_flight -= int(np.round((forwards[j] - wrap(forwards[j], period_ms)) / period_ms))
    for _ in range(SETTLED):
        for x in range(2 * together):
            change = 1 if order[x] < together else -1
            in_flight += change
            pending += 0 if change == 1 else 1
            if in_flight > figures[MOST_IN_FLIGHT]:
                return False
            if in_flight * figures[KEPT] + pending * figures[PENDING] > figures[ROOM]:
                return False
            pending -= min(pending, rooms[x])
    return True


@kernel
def count_spare(period_ms: float, forwards: Floats, inputs: Floats, figures: Floats, most: int) -> int:
    """How many more micro-batches than a stage's timetable has in flight its memory holds, up to most."""
    fuller = figures.copy()
    for spare in range(most):
        fuller[ROOM] -= figures[KEPT]
        fuller[MOST_IN_FLIGHT] -= 1.0
        if not fits_timetable(period_ms, forwards, inputs, fuller):
            return spare
    return most


@kernel
def write_timetable(
    period_ms: float, forwards: Floats, inputs: Floats, figures: Floats, ahead: int, word: Words
) -> None:
    """Overwrite a stage's word [3M] with the order of its timetable, which so many forwards more run ahead of."""
    together, count = forwards.shape[0], word.shape[0] // 3
    order, rooms = np.empty(2 * together, np.int64), np.empty(2 * together, np.int64)
    _fill_gaps(period_ms, forwards, inputs, figures, order, rooms)
    first = np.empty(2 * together, np.int64)  # period of micro-batch j's actions
    for j in range(together):
        first[j] = int(np.round((forwards[j] - wrap(forwards[j], period_ms)) / period_ms))
        first[together + j] = int(np.round((inputs[j] - wrap(inputs[j], period_ms)) / period_ms))
    word[:ahead] = FORWARD
    n, pending, period = ahead, 0, first.min()
    while n + pending < word.shape[0]:
        for x in range(2 * together):
            action = order[x]
            m = (period - first[action]) * together + action % together
            if 0 <= m < (count - ahead if action < together else count):
                word[n] = FORWARD if action < together else INPUT
                n += 1
                pending += 0 if action < together else 1
            for _ in range(min(pending, rooms[x])):
                word[n] = WEIGHT
                n += 1
                pending -= 1
        period += 1
    word[n:] = WEIGHT
