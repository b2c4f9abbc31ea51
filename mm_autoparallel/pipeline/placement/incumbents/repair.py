"""Repair: the modes that make a changed stage fit its memory again at little cost, for local search.

Where a host holds too much, layers leave the modes that move bytes. Then layers take modes, about the best bytes per ms
first and within what the host may hold, until memory fits; and every mode that is not needed is dropped, or changed for
a faster one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.incumbents.sums import State, Sums
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.stage_times import wide_layout

Ints = NDArray[np.int64]


@kernel
def stage_overflow(sums: Sums, state: State, stage: int) -> tuple[float, int]:
    """Bytes by which a stage at work exceeds its memory (negative: spare) and the in-flight row that holds most."""
    static, transient, restored = 0.0, 0.0, 0.0
    kept, pending = np.empty(sums.num_chunks), np.zeros(sums.num_chunks)
    for c in range(sums.num_chunks):
        k = sums.virtual[stage, c]
        a, b = sums.start[state.boundary[k]], sums.start[state.boundary[k + 1]]
        static += sums.static_bytes[b] - sums.static_bytes[a]
        kept[c] = sums.activation_bytes[b] - sums.activation_bytes[a]
        if sums.splits:
            pending[c] = sums.pending_bytes[b] - sums.pending_bytes[a]
        for i in range(a, b):
            transient = max(transient, sums.transient_bytes[i])
        for g in range(sums.before.shape[0]):
            low = sums.before[g, a]
            for lane in range(sums.lane_offset[g], sums.lane_offset[g + 1]):
                high = low + state.lanes[k, lane]
                kept[c] -= sums.saved_bytes[lane, high] - sums.saved_bytes[lane, low]
                restored += sums.restored_bytes[lane, high] - sums.restored_bytes[lane, low]
                low = high
    most, binding = -np.inf, 0
    for row in range(sums.row_offset[stage], sums.row_offset[stage + 1]):
        held = 0.0
        for c in range(sums.num_chunks):
            held += sums.rows[row, c] * kept[c]
        if sums.splits:
            for c in range(sums.num_chunks):
                held += sums.pending_rows[row, c] * pending[c]
        if held > most:
            most, binding = held, row
    return static + transient + restored + most - sums.available_bytes[stage], binding


@kernel
def step_overflow(sums: Sums, state: State, stage: int) -> float:
    """Bytes by which a stage exceeds its memory during the optimizer's step, whatever its modes (negative: spare)."""
    held, once, shard = 0.0, 0.0, 0.0
    for c in range(sums.num_chunks):
        k = sums.virtual[stage, c]
        a, b = sums.start[state.boundary[k]], sums.start[state.boundary[k + 1]]
        held += sums.static_bytes[b] - sums.static_bytes[a] + sums.step_bytes[b] - sums.step_bytes[a]
        shard += sums.step_shard_bytes[b] - sums.step_shard_bytes[a]
        for i in range(a, b):
            once = max(once, sums.step_once_bytes[i])
    return float(held + min(once, shard) - sums.available_bytes[stage])


@kernel
def host_overflow(sums: Sums, state: State, stage: int) -> float:
    """Bytes by which a stage exceeds what it may keep on its host (negative: spare)."""
    static, most = 0.0, 0.0
    moved = np.zeros(sums.num_chunks)
    for c in range(sums.num_chunks):
        k = sums.virtual[stage, c]
        a, b = sums.start[state.boundary[k]], sums.start[state.boundary[k + 1]]
        static += sums.host_static_bytes[b] - sums.host_static_bytes[a]
        for g in range(sums.before.shape[0]):
            low = sums.before[g, a]
            for lane in range(sums.lane_offset[g], sums.lane_offset[g + 1]):
                high = low + state.lanes[k, lane]
                moved[c] += sums.host_bytes[lane, high] - sums.host_bytes[lane, low]
                low = high
    for row in range(sums.row_offset[stage], sums.row_offset[stage + 1]):
        held = 0.0
        for c in range(sums.num_chunks):
            held += sums.rows[row, c] * moved[c]
        most = max(most, held)
    return float(static + most - sums.host_limit_bytes[stage])


@kernel
def chunk_times(sums: Sums, state: State, virtual_stage: int) -> tuple[float, float, float]:
    """Forward and backward of a virtual stage as it computes them, and what its host link takes beside each, in ms."""
    k, stage = virtual_stage, sums.stage_of[virtual_stage]
    a, b = sums.start[state.boundary[k]], sums.start[state.boundary[k + 1]]
    forward, backward, moved = sums.forward_ms[b] - sums.forward_ms[a], sums.backward_ms[b] - sums.backward_ms[a], 0.0
    for g in range(sums.before.shape[0]):
        low = sums.before[g, a]
        for lane in range(sums.lane_offset[g], sums.lane_offset[g + 1]):
            high = low + state.lanes[k, lane]
            forward += sums.extra_forward_ms[lane, high] - sums.extra_forward_ms[lane, low]
            backward += sums.extra_backward_ms[lane, high] - sums.extra_backward_ms[lane, low]
            moved += sums.host_bytes[lane, high] - sums.host_bytes[lane, low]
            low = high
    factor = sums.time_factor[stage]
    return forward * factor, backward * factor, moved * sums.host_ms_per_byte[stage]


@kernel
def load_ms(sums: Sums, state: State, virtual_stage: int) -> float:
    """Forward and backward of a virtual stage."""
    forward, backward, host = chunk_times(sums, state, virtual_stage)
    return float(max(forward, host) + max(backward, host))


@kernel
def layer_of_lane(sums: Sums, state: State, virtual_stage: int, lane: int) -> int:
    """Where along its group the stretch of `lane` ends in a virtual stage: the layer that a longer one takes next."""
    g = sums.lane_group[lane]
    at = sums.before[g, sums.start[state.boundary[virtual_stage]]]
    for earlier in range(sums.lane_offset[g], lane + 1):
        at += state.lanes[virtual_stage, earlier]
    return int(at)


@kernel
def added_ms(
    sums: Sums, lane: int, at: int, sign: int, stage: int, times_ms: tuple[float, float, float]
) -> tuple[float, tuple[float, float, float]]:
    """What layer `at` of its group adds to the load of a chunk with times_ms (see `chunk_times`) when it takes `lane`
    (sign 1) or leaves it (sign -1), and the times then.
    """
    factor = sums.time_factor[stage] * sign
    forward = (sums.extra_forward_ms[lane, at + 1] - sums.extra_forward_ms[lane, at]) * factor
    backward = (sums.extra_backward_ms[lane, at + 1] - sums.extra_backward_ms[lane, at]) * factor
    if not sums.has_host:
        return forward + backward, times_ms
    host = (sums.host_bytes[lane, at + 1] - sums.host_bytes[lane, at]) * sums.host_ms_per_byte[stage] * sign
    then = (times_ms[0] + forward, times_ms[1] + backward, times_ms[2] + host)
    before = max(times_ms[0], times_ms[2]) + max(times_ms[1], times_ms[2])
    return max(then[0], then[2]) + max(then[1], then[2]) - before, then


@kernel
def relief_of(sums: Sums, lane: int, at: int, in_flight: float) -> float:
    """Bytes that layer `at` of its group frees in `lane`."""
    saved = sums.saved_bytes[lane, at + 1] - sums.saved_bytes[lane, at]
    return float(in_flight * saved - (sums.restored_bytes[lane, at + 1] - sums.restored_bytes[lane, at]))


@kernel
def add_mode(sums: Sums, state: State, stage: int, overflow: float, binding: int) -> bool:
    """Let one more layer of a stage take a mode, or a stronger one: about the most bytes per ms; False where none
    helps. overflow, binding: what `stage_overflow` says now.
    """
    best_gain, best_k, best_lane, best_from = 0.0, -1, -1, -1
    times_ms = (0.0, 0.0, 0.0)
    for c in range(sums.num_chunks):
        k = sums.virtual[stage, c]
        b = sums.start[state.boundary[k + 1]]
        if sums.has_host:
            times_ms = chunk_times(sums, state, k)
        for lane in range(state.lanes.shape[1]):
            if state.closed[lane]:
                continue
            g = sums.lane_group[lane]
            first, last = sums.lane_offset[g], sums.lane_offset[g + 1]
            end = layer_of_lane(sums, state, k, last - 1)
            if end < sums.before[g, b]:
                at = layer_of_lane(sums, state, k, lane)
                relief = relief_of(sums, lane, at, sums.rows[binding, c])
                extra, _ = added_ms(sums, lane, at, 1, stage, times_ms)
                gain = relief / max(extra, 1e-12) * np.random.uniform(0.3, 1.0)
                if gain > best_gain:
                    best_gain, best_k, best_lane, best_from = gain, k, lane, -1
            for other in range(first, last):
                if other == lane or state.lanes[k, other] == 0:
                    continue
                at = layer_of_lane(sums, state, k, other) - 1
                relief = relief_of(sums, lane, at, sums.rows[binding, c])
                relief -= relief_of(sums, other, at, sums.rows[binding, c])
                less, then = added_ms(sums, other, at, -1, stage, times_ms)
                extra, _ = added_ms(sums, lane, at, 1, stage, then)
                gain = relief / max(less + extra, 1e-12) * np.random.uniform(0.3, 1.0)
                if gain > best_gain:
                    best_gain, best_k, best_lane, best_from = gain, k, lane, other
    if best_k < 0:
        return False
    state.lanes[best_k, best_lane] += 1
    if best_from < 0:
        return True
    state.lanes[best_k, best_from] -= 1
    if stage_overflow(sums, state, stage)[0] < overflow:
        return True
    state.lanes[best_k, best_from] += 1  # layers behind it moved to other modes, and that outweighs it
    state.lanes[best_k, best_lane] -= 1
    return False


@kernel
def drop_mode(sums: Sums, state: State, stage: int) -> bool:
    """Let one layer of a stage leave its mode, for none or a faster one, where the stage fits then: about the most ms;
    False where none may.
    """
    best_less, best_k, best_lane, best_to = 0.0, -1, -1, -1
    times_ms = (0.0, 0.0, 0.0)
    for c in range(sums.num_chunks):
        k = sums.virtual[stage, c]
        if sums.has_host:
            times_ms = chunk_times(sums, state, k)
        for lane in range(state.lanes.shape[1]):
            if state.lanes[k, lane] == 0:
                continue
            g = sums.lane_group[lane]
            first, last = sums.lane_offset[g], sums.lane_offset[g + 1]
            more, _ = added_ms(sums, lane, layer_of_lane(sums, state, k, lane) - 1, -1, stage, times_ms)
            now_ms = load_ms(sums, state, k) if last - first > 1 else 0.0
            for to in range(first - 1, last):  # the one before the first stands for none
                if to == lane or (to >= first and state.closed[to]):
                    continue
                state.lanes[k, lane] -= 1
                less = -more
                if to >= first:
                    state.lanes[k, to] += 1
                    less = now_ms - load_ms(sums, state, k)
                less *= np.random.uniform(0.3, 1.0)
                if less > best_less and stage_overflow(sums, state, stage)[0] <= 0:
                    best_less, best_k, best_lane = less, k, lane
                    best_to = to if to >= first else -1
                state.lanes[k, lane] += 1
                if to >= first:
                    state.lanes[k, to] -= 1
    if best_k < 0:
        return False
    state.lanes[best_k, best_lane] -= 1
    if best_to >= 0:
        state.lanes[best_k, best_to] += 1
    return True


@kernel
def leave_host(sums: Sums, state: State, stage: int) -> bool:
    """Let one layer of a stage leave a mode that moves bytes, about the most bytes first; False where none has one."""
    most, best_k, best_lane = 0.0, -1, -1
    for c in range(sums.num_chunks):
        k = sums.virtual[stage, c]
        for lane in range(state.lanes.shape[1]):
            if state.lanes[k, lane] > 0:
                at = layer_of_lane(sums, state, k, lane)
                moved = sums.host_bytes[lane, at] - sums.host_bytes[lane, at - 1]
                moved *= np.random.uniform(0.3, 1.0)
                if moved > most:
                    most, best_k, best_lane = moved, k, lane
    if best_k >= 0:
        state.lanes[best_k, best_lane] -= 1
    return best_k >= 0


@kernel
def close_lanes(sums: Sums, state: State, stage: int, before: Ints) -> bool:
    """Where the host of a stage holds too much now, go back to the lanes before, [K, L], and close those that grew;
    elsewhere take the lanes over. False where none grew: layers behind a shorter lane have moved to other modes.
    """
    is_over = host_overflow(sums, state, stage) > 0.0
    is_going_on = not is_over
    for c in range(sums.num_chunks):
        k = sums.virtual[stage, c]
        for lane in range(before.shape[1]):
            if is_over:
                if state.lanes[k, lane] > before[k, lane]:
                    state.closed[lane] = True
                    is_going_on = True
                state.lanes[k, lane] = before[k, lane]
            else:
                before[k, lane] = state.lanes[k, lane]
    return is_going_on


@kernel
def repair(sums: Sums, state: State, stage: int) -> None:
    """Take just enough modes on one stage, and write its times and its overflow."""
    before = state.lanes
    if sums.limits_host:
        state.closed[:] = False
        while host_overflow(sums, state, stage) > 0.0 and leave_host(sums, state, stage):
            pass
        before = state.lanes.copy()
    overflow, binding = stage_overflow(sums, state, stage)
    while overflow > 0 and add_mode(sums, state, stage, overflow, binding):
        if sums.limits_host and not close_lanes(sums, state, stage, before):
            break
        overflow, binding = stage_overflow(sums, state, stage)
    if overflow <= 0:
        while drop_mode(sums, state, stage):
            if sums.limits_host and not close_lanes(sums, state, stage, before):
                break
    state.overflow_bytes[stage] = max(0.0, stage_overflow(sums, state, stage)[0])
    if sums.has_step:
        state.overflow_bytes[stage] = max(state.overflow_bytes[stage], step_overflow(sums, state, stage))
    if sums.limits_host:
        state.overflow_bytes[stage] += max(0.0, host_overflow(sums, state, stage))
    num_virtual = sums.num_stages * sums.num_chunks
    at = wide_layout(sums.num_durations, num_virtual, sums.num_stages)
    tail = sums.stage_tail_ms[stage]
    for c in range(sums.num_chunks):
        k = sums.virtual[stage, c]
        end = state.boundary[k + 1]
        tail += sums.tail_ms[sums.start[end]] - sums.tail_ms[sums.start[state.boundary[k]]]
        forward, backward, host = chunk_times(sums, state, k)
        state.times_ms[at.forward + k] = max(forward, host)
        state.times_ms[at.backward + k] = max(backward, host)
        if sums.splits:
            a, b, factor = sums.start[state.boundary[k]], sums.start[end], sums.time_factor[stage]
            of_weights = (sums.weight_ms[b] - sums.weight_ms[a]) * factor
            state.times_ms[2 * num_virtual + k] = max(backward - of_weights, host)
            state.times_ms[3 * num_virtual + k] = (sums.parted_ms[b] - sums.parted_ms[a]) * factor
        if k < num_virtual - 1:
            state.times_ms[at.hop_forward + k] = sums.hop_forward_ms[k, end - 1]
            state.times_ms[at.hop_backward + k] = sums.hop_backward_ms[k, end - 1]
    for pair in range(sums.pairs.shape[0]):
        if sums.pairs[pair, 0] == stage:
            forward, backward = state.times_ms[sums.pairs[pair, 1]], state.times_ms[sums.pairs[pair, 2]]
            both = forward + backward - sums.pair_overlap_fraction * min(forward, backward)
            state.times_ms[at.hop_forward - 1 - sums.pairs.shape[0] + pair] = both
    state.times_ms[at.tail + stage] = tail
