"""Bounds of a step whatever the order, from what one stage holds and the least of all others, for `verify`.

Of one stage with forward f, gradients of inputs i and what a backward takes beyond that at least, e (a whole one b - i,
a split one its weights' gradient): `head` is the least time before its first forward, `turn` the least from the end of
its forward of a micro-batch to the begin of the backward, `rest` the least from the end of its last gradient of an
input to the end of the step, `above` the part of it that lies on the stages before. At most A of M micro-batches are in
flight, at most H in flight or pending, and at most S pending.
    head + M (f + i + e) + tail                                        all of its work
    head + M (f + i) + rest
    head + f + turn + max(0, M - A) f + max(M (i + e) + tail, M i + rest)    what its first backward waits for
    head + M (f + i) + (M - S) e + above                               until its last gradient is handed on
    head + f + turn + max(0, M - A) f + M i + (M - S) e + above
    head + M f + max(0, M - A) i + max(0, M - H) e + turn + i + rest        until its last forward, and then
    head + f + turn + (M - A) (f + i) + max(0, M - H) e + turn + i + rest   where M > A
    head + r (f + turn + i) + (M - 1 - r A) (f + i) + f + turn + i + rest     r = ⌈M / A⌉ - 1 rounds of A micro-batches
    head + r (f + turn + i + e) + (M - 1 - r H) (f + i + e) + f + turn + i + rest     with H; where r = 0, (M - 1) f
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
    head, rest = np.full(size, np.inf), np.full(size, np.inf)  # of placements of the stages so far that end there
    head[0], rest[0] = 0.0, 0.0
    heads, upstream = [], []
    for of in fillings:
        heads.append(head[of.begin])
        upstream.append(rest[of.begin])
        rows = of.figures.T
        head, rest = np.full(size, np.inf), np.full(size, np.inf)
        np.minimum.at(head, of.end, heads[-1] + rows[FORWARD] + rows[HOP_FORWARD])
        after = np.maximum(_extra_ms(rows) + rows[TAIL], upstream[-1])
        np.minimum.at(rest, of.end, rows[HOP_BACKWARD] + rows[INPUT] + after)
    onward = np.full(size, np.inf)  # from a hop to the stages behind until their gradient is back at it
    onward[size - 1] = 0.0
    bounds = []
    for of, first, above in zip(fillings[::-1], heads[::-1], upstream[::-1], strict=True):
        rows = of.figures.T
        turn = rows[HOP_FORWARD] + onward[of.end] + rows[HOP_BACKWARD]
        onward = np.full(size, np.inf)
        np.minimum.at(onward, of.begin, rows[FORWARD] + turn + rows[INPUT])
        bounds.append(_bound_rows(rows, first, turn, above, float(num_microbatches)))
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


def _bound_rows(rows: Floats, head: Floats, turn: Floats, above: Floats, m: float) -> Floats:
    """[n] the largest of the bounds of the module's docstring."""
    largest_ms: Floats = np.full(rows.shape[1], np.inf)
    joined = np.isfinite(head) & np.isfinite(turn)  # the others are part of no placement
    rows, head, turn, above = rows[:, joined], head[joined], turn[joined], above[joined]
    forward, of_input, tail, extra = rows[FORWARD], rows[INPUT], rows[TAIL], _extra_ms(rows)
    room = -rows[LESS_ROOM]
    in_flight = np.maximum(np.minimum(most_at_once(room, rows[KEPT], m), -rows[LESS_ON_HOST]), 1.0)
    held = np.maximum(most_at_once(room, np.minimum(rows[KEPT], rows[PENDING]), m), 1.0)
    done = (m - most_at_once(room, rows[PENDING], m)) * extra
    rest = np.maximum(extra + tail, above)
    once = forward + turn + of_input
    later = np.maximum(m - in_flight, 0.0)
    before_last = later * of_input + np.maximum(m - held, 0.0) * extra
    work = np.maximum(m * (of_input + extra) + tail, m * of_input + rest)
    bounds = [
        head + m * (forward + of_input + extra) + tail,
        head + m * (forward + of_input) + rest,
        head + forward + turn + later * forward + work,
        head + m * (forward + of_input) + done + above,
        head + forward + turn + later * forward + m * of_input + done + above,
        head + m * forward + before_last + turn + of_input + rest,
        np.where(later > 0.0, head + forward + turn + later * forward + before_last + turn + of_input + rest, 0.0),
        head + _until_last(m, in_flight, forward, turn, of_input) + once + rest,
        head + _until_last(m, held, forward, turn, of_input + extra) + once + rest,
    ]
    largest_ms[joined] = np.max(bounds, axis=0) * (1.0 - ROUNDING_FRACTION)
    return largest_ms
