"""Bounds for pipelines of one chunk a stage: a shortest path over where stages end.

A stage holds an interval of segments, so what it must recompute and how long it takes are known per interval. Of the
schedule's graph only some paths are kept (`kept_paths`); what the stages before have used up matters to them by its sum
alone, so keeping the least sum per position loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import (
    Bound,
    Look,
    available_bytes,
    available_host_bytes,
    least_step,
    overfull,
    overfull_host,
)
from mm_autoparallel.pipeline.placement.bounds.kept_paths import Beside, can_take, least_rest, nothing_beside
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import list_host_links
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Intervals of all stages beyond which work alone is the bound (each takes eight bytes).
MAX_INTERVALS = 20_000_000
#: Intervals between two looks at whether the search is stopped: some tenths of a second.
MAX_AT_ONCE = 1_000_000


class OneChunk(NamedTuple):
    """P stages over N segments; times are means over the micro-batches.

    first, last: [P + 1] windows of the boundaries. forward_ms, backward_ms, tail_ms, static_bytes, activation_bytes,
    host_static_bytes, layers: prefix sums [N + 1] over segments; transient_bytes: [N]. before: [G, N + 1] layers of
    each recompute group before each segment; lane_offset, extra_forward_ms … host_bytes as in Segments. is_plain: see
    there. time_factor, host_ms_per_byte, least_factor (of all stages before, 1 where there are none): [P].
    in_flight, num_warmup, num_cooldown (see `count_in_order`), available_bytes, host_room_bytes (infinite where it is
    not limited), stage_tail_ms: [P]. hop_ms: [P, N + 1] forth and back after each stage, by where it ends; hop_back_ms:
    of it the way back. latency_ms: [P] of all forward hops before a stage. least_scale, most_scale: bounds on the
    factors by which times of one micro-batch differ from the mean. winds: whether paths may wind (`kept_paths`).
    """

    num_microbatches: int
    most_layers: int
    least_scale: float
    most_scale: float
    first: Ints
    last: Ints
    forward_ms: Floats
    backward_ms: Floats
    tail_ms: Floats
    static_bytes: Floats
    activation_bytes: Floats
    host_static_bytes: Floats
    layers: Ints
    transient_bytes: Floats
    before: Ints
    lane_offset: Ints
    extra_forward_ms: Floats
    extra_backward_ms: Floats
    saved_bytes: Floats
    restored_bytes: Floats
    host_bytes: Floats
    is_plain: bool
    time_factor: Floats
    host_ms_per_byte: Floats
    least_factor: Floats
    in_flight: Floats
    num_warmup: Floats
    num_cooldown: Floats
    available_bytes: Floats
    host_room_bytes: Floats
    stage_tail_ms: Floats
    hop_ms: Floats
    hop_back_ms: Floats
    latency_ms: Floats
    winds: bool
    beside: Beside


def bound_one_chunk(
    segments: Segments,
    least_scale: float,
    most_scale: float,
    floor_ms: float,
    look: Look,
    known_loads: Callable[[], Floats] | None = None,
    enough_ms: float = np.inf,
) -> Bound:
    """The bound of a problem with one chunk a stage, at least `floor_ms`.

    segments: of the mean micro-batch. least_scale, most_scale: as in OneChunk. known_loads: what else is known of
    loads, as `least_loads` tells them. enough_ms: as in `least_step`. Raises what `look` does.
    """
    if segments.problem.num_stages * (segments.num_segments + 1) ** 2 > MAX_INTERVALS:
        return Bound(floor_ms)
    of = prepare(segments, least_scale, most_scale)
    loads = least_loads(of, look)
    if known_loads is not None:
        look()
        loads = np.maximum(loads, known_loads())
        of = of._replace(is_plain=False)  # what makes them longer may be forward
    rest = least_rest(of, loads)
    if rest[0, 0] < np.inf:
        return least_step(floor_ms, lambda step_ms: bool(can_take(of, loads, rest, step_ms)), look, enough_ms)
    excess_bytes, stage, exact = least_excess(of, look)
    if excess_bytes > 0.0:
        return overfull(segments.problem, excess_bytes, stage, exact)
    if segments.limits_host:
        roomy = of._replace(host_room_bytes=np.full_like(of.host_room_bytes, np.inf))
        if least_rest(of, least_loads(roomy, look))[0, 0] < np.inf:
            return overfull_host(segments.problem)
    return Bound(floor_ms)


@lru_cache(maxsize=256)
def count_in_order(schedule: str, num_stages: int, num_microbatches: int) -> tuple[Floats, Floats, Floats]:
    """[P] most micro-batches in flight; forwards after the first one and before the first backward; backwards after the
    last forward and before the last one. The latter two are infinite, which leaves `turn` out, where micro-batches do
    not go in order. Where no rule gives the order one is in flight at some time, and no more is known.
    """
    if find_schedule(schedule, 1).given_by != "rule":
        return np.ones(num_stages), *np.full((2, num_stages), np.inf)
    order_of = find_schedule(schedule, 1).order
    in_order = np.arange(num_microbatches)
    in_flight, num_warmup, num_cooldown = np.empty(num_stages), np.empty(num_stages), np.empty(num_stages)
    for s in range(num_stages):
        order = order_of(num_stages, 1, num_microbatches, s)
        forward = order[:, 0] == FORWARD
        in_flight[s] = np.max(np.cumsum(np.where(forward, 1, -1)))
        ordered = np.array_equal(order[forward, 2], in_order) and np.array_equal(order[~forward, 2], in_order)
        num_warmup[s] = np.argmin(forward) - 1 if ordered else np.inf
        num_cooldown[s] = np.argmax(forward[::-1]) - 1 if ordered else np.inf
    return in_flight, num_warmup, num_cooldown


@lru_cache(maxsize=256)
def goes_back_and_forth(schedule: str, num_stages: int, num_microbatches: int) -> bool:
    """Whether each stage runs a forward for each later stage and itself, and from then on a backward and a forward in
    turn."""
    if find_schedule(schedule, 1).given_by != "rule":
        return False
    order_of = find_schedule(schedule, 1).order
    for s in range(num_stages):
        order = order_of(num_stages, 1, num_microbatches, s)
        ahead = min(num_stages - s, num_microbatches)
        kinds = [True] * ahead + [False, True] * (num_microbatches - ahead) + [False] * ahead
        forward = order[:, 0] == FORWARD
        micro_batches = np.where(forward, np.cumsum(forward), np.cumsum(~forward)) - 1
        if not np.array_equal(forward, kinds) or not np.array_equal(order[:, 2], micro_batches):
            return False
    return True


def prepare(segments: Segments, least_scale: float, most_scale: float, beside: Beside | None = None) -> OneChunk:
    """The arrays of `segments`, which are of the mean micro-batch. least_scale, most_scale: as in OneChunk."""
    problem, chain = segments.problem, segments.problem.chain
    num_stages, at = problem.num_stages, segments.start
    in_flight, num_warmup, num_cooldown = count_in_order(problem.schedule, num_stages, problem.num_microbatches)
    hop_ms, hop_back_ms = np.zeros((2, num_stages, segments.num_segments + 1))
    latency_ms = np.zeros(num_stages)
    if num_stages > 1:
        last_blocks = [chain[e] for e in segments.flat[at[1:] - 1]]
        output_bytes = np.array([0.0, *(block.output_bytes for block in last_blocks)])
        both_ways = np.array([1.0, *(2.0 if block.sends_gradient else 1.0 for block in last_blocks)])
        fixed_ms, per_byte_ms = np.array(problem.p2p_ms)[:, None], np.array(problem.p2p_ms_per_byte)[:, None]
        one_way_ms = fixed_ms + per_byte_ms * output_bytes
        hop_ms[:-1], hop_back_ms[:-1] = one_way_ms * both_ways, one_way_ms * (both_ways - 1.0)
        latency_ms[1:] = np.cumsum(problem.p2p_ms)
    return OneChunk(
        num_microbatches=problem.num_microbatches,
        most_layers=problem.max_layers_per_chunk or problem.num_layers,
        least_scale=least_scale,
        most_scale=most_scale,
        first=segments.first,
        last=segments.last,
        forward_ms=segments.forward_ms[at],
        backward_ms=segments.backward_ms[at],
        tail_ms=segments.tail_ms[at],
        static_bytes=segments.static_bytes[at],
        activation_bytes=segments.activation_bytes[at],
        host_static_bytes=segments.host_static_bytes[at],
        layers=segments.layers[at],
        transient_bytes=np.maximum.reduceat(segments.transient_bytes, at[:-1]),
        before=np.ascontiguousarray(segments.before[:, at]),
        lane_offset=segments.lane_offset,
        extra_forward_ms=segments.extra_forward_ms,
        extra_backward_ms=segments.extra_backward_ms,
        saved_bytes=segments.saved_bytes,
        restored_bytes=segments.restored_bytes,
        host_bytes=segments.host_bytes,
        is_plain=segments.is_plain,
        time_factor=np.array(problem.time_factors, dtype=np.float64),
        host_ms_per_byte=np.array(list_host_links(problem)),
        least_factor=np.minimum.accumulate([problem.time_factors[0], *problem.time_factors[:-1]]),
        in_flight=in_flight,
        num_warmup=num_warmup,
        num_cooldown=num_cooldown,
        available_bytes=available_bytes(problem),
        host_room_bytes=available_host_bytes(problem),
        stage_tail_ms=np.array(problem.stage_tail_ms, dtype=np.float64),
        hop_ms=hop_ms,
        hop_back_ms=hop_back_ms,
        latency_ms=latency_ms,
        winds=least_scale == most_scale == 1.0
        and goes_back_and_forth(problem.schedule, num_stages, problem.num_microbatches),
        beside=beside or nothing_beside(num_stages),
    )


def least_loads(of: OneChunk, look: Look) -> Floats:
    """[P, N + 1, N + 1] forward and backward in ms of a stage that holds segments begin to end, in the modes that fit
    its memory at least cost; infinite where none do. With one group of one mode that is exact. Where layers have a
    choice, they are taken in fractions, never for more than the truth (see `least_load`), and what those that move
    bytes free together is what the host has room for.
    """
    num_stages, num_segments = of.in_flight.shape[0], of.transient_bytes.shape[0]
    loads = np.full((num_stages, num_segments + 1, num_segments + 1), np.inf)
    at_once = max(1, MAX_AT_ONCE // (num_segments + 1) ** 2)
    for begin in range(0, num_stages, at_once):
        look()
        _fill_loads(of, begin, min(begin + at_once, num_stages), loads)
    return loads


@kernel
def _fill_loads(of: OneChunk, first_stage: int, end_stage: int, loads: Floats) -> None:
    """Fill in those of stages from first_stage to before end_stage, which are infinite before."""
    num_groups = of.before.shape[0]
    freeable = np.zeros((num_groups, of.extra_backward_ms.shape[1]))
    chosen = np.zeros(max(num_groups, 1), dtype=np.int64)
    for s in range(first_stage, end_stage):
        in_flight, factor = of.in_flight[s], of.time_factor[s]
        cheapest, per_host_byte = np.inf, 0.0
        for g in range(num_groups):
            for i in range(of.extra_backward_ms.shape[1] - 1):
                most_freed = 0.0
                for lane in range(of.lane_offset[g], of.lane_offset[g + 1]):
                    freed = in_flight * (of.saved_bytes[lane, i + 1] - of.saved_bytes[lane, i])
                    freed -= of.restored_bytes[lane, i + 1] - of.restored_bytes[lane, i]
                    most_freed = max(most_freed, freed)
                    moved = of.host_bytes[lane, i + 1] - of.host_bytes[lane, i]
                    if freed > 0.0 and moved > 0.0:
                        per_host_byte = max(per_host_byte, freed / moved)
                    elif freed > 0.0:
                        extra = of.extra_backward_ms[lane, i + 1] - of.extra_backward_ms[lane, i]
                        extra += of.extra_forward_ms[lane, i + 1] - of.extra_forward_ms[lane, i]
                        cheapest = min(cheapest, extra * factor / freed)
                freeable[g, i + 1] = freeable[g, i] + most_freed
        for begin in range(of.first[s], of.last[s] + 1):
            chosen[:] = 0
            transient = 0.0
            for end in range(begin + 1, of.last[s + 1] + 1):
                transient = max(transient, of.transient_bytes[end - 1])
                num_layers = of.layers[end] - of.layers[begin]
                if end < of.first[s + 1] or num_layers < 1 or num_layers > of.most_layers:
                    continue
                held = of.static_bytes[end] - of.static_bytes[begin]
                held += in_flight * (of.activation_bytes[end] - of.activation_bytes[begin])
                need = held + transient - of.available_bytes[s]
                load = of.forward_ms[end] - of.forward_ms[begin] + of.backward_ms[end] - of.backward_ms[begin]
                load *= factor
                room = of.host_room_bytes[s] - (of.host_static_bytes[end] - of.host_static_bytes[begin])
                if room < 0.0:
                    continue
                if need > 0.0:
                    num_active, group, total = 0, 0, 0.0
                    for g in range(num_groups):
                        if of.before[g, end] > of.before[g, begin]:
                            num_active += 1
                            group = g
                            total += freeable[g, of.before[g, end]] - freeable[g, of.before[g, begin]]
                    if num_active == 1 and of.is_plain:  # as `need` only grows with `end`, so does the count
                        low, r = of.before[group, begin], chosen[group]
                        count = of.before[group, end] - low
                        freed = -np.inf
                        while r <= count:
                            freed = in_flight * (of.saved_bytes[group, low + r] - of.saved_bytes[group, low])
                            freed -= of.restored_bytes[group, low + r] - of.restored_bytes[group, low]
                            if freed >= need:
                                break
                            r += 1
                        if r > count:
                            chosen[group] = count
                            continue
                        chosen[group] = r
                        extra = of.extra_backward_ms[group, low + r] - of.extra_backward_ms[group, low]
                        load += extra * factor
                    elif total >= need:
                        left = need
                        if per_host_byte > 0.0:
                            left -= per_host_byte * room / in_flight
                        if left > 0.0 and cheapest == np.inf:
                            continue
                        least = load + left * cheapest if left > 0.0 else load
                        load = max(least, least_load(load, need, cheapest, per_host_byte, of.host_ms_per_byte[s]))
                    else:
                        continue
                loads[s, begin, end] = load


@kernel
def least_load(
    load_ms: float, need_bytes: float, cheapest_ms_per_byte: float, per_host_byte: float, host_ms_per_byte: float
) -> float:
    """The least forward and backward of a stage that takes load_ms in no mode and must free need_bytes.

    Modes that move bytes free at most `per_host_byte` for each, and of load x the link takes at most x / 2 each way;
    the others cost cheapest_ms_per_byte at least, which must fit beside load_ms. So
        need ≤ per_host_byte · x / (2 · host_ms_per_byte) + (x − load) / cheapest.
    """
    if per_host_byte > 0.0 and host_ms_per_byte <= 0.0:
        return load_ms
    if per_host_byte == 0.0:
        return load_ms + need_bytes * cheapest_ms_per_byte
    if cheapest_ms_per_byte <= 0.0:
        return load_ms
    by_host = per_host_byte / (2.0 * host_ms_per_byte)  # bytes freed in each ms of load
    return max(load_ms, (need_bytes + load_ms / cheapest_ms_per_byte) / (by_host + 1.0 / cheapest_ms_per_byte))


def least_excess(of: OneChunk, look: Look) -> tuple[float, int, bool]:
    """The least bytes by which the worst stage exceeds its memory (negative: to spare), that stage, and whether some
    placement exceeds by no more. Infinite where no placement exists whatever the memory.
    """
    num_stages = len(of.in_flight)
    held = np.empty((num_stages, len(of.static_bytes)))
    exact = True
    for s in range(num_stages):
        look()
        held[s] = of.static_bytes + of.in_flight[s] * of.activation_bytes
        of_lane = np.diff(of.in_flight[s] * of.saved_bytes - of.restored_bytes, axis=1)
        freeable = np.zeros(of.before.shape[:1] + of.saved_bytes.shape[1:])
        for g, (first, last) in enumerate(pairwise(of.lane_offset)):
            freed = of_lane[first:last].max(axis=0)
            # a layer that frees less, or nothing, may stand before one that frees more
            exact = exact and bool(np.any(np.all(of_lane[first:last] >= np.maximum(freed, 0.0), axis=1)))
            freeable[g, 1:] = np.cumsum(np.maximum(freed, 0.0))
        held[s] -= np.take_along_axis(freeable, of.before, axis=1).sum(axis=0)
    worst, stage = _spread(of, held)
    return float(worst), int(stage), exact


@kernel
def _spread(of: OneChunk, held: Floats) -> tuple[float, int]:
    """The least of the largest excess of any stage over all ways to divide the segments, and the first stage that has
    it. held: [P, N + 1] bytes that segments before each hold there at least."""
    num_stages, num_segments = held.shape[0], held.shape[1] - 1
    excess = np.full((num_stages + 1, num_segments + 1), np.inf)
    excess[0, 0] = -np.inf
    through = np.zeros((num_stages, num_segments + 1), dtype=np.int64)
    own = np.full((num_stages, num_segments + 1), np.inf)
    for s in range(num_stages):
        for begin in range(of.first[s], of.last[s] + 1):
            transient = 0.0
            for end in range(begin + 1, of.last[s + 1] + 1):
                transient = max(transient, of.transient_bytes[end - 1])
                num_layers = of.layers[end] - of.layers[begin]
                if end < of.first[s + 1] or num_layers < 1 or num_layers > of.most_layers:
                    continue
                over = held[s, end] - held[s, begin] + transient - of.available_bytes[s]
                both = max(excess[s, begin], over)
                if both < excess[s + 1, end]:
                    excess[s + 1, end], through[s, end], own[s, end] = both, begin, over
    worst, at, stage = excess[num_stages, num_segments], num_segments, 0
    for s in range(num_stages - 1, -1, -1):
        if own[s, at] == worst:
            stage = s
        at = through[s, at]
    return worst, stage
