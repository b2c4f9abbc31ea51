"""Lower bounds of a strategy: what no placement of its problem can beat, in microseconds to some milliseconds.

Every bound holds for the simulator's own step, because each is the length of a path in the schedule's graph, and of all
paths the step is the longest. With M micro-batches, F, B, L = F + B of a stage for one of them (recompute included),
and what comes before a stage meaning one pass through all stages before it, forth and back, hops included:

    work      Σ over stages of (M·L + tail) ≤ P · step; and the largest block lies on some stage whole.
    stage     first task of stage s: a forward that has come through all stages before; last task: a backward whose
              gradient goes back through them. Between them lie M·L, whatever the order:
                  before + M·L + tail of stage 0,   and   forward before + M·L + tail of s
    turn      one chunk, micro-batches in order, w forwards of s between its first and the first backward: the first
              micro-batch's pass goes through the later stages as well, in place of those w forwards:
                  before + M·L − w·F + after.   The mirror image (last forward, w backwards) gives − w·B; the better counts.
    mixture   the weighted mean of any paths (average_path): with several chunks, the bubble that no lay-out of work avoids.
    memory    in-flight counts are the schedule's; the least recompute that fits a stage is part of its L.

With one chunk these are minimised over all placements (one_chunk); with more, over counts of the main kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.placement.infeasible import explain_windows
from mm_autoparallel.placement.units import Units, cut_into_units
from mm_autoparallel.problem import ChainBlock, Problem
from mm_autoparallel.schedules.action import FORWARD
from mm_autoparallel.schedules.catalog import find_schedule
from mm_autoparallel.search import many_chunks, one_chunk
from mm_autoparallel.search.average_path import average_path
from mm_autoparallel.simulate.graph import short_graph
from mm_autoparallel.units import GB

Floats = NDArray[np.float64]

#: Bisection ends this close; the lower end counts.
PRECISION_FRACTION = 1e-5
#: Longer than any step, and short enough that sums of some stay finite.
ANY_STEP_MS = 1e300
#: Far above the rounding of sums, far below what matters; always to the side that keeps the bound true.
ROUNDING_FRACTION = 1e-10
#: Intervals of all stages beyond which one chunk is bounded by work alone (eight bytes each).
MAX_INTERVALS = 20_000_000


@dataclass(frozen=True)
class Bound:
    """No placement of the problem is below step_ms; infinite where none fits its memory, and then `reason` says why.

    overflow_bytes: by how much the worst stage exceeds its limit in every placement. exact: some placement exceeds by
    no more, so limits that much higher would do.
    """

    step_ms: float
    reason: str = ""
    overflow_bytes: float = 0.0
    exact: bool = False


def work_bound_ms(problem: Problem) -> float:
    """The bound that costs microseconds: work spread perfectly, memory left out (`work` of the module's first lines)."""
    total_ms = sum(problem.stage_tail_ms)
    largest_ms = 0.0
    for block in problem.chain:
        scale = sum(block.microbatch_scale) if block.microbatch_scale else float(problem.num_microbatches)
        block_ms = (block.forward_ms + block.backward_ms) * scale + block.tail_ms
        total_ms += block.count * block_ms
        largest_ms = max(largest_ms, block_ms)
    return max(total_ms / problem.num_stages, largest_ms) * (1.0 - ROUNDING_FRACTION)


def bound_step(problem: Problem, sharpen: bool = False) -> Bound:
    """The bound that costs milliseconds: paths through every stage, with the recompute that its memory enforces.

    sharpen: with several chunks a stage, look for a mixture of paths that counts the bubble, in tens of milliseconds.
    """
    scaled, least_scale, most_scale = _mean_microbatch(problem)
    units = cut_into_units(scaled)
    reason = explain_windows(units)
    if reason:
        return Bound(np.inf, reason)
    floor_ms = work_bound_ms(problem)
    if problem.num_chunks > 1:
        return _bound_many_chunks(units, least_scale, floor_ms, sharpen)
    if problem.num_stages * (units.num_units + 1) ** 2 > MAX_INTERVALS:
        return Bound(floor_ms)
    return _bound_one_chunk(units, least_scale, most_scale, floor_ms)


def _mean_microbatch(problem: Problem) -> tuple[Problem, float, float]:
    """The problem with every micro-batch the mean of its own, and the least and the largest factor on any block's times."""
    if not any(block.microbatch_scale for block in problem.chain):
        return problem, 1.0, 1.0
    chain: list[ChainBlock] = []
    least, most = 1.0, 1.0
    for block in problem.chain:
        scale = block.microbatch_scale or (1.0,)
        mean = sum(scale) / len(scale)
        if mean > 0:
            least, most = min(least, min(scale) / mean), max(most, max(scale) / mean)
        recompute = block.recompute
        chain.append(
            replace(
                block,
                forward_ms=block.forward_ms * mean,
                backward_ms=block.backward_ms * mean,
                recompute=recompute and replace(recompute, extra_backward_ms=recompute.extra_backward_ms * mean),
                microbatch_scale=(),
            )
        )
    return replace(problem, chain=tuple(chain)), least, most


def _least_step(floor_ms: float, is_possible: Callable[[float], bool]) -> float:
    """The largest step found impossible, within PRECISION_FRACTION of the least possible one, and at least `floor_ms`."""
    low, high = floor_ms, max(floor_ms, 1e-9) * 1.05
    if is_possible(low) or not is_possible(ANY_STEP_MS):
        return low
    while not is_possible(high):
        low, high = high, high * 1.5
    while high - low > PRECISION_FRACTION * high:
        middle = 0.5 * (low + high)
        if is_possible(middle):
            high = middle
        else:
            low = middle
    return low * (1.0 - ROUNDING_FRACTION)


# ---------------------------------------------------------------------------------------------------------- one chunk


@lru_cache(maxsize=256)
def _in_flight_and_warmup(schedule: str, num_stages: int, num_microbatches: int) -> tuple[Floats, Floats]:
    """[P] most micro-batches in flight, and forwards between a stage's first forward and first backward.

    The latter is infinite, which leaves `turn` out, where micro-batches do not go in order.
    """
    order_of = find_schedule(schedule, 1).order
    in_order = np.arange(num_microbatches)
    in_flight, num_warmup = np.empty(num_stages), np.empty(num_stages)
    for s in range(num_stages):
        order = order_of(num_stages, 1, num_microbatches, s)
        forward = order[:, 0] == FORWARD
        in_flight[s] = np.max(np.cumsum(np.where(forward, 1, -1)))
        ordered = np.array_equal(order[forward, 2], in_order) and np.array_equal(order[~forward, 2], in_order)
        num_warmup[s] = np.argmin(forward) - 1 if ordered else np.inf
    return in_flight, num_warmup


def _bound_one_chunk(units: Units, least_scale: float, most_scale: float, floor_ms: float) -> Bound:
    of = _prepare_one_chunk(units, least_scale, most_scale)
    loads = one_chunk.least_loads(of)
    rest = one_chunk.least_rest(of, loads)
    if rest[0, 0] < np.inf:
        return Bound(_least_step(floor_ms, lambda step_ms: bool(one_chunk.can_take(of, loads, rest, step_ms))))
    excess_bytes, stage = one_chunk.least_excess(of)
    if excess_bytes <= 0.0:
        return Bound(floor_ms)
    return _overfull(units.problem, float(excess_bytes), int(stage), exact=True)


def _prepare_one_chunk(units: Units, least_scale: float, most_scale: float) -> one_chunk.OneChunk:
    problem, chain = units.problem, units.problem.chain
    num_stages, at = problem.num_stages, units.start
    in_flight, num_warmup = _in_flight_and_warmup(problem.schedule, num_stages, problem.num_microbatches)
    hop_ms = np.zeros((num_stages, units.num_units + 1))
    latency_ms = np.zeros(num_stages)
    if num_stages > 1:
        last_blocks = [chain[e] for e in units.flat[at[1:] - 1]]
        output_bytes = np.array([0.0, *(block.output_bytes for block in last_blocks)])
        both_ways = np.array([1.0, *(2.0 if block.sends_gradient else 1.0 for block in last_blocks)])
        fixed_ms, per_byte_ms = np.array(problem.p2p_ms)[:, None], np.array(problem.p2p_ms_per_byte)[:, None]
        hop_ms[:-1] = (fixed_ms + per_byte_ms * output_bytes) * both_ways
        latency_ms[1:] = np.cumsum(problem.p2p_ms)
    return one_chunk.OneChunk(
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
        available_bytes=_available_bytes(problem),
        stage_tail_ms=np.array(problem.stage_tail_ms),
        hop_ms=hop_ms,
        latency_ms=latency_ms,
    )


def _available_bytes(problem: Problem) -> Floats:
    """[P] what blocks may fill; a little more than the simulator allows, so that rounding never makes a bound false."""
    return np.array(problem.memory_limit_bytes) * (1.0 + ROUNDING_FRACTION) - np.array(problem.stage_static_bytes)


def _overfull(problem: Problem, excess_bytes: float, stage: int | None, exact: bool) -> Bound:
    where = "some stage" if stage is None else f"stage {stage}"
    limit_bytes = min(problem.memory_limit_bytes) if stage is None else problem.memory_limit_bytes[stage]
    reason = (
        f"memory: {where} is {excess_bytes / GB:.3g} GB over its {limit_bytes / GB:.4g} GB at the least, whatever the "
        f"layers and with all recompute that helps"
    )
    return Bound(np.inf, reason, excess_bytes, exact)


# -------------------------------------------------------------------------------------------------------- many chunks


@lru_cache(maxsize=1024)
def _least_in_flight(schedule: str, num_stages: int, num_chunks: int, num_microbatches: int) -> Floats:
    """[P] the number of micro-batches that at some moment every chunk of the stage has in flight at least.

    Of a run that leaves out the middle: up to its last forward its orders begin as the full run's do.
    """
    graph = short_graph(schedule, num_stages, num_chunks, num_microbatches)
    return np.array([float(rows.min(axis=1).max()) for rows in graph.in_flight])


def _bound_many_chunks(units: Units, least_scale: float, floor_ms: float, sharpen: bool) -> Bound:
    problem, chain = units.problem, units.problem.chain
    num_stages, num_microbatches = problem.num_stages, problem.num_microbatches
    movable = [b for b in chain if not b.pinned]
    if not movable:
        return Bound(floor_ms)
    main = max(movable, key=lambda b: b.count * (b.forward_ms + b.backward_ms))
    others = [b for b in chain if replace(b, name="", count=0) != replace(main, name="", count=0)]
    num_layers = sum(b.count for b in chain) - sum(b.count for b in others)
    pinned = [(b, 0 if b.pinned == "first" else num_stages - 1) for b in others if b.pinned]
    of = _main_kind(problem, main, num_layers, pinned)
    excess_bytes = float(many_chunks.least_excess(of))
    if excess_bytes > 0.0:
        return _overfull(problem, excess_bytes, None, exact=False)
    recomputed = many_chunks.least_recompute(of)
    counts = np.arange(num_layers + 1)
    extra_ms = main.recompute.extra_backward_ms if main.recompute else 0.0
    layer_ms = main.forward_ms + main.backward_ms
    works_ms = num_microbatches * np.where(recomputed < 0, np.inf, counts * layer_ms + recomputed * extra_ms)
    for block, stage in pinned:
        works_ms[stage] += num_microbatches * block.count * (block.forward_ms + block.backward_ms)
    free = [b for b in others if not b.pinned]
    free_ms = num_microbatches * sum(b.count * (b.forward_ms + b.backward_ms) for b in free)
    at = units.start[units.first[:num_stages]]
    latency_ms = np.concatenate([[0.0], np.cumsum(problem.p2p_ms[: num_stages - 1])]) * (num_stages > 1)
    forward_before_ms = least_scale * units.forward_ms[at] + latency_ms
    before_ms = forward_before_ms + least_scale * units.backward_ms[at]
    tails_ms = float(units.tail_ms[-1]) + sum(problem.stage_tail_ms)
    taken_ms = max(before_ms.sum(), forward_before_ms.sum() + tails_ms)

    def has_room(step_ms: float) -> bool:
        work_ms = many_chunks.least_total(works_ms, works_ms, step_ms - before_ms) + free_ms
        return bool(work_ms <= num_stages * step_ms - taken_ms)

    recompute_ms = many_chunks.least_total(recomputed * extra_ms, works_ms, np.full(num_stages, ANY_STEP_MS))
    if not sharpen or not np.isfinite(recompute_ms):
        return Bound(_least_step(floor_ms, has_room))
    path = average_path(
        problem.schedule,
        num_stages,
        problem.num_chunks,
        num_microbatches,
        forward_ms=float(units.forward_ms[-1]),
        backward_ms=float(units.backward_ms[-1]) + recompute_ms,
        tail_ms=float(units.tail_ms[-1]),
        hop_ms=float(np.mean(problem.p2p_ms)),
    )
    if path is None:
        return Bound(_least_step(floor_ms, has_room))

    def cost_ms(block: ChainBlock) -> Floats:
        """[P, V] of one such block on the mixture, by where it lies."""
        per_virtual = least_scale * (path.forward_count * block.forward_ms + path.backward_count * block.backward_ms)
        return per_virtual.reshape(-1, num_stages).T + (path.end_fraction * block.tail_ms)[:, None]

    least_backward = path.backward_count.reshape(-1, num_stages).min(axis=0)[:, None]
    costs_ms = counts * cost_ms(main).min(axis=1)[:, None] + recomputed * (least_scale * extra_ms * least_backward)
    fixed_ms = sum(float(cost_ms(b)[stage, 0 if b.pinned == "first" else -1]) * b.count for b, stage in pinned)
    fixed_ms += sum(float(cost_ms(b).min()) * b.count for b in free)
    fixed_ms += float(path.end_fraction @ np.array(problem.stage_tail_ms))
    if num_stages > 1:
        fixed_ms += float(path.hop_forward_count @ np.array(problem.p2p_ms))
        if all(b.sends_gradient for b in chain):
            fixed_ms += float(path.hop_backward_count @ np.array(problem.p2p_ms))

    def is_possible(step_ms: float) -> bool:
        return has_room(step_ms) and bool(
            many_chunks.least_total(costs_ms, works_ms, step_ms - before_ms) + fixed_ms <= step_ms
        )

    return Bound(_least_step(floor_ms, is_possible))


def _main_kind(
    problem: Problem, main: ChainBlock, num_layers: int, pinned: list[tuple[ChainBlock, int]]
) -> many_chunks.MainKind:
    in_flight = _least_in_flight(problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    available_bytes = _available_bytes(problem)
    for block, stage in pinned:
        mode = block.recompute
        held_bytes = min(block.activation_bytes, mode.activation_bytes) if mode else block.activation_bytes
        available_bytes[stage] -= block.count * (block.static_bytes + in_flight[stage] * held_bytes)
    mode = main.recompute
    return many_chunks.MainKind(
        num_layers=num_layers,
        static_bytes=main.static_bytes,
        activation_bytes=main.activation_bytes,
        saved_bytes=main.activation_bytes - mode.activation_bytes if mode else 0.0,
        restored_bytes=mode.restored_bytes if mode else 0.0,
        transient_bytes=main.transient_bytes,
        in_flight=in_flight,
        available_bytes=available_bytes,
    )
