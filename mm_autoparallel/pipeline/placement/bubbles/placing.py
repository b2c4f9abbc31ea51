"""A problem with encoders placed as any other: `place_encoded`, told as a PlacementResult."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mm_autoparallel.pipeline.placement.bubbles.run import place_encoded
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION, PlacementResult
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.encoders.orders import write_orders
from mm_autoparallel.pipeline.simulate.encoders.step import part_encoders
from mm_autoparallel.pipeline.simulate.step import simulate


def place_beside(
    problem: Problem,
    time_limit_s: float | None,
    should_stop: Callable[[], bool],
    cutoff_ms: float = np.inf,
    gap_fraction: float = 0.0,
) -> PlacementResult:
    """As `place`, of a problem with encoders."""
    began = time.monotonic()
    found = place_encoded(
        part_encoders(problem), time_limit_s, should_stop, cutoff_ms=cutoff_ms, gap_fraction=gap_fraction
    )
    lower_ms, enough = found.lower_bound_ms, 1.0 - max(gap_fraction, OPTIMAL_GAP_FRACTION)
    shown = PlacementResult(
        found.status, None, None, np.inf, lower_ms, time.monotonic() - began, reason=found.reason, proof="orders"
    )
    if found.status == "infeasible":
        return replace(shown, overflow_bytes=found.decoder.overflow_bytes)
    if found.placement is None or found.tasks is None or found.words is None:
        if lower_ms >= enough * cutoff_ms:
            return replace(shown, status="dominated", reason="")
        return replace(shown, status="unknown")
    orders = write_orders(found.tasks, found.words)[: problem.num_stages]
    placement = replace(found.placement, orders=orders)
    timeline = simulate(problem, placement)
    is_late = should_stop() or (time_limit_s is not None and time.monotonic() - began >= time_limit_s)
    is_done = lower_ms >= enough * min(timeline.step_ms, cutoff_ms)
    return replace(
        shown,
        status="optimal" if lower_ms >= timeline.step_ms * (1.0 - OPTIMAL_GAP_FRACTION) else "feasible",
        placement=placement,
        timeline=timeline,
        step_ms=timeline.step_ms,
        lower_bound_ms=min(lower_ms, timeline.step_ms),
        reason="" if is_late or is_done else "its orders keep a gap after the largest effort",
    )
