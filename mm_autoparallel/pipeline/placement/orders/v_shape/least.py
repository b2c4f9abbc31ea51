"""The bound of every placement and order of a V, before any is looked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mm_autoparallel.pipeline.placement.bounds.bound import ROUNDING_FRACTION, Bound
from mm_autoparallel.pipeline.placement.orders.closing import CLAIM_FRACTION
from mm_autoparallel.pipeline.placement.orders.options import explain_excess
from mm_autoparallel.pipeline.placement.orders.v_shape.pieces import list_pieces, pieces_below
from mm_autoparallel.pipeline.placement.orders.v_shape.space import Space
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes

#: Steps below which the bound is looked for, one after another, in parts of what stages must compute; pieces are listed
#: for those up to the next of a LISTED at once.
LEVELS = (1.005, 1.02, 1.05, 1.1, 1.15, 1.2, 1.25, 1.4, 1.6, 2.0, 2.5, np.inf)
LISTED = (1.1, 1.25, 1.6, 2.5, np.inf)


def bound_v(
    segments: Segments,
    floor_ms: float,
    low_ms: float,
    enough_ms: float,
    stop: Callable[[], bool],
    one_level: bool = False,
) -> Bound:
    """At least low_ms, a bound that is known; what is above enough_ms is not looked at. floor_ms: of all work.

    Where what stages could hold is too much to be listed, or on stop, what was found so far counts. one_level: the
    first level that is above low_ms is looked at alone, and the answer is partial where nothing is below it.
    """
    excess_bytes = _excess_of_all(segments)
    if excess_bytes > 0.0:
        return Bound(np.inf, explain_excess(excess_bytes), excess_bytes)
    listed, listed_ms = None, 0.0
    for level in LEVELS:
        most_ms = min(_times(level, floor_ms), enough_ms)
        if most_ms <= low_ms:
            continue
        try:
            if listed is None or most_ms > listed_ms:
                first = level if one_level else next(each for each in LISTED if each >= level)
                listed_ms = min(_times(first, floor_ms), enough_ms)
                listed = list_pieces(segments, listed_ms, stop)
            space = Space(pieces_below(listed, most_ms), most_ms)
        except TooManyPatterns:
            break
        if np.isfinite(space.least_ms):
            return Bound(max(low_ms, min(space.least_ms, most_ms) * (1.0 - CLAIM_FRACTION)))
        if np.isinf(most_ms):
            return excess_bound(space)
        low_ms = max(low_ms, most_ms)
        if most_ms >= enough_ms or stop():
            break
        if one_level:
            return Bound(low_ms, is_partial=True)
    return Bound(low_ms)


def _excess_of_all(segments: Segments) -> float:
    """By how much the stages exceed their limits together at least, shared out evenly among them: with one micro-batch
    at a time, each layer in the mode that then holds least. Some stage exceeds its own by no less."""
    problem = segments.problem
    needed = -(allowed_bytes(problem) - np.array(problem.stage_static_bytes)).sum()
    for block in problem.chain:
        kept = [block.activation_bytes, *(mode.activation_bytes + mode.restored_bytes for mode in block.modes)]
        needed += block.count * (block.static_bytes + max(0.0, min(kept)))
    return float(needed) / problem.num_stages if needed > ROUNDING_FRACTION * sum(problem.memory_limit_bytes) else 0.0


def _times(level: float, floor_ms: float) -> float:
    return level * floor_ms if np.isfinite(level) else np.inf


def excess_bound(space: Space) -> Bound:
    """That of a space of all placements, none of which fits."""
    excess_bytes = space.excess_bytes
    if np.isfinite(excess_bytes):
        return Bound(np.inf, explain_excess(excess_bytes), excess_bytes)
    reason = "host: with one micro-batch at a time every placement still exceeds a host's limit, or a device's"
    return Bound(np.inf, reason, by_host=True)
