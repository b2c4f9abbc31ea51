"""The bound of every placement and order of a V, before any is looked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mm_autoparallel.pipeline.placement.bounds.bound import Bound
from mm_autoparallel.pipeline.placement.orders.closing import CLAIM_FRACTION
from mm_autoparallel.pipeline.placement.orders.options import explain_excess
from mm_autoparallel.pipeline.placement.orders.v_shape.pieces import list_pieces
from mm_autoparallel.pipeline.placement.orders.v_shape.space import Space
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.segments import Segments

#: Steps below which the bound is looked for, one after another, in parts of what stages must compute.
LEVELS = (1.005, 1.02, 1.05, 1.1, 1.25, 1.6, 2.5, np.inf)


def bound_v(segments: Segments, floor_ms: float, low_ms: float, enough_ms: float, stop: Callable[[], bool]) -> Bound:
    """At least low_ms, a bound that is known; what is above enough_ms is not looked at. floor_ms: of all work.

    Where what stages could hold is too much to be listed, or on stop, what was found so far counts.
    """
    for level in LEVELS:
        most_ms = min(level * floor_ms if np.isfinite(level) else np.inf, enough_ms)
        if most_ms <= low_ms:
            continue
        try:
            space = Space(list_pieces(segments, most_ms, stop), most_ms)
        except TooManyPatterns:
            break
        if np.isfinite(space.least_ms):
            return Bound(max(low_ms, min(space.least_ms, most_ms) * (1.0 - CLAIM_FRACTION)))
        if np.isinf(most_ms):
            return excess_bound(space)
        low_ms = max(low_ms, most_ms)
        if most_ms >= enough_ms:
            break
    return Bound(low_ms)


def excess_bound(space: Space) -> Bound:
    """That of a space of all placements, none of which fits."""
    excess_bytes = space.excess_bytes
    if np.isfinite(excess_bytes):
        return Bound(np.inf, explain_excess(excess_bytes), excess_bytes)
    reason = "host: with one micro-batch at a time every placement still exceeds a host's limit, or a device's"
    return Bound(np.inf, reason, by_host=True)
