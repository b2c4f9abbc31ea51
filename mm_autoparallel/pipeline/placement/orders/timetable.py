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
#: What may follow in a timetable: a forward at once or later, a gradient of an input, one of weights.
CHOICES = 4
#: Periods after which pending weight gradients come and go as in all that follow.
SETTLED = 4


@kernel
def wrap(time_ms: float, period_ms: float) -> float:
    """The time within its period."""
    left = time_ms - np.floor(time_ms / period_ms) * period_ms
    return 0.0 if left >= period_ms * (1.0 - SAME) else left


@kernel
def list_timetables(
    period_ms: float,
    latest: Floats,
    earliest: Floats,
    is_last: bool,
    figures: Floats,
    most_waits_ms: float,
    most_nodes: int,
    forwards: Floats,
    inputs: Floats,
    waits_ms: Floats,
) -> int:
    """List when a stage may begin K forwards, no later than latest [K], and K gradients of inputs, no earlier than
    earliest [K], the least sum of waits first: how much earlier forwards are, and how much later gradients.

    is_last: of the last stage; forwards begin whenever they like, micro-batch 0 at 0, and gradients after them.
    Overwrites forwards [L, K], inputs [L, K] and waits_ms [L] with at most L timetables that fit and wait less than
    most_waits_ms in all; how many. One action of each is exactly when it wants to be, the others follow at once or when
    they want to, in every order that is tried before most_nodes are.
    """
    together, most = latest.shape[0], waits_ms.shape[0]
    forward_ms, input_ms, weight_ms = figures[FORWARD_MS], figures[INPUT_MS], figures[WEIGHT_MS]
    depth, near_ms, count, num_nodes = 3 * together, SAME * period_ms, 0, 0
    begins = np.empty((2, together))
    now_ms, spare_ms, waited_ms = np.empty(depth + 1), np.empty(depth + 1), np.empty(depth + 1)
    ran, choice = np.zeros((depth + 1, 3), np.int64), np.empty(depth + 1, np.int64)
    for first_kind in range(1 if is_last else 2):
        for first in range(together * together):
            first_of = first % together, first // together
            if is_last and first_of[0] > 0:
                continue
            begins[0, first_of[0]], begins[1, first_of[1]] = latest[first_of[0]], earliest[first_of[1]]
            ran[1], choice[1], d = 0, 0, 1
            ran[1, first_kind] = 1
            now_ms[1] = begins[first_kind, first_of[first_kind]] + (forward_ms if first_kind == 0 else input_ms)
            spare_ms[1], waited_ms[1] = period_ms - together * (forward_ms + input_ms + weight_ms), 0.0
            while d > 0:
                if d == depth or choice[d] == CHOICES:
                    if d == depth:
                        total_ms = _waits(period_ms, forward_ms, is_last, begins, waited_ms[d])
                        is_new = count < most or total_ms < waits_ms[most - 1] - near_ms
                        is_new = is_new and _in_turn(period_ms, begins)
                        if is_new and fits_timetable(period_ms, begins[0], begins[1], figures):
                            count = _insert(begins, total_ms, near_ms, forwards, inputs, waits_ms, count)
                    d -= 1
                    continue
                chosen, below_ms = choice[d], most_waits_ms if count < most else waits_ms[most - 1] - near_ms
                choice[d] += 1
                num_nodes += 1
                if num_nodes > most_nodes:
                    return count
                kind = max(0, chosen - 1)  # of a forward at once or later, a gradient of an input, a weight's
                if ran[d, kind] == together:
                    continue
                wait_ms = gap_ms = 0.0
                if kind < 2:
                    j = (first_of[kind] + ran[d, kind]) % together
                    if is_last:
                        gap_ms = 0.5 * spare_ms[d] if chosen == 1 else 0.0
                        begins[kind, j] = now_ms[d] + gap_ms
                    elif kind == 0:
                        wait_ms = wrap(latest[j] - now_ms[d], period_ms)
                        gap_ms = min(spare_ms[d], wait_ms) if chosen == 1 else 0.0
                        wait_ms -= gap_ms
                        begins[0, j] = latest[j] - wait_ms
                    else:
                        gap_ms = wrap(earliest[j] - now_ms[d], period_ms)
                        if gap_ms > spare_ms[d] + near_ms:
                            gap_ms, wait_ms = 0.0, wrap(now_ms[d] - earliest[j], period_ms)
                        begins[1, j] = earliest[j] + wait_ms
                if (chosen == 1 and gap_ms < near_ms) or waited_ms[d] + wait_ms >= below_ms:
                    continue
                length_ms = forward_ms if kind == 0 else input_ms if kind == 1 else weight_ms
                now_ms[d + 1], spare_ms[d + 1] = now_ms[d] + gap_ms + length_ms, max(0.0, spare_ms[d] - gap_ms)
                waited_ms[d + 1], ran[d + 1], choice[d + 1] = waited_ms[d] + wait_ms, ran[d], 0
                ran[d + 1, kind] += 1
                d += 1
    return count


@kernel
def _waits(period_ms: float, forward_ms: float, is_last: bool, begins: Floats, waited_ms: float) -> float:
    """The sum of waits; of the last stage gradients are first put after their forwards, in begins [2, K]."""
    if is_last:
        for j in range(begins.shape[1]):
            wait_ms = wrap(begins[1, j] - begins[0, j] - forward_ms, period_ms)
            begins[1, j] = begins[0, j] + forward_ms + wait_ms
            waited_ms += wait_ms
    return waited_ms


@kernel
def _in_turn(period_ms: float, begins: Floats) -> bool:
    """Whether micro-batches are taken in order by both kinds of begins [2, K]."""
    for of in begins:
        for j in range(1, of.shape[0]):
            if of[j] < of[j - 1] - SAME * period_ms:
                return False
        if of[-1] > of[0] + period_ms * (1.0 + SAME):
            return False
    return True


@kernel
def is_same(forwards: Floats, inputs: Floats, other_forwards: Floats, other_inputs: Floats, near_ms: float) -> bool:
    """Whether two timetables differ by a shift alone."""
    shift_ms = other_forwards[0] - forwards[0]
    for j in range(forwards.shape[0]):
        if abs(other_forwards[j] - forwards[j] - shift_ms) > near_ms:
            return False
        if abs(other_inputs[j] - inputs[j] - shift_ms) > near_ms:
            return False
    return True


@kernel
def _insert(
    begins: Floats, total_ms: float, near_ms: float, forwards: Floats, inputs: Floats, waits_ms: Floats, count: int
) -> int:
    """Put a timetable among the first, count so many, unless it is there; how many then."""
    for x in range(count):
        if abs(waits_ms[x] - total_ms) < near_ms and is_same(begins[0], begins[1], forwards[x], inputs[x], near_ms):
            return count
    x = min(count, waits_ms.shape[0] - 1)
    while x > 0 and waits_ms[x - 1] > total_ms:
        forwards[x], inputs[x], waits_ms[x] = forwards[x - 1], inputs[x - 1], waits_ms[x - 1]
        x -= 1
    forwards[x], inputs[x], waits_ms[x] = begins[0], begins[1], total_ms
    return int(min(count + 1, waits_ms.shape[0]))


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
