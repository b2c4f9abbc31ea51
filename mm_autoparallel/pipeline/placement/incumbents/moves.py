"""Moves of local search: small lawful changes of a placement.

A move shifts one boundary, hands a segment from one chunk to another along the chain, swaps the sizes of two
neighbours, or trades modes inside a stage. `repair` then settles the modes of the stages that it touched.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.incumbents.repair import layer_of_lane
from mm_autoparallel.pipeline.placement.incumbents.sums import State, Sums
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.engine import stage_at, virtual_at

Ints = NDArray[np.int64]


@kernel
def clamp_lanes(sums: Sums, state: State, virtual_stage: int) -> None:
    """Bring counts of lanes back to what the chunk holds."""
    k = virtual_stage
    a, b = sums.start[state.boundary[k]], sums.start[state.boundary[k + 1]]
    for g in range(sums.before.shape[0]):
        left = sums.before[g, b] - sums.before[g, a]
        for lane in range(sums.lane_offset[g], sums.lane_offset[g + 1]):
            state.lanes[k, lane] = min(state.lanes[k, lane], left)
            left -= state.lanes[k, lane]


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
    for k in range(source.lanes.shape[0]):
        for lane in range(source.lanes.shape[1]):
            target.lanes[k, lane] = source.lanes[k, lane]
    for s in range(source.overflow_bytes.shape[0]):
        target.overflow_bytes[s] = source.overflow_bytes[s]
    for i in range(source.times_ms.shape[0]):
        target.times_ms[i] = source.times_ms[i]


@kernel
def propose(sums: Sums, trial: State, touched: NDArray[np.bool_]) -> bool:
    """Apply one random move to `trial` and mark the stages it touches; False where the move is not lawful."""
    num_virtual = sums.num_stages * sums.num_chunks
    num_lanes = trial.lanes.shape[1]
    kind = np.random.randint(0, 10)
    if num_virtual == 1 or (kind < 2 and num_lanes > 0):
        if num_lanes == 0:
            return False
        # one more layer here, one less somewhere else on the stage; the repair settles the rest
        s = np.random.randint(0, sums.num_stages)
        k = virtual_at(np.random.randint(0, sums.num_chunks), s, sums.num_stages, sums.v_shaped)
        lane = np.random.randint(0, num_lanes)
        other = virtual_at(np.random.randint(0, sums.num_chunks), s, sums.num_stages, sums.v_shaped)
        other_lane = np.random.randint(0, num_lanes)
        g = sums.lane_group[lane]
        end = layer_of_lane(sums, trial, k, sums.lane_offset[g + 1] - 1)
        if end >= sums.before[g, sums.start[trial.boundary[k + 1]]] and (
            other != k or sums.lane_group[other_lane] != g
        ):
            return False
        if (other == k and other_lane == lane) or trial.lanes[other, other_lane] == 0:
            return False
        trial.lanes[k, lane] += 1
        trial.lanes[other, other_lane] -= 1
        touched[s] = True
        return True
    if kind < 5:  # shift one boundary
        k = np.random.randint(1, num_virtual)
        size = 1 + (np.random.randint(0, 4) == 0) * np.random.randint(0, 3)
        trial.boundary[k] += size if np.random.randint(0, 2) == 0 else -size
        first_changed, last_changed = k - 1, k
    elif kind < 9:  # hand one segment from a chunk to another, shifting all between
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
        clamp_lanes(sums, trial, k)
        touched[stage_at(k, sums.num_stages, sums.v_shaped)] = True
    return True
