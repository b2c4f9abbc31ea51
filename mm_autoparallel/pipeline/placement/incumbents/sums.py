"""Sums: the numbers of Segments and Problem that local search needs, as arrays for its kernels, and its State."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import list_host_links
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.loads import hop_ms
from mm_autoparallel.pipeline.simulate.stage_times import wide_layout

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Sums(NamedTuple):
    """The fields of Segments and Problem by name, and the in-flight rows of every stage.

    v_shaped: see engine.virtual_at. splits: backwards are parted; rows then go on with what is pending, and parted has
    weight_ms, parted_ms and pending_bytes of Segments, [3, E + 1]. pairs: [., 3] stage, and entries of forward and
    backward among the num_durations, of what runs together (see TaskGraph). has_step: something passes during the
    optimizer's step; has_host: bytes move to one; limits_host: what lies there is limited.
    """

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
    has_step: bool
    step_bytes: Floats
    step_once_bytes: Floats
    step_shard_bytes: Floats
    before: Ints
    lane_offset: Ints
    lane_group: Ints
    extra_forward_ms: Floats
    extra_backward_ms: Floats
    saved_bytes: Floats
    restored_bytes: Floats
    host_bytes: Floats
    has_host: bool
    limits_host: bool
    host_static_bytes: Floats
    host_limit_bytes: Floats
    time_factor: Floats
    host_ms_per_byte: Floats
    hop_forward_ms: Floats
    hop_backward_ms: Floats
    rows: Floats
    row_offset: Ints
    available_bytes: Floats
    stage_tail_ms: Floats
    v_shaped: bool
    splits: bool
    parted: Floats
    num_durations: int
    pairs: Ints
    pair_overlap_fraction: float


class State(NamedTuple):
    """A placement under change. boundary: [K + 1]; lanes: [K, L] layers in each; overflow_bytes: [P], of the device and
    of the host together; times_ms as TimesLayout has them. closed: [L] lanes that take no more layers for now."""

    boundary: Ints
    lanes: Ints
    overflow_bytes: Floats
    times_ms: Floats
    closed: NDArray[np.bool_]


def collect_sums(segments: Segments, graph: TaskGraph) -> Sums:
    """Gather what the kernels need from `segments` and the in-flight rows of `graph`."""
    problem = segments.problem
    num_virtual = problem.num_virtual_stages
    last_element = segments.flat[segments.start[1:] - 1]
    hops = np.zeros((2, max(num_virtual - 1, 1), segments.num_segments))
    for k in range(num_virtual - 1):
        by_block = {e: hop_ms(problem, k, problem.chain[e]) for e in np.unique(last_element).tolist()}
        hops[:, k] = np.array([by_block[e] for e in last_element.tolist()]).T
    both = zip(graph.in_flight, graph.pending, strict=True)
    held = [np.concatenate([row, rest], axis=1) for row, rest in both] if problem.splits else graph.in_flight
    rows = [row.astype(np.float64) for row in held]
    of_pairs = np.array(problem.stage_of)[graph.pairs[:, 0]]
    return Sums(
        problem.num_stages,
        problem.num_chunks,
        problem.num_microbatches,
        problem.max_layers_per_chunk if problem.max_layers_per_chunk is not None else int(segments.layers[-1]),
        segments.start,
        segments.first,
        segments.last,
        segments.layers,
        segments.forward_ms,
        segments.backward_ms,
        segments.static_bytes,
        segments.activation_bytes,
        segments.tail_ms,
        segments.transient_bytes,
        segments.has_step,
        segments.step_bytes,
        segments.step_once_bytes,
        segments.step_shard_bytes,
        segments.before,
        segments.lane_offset,
        np.repeat(np.arange(len(segments.groups)), np.diff(segments.lane_offset)),
        segments.extra_forward_ms,
        segments.extra_backward_ms,
        segments.saved_bytes,
        segments.restored_bytes,
        segments.host_bytes,
        bool(segments.host_bytes.any()),
        segments.limits_host,
        segments.host_static_bytes,
        np.array(problem.host_limit_bytes or (np.inf,) * problem.num_stages, dtype=np.float64),
        np.array(problem.time_factors, dtype=np.float64),
        np.array(list_host_links(problem), dtype=np.float64),
        hops[0],
        hops[1],
        np.concatenate(rows),
        np.cumsum([0, *(len(row) for row in rows)]),
        np.array(problem.memory_limit_bytes, dtype=np.float64) - np.array(problem.stage_static_bytes),
        np.array(problem.stage_tail_ms, dtype=np.float64),
        problem.v_shaped,
        problem.splits,
        np.stack([segments.weight_ms, segments.parted_ms, segments.pending_bytes]),
        graph.num_durations,
        np.column_stack([of_pairs, graph.pairs]).astype(np.int64),
        problem.pair_overlap_fraction,
    )


def empty_state(segments: Segments, num_durations: int) -> State:
    """A state of the right shape, for a graph with so many durations; its numbers mean nothing yet."""
    problem = segments.problem
    num_virtual = problem.num_virtual_stages
    return State(
        np.zeros(num_virtual + 1, dtype=np.int64),
        np.zeros((num_virtual, segments.num_lanes), dtype=np.int64),
        np.zeros(problem.num_stages),
        np.zeros(wide_layout(num_durations, num_virtual, problem.num_stages).num_times),
        np.zeros(segments.num_lanes, dtype=np.bool_),
    )


def balanced_boundaries(segments: Segments) -> Ints:
    """[K + 1] boundaries with about equal time in every chunk, inside their windows."""
    num_virtual = segments.problem.num_virtual_stages
    work = (segments.forward_ms + segments.backward_ms)[segments.start]
    factors = [segments.problem.time_factors[stage] for stage in segments.problem.stage_of]
    speed = np.cumsum([0.0, *(1.0 / factor for factor in factors)])
    boundary = np.searchsorted(work, work[-1] * speed / speed[-1])
    layers = segments.layers[segments.start]
    most = (
        segments.problem.max_layers_per_chunk if segments.problem.max_layers_per_chunk is not None else int(layers[-1])
    )
    boundary[0], boundary[-1] = 0, segments.num_segments
    for k in range(1, num_virtual):  # inside its window, one layer after the boundary before, not too many
        low = max(segments.first[k], np.searchsorted(layers, layers[boundary[k - 1]] + 1))
        high = min(segments.last[k], np.searchsorted(layers, layers[boundary[k - 1]] + most, side="right") - 1)
        boundary[k] = min(max(boundary[k], low), high)
    whole: Ints = boundary.astype(np.int64)
    return whole
