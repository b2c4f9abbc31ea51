"""Bounds of a step whatever the order, stage by stage, where stage s holds virtual stages s and 2P - 1 - s of a V.

Of one way to fill both: a micro-batch begins on the stage with forward `f_a`, comes back after `there` for `f_z`, then
after `round` for the gradient of its input `i_z`, and after `here` for `i_a`; weight gradients `w_a` and `w_z` may
follow any time after. `head` is the least time before its first forward, `back` the least that the stages before take
after its last gradient. With room for A micro-batches of the first chunk, and for S_a and S_z whose weight gradient
alone is left, and L all of its work for one micro-batch, T is at least

    head + M L + tail                                       all of its work
    head + M (L - w_a - w_z) + done + rest                  rest = max(w_a + tail, back), after the last i_a;
                                                            done = (M - S_a) w_a + (M - S_z) w_z
    t + M L - before + tail, t + M (L - w_a - w_z) - before + done + rest
                                                            where `before` is the most that it can have run at t:
        t = head + f_a + there                              the begin of the first f_z: A f_a
        t + f_z + round                                     of the first i_z: forwards that its room holds
        t + f_z + round + i_z + here                        of the first i_a: A (L - i_a - w_a)
    head + M (kept_a once + kept_z (f_z + round + i_z) + pending_a w_a + pending_z w_z) / room + tail
                                                            Little's law; once = t + i_a - head, t the last of them
    head + r once + (M - 1 - r A) f_a + once + rest         r = ⌈M / A⌉ - 1 rounds of A micro-batches

and where that does not reach the step in question, the end of one machine that runs its actions in the order in which
their data can be there (`bound_releases`). All hold for relaxed figures too. States of a placement are the segments
that the outer stages have left, [b, e): the least over placements of the largest over stages is a shortest path of the
min-max kind through them, from both ends of the chain to a point inside.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT_MS,
    KEPT,
    PENDING,
    TAIL_MS,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.v_shape.pieces import (
    HOST_STATIC,
    ON_HOST,
    RESTORED,
    STATIC,
    STEP,
    STEP_ONCE,
    STEP_SHARD,
    TRANSIENT,
    Pieces,
)
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, allowed_host_bytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Of a bound: what the rounding of its sums may have added to it.
ROUNDING_FRACTION = 1e-11
#: Micro-batches beyond which earliest begins are not looked at: what they take grows with these, and what they add does
#: not. Of Qwen2-VL-72B over 16 stages with 256 the bound was the same with and without, in 114 and in 1.6 CPU s.
MOST_RELEASED = 64
#: Which pairs of pieces are listed.
EVERY, REACHED, BEST = 0, 1, 2
#: Columns of stages: bytes that its pieces may take of the device, and of the host; what follows its last action.
LIMIT, HOST_LIMIT, STAGE_TAIL_MS = 0, 1, 2


def stage_figures(pieces: Pieces) -> Floats:
    """[P, 3] what pairs of pieces may take, and their stage adds."""
    problem = pieces.segments.problem
    free = allowed_bytes(problem) - np.array(problem.stage_static_bytes)
    return np.column_stack([free, allowed_host_bytes(problem), np.array(problem.stage_tail_ms)])


@kernel
def room_of(a: Floats, z: Floats, stage: Floats) -> float:
    """Bytes that a stage has for micro-batches with these two pieces; negative where the optimizer's step, or what lies
    on the host, exceeds its limit."""
    static = a[STATIC] + z[STATIC]
    once = min(max(a[STEP_ONCE], z[STEP_ONCE]), a[STEP_SHARD] + z[STEP_SHARD])
    if static + a[STEP] + z[STEP] + once > stage[LIMIT] or a[HOST_STATIC] + z[HOST_STATIC] > stage[HOST_LIMIT]:
        return -1.0
    return float(stage[LIMIT] - static - a[RESTORED] - z[RESTORED] - max(a[TRANSIENT], z[TRANSIENT]))


@kernel
def excess_of(a: Floats, z: Floats, stage: Floats) -> float:
    """By how much one micro-batch at a time exceeds the device's limit; infinite where it does the host's."""
    static = a[STATIC] + z[STATIC]
    on_host = a[HOST_STATIC] + z[HOST_STATIC] + a[ON_HOST] + z[ON_HOST]
    if on_host > stage[HOST_LIMIT]:
        return np.inf
    once = min(max(a[STEP_ONCE], z[STEP_ONCE]), a[STEP_SHARD] + z[STEP_SHARD])
    at_work = a[RESTORED] + z[RESTORED] + max(a[TRANSIENT], z[TRANSIENT]) + a[KEPT] + z[KEPT]
    return float(max(0.0, static + max(at_work, a[STEP] + z[STEP] + once) - stage[LIMIT]))


@kernel
def _fit(room: float, each: float, most: float) -> float:
    """How many of `each` bytes fit, most at most."""
    return most if each <= 0.0 else min(most, np.floor(room / each * (1.0 + 1e-12)))


@kernel
def bound_pair(
    a: Floats,
    z: Floats,
    stage: Floats,
    num_microbatches: int,
    head: float,
    back: float,
    there: float,
    round_ms: float,
    here: float,
    most: float,
) -> float:
    """The largest of the bounds above; infinite where no order fits. Of several that reach `most`, the first."""
    m, room = float(num_microbatches), room_of(a, z, stage)
    f_a, i_a, w_a, f_z, i_z, w_z = (
        a[FORWARD_MS],
        a[INPUT_MS],
        a[WEIGHT_MS],
        z[FORWARD_MS],
        z[INPUT_MS],
        z[WEIGHT_MS],
    )
    tail = stage[STAGE_TAIL_MS] + a[TAIL_MS] + z[TAIL_MS]
    enough = most / (1.0 - ROUNDING_FRACTION) * (1.0 + ROUNDING_FRACTION)
    bound = head + m * (f_a + f_z + i_a + i_z + w_a + w_z) + tail
    once = f_a + there + f_z + round_ms + i_z + here + i_a
    if bound < enough and room > 0.0:
        held = a[KEPT] * once + z[KEPT] * (f_z + round_ms + i_z) + a[PENDING] * w_a + z[PENDING] * w_z
        bound = max(bound, head + m * held / room + tail)
    if bound >= enough:
        return float(bound * (1.0 - ROUNDING_FRACTION))
    if excess_of(a, z, stage) > 0.0:
        return np.inf
    host_room = stage[HOST_LIMIT] - a[HOST_STATIC] - z[HOST_STATIC]
    most_a = min(_fit(room, a[KEPT], m), m if a[ON_HOST] <= 0.0 else _fit(host_room, a[ON_HOST], m))
    rest = max(w_a + tail, back)
    done = (m - _fit(room, a[PENDING], m)) * w_a + (m - _fit(room, z[PENDING], m)) * w_z
    passes = f_a + f_z + i_a + i_z
    after = m * passes + max(m * (w_a + w_z) + tail, done + rest)  # of a stage that never waits
    bound = max(bound, head + after)
    begin = head + f_a + there
    bound = max(bound, begin + after - most_a * f_a)
    if most_a >= 1.0:
        rounds = np.ceil(m / most_a) - 1.0
        bound = max(bound, head + rounds * once + (m - 1.0 - rounds * most_a) * f_a + once + rest)
    if bound >= enough:
        return float(bound * (1.0 - ROUNDING_FRACTION))
    forwards = 0.0
    for n in range(1, int(most_a) + 1):
        again = min(float(n), _fit(max(0.0, room * (1.0 + 1e-12) - n * a[KEPT]), z[KEPT], m))
        forwards = max(forwards, n * f_a + again * f_z)
    begin += f_z + round_ms
    bound = max(bound, begin + after - forwards)
    begin += i_z + here
    bound = max(bound, begin + after - most_a * (f_a + f_z + i_z + w_z))
    return float(bound * (1.0 - ROUNDING_FRACTION))


@kernel
def bound_releases(
    a: Floats,
    z: Floats,
    stage: Floats,
    num_microbatches: int,
    head: float,
    back: float,
    way: tuple[float, float, float],
    rates: tuple[float, float, float, float],
) -> float:
    """One machine with release dates: no action of the stage begins before its data can be there.

    way: there, round and here of `bound_pair`. rates: what the j-th micro-batch adds at least to the time at which its
    first forward, its second, its gradient and its second gradient can begin: of the stages that all micro-batches
    before it must have passed, one has at least the mean of the work.
    """
    m = num_microbatches
    room = room_of(a, z, stage)
    host_room = stage[HOST_LIMIT] - a[HOST_STATIC] - z[HOST_STATIC]
    most = min(_fit(room, a[KEPT], float(m)), float(m) if a[ON_HOST] <= 0.0 else _fit(host_room, a[ON_HOST], float(m)))
    behind = max(1, int(most))
    release = np.empty((6, m))
    lengths = (a[FORWARD_MS], z[FORWARD_MS], z[INPUT_MS], a[INPUT_MS], z[WEIGHT_MS], a[WEIGHT_MS])
    f_a, f_z, i_z, i_a = lengths[0], lengths[1], lengths[2], lengths[3]
    entered = head + f_a + a[HOP_FORWARD_MS]
    for j in range(m):
        at = max(head, (j + 1) * rates[0])
        if j > 0:
            at = max(at, release[0, j - 1] + f_a)
        if j >= behind:
            at = max(at, release[3, j - behind] + i_a)
        release[0, j] = at
        at = max(at + f_a + way[0], entered + (j + 1) * rates[1])
        if j > 0:
            at = max(at, release[1, j - 1] + f_z)
        release[1, j] = at
        at = max(at + f_z + way[1], (j + 1) * rates[2])
        if j > 0:
            at = max(at, release[2, j - 1] + i_z)
        release[2, j] = at
        release[4, j] = at + i_z
        at = max(at + i_z + way[2], entered + (j + 1) * rates[3])
        if j > 0:
            at = max(at, release[3, j - 1] + i_a)
        release[3, j] = at
        release[5, j] = at + i_a
    tail = stage[STAGE_TAIL_MS] + a[TAIL_MS] + z[TAIL_MS]
    bound = 0.0
    ran = np.empty(6, np.int64)
    for num_kinds in (6, 4):  # all actions; and all but weight gradients, before what follows the last of these
        time = 0.0
        ran[:] = 0
        for _ in range(num_kinds * m):
            best, begin = -1, np.inf
            for kind in range(num_kinds):
                if ran[kind] < m and release[kind, ran[kind]] < begin:
                    best, begin = kind, release[kind, ran[kind]]
            time = max(time, begin) + lengths[best]
            ran[best] += 1
        bound = max(bound, time + (tail if num_kinds == 6 else max(lengths[5] + tail, back)))
    return bound * (1.0 - ROUNDING_FRACTION)


@kernel
def list_pairs(
    s: int,
    b: int,
    e: int,
    num_microbatches: int,
    relaxed: Floats,
    spans: Ints,
    by_begin: Ints,
    by_end: Ints,
    ends_in: Ints,
    sums: Floats,
    hops: Floats,
    stages: Floats,
    only_excess: bool,
    most: float,
    behind: float,
    only: int,
    after: Floats,
    looked: Ints,
    rows: Ints,
    bounds: Floats,
) -> int:
    """Pairs of pieces with which stage s takes segments from both ends of [b, e) in a step below `most`: how many,
    their rows [., 2] and bounds [.], or excess bytes, as far as these arrays go.

    spans: [R, 2] begin and end of pieces. by_begin: [K, N + 2] the first row of each begin; by_end: [K, N + 2] the same
    of ends, in the list ends_in [R]. sums: [5, N + 1] head and back of stage s, and prefix sums of the least forwards,
    input gradients and all work of segments; hops: [2, 2, K + 1] prefix sums of the least hops forward and backward.
    behind: of that work, what the stages after s can take in a step below `most`. only: EVERY of them; REACHED, one for
    each stretch that they leave and where `after` [N + 1, N + 1] is not 0, which is then written; or BEST, with which
    the largest of its bound and `after` of what it leaves is least, where that is below `most`, as its bound. looked:
    [1] goes up by how many were looked at.
    """
    num_stages, num_virtual = stages.shape[0], by_begin.shape[0]
    last, size = num_virtual - 1 - s, sums.shape[1] - 1
    n, before = 0, max(1, s)
    beyond = hops[0, num_virtual - 1] - hops[0, last + 1] if last + 1 < num_virtual else 0.0
    beyond += hops[1, num_virtual - 1] - hops[1, last + 1] if last + 1 < num_virtual else 0.0
    beyond += sums[2, size] - sums[2, e] + sums[3, size] - sums[3, e]
    for row in range(by_begin[s, b], by_begin[s, b + 1]):
        inner = spans[row, 1]
        for place in range(by_end[last, e], by_end[last, e + 1]):
            other = ends_in[place]
            outer = spans[other, 0]
            if outer < inner or (s == num_stages - 1) != (outer == inner):
                continue
            if sums[4, outer] - sums[4, inner] > behind:
                continue
            rest = after[inner, outer] if only != EVERY else 0.0
            if (only == REACHED and rest == 0.0) or (only == BEST and rest >= most):
                continue
            looked[0] += 1
            a, z = relaxed[row], relaxed[other]
            if only_excess:
                bound = excess_of(a, z, stages[s])
            else:
                there = a[HOP_FORWARD_MS] + hops[0, last] - hops[0, s + 1] + sums[2, outer] - sums[2, inner]
                here = a[HOP_BACKWARD_MS] + hops[1, last] - hops[1, s + 1] + sums[3, outer] - sums[3, inner]
                way = z[HOP_FORWARD_MS] + z[HOP_BACKWARD_MS] + beyond
                head, back, there, here = sums[0, b], sums[1, b], max(0.0, there), max(0.0, here)
                bound = bound_pair(a, z, stages[s], num_microbatches, head, back, there, way, here, most)
                if bound < most and num_microbatches <= MOST_RELEASED:
                    inside_f, inside_i = sums[2, outer] - sums[2, inner], sums[3, outer] - sums[3, inner]
                    others = max(1, num_stages - 1 - s)
                    rates = (
                        sums[2, b] / before,
                        inside_f / others,
                        (sums[2, b] + sums[2, size] - sums[2, e] + sums[3, size] - sums[3, e]) / before,
                        (inside_f + inside_i) / others,
                    )
                    ways = there, way, here
                    released = bound_releases(a, z, stages[s], num_microbatches, head, back, ways, rates)
                    bound = max(bound, released)
            if bound >= most:
                continue
            if only == REACHED:
                after[inner, outer] = 0.0
                continue
            if only == BEST:
                most = max(bound, rest)
                rows[0, 0], rows[0, 1], bounds[0], n = row, other, most, 1
                continue
            if n < bounds.shape[0]:
                rows[n, 0], rows[n, 1], bounds[n] = row, other, bound
            n += 1
    return n


@kernel
def bound_states(
    num_microbatches: int,
    relaxed: Floats,
    spans: Ints,
    by_begin: Ints,
    by_end: Ints,
    ends_in: Ints,
    sums: Floats,
    hops: Floats,
    stages: Floats,
    only_excess: bool,
    most: float,
    behind: Floats,
    most_looked: int,
    rest: Floats,
) -> bool:
    """Overwrite rest [P + 1, N + 1, N + 1]: the least that stages from s on must take with segments [b, e); infinite
    where that is not below `most`. sums: [P, 5, N + 1], behind: [P], else as `list_pairs`. False where more pairs would
    have to be looked at."""
    num_stages, size = stages.shape[0], rest.shape[1]
    rows, bounds, looked = np.empty((1, 2), np.int64), np.empty(1), np.zeros(1, np.int64)
    rest[:] = np.inf
    for b in range(size):
        rest[num_stages, b, b] = 0.0
    reached = np.full((num_stages, size, size), np.inf)  # 0 where it is
    reached[0, 0, size - 1] = 0.0
    for step in range(2):  # forth to see which states there are, back to bound them
        for x in range(num_stages - 1 + step):
            s = x if step == 0 else num_stages - 1 - x
            after = reached[s + 1] if step == 0 else rest[s + 1]
            for b in range(size):
                for e in range(b, size):
                    if reached[s, b, e] > 0.0:
                        continue
                    n = list_pairs(
                        s, b, e, num_microbatches, relaxed, spans, by_begin, by_end, ends_in, sums[s], hops, stages,
                        only_excess, most, behind[s], REACHED if step == 0 else BEST, after, looked, rows, bounds,
                    )  # fmt: skip
                    if looked[0] > most_looked:
                        return False
                    if n > 0:
                        rest[s, b, e] = bounds[0]
    return True
