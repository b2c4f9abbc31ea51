"""Main kind: the layers with the most work, of which stages with several chunks take whole numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import available_bytes, available_host_bytes
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.graph import short_graph

Floats = NDArray[np.float64]


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


@lru_cache(maxsize=1024)
def _least_in_flight(schedule: str, num_stages: int, num_chunks: int, num_microbatches: int) -> Floats:
    """[P] the number of micro-batches that at some moment every chunk of the stage has in flight at least.

    Of a run that leaves out the middle: up to its last forward its orders begin as the full run's do. Where the order
    is to be found: one, once it has come through the stage's last chunk.
    """
    if find_schedule(schedule, num_chunks).given_by == "placement":
        return np.ones(num_stages)
    graph = short_graph(schedule, num_stages, num_chunks, num_microbatches)
    return np.array([float(rows.min(axis=1).max()) for rows in graph.in_flight])


@lru_cache(maxsize=1024)
def fullest_moments(
    schedule: str, num_stages: int, num_chunks: int, num_microbatches: int
) -> tuple[tuple[Floats, ...], ...]:
    """Of each stage, micro-batches in flight in each chunk [C] at two moments: with the most in the chunk that has the
    least, and with the most in all; one in each where the order is to be found."""
    if find_schedule(schedule, num_chunks).given_by == "placement":
        return ((np.ones(num_chunks),),) * num_stages
    graph = short_graph(schedule, num_stages, num_chunks, num_microbatches)
    moments = ([rows[rows.min(axis=1).argmax()], rows[rows.sum(axis=1).argmax()]] for rows in graph.in_flight)
    return tuple(tuple(np.unique(np.array(each, dtype=np.float64), axis=0)) for each in moments)


def main_kind(problem: Problem, main: ChainBlock, num_layers: int, pinned: tuple[tuple[int, int], ...]) -> MainKind:
    """That of `problem`; main: one of its blocks. pinned: other blocks that lie on one stage, with that stage."""
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
            if works_ms[s, n] == np.inf:
                continue  # too many, or fewer than must be
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
