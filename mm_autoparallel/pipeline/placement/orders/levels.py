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
from mm_autoparallel.pipeline.placement.patterns.intervals import list_intervals
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes

Floats = NDArray[np.float64]

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
    held = np.zeros(len(segments.flat) + 1)
    for g in range(len(segments.groups)):
        lanes = range(int(segments.lane_offset[g]), int(segments.lane_offset[g + 1]))
        adds = [np.diff(segments.restored_bytes[lane] - segments.saved_bytes[lane]) for lane in lanes]
        if adds:
            layers = np.flatnonzero(np.diff(segments.before[g]))
            held[layers + 1] = np.minimum(0.0, np.min(adds, axis=0))[: len(layers)]
    held = np.cumsum(held)
    size = segments.num_segments + 1
    least: Floats = np.full(size, np.inf)
    least[-1] = 0.0
    limits = allowed_bytes(problem)
    for s in range(problem.num_stages - 1, -1, -1):
        of = list_intervals(segments, s, np.inf)
        fixed = problem.stage_static_bytes[s] + of.static_bytes
        at_work = fixed + of.transient_bytes + of.activation_bytes
        at_work = at_work + held[segments.start[of.end]] - held[segments.start[of.begin]]
        at_step = fixed + of.step_bytes + np.minimum(of.step_once_bytes, of.step_shard_bytes)
        excess = np.maximum(np.maximum(at_work, at_step) - limits[s], 0.0)
        from_here = np.full(size, np.inf)
        np.minimum.at(from_here, of.begin, np.maximum(excess, least[of.end]))
        least = from_here
    return float(least[0]) * (1.0 - ROUNDING_FRACTION) if np.isfinite(least[0]) else 0.0
