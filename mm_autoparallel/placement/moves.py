"""Moves of local search: small lawful changes of a placement, and the least recompute that makes it fit again.

A move shifts one boundary, hands a unit from one chunk to another along the chain, swaps the sizes of two neighbours,
or trades recompute inside a stage. The stages it touched are then repaired: layers are recomputed, about the best bytes
per ms first, until memory fits, then every recompute that is not needed is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.placement.units import Units
from mm_autoparallel.simulate.compiled import kernel
from mm_autoparallel.simulate.graph import TaskGraph
from mm_autoparallel.simulate.loads import allowed_bytes, hop_ms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Sums(NamedTuple):
    """The numbers of Units and Problem that a move needs, as arrays for the kernels."""

    num_stages: int
    num_chunks: int
    num_microbatches: int
    most_layers: int
    start: Ints
    first: Ints
    last: Ints
    layers: Ints
    forward_ms: Floats
    backward_ms: Floats
    static_bytes: Floats
    activation_bytes: Floats
    tail_ms: Floats
    transient_bytes: Floats
    before: Ints
    extra_ms: Floats
    saved_bytes: Floats
    restored_bytes: Floats
    hop_forward_ms: Floats
    hop_backward_ms: Floats
    rows: Floats
    row_offset: Ints
    available_bytes: Floats
    stage_tail_ms: Floats


class State(NamedTuple):
    """A placement under change. boundary: [K + 1]; recompute: [K, G]; overflow_bytes: [P]; times_ms as in
    `step_bounds`."""

    boundary: Ints
    recompute: Ints
    overflow_bytes: Floats
    times_ms: Floats


def collect_sums(units: Units, graph: TaskGraph) -> Sums:
    """Gather what the kernels need from `units` and the in-flight rows of `graph`."""
    problem = units.problem
    num_virtual = problem.num_virtual_stages
    last_element = units.flat[units.start[1:] - 1]
    hops = np.zeros((2, max(num_virtual - 1, 1), units.num_units))
    for k in range(num_virtual - 1):
        by_block = {e: hop_ms(problem, k, problem.chain[e]) for e in np.unique(last_element).tolist()}
        hops[:, k] = np.array([by_block[e] for e in last_element.tolist()]).T
    rows = [row.astype(np.float64) for row in graph.in_flight]
    return Sums(
        problem.num_stages,
        problem.num_chunks,
        problem.num_microbatches,
        problem.max_layers_per_chunk if problem.max_layers_per_chunk is not None else int(units.layers[-1]),
        units.start,
        units.first,
        units.last,
        units.layers,
        units.forward_ms,
        units.backward_ms,
        units.static_bytes,
        units.activation_bytes,
        units.tail_ms,
        units.transient_bytes,
        units.before,
        units.extra_ms,
        units.saved_bytes,
        units.restored_bytes,
        hops[0],
        hops[1],
        np.concatenate(rows),
        np.cumsum([0, *(len(row) for row in rows)]),
        allowed_bytes(problem) - np.array(problem.stage_static_bytes),
        np.array(problem.stage_tail_ms),
    )


def empty_state(units: Units) -> State:
    """A state of the right shape; its numbers mean nothing yet."""
    problem = units.problem
    num_virtual = problem.num_virtual_stages
    return State(
        np.zeros(num_virtual + 1, dtype=np.int64),
        np.zeros((num_virtual, len(units.groups)), dtype=np.int64),
        np.zeros(problem.num_stages),
        np.zeros(4 * num_virtual - 1 + problem.num_stages),
    )


def balanced_boundaries(units: Units) -> Ints:
    """[K + 1] boundaries with about equal time in every chunk, inside their windows."""
    num_virtual = units.problem.num_virtual_stages
    work = (units.forward_ms + units.backward_ms)[units.start]
    boundary = np.searchsorted(work, work[-1] * np.arange(num_virtual + 1) / num_virtual)
    layers = units.layers[units.start]
    most = units.problem.max_layers_per_chunk if units.problem.max_layers_per_chunk is not None else int(layers[-1])
    boundary[0], boundary[-1] = 0, units.num_units
    for k in range(1, num_virtual):  # inside its window, one layer after the boundary before, not too many
        low = max(units.first[k], np.searchsorted(layers, layers[boundary[k - 1]] + 1))
        high = min(units.last[k], np.searchsorted(layers, layers[boundary[k - 1]] + most, side="right") - 1)
        boundary[k] = min(max(boundary[k], low), high)
    whole: Ints = boundary.astype(np.int64)
    return whole


@kernel
def stage_overflow(sums: Sums, state: State, stage: int) -> tuple[float, int]:
    """Bytes by which a stage exceeds its memory (negative: spare) and the in-flight row that holds most."""
    static, transient, restored = 0.0, 0.0, 0.0
    kept = np.empty(sums.num_chunks)
    for c in range(sums.num_chunks):
        k = c * sums.num_stages + stage
        a, b = sums.start[state.boundary[k]], sums.start[state.boundary[k + 1]]
        static += sums.static_bytes[b] - sums.static_bytes[a]
        kept[c] = sums.activation_bytes[b] - sums.activation_bytes[a]
        for i in range(a, b):
            transient = max(transient, sums.transient_bytes[i])
        for g in range(sums.before.shape[0]):
            low = sums.before[g, a]
            high = low + state.recompute[k, g]
            kept[c] -= sums.saved_bytes[g, high] - sums.saved_bytes[g, low]
            restored += sums.restored_bytes[g, high] - sums.restored_bytes[g, low]
    most, binding = -np.inf, 0
    for row in range(sums.row_offset[stage], sums.row_offset[stage + 1]):
        held = 0.0
        for c in range(sums.num_chunks):
            held += sums.rows[row, c] * kept[c]
        if held > most:
            most, binding = held, row
    return static + transient + restored + most - sums.available_bytes[stage], binding


@kernel
def repair(sums: Sums, state: State, stage: int) -> None:
    """Recompute just enough on one stage, and write its times and its overflow."""
    num_groups = sums.before.shape[0]
    overflow, binding = stage_overflow(sums, state, stage)
    while overflow > 0:
        best_gain, best_k, best_g = 0.0, -1, -1
        for c in range(sums.num_chunks):
            k = c * sums.num_stages + stage
            a, b = sums.start[state.boundary[k]], sums.start[state.boundary[k + 1]]
            for g in range(num_groups):
                at = sums.before[g, a] + state.recompute[k, g]
                if at < sums.before[g, b]:
                    saved = sums.saved_bytes[g, at + 1] - sums.saved_bytes[g, at]
                    restored = sums.restored_bytes[g, at + 1] - sums.restored_bytes[g, at]
                    relief = sums.rows[binding, c] * saved - restored
                    gain = (
                        relief
                        / max(sums.extra_ms[g, at + 1] - sums.extra_ms[g, at], 1e-12)
                        * np.random.uniform(0.3, 1.0)
                    )
                    if gain > best_gain:
                        best_gain, best_k, best_g = gain, k, g
        if best_k < 0:
            break
        state.recompute[best_k, best_g] += 1
        overflow, binding = stage_overflow(sums, state, stage)
    dropped = overflow <= 0
    while dropped:
        dropped = False
        best_extra, best_k, best_g = 0.0, -1, -1
        for c in range(sums.num_chunks):
            k = c * sums.num_stages + stage
            a = sums.start[state.boundary[k]]
            for g in range(num_groups):
                if state.recompute[k, g] > 0:
                    at = sums.before[g, a] + state.recompute[k, g]
                    extra = (sums.extra_ms[g, at] - sums.extra_ms[g, at - 1]) * np.random.uniform(0.3, 1.0)
                    if extra > best_extra:
                        state.recompute[k, g] -= 1
                        if stage_overflow(sums, state, stage)[0] <= 0:
                            best_extra, best_k, best_g = extra, k, g
                        state.recompute[k, g] += 1
        if best_k >= 0:
            state.recompute[best_k, best_g] -= 1
            dropped = True
    state.overflow_bytes[stage] = max(0.0, stage_overflow(sums, state, stage)[0])
    num_virtual = sums.num_stages * sums.num_chunks
    tail = sums.stage_tail_ms[stage]
    for c in range(sums.num_chunks):
        k = c * sums.num_stages + stage
        end = state.boundary[k + 1]
        a, b = sums.start[state.boundary[k]], sums.start[end]
        backward = sums.backward_ms[b] - sums.backward_ms[a]
        for g in range(num_groups):
            low = sums.before[g, a]
            backward += sums.extra_ms[g, low + state.recompute[k, g]] - sums.extra_ms[g, low]
        tail += sums.tail_ms[b] - sums.tail_ms[a]
        state.times_ms[k] = sums.forward_ms[b] - sums.forward_ms[a]
        state.times_ms[num_virtual + k] = backward
        if k < num_virtual - 1:
            state.times_ms[2 * num_virtual + k] = sums.hop_forward_ms[k, end - 1]
            state.times_ms[3 * num_virtual - 1 + k] = sums.hop_backward_ms[k, end - 1]
    state.times_ms[4 * num_virtual - 1 + stage] = tail


@kernel
def clamp_recompute(sums: Sums, state: State, virtual_stage: int) -> None:
    """Bring recompute counts back to what the chunk holds."""
    k = virtual_stage
    a, b = sums.start[state.boundary[k]], sums.start[state.boundary[k + 1]]
    for g in range(sums.before.shape[0]):
        state.recompute[k, g] = min(state.recompute[k, g], sums.before[g, b] - sums.before[g, a])


@kernel
def lawful(sums: Sums, boundary: Ints) -> bool:
    """Whether every boundary lies in its window and every chunk holds a lawful number of layers."""
    for k in range(boundary.shape[0]):
        if boundary[k] < sums.first[k] or boundary[k] > sums.last[k]:
            return False
    for k in range(boundary.shape[0] - 1):
        num_layers = sums.layers[sums.start[boundary[k + 1]]] - sums.layers[sums.start[boundary[k]]]
        if boundary[k + 1] <= boundary[k] or num_layers < 1 or num_layers > sums.most_layers:
            return False
    return True


@kernel
def copy_state(source: State, target: State) -> None:
    """Overwrite `target` with `source`."""
    for k in range(source.boundary.shape[0]):  # loops: numba takes seconds to compile assignments of whole arrays
        target.boundary[k] = source.boundary[k]
    for k in range(source.recompute.shape[0]):
        for g in range(source.recompute.shape[1]):
            target.recompute[k, g] = source.recompute[k, g]
    for s in range(source.overflow_bytes.shape[0]):
        target.overflow_bytes[s] = source.overflow_bytes[s]
    for i in range(source.times_ms.shape[0]):
        target.times_ms[i] = source.times_ms[i]


@kernel
def propose(sums: Sums, trial: State, touched: NDArray[np.bool_]) -> bool:
    """Apply one random move to `trial` and mark the stages it touches; False where the move is not lawful."""
    num_virtual = sums.num_stages * sums.num_chunks
    num_groups = sums.before.shape[0]
    kind = np.random.randint(0, 10)
    if num_virtual == 1 or (kind < 2 and num_groups > 0):
        if num_groups == 0:
            return False
        # one more layer here, one less somewhere else on the stage; the repair settles the rest
        s = np.random.randint(0, sums.num_stages)
        k = np.random.randint(0, sums.num_chunks) * sums.num_stages + s
        g = np.random.randint(0, num_groups)
        other = np.random.randint(0, sums.num_chunks) * sums.num_stages + s
        other_g = np.random.randint(0, num_groups)
        a, b = sums.start[trial.boundary[k]], sums.start[trial.boundary[k + 1]]
        if trial.recompute[k, g] >= sums.before[g, b] - sums.before[g, a]:
            return False
        if (other == k and other_g == g) or trial.recompute[other, other_g] == 0:
            return False
        trial.recompute[k, g] += 1
        trial.recompute[other, other_g] -= 1
        touched[s] = True
        return True
    if kind < 5:  # shift one boundary
        k = np.random.randint(1, num_virtual)
        size = 1 + (np.random.randint(0, 4) == 0) * np.random.randint(0, 3)
        trial.boundary[k] += size if np.random.randint(0, 2) == 0 else -size
        first_changed, last_changed = k - 1, k
    elif kind < 9:  # hand one unit from a chunk to another, shifting all between
        giver, taker = np.random.randint(0, num_virtual), np.random.randint(0, num_virtual)
        if giver == taker:
            return False
        first_changed, last_changed = min(giver, taker), max(giver, taker)
        for k in range(first_changed + 1, last_changed + 1):
            trial.boundary[k] += -1 if giver < taker else 1
    else:  # swap the sizes of two neighbours
        k = np.random.randint(1, num_virtual)
        trial.boundary[k] = trial.boundary[k - 1] + trial.boundary[k + 1] - trial.boundary[k]
        first_changed, last_changed = k - 1, k
    if not lawful(sums, trial.boundary):
        return False
    for k in range(first_changed, last_changed + 1):
        clamp_recompute(sums, trial, k)
        touched[k % sums.num_stages] = True
    return True
