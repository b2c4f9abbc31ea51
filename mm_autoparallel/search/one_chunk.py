"""Bounds for pipelines of one chunk a stage: a shortest path over where stages end.

A stage holds an interval of units, so what it must recompute and how long it takes are known per interval. Of the
schedule's graph only three paths through each stage are kept (`bounds` names them); under these, what the stages before
have used up matters by its sum alone, so keeping the least sum per position loses nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.placement.units import Units
from mm_autoparallel.schedules.action import FORWARD
from mm_autoparallel.schedules.catalog import find_schedule
from mm_autoparallel.search.bound import Bound, available_bytes, least_step, overfull
from mm_autoparallel.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Intervals of all stages beyond which work alone is the bound (each takes eight bytes).
MAX_INTERVALS = 20_000_000


class OneChunk(NamedTuple):
    """P stages over N units; times are means over the micro-batches.

    first, last: [P + 1] windows of the boundaries. forward_ms, backward_ms, tail_ms, static_bytes, activation_bytes,
    layers: prefix sums [N + 1] over units; transient_bytes: [N]. before: [G, N + 1] layers of each recompute group
    before each unit; extra_ms, saved_bytes, restored_bytes: [G, most + 1] prefix sums over its layers.
    in_flight, num_warmup, num_cooldown (see `_count_in_order`), available_bytes, stage_tail_ms: [P]. hop_ms: [P, N + 1]
    forth and back after each stage, by where it ends. latency_ms: [P] of all forward hops before a stage. least_scale,
    most_scale: bounds on the factors by which times of one micro-batch differ from the mean.
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
    layers: Ints
    transient_bytes: Floats
    before: Ints
    extra_ms: Floats
    saved_bytes: Floats
    restored_bytes: Floats
    in_flight: Floats
    num_warmup: Floats
    num_cooldown: Floats
    available_bytes: Floats
    stage_tail_ms: Floats
    hop_ms: Floats
    latency_ms: Floats


def bound_one_chunk(units: Units, least_scale: float, most_scale: float, floor_ms: float) -> Bound:
    """The bound of a problem with one chunk a stage, at least `floor_ms`.

    units: of the mean micro-batch. least_scale, most_scale: as in OneChunk.
    """
    if units.problem.num_stages * (units.num_units + 1) ** 2 > MAX_INTERVALS:
        return Bound(floor_ms)
    of = _prepare(units, least_scale, most_scale)
    loads = least_loads(of)
    rest = least_rest(of, loads)
    if rest[0, 0] < np.inf:
        return least_step(floor_ms, lambda step_ms: bool(can_take(of, loads, rest, step_ms)))
    excess_bytes, stage, exact = least_excess(of)
    if excess_bytes <= 0.0:
        return Bound(floor_ms)
    return overfull(units.problem, excess_bytes, stage, exact)


@lru_cache(maxsize=256)
def _count_in_order(schedule: str, num_stages: int, num_microbatches: int) -> tuple[Floats, Floats, Floats]:
    """[P] most micro-batches in flight; forwards after the first one and before the first backward; backwards after the
    last forward and before the last one. The latter two are infinite, which leaves `turn` out, where micro-batches do
    not go in order.
    """
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


def _prepare(units: Units, least_scale: float, most_scale: float) -> OneChunk:
    problem, chain = units.problem, units.problem.chain
    num_stages, at = problem.num_stages, units.start
    in_flight, num_warmup, num_cooldown = _count_in_order(problem.schedule, num_stages, problem.num_microbatches)
    hop_ms = np.zeros((num_stages, units.num_units + 1))
    latency_ms = np.zeros(num_stages)
    if num_stages > 1:
        last_blocks = [chain[e] for e in units.flat[at[1:] - 1]]
        output_bytes = np.array([0.0, *(block.output_bytes for block in last_blocks)])
        both_ways = np.array([1.0, *(2.0 if block.sends_gradient else 1.0 for block in last_blocks)])
        fixed_ms, per_byte_ms = np.array(problem.p2p_ms)[:, None], np.array(problem.p2p_ms_per_byte)[:, None]
        hop_ms[:-1] = (fixed_ms + per_byte_ms * output_bytes) * both_ways
        latency_ms[1:] = np.cumsum(problem.p2p_ms)
    return OneChunk(
        num_microbatches=problem.num_microbatches,
        most_layers=problem.max_layers_per_chunk or problem.num_layers,
        least_scale=least_scale,
        most_scale=most_scale,
        first=units.first,
        last=units.last,
        forward_ms=units.forward_ms[at],
        backward_ms=units.backward_ms[at],
        tail_ms=units.tail_ms[at],
        static_bytes=units.static_bytes[at],
        activation_bytes=units.activation_bytes[at],
        layers=units.layers[at],
        transient_bytes=np.maximum.reduceat(units.transient_bytes, at[:-1]),
        before=np.ascontiguousarray(units.before[:, at]),
        extra_ms=units.extra_ms,
        saved_bytes=units.saved_bytes,
        restored_bytes=units.restored_bytes,
        in_flight=in_flight,
        num_warmup=num_warmup,
        num_cooldown=num_cooldown,
        available_bytes=available_bytes(problem),
        stage_tail_ms=np.array(problem.stage_tail_ms),
        hop_ms=hop_ms,
        latency_ms=latency_ms,
    )


@kernel
def least_loads(of: OneChunk) -> Floats:
    """[P, N + 1, N + 1] forward and backward in ms of a stage that holds units begin to end, with the least recompute
    that fits its memory; infinite where none does. Where several groups could recompute, the cheapest bytes of any of
    their layers are taken, in fractions: never more than the truth.
    """
    num_stages, num_units = of.in_flight.shape[0], of.transient_bytes.shape[0]
    num_groups = of.before.shape[0]
    loads = np.full((num_stages, num_units + 1, num_units + 1), np.inf)
    freeable = np.zeros((num_groups, of.extra_ms.shape[1]))
    chosen = np.zeros(max(num_groups, 1), dtype=np.int64)
    for s in range(num_stages):
        in_flight = of.in_flight[s]
        cheapest = np.inf
        for g in range(num_groups):
            for i in range(of.extra_ms.shape[1] - 1):
                freed = in_flight * (of.saved_bytes[g, i + 1] - of.saved_bytes[g, i])
                freed -= of.restored_bytes[g, i + 1] - of.restored_bytes[g, i]
                freeable[g, i + 1] = freeable[g, i] + max(freed, 0.0)
                if freed > 0.0:
                    cheapest = min(cheapest, (of.extra_ms[g, i + 1] - of.extra_ms[g, i]) / freed)
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
                if need > 0.0:
                    num_active, group, total = 0, 0, 0.0
                    for g in range(num_groups):
                        if of.before[g, end] > of.before[g, begin]:
                            num_active += 1
                            group = g
                            total += freeable[g, of.before[g, end]] - freeable[g, of.before[g, begin]]
                    if num_active == 1:  # as `need` only grows with `end`, so does the count
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
                        load += of.extra_ms[group, low + r] - of.extra_ms[group, low]
                    elif total >= need:
                        load += need * cheapest
                    else:
                        continue
                loads[s, begin, end] = load
    return loads


def least_rest(of: OneChunk, loads: Floats) -> Floats:
    """[P + 1, N + 1] least time of one micro-batch through stages s … P - 1 that begin at a unit, forth and back."""
    num_stages, num_units = len(of.in_flight), len(of.transient_bytes)
    rest = np.full((num_stages + 1, num_units + 1), np.inf)
    rest[num_stages, num_units] = 0.0
    for s in range(num_stages - 1, -1, -1):
        rest[s] = np.min(of.least_scale * loads[s] + of.hop_ms[s] + rest[s + 1], axis=1)
    return rest


@kernel
def can_take(of: OneChunk, loads: Floats, rest: Floats, step_ms: float) -> bool:
    """Whether some placement has none of its kept paths longer than `step_ms`."""
    num_stages, num_units = of.in_flight.shape[0], of.transient_bytes.shape[0]
    num_microbatches = of.num_microbatches
    least = np.full(num_units + 1, np.inf)
    least[0] = 0.0
    for s in range(num_stages):
        following = np.full(num_units + 1, np.inf)
        for begin in range(of.first[s], of.last[s] + 1):
            if least[begin] == np.inf:
                continue
            forward_before = of.least_scale * of.forward_ms[begin] + of.latency_ms[s]
            for end in range(max(begin + 1, of.first[s + 1]), of.last[s + 1] + 1):
                load = loads[s, begin, end]
                forward = of.forward_ms[end] - of.forward_ms[begin]
                if num_microbatches * (forward + of.backward_ms[end] - of.backward_ms[begin]) > step_ms:
                    break
                if load == np.inf:
                    continue
                tail = of.stage_tail_ms[s] + of.tail_ms[end] - of.tail_ms[begin]
                used = least[begin] + (tail if s == 0 else 0.0)
                whole = num_microbatches * load
                if used + whole > step_ms or forward_before + whole + tail > step_ms:
                    continue
                onward = of.hop_ms[s, end] + rest[s + 1, end]
                spared = min(of.num_warmup[s] * forward, of.num_cooldown[s] * (load - forward))
                if used + whole - of.most_scale * spared + onward > step_ms:
                    continue
                following[end] = min(following[end], used + of.least_scale * load + of.hop_ms[s, end])
        least = following
    return bool(least[num_units] < np.inf)


def least_excess(of: OneChunk) -> tuple[float, int, bool]:
    """The least bytes by which the worst stage exceeds its memory (negative: to spare), that stage, and whether some
    placement exceeds by no more. Infinite where no placement exists whatever the memory.
    """
    num_stages, num_units = len(of.in_flight), len(of.transient_bytes)
    unit = np.arange(num_units + 1)
    begin, end = unit[:, None], unit[None, :]
    transient = np.where(end[:, :-1] >= begin, of.transient_bytes, 0.0)  # of unit `end`, for stages from `begin` on
    transient = np.concatenate([np.zeros((num_units + 1, 1)), np.maximum.accumulate(transient, axis=1)], axis=1)
    num_layers = of.layers[end] - of.layers[begin]
    lawful = (num_layers >= 1) & (num_layers <= of.most_layers)
    excess = np.full((num_stages + 1, num_units + 1), np.inf)
    excess[0, 0] = -np.inf
    over = np.full((num_stages, num_units + 1, num_units + 1), np.inf)
    exact = True
    for s in range(num_stages):
        held = of.static_bytes + of.in_flight[s] * of.activation_bytes
        freed = np.diff(of.in_flight[s] * of.saved_bytes - of.restored_bytes, axis=1)
        exact = exact and not np.any(freed < 0)  # a layer that recomputes to no avail may stand before one that helps
        freeable = np.zeros_like(of.saved_bytes)
        freeable[:, 1:] = np.cumsum(np.maximum(freed, 0.0), axis=1)
        held = held - np.take_along_axis(freeable, of.before, axis=1).sum(axis=0)
        allowed = lawful & (begin >= of.first[s]) & (begin <= of.last[s])
        allowed &= (end >= of.first[s + 1]) & (end <= of.last[s + 1])
        over[s][allowed] = (held[end] - held[begin] + transient - of.available_bytes[s])[allowed]
        excess[s + 1] = np.min(np.maximum(excess[s][:, None], over[s]), axis=0)
    worst, at = excess[num_stages, num_units], num_units
    stage = 0
    for s in range(num_stages - 1, -1, -1):
        through = int(np.argmin(np.maximum(excess[s], over[s][:, at])))
        if over[s][through, at] == worst:
            stage = s
        at = through
    return float(worst), stage, bool(exact)
