"""Bounds for pipelines of several chunks a stage: how many layers of the main kind each stage takes.

Which chunk of a stage holds a layer is left open: every layer counts with the least number of micro-batches in flight
that any chunk has, and with the least weight that any chunk has on the paths. The other blocks may lie anywhere, but
their time has to find room somewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import (
    ANY_STEP_MS,
    Bound,
    Look,
    available_bytes,
    available_host_bytes,
    least_step,
    overfull,
    overfull_host,
)
from mm_autoparallel.pipeline.placement.paths.average_path import AveragePath, average_path
from mm_autoparallel.pipeline.placement.segments import Units
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.graph import short_graph
from mm_autoparallel.pipeline.simulate.loads import microbatch_classes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class MainKind(NamedTuple):
    """N layers of the kind with the most work, on P stages.

    static_bytes, activation_bytes, transient_bytes: of one of them. saved_bytes, restored_bytes: [modes] of one of them
    in each of its modes (one that changes nothing, where it has none). in_flight: [P]. available_bytes: [P] what blocks
    pinned to a stage leave. moved_bytes: [P] what modes that move bytes free on a stage at most, where what may lie on
    its host is limited and there are others; 0 counts them among the others. is_still: [modes] those others.
    """

    num_layers: int
    static_bytes: float
    activation_bytes: float
    saved_bytes: Floats
    restored_bytes: Floats
    transient_bytes: float
    in_flight: Floats
    available_bytes: Floats
    moved_bytes: Floats
    is_still: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Counts:
    """What stages of n layers of the main kind take. Blocks are named by their place in the chain.

    main: one of that kind. pinned: other blocks that must lie on one stage, with that stage. free: those that need not.
    freed_count, works_ms: [P, N + 1] how much must be freed at least (layers where the main kind has one mode, else
    bytes; `_price` says what one of them costs), and the stage's work in the whole step with that and what is pinned.
    free_ms: that of the free blocks. before_ms: [P] what a stage's first forward and last backward wait
    for. taken_ms: the larger sum over all stages, of that or of what comes before their forwards and after their work.
    """

    main: int
    pinned: tuple[tuple[int, int], ...]
    free: tuple[int, ...]
    freed_count: Floats
    works_ms: Floats
    free_ms: float
    before_ms: Floats
    taken_ms: float

    def has_room(self, step_ms: float) -> bool:
        """Whether the stages can take all work within `step_ms` (`stage`, summed over all stages)."""
        work_ms = self.free_ms + float(least_total(self.works_ms, self.works_ms, step_ms - self.before_ms))
        return work_ms <= len(self.before_ms) * step_ms - self.taken_ms


def bound_many_chunks(
    problem: Problem, units: Units, least_scale: float, floor_ms: float, sharpen: bool, look: Look
) -> Bound:
    """The bound of a problem with several chunks a stage, at least `floor_ms`.

    units: of the problem with every micro-batch the mean of its own. least_scale: the least factor of a block's times
    on any micro-batch, relative to that mean. sharpen: use a mixture of paths as well. Raises what `look` does.
    """
    chain = problem.chain
    movable = [e for e, block in enumerate(chain) if not block.pinned]
    if not movable:
        return Bound(floor_ms)
    loads_ms = [block.count * (block.forward_ms + block.backward_ms) for block in units.problem.chain]
    main = max(movable, key=lambda e: loads_ms[e])
    kind = replace(chain[main], name="", count=0)
    others = [e for e, block in enumerate(chain) if replace(block, name="", count=0) != kind]
    pinned = tuple((e, 0 if chain[e].pinned == "first" else problem.num_stages - 1) for e in others if chain[e].pinned)
    num_layers = sum(block.count for block in chain) - sum(chain[e].count for e in others)
    of = _main_kind(problem, chain[main], num_layers, pinned)
    excess_bytes = float(least_excess(of))
    if excess_bytes > 0.0:
        return overfull(problem, excess_bytes, None, exact=False)
    free = tuple(e for e in others if not chain[e].pinned)
    counts = _count(units, of, main, pinned, free, least_scale)
    if not of.is_still.all() and not counts.has_room(ANY_STEP_MS):
        roomy = of._replace(moved_bytes=np.zeros_like(of.moved_bytes), is_still=np.ones_like(of.is_still))
        if _count(units, roomy, main, pinned, free, least_scale).has_room(ANY_STEP_MS):
            return overfull_host(problem)
    path = _mix(problem, of, units, counts) if sharpen else None
    if path is None:
        return least_step(floor_ms, counts.has_room, look)
    costs_ms, fixed_ms = _cost_on(path, problem, of, counts)

    def is_possible(step_ms: float) -> bool:
        most_ms: Floats = step_ms - counts.before_ms
        return counts.has_room(step_ms) and bool(least_total(costs_ms, counts.works_ms, most_ms) + fixed_ms <= step_ms)

    return least_step(floor_ms, is_possible, look)


@lru_cache(maxsize=1024)
def _least_in_flight(schedule: str, num_stages: int, num_chunks: int, num_microbatches: int) -> Floats:
    """[P] the number of micro-batches that at some moment every chunk of the stage has in flight at least.

    Of a run that leaves out the middle: up to its last forward its orders begin as the full run's do.
    """
    graph = short_graph(schedule, num_stages, num_chunks, num_microbatches)
    return np.array([float(rows.min(axis=1).max()) for rows in graph.in_flight])


def _main_kind(problem: Problem, main: ChainBlock, num_layers: int, pinned: tuple[tuple[int, int], ...]) -> MainKind:
    in_flight = _least_in_flight(problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    room_bytes = available_bytes(problem)
    for e, stage in pinned:
        block = problem.chain[e]
        held_bytes = min([block.activation_bytes, *(mode.activation_bytes for mode in block.modes)])
        room_bytes[stage] -= block.count * (block.static_bytes + in_flight[stage] * held_bytes)
    saved_bytes = np.array([main.activation_bytes - mode.activation_bytes for mode in main.modes] or [0.0])
    restored_bytes = np.array([mode.restored_bytes for mode in main.modes] or [0.0])
    host_bytes = np.array([mode.host_bytes for mode in main.modes] or [0.0])
    moved_bytes, is_still = np.zeros(problem.num_stages), np.ones(len(host_bytes), dtype=np.bool_)
    if problem.host_limit_bytes and len(host_bytes) > 1 and host_bytes.any():
        is_still = host_bytes == 0.0
        kept_there = in_flight[:, None] * host_bytes[~is_still]  # of a layer, at the moment that in_flight stands for
        freed = in_flight[:, None] * saved_bytes[~is_still] - restored_bytes[~is_still]
        moved_bytes = available_host_bytes(problem) * np.maximum(freed / kept_there, 0.0).max(axis=1)
    return MainKind(
        num_layers=num_layers,
        static_bytes=main.static_bytes,
        activation_bytes=main.activation_bytes,
        saved_bytes=saved_bytes,
        restored_bytes=restored_bytes,
        transient_bytes=main.transient_bytes,
        in_flight=in_flight,
        available_bytes=room_bytes,
        moved_bytes=moved_bytes,
        is_still=is_still,
    )


def _count(
    units: Units,
    of: MainKind,
    main: int,
    pinned: tuple[tuple[int, int], ...],
    free: tuple[int, ...],
    least_scale: float,
) -> _Counts:
    """units: of the mean micro-batch."""
    problem, chain = units.problem, units.problem.chain
    num_stages, num_microbatches = problem.num_stages, problem.num_microbatches
    factors = problem.time_factors
    loads_ms = [num_microbatches * (block.forward_ms + block.backward_ms) for block in chain]
    freed_count = least_freed(of, len(chain[main].modes) < 2)
    price_ms = np.array([num_microbatches * _price(of, chain[main], s, 1.0, 1.0) for s in range(num_stages)])
    load_ms = np.arange(freed_count.shape[1]) * loads_ms[main] + np.maximum(freed_count, 0.0) * price_ms[:, None]
    works_ms = np.where(freed_count < 0, np.inf, load_ms * np.array(factors)[:, None])
    for e, stage in pinned:
        works_ms[stage] += chain[e].count * loads_ms[e] * factors[stage]
    free_ms = sum(chain[e].count * loads_ms[e] for e in free) * min(factors)
    begin = units.start[units.first[:num_stages]]  # no stage's first chunk begins earlier
    latency_ms = np.zeros(num_stages)
    if num_stages > 1:
        latency_ms[1:] = np.cumsum(problem.p2p_ms[: num_stages - 1])
    least_factor = np.minimum.accumulate([factors[0], *factors[:-1]])  # of the stages before
    forward_before_ms = least_scale * units.forward_ms[begin] * least_factor + latency_ms
    before_ms = forward_before_ms + least_scale * units.backward_ms[begin] * least_factor
    tails_ms = float(units.tail_ms[-1]) + sum(problem.stage_tail_ms)
    taken_ms = max(float(before_ms.sum()), float(forward_before_ms.sum()) + tails_ms)
    return _Counts(main, pinned, free, freed_count, works_ms, free_ms, before_ms, taken_ms)


def _price(of: MainKind, main: ChainBlock, stage: int, forward_count: float, backward_count: float) -> float:
    """The least that a layer, or a byte, that must be freed on `stage` adds to that many forwards and backwards,
    before the stage's factor. Traffic to the host counts for nothing, since it may be hidden; where what lies there is
    limited, what it frees at most is taken off before.
    """
    modes = main.modes
    if len(modes) < 2:
        return sum(forward_count * m.extra_forward_ms + backward_count * m.extra_backward_ms for m in modes)
    freed = of.in_flight[stage] * of.saved_bytes - of.restored_bytes
    return min(
        (
            (forward_count * mode.extra_forward_ms + backward_count * mode.extra_backward_ms) / float(of_layer)
            for mode, of_layer, is_still in zip(modes, freed, of.is_still, strict=True)
            if of_layer > 0 and is_still
        ),
        default=0.0,
    )


def _mix(problem: Problem, of: MainKind, units: Units, counts: _Counts) -> AveragePath | None:
    """A mixture of paths found for the problem's work and what its modes cost at least."""
    chain, num_stages = problem.chain, problem.num_stages
    price_ms = np.array([_price(of, chain[counts.main], s, 1.0, 1.0) for s in range(num_stages)])
    extra_ms = counts.freed_count * price_ms[:, None]
    recompute_ms = float(least_total(extra_ms, counts.works_ms, np.full(num_stages, ANY_STEP_MS)))
    if not np.isfinite(recompute_ms):
        return None
    classes, scales = microbatch_classes(problem)
    count = np.array([block.count for block in chain])
    forward_ms = count * [block.forward_ms for block in chain] @ scales
    backward_ms = count * [block.backward_ms for block in chain] @ scales
    return average_path(
        problem.schedule,
        num_stages,
        problem.num_chunks,
        problem.num_microbatches,
        classes,
        forward_ms=forward_ms,
        backward_ms=backward_ms + recompute_ms * scales[counts.main],
        tail_ms=float(units.tail_ms[-1]),
        hop_ms=float(np.mean(problem.p2p_ms)) if num_stages > 1 else 0.0,
    )


def _cost_on(path: AveragePath, problem: Problem, of: MainKind, counts: _Counts) -> tuple[Floats, float]:
    """[P, N + 1] what n layers of the main kind add to the mixture's length at least, and what all else adds."""
    num_stages, chain = problem.num_stages, problem.chain
    factors = np.array(problem.time_factors)
    _, scales = microbatch_classes(problem)

    def per_chunk(per_virtual: Floats) -> Floats:
        return per_virtual.reshape(-1, num_stages).T

    def cost_ms(e: int) -> Floats:
        """[P, V] of one such block, by where it lies."""
        passes_ms = path.forward_count @ scales[e] * chain[e].forward_ms
        passes_ms += path.backward_count @ scales[e] * chain[e].backward_ms
        costs_ms: Floats = per_chunk(passes_ms) * factors[:, None] + (path.end_fraction * chain[e].tail_ms)[:, None]
        return costs_ms

    main = counts.main
    passes = [per_chunk(count @ scales[main]) for count in (path.forward_count, path.backward_count)]
    extras_ms = np.array(
        [
            min(_price(of, chain[main], s, *both) for both in zip(*(rows[s].tolist() for rows in passes), strict=True))
            for s in range(num_stages)
        ]
    )
    num_layers = np.arange(counts.freed_count.shape[1])
    costs_ms = num_layers * cost_ms(main).min(axis=1)[:, None] + counts.freed_count * (extras_ms * factors)[:, None]
    fixed_ms = float(path.end_fraction @ np.array(problem.stage_tail_ms))
    for e, stage in counts.pinned:
        chunk = 0 if chain[e].pinned == "first" else problem.num_chunks - 1
        fixed_ms += chain[e].count * float(cost_ms(e)[stage, chunk])
    fixed_ms += sum(chain[e].count * float(cost_ms(e).min()) for e in counts.free)
    if num_stages > 1:
        fixed_ms += float(path.hop_forward_count @ np.array(problem.p2p_ms))
        if all(block.sends_gradient for block in chain):
            fixed_ms += float(path.hop_backward_count @ np.array(problem.p2p_ms))
    return costs_ms, fixed_ms


@kernel
def least_freed(of: MainKind, in_layers: bool) -> Floats:
    """[P, N + 1] what a stage of n layers must free at least to fit; -1 where it cannot. In layers that take the first
    mode, or in bytes that modes free which move none (all modes, where moved_bytes is 0).
    """
    num_stages = of.in_flight.shape[0]
    freed_count = np.full((num_stages, of.num_layers + 1), -1.0)
    for s in range(num_stages):
        freed, freed_still = -np.inf, 0.0
        for m in range(of.saved_bytes.shape[0]):
            of_layer = of.in_flight[s] * of.saved_bytes[m] - of.restored_bytes[m]
            freed = max(freed, of_layer)
            if of.is_still[m]:
                freed_still = max(freed_still, of_layer)
        for n in range(of.num_layers + 1):
            need = n * (of.static_bytes + of.in_flight[s] * of.activation_bytes) - of.available_bytes[s]
            if n > 0:
                need += of.transient_bytes
            count = 0.0
            if need > 0.0:
                if freed <= 0.0:
                    break
                count = np.ceil(need / freed * (1.0 - 1e-9))
                if count > n:
                    break
            left = max(need - of.moved_bytes[s], 0.0)
            if left > n * freed_still * (1.0 + 2e-9):
                break
            freed_count[s, n] = count if in_layers else left
    return freed_count


@kernel
def least_total(costs_ms: Floats, works_ms: Floats, most_ms: Floats) -> float:
    """The least Σ costs_ms[s, n_s] over counts that sum to N with works_ms[s, n_s] ≤ most_ms[s]; both [P, N + 1]."""
    num_stages, num_layers = costs_ms.shape[0], costs_ms.shape[1] - 1
    least = np.full(num_layers + 1, np.inf)
    least[0] = 0.0
    for s in range(num_stages):
        following = np.full(num_layers + 1, np.inf)
        for n in range(num_layers + 1):
            if works_ms[s, n] > most_ms[s]:
                break  # work only grows with n
            for before in range(num_layers + 1 - n):
                following[before + n] = min(following[before + n], least[before] + costs_ms[s, n])
        least = following
    return float(least[num_layers])


@kernel
def least_excess(of: MainKind) -> float:
    """Bytes by which some stage is over in every placement, all layers recomputed if that helps; 0: unknown."""
    low, high = 0.0, 1.0
    if can_hold(of, 0.0):
        return 0.0
    while not can_hold(of, high):
        low, high = high, high * 2.0
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        if can_hold(of, middle):
            high = middle
        else:
            low = middle
    return low


@kernel
def can_hold(of: MainKind, excess_bytes: float) -> bool:
    """Whether limits that much higher could hold all layers."""
    total = 0.0
    for s in range(of.in_flight.shape[0]):
        freed = max(0.0, np.max(of.in_flight[s] * of.saved_bytes - of.restored_bytes))
        layer = of.static_bytes + of.in_flight[s] * of.activation_bytes - freed
        room = of.available_bytes[s] + excess_bytes - of.transient_bytes
        if room >= 0.0 and layer * of.num_layers <= room:  # layers of no bytes too
            total += of.num_layers
        elif room >= 0.0:
            total += min(float(of.num_layers), np.floor(room / layer * (1.0 + 1e-9)))
    return bool(total >= of.num_layers)
