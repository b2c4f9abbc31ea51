"""A problem with a free order and two chunks a stage, placed: its pieces listed near the bound, searched and proven."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mm_autoparallel.pipeline.placement.orders.v_shape.least import bound_v, excess_bound
from mm_autoparallel.pipeline.placement.orders.v_shape.pieces import list_pieces
from mm_autoparallel.pipeline.placement.orders.v_shape.run import VSearch
from mm_autoparallel.pipeline.placement.orders.v_shape.space import Space
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.result import PlacementResult, infeasible_result
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import Placement

#: Steps below which placements are looked for first, in parts of the bound of all placements; then all.
LEVELS = (1.06, 1.25, 1.6, 2.5, np.inf)


def place_v(
    segments: Segments,
    lower_ms: float,
    should_stop: Callable[[], bool],
    on_better: Callable[[float, Placement], None],
    cutoff_ms: float,
    gap_fraction: float,
    hint: Placement | None,
    latest_cutoff_ms: Callable[[], float],
) -> VSearch | PlacementResult:
    """The search once it has ended, or what is known without one. lower_ms: a bound that is known."""
    search: VSearch | None = None

    def stop() -> bool:
        if search is not None:
            search.upper_ms = min(search.upper_ms, latest_cutoff_ms())
        return should_stop()

    began = time.monotonic()

    def unknown(reason: str) -> PlacementResult:
        solve_s = time.monotonic() - began
        return PlacementResult("unknown", None, None, np.inf, lower_ms, solve_s, reason=reason, proof="orders")

    least = bound_v(segments, lower_ms, lower_ms, cutoff_ms, stop)
    if least.reason:
        return infeasible_result(least.reason, least.overflow_bytes)
    lower_ms = least_ms = least.step_ms
    for level in LEVELS if lower_ms < cutoff_ms else ():
        most_ms = min(cutoff_ms, level * least_ms if np.isfinite(level) else np.inf)
        try:
            space = Space(list_pieces(segments, most_ms, stop), most_ms)
        except TooManyPatterns:
            if search is None:
                return unknown("" if should_stop() else "the ways to fill a stage are too many to be listed")
            break
        if np.isfinite(space.least_ms):
            known = search.placement if search is not None else hint
            search = VSearch(segments.problem, space, lower_ms, stop, on_better, cutoff_ms, gap_fraction)
            if known is not None:
                search.adopt(known)
            search.search()
            if search.upper_ms <= most_ms:
                search.prove()
                return search
        elif np.isinf(most_ms):
            excess = excess_bound(space)
            return infeasible_result(excess.reason, excess.overflow_bytes)
        else:
            lower_ms = max(lower_ms, most_ms)
        if most_ms >= cutoff_ms or should_stop():
            break
    if search is not None:
        return search
    return unknown("") if should_stop() else replace(unknown(""), status="dominated")
