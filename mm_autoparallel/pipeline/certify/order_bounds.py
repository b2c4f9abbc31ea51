"""Bounds of a step whatever the order, from what one stage holds and the least of all others, for `verify`.

Of one stage with forward f, gradients of inputs i and what a backward takes beyond that at least, e (a whole one b - i,
a split one its weights' gradient): `head` is the least time before its first forward, `turn` the least from the end of
its forward of a micro-batch to the begin of the backward, `rest` the least from the end of its last gradient of an
input to the end of the step, `above` the part of it that lies on the stages before. At most A of M micro-batches are in
flight, here and on the stages before, at most H here in flight or pending, and at most S pending. No stage up to this
one passes forwards on faster than one every p, nor gradients of inputs than one every q.
    head + late + M (f + i + e) + tail                                  all of its work
    head + late + M (f + i) + rest
    head + late + M (f + i) + (M - S) e + above                         until its last gradient is handed on
    head + M (f + i) + max(0, M - H) e + over                           until its last forward, and then
    head + late + M (f + i) + max(0, M - H) e + over                    where M > A
    head + r (f + turn + i) + (M - 1 - r A) (f + i) + f + turn + i + rest     r = ⌈M / A⌉ - 1 rounds of A micro-batches
    head + r (f + turn + i + e) + (M - 1 - r H) (f + i + e) + f + turn + i + rest     with H; where r = 0, (M - 1) f
Late: n forwards end before the first backward, no sooner than (n - 1) p + f after the first of them began, and the
backward begins turn + f after that at the earliest: beside forwards that is max(turn, (n - 1) p) - (n - 1) f. Over: of
n gradients of inputs after the last forward the first is followed by n - 1 that are q apart above, and then by `above`;
the last forward by turn, i and rest: max(turn + rest, (n - 1) q + above) - (n - 1) i. Each with the best n of 1 to A.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.certify.order_options import (
    FORWARD,
    HOP_BACKWARD,
    HOP_FORWARD,
    INPUT,
    KEPT,
    LESS_ON_HOST,
    LESS_ROOM,
    PENDING,
    TAIL,
    WEIGHT,
    WHOLE,
    Fillings,
)

Floats = NDArray[np.float64]

#: What a bound may have gained by rounding, as a part of it; and how often fillings are looked at again once others
#: have gone.
ROUNDING_FRACTION, MAX_ROUNDS = 1e-11, 20


def drop_slow(
    fillings: list[Fillings], num_microbatches: int, bound_ms: float, should_stop: Callable[[], bool]
) -> list[Fillings]:
    """Those that can be part of a step below bound_ms, as far as the bounds above tell."""
    num_left = sum(map(len, fillings))
    for _ in range(MAX_ROUNDS):
        least_ms = bound_fillings(fillings, num_microbatches)
        kept = [of.select(ms < bound_ms) for of, ms in zip(fillings, least_ms, strict=True)]
        num_before, num_left = num_left, sum(map(len, kept))
        fillings = kept
        if num_left == num_before or not all(map(len, fillings)) or should_stop():
            break
    return fillings


def bound_fillings(fillings: list[Fillings], num_microbatches: int) -> list[Floats]:
    """[n] of each stage: no step with this filling is shorter; infinite where it is part of no placement."""
    size = 1 + max(int(of.end.max(initial=0)) for of in fillings)
    # of placements of the stages so far that end there: head, above, p, q, and A, negative
    so_far = np.full((5, size), np.inf)
    so_far[:, 0] = 0.0, 0.0, 0.0, 0.0, -float(num_microbatches)
    before = []
    for of in fillings:
        rows = of.figures.T
        head, above, forward_pace, input_pace, flight = so_far[:, of.begin]
        own = _extra_ms(rows) + rows[TAIL]
        forward_pace, flight = (
            np.maximum(forward_pace, rows[FORWARD]),
            np.maximum(flight, -_in_flight(rows, num_microbatches)),
        )
        before.append(np.array([head, above, forward_pace, np.maximum(input_pace, rows[INPUT]), flight]))
        # above counts from the stage on whose own end it is made of, and so does q
        input_pace = np.maximum(np.where(own > above, 0.0, input_pace), rows[INPUT])
        above = rows[HOP_BACKWARD] + rows[INPUT] + np.maximum(own, above)
        after = head + rows[FORWARD] + rows[HOP_FORWARD], above, forward_pace, input_pace, flight
        so_far = np.full((5, size), np.inf)
        for least, new in zip(so_far, after, strict=True):
            np.minimum.at(least, of.end, new)
    onward = np.full(size, np.inf)  # from a hop to the stages behind until their gradient is back at it
    onward[size - 1] = 0.0
    bounds = []
    for of, known in zip(fillings[::-1], before[::-1], strict=True):
        rows = of.figures.T
        turn = rows[HOP_FORWARD] + onward[of.end] + rows[HOP_BACKWARD]
        onward = np.full(size, np.inf)
        np.minimum.at(onward, of.begin, rows[FORWARD] + turn + rows[INPUT])
        bounds.append(_bound_rows(rows, known, turn, float(num_microbatches)))
    return bounds[::-1]


def _extra_ms(rows: Floats) -> Floats:
    extra: Floats = np.maximum(np.minimum(rows[WEIGHT], rows[WHOLE] - rows[INPUT]), 0.0)
    return extra


def most_at_once(room_bytes: Floats, each_bytes: Floats, most: float) -> Floats:
    """[n] how many of each_bytes fit into room_bytes, at most `most`; rounding lets one more in rather than fewer."""
    free = each_bytes <= 0.0
    fit = np.floor(room_bytes / np.where(free, 1.0, each_bytes) * (1.0 + 1e-12))
    return np.where(free, most, np.clip(fit, 0.0, most))


def _until_last(m: float, most: Floats, forward: Floats, turn: Floats, after: Floats) -> Floats:
    """[n] between the begins of the first and the last forward. Forward r·most + k begins when `most` before it are
    through: the k + 1 that this asks for since the begin of the last round, one after another, with k forwards."""
    rounds = np.ceil(m / most) - 1.0
    more = m - 1.0 - rounds * most
    since: Floats = np.where(rounds > 0.0, rounds * (forward + turn + after) + more * (forward + after), more * forward)
    return since


def _in_flight(rows: Floats, m: float) -> Floats:
    most: Floats = np.maximum(np.minimum(most_at_once(-rows[LESS_ROOM], rows[KEPT], m), -rows[LESS_ON_HOST]), 1.0)
    return most


def _least_over(by_all: Floats, at_once: Floats | float, pace: Floats, action: Floats, most: Floats) -> Floats:
    """[n] the least of max(by_all, (k - 1) pace + at_once) - (k - 1) action, for k = 1 to most. It falls as long as
    by_all is the larger one, and does not fall after that, for pace is at least action."""
    turns = np.floor((by_all - at_once) / np.where(pace > 0.0, pace, 1.0))
    turns = np.where(pace > 0.0, turns, most)
    sums = []
    for more in (0.0, 1.0):
        behind = np.clip(turns + more, 0.0, most - 1.0)
        sums.append(np.maximum(by_all, behind * pace + at_once) - behind * action)
    return np.minimum(*sums)


def _bound_rows(rows: Floats, known: Floats, turn: Floats, m: float) -> Floats:
    """[n] the largest of the bounds of the module's docstring. known: head, above, p, q, -A [5, n]."""
    largest_ms: Floats = np.full(rows.shape[1], np.inf)
    joined = np.isfinite(known[0]) & np.isfinite(turn)  # the others are part of no placement
    rows, turn = rows[:, joined], turn[joined]
    head, above, forward_pace, input_pace, flight = known[:, joined]
    forward, of_input, tail, extra = rows[FORWARD], rows[INPUT], rows[TAIL], _extra_ms(rows)
    room = -rows[LESS_ROOM]
    held = np.maximum(most_at_once(room, np.minimum(rows[KEPT], rows[PENDING]), m), 1.0)
    done = (m - most_at_once(room, rows[PENDING], m)) * extra
    rest = np.maximum(extra + tail, above)
    once = forward + turn + of_input
    both = m * (forward + of_input)
    begin = head + _least_over(turn, 0.0, forward_pace, forward, -flight)
    end = np.maximum(m - held, 0.0) * extra + _least_over(turn + rest, above, input_pace, of_input, -flight)
    bounds = [
        begin + both + m * extra + tail,
        begin + both + rest,
        begin + both + done + above,
        np.where(m > -flight, begin, head) + both + end,
        head + _until_last(m, _in_flight(rows, m), forward, turn, of_input) + once + rest,
        head + _until_last(m, held, forward, turn, of_input + extra) + once + rest,
    ]
    largest_ms[joined] = np.max(bounds, axis=0) * (1.0 - ROUNDING_FRACTION)
    return largest_ms
