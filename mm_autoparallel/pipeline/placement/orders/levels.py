"""Levels: what takes at most so long. Far fewer ways to fill a stage lie below a step than there are in all.

A stage of forward f, backward b and M micro-batches takes M (f + b) at least, which limits what it holds, and so where
each stage may begin: as far as the stages before it reach, and the stages after it reach back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.options import ROUNDING_FRACTION, Options, list_options
from mm_autoparallel.pipeline.placement.patterns.intervals import MAX_INTERVALS
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, allowed_host_bytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Steps below which a bound is looked for, one after another, in parts of what stages must compute.
LEVELS = (1.04, 1.1, 1.2, 1.4, 1.8, 2.5, np.inf)


def segments_below(segments: Segments, most_ms: float) -> Segments | None:
    """`segments` with windows that leave every placement of at most most_ms; None where that leaves none at all."""
    problem = segments.problem
    if np.isinf(most_ms):
        return segments
    ends_ms = (segments.forward_ms + segments.backward_ms)[segments.start]
    room_ms = (most_ms * (1.0 + ROUNDING_FRACTION) - np.array(problem.stage_tail_ms)) / problem.num_microbatches
    caps_ms = room_ms / np.array(problem.time_factors)
    first, last = segments.first.copy(), segments.last.copy()
    if np.any(caps_ms < 0.0):
        return None
    for s in range(problem.num_stages):
        reach = np.searchsorted(ends_ms, ends_ms[last[s]] + caps_ms[s], side="right") - 1
        last[s + 1] = min(last[s + 1], reach)
    for s in range(problem.num_stages - 1, -1, -1):
        reach = np.searchsorted(ends_ms, ends_ms[first[s + 1]] - caps_ms[s], side="left")
        first[s] = max(first[s], reach)
    return None if np.any(first > last) else replace(segments, first=first, last=last)


def options_below(
    segments: Segments, most_ms: float, should_stop: Callable[[], bool], only_bounds: bool = False
) -> Options | None:
    """The ways to fill stages of which any placement of at most most_ms is made; None where there is none. Raises
    TooManyPatterns where they are too many, or on should_stop. only_bounds: as in `list_options`.
    """
    near = segments_below(segments, most_ms)
    return list_options(near, should_stop, most_ms, only_bounds) if near is not None else None


def least_excess_bytes(segments: Segments) -> float:
    """By how much some stage exceeds its limit at least, with one micro-batch at a time on every stage and each layer
    in the mode that holds least; 0 where that shows nothing.
    """
    problem = segments.problem
    added = np.zeros(len(segments.flat) + 1)
    for g in range(len(segments.groups)):
        lanes = range(int(segments.lane_offset[g]), int(segments.lane_offset[g + 1]))
        adds = [np.diff(segments.restored_bytes[lane] - segments.saved_bytes[lane]) for lane in lanes]
        if adds:
            layers = np.flatnonzero(np.diff(segments.before[g]))
            added[layers + 1] = np.minimum(0.0, np.min(adds, axis=0))[: len(layers)]
    held = np.cumsum(added)[segments.start]
    first, last, size = segments.first, segments.last, segments.num_segments + 1
    if size**2 > MAX_INTERVALS:
        return 0.0
    static, kept, step, shard, of_host, num_layers = (
        of[segments.start] - of[segments.start][:, None]  # [N + 1, N + 1] by begin and end
        for of in (
            segments.static_bytes,
            segments.activation_bytes,
            segments.step_bytes,
            segments.step_shard_bytes,
            segments.host_static_bytes,
            segments.layers.astype(np.float64),
        )
    )
    at_work = static + kept + _largest_of(segments.transient_bytes, segments.start) + held - held[:, None]
    at_step = static + step + np.minimum(_largest_of(segments.step_once_bytes, segments.start), shard)
    most_layers = np.inf if problem.max_layers_per_chunk is None else problem.max_layers_per_chunk
    need = np.where((num_layers >= 1) & (num_layers <= most_layers), np.maximum(at_work, at_step), np.inf)
    room, host_room = allowed_bytes(problem) - np.array(problem.stage_static_bytes), allowed_host_bytes(problem)
    least: Floats = np.full(size, np.inf)
    least[-1] = 0.0
    for s in range(problem.num_stages - 1, -1, -1):
        window = slice(first[s], last[s] + 1), slice(first[s + 1], last[s + 1] + 1)
        excess = np.where(of_host[window] <= host_room[s], np.maximum(need[window] - room[s], 0.0), np.inf)
        from_here = np.full(size, np.inf)
        from_here[window[0]] = np.maximum(excess, least[window[1]]).min(axis=1, initial=np.inf)
        least = from_here
    return float(least[0]) * (1.0 - ROUNDING_FRACTION) if np.isfinite(least[0]) else 0.0


def _largest_of(values: Floats, start: Ints) -> Floats:
    """[N + 1, N + 1] the largest value of the segments from each begin to before each end; 0 where there is none."""
    of_segment = np.maximum.reduceat(values, start[:-1])
    behind = np.triu(np.ones((len(start), len(start)), dtype=bool), 1)
    largest: Floats = np.maximum.accumulate(np.where(behind, np.concatenate([[0.0], of_segment]), 0.0), axis=1)
    return largest
