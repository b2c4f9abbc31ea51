"""A problem with a free order placed: its ways to fill stages listed near the bound, then searched and proven."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.placement.infeasible import explain_windows
from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.levels import options_below
from mm_autoparallel.pipeline.placement.orders.run import SEEDS, OrderSearch
from mm_autoparallel.pipeline.placement.orders.slimming import hold_less
from mm_autoparallel.pipeline.placement.orders.v_shape.compiling import compile_v
from mm_autoparallel.pipeline.placement.orders.v_shape.placing import place_v
from mm_autoparallel.pipeline.placement.orders.v_shape.run import VSearch
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION, PlacementResult, Status, infeasible_result
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import microbatch_classes
from mm_autoparallel.pipeline.simulate.step import simulate

#: The gap that is called none: solvers tell steps apart that differ by less.
OPTIMAL_FRACTION = 1e-6
#: Ways to fill a stage are listed first for steps below this many times the bound. Assumed.
NEAR_FACTOR = 1.25
#: Seeds that differ; numpy takes 32 bits.
MOST_SEEDS = 1_000


def place_orders(
    problem: Problem,
    time_limit_s: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_better: Callable[[float, Placement], None] = lambda *_: None,
    cutoff_ms: float = np.inf,
    gap_fraction: float = 0.0,
    hint: Placement | None = None,
    latest_cutoff_ms: Callable[[], float] = lambda: np.inf,
    seed: int = 0,
) -> PlacementResult:
    """As `place`, of a problem whose order is free. seed: of what is drawn, with one chunk a stage."""
    (compile_v if problem.num_chunks > 1 else compile_orders)()
    began = time.monotonic()
    deadline = began + time_limit_s if time_limit_s is not None else np.inf
    segments = cut_into_segments(problem)
    if segments.has_layouts:
        raise JobError("schedule free takes one layout a layer; leave the layouts of modes out, or name a schedule")
    if microbatch_classes(problem)[0]:
        raise JobError("schedule free takes equal micro-batches; leave microbatch_scale out, or name a schedule")
    if problem.pair_overlap_fraction:
        raise JobError("schedule free pairs no forward with a backward; leave pair_overlap_fraction out")
    search: OrderSearch | None = None

    def stop() -> bool:
        return time.monotonic() > deadline or should_stop()

    def stop_search() -> bool:
        if search is not None:
            search.upper_ms = min(search.upper_ms, latest_cutoff_ms())
        return stop()

    reason = explain_windows(segments)
    if reason:
        return replace(infeasible_result(reason), solve_s=time.monotonic() - began)
    bound = bound_step(problem, should_stop=stop)
    if bound.reason:
        return replace(infeasible_result(bound.reason, bound.overflow_bytes), solve_s=time.monotonic() - began)
    if problem.num_chunks > 1:
        found = place_v(segments, bound.step_ms, stop, on_better, cutoff_ms, gap_fraction, hint, latest_cutoff_ms)
        found = found if isinstance(found, PlacementResult) else _result(found)
        return replace(found, solve_s=time.monotonic() - began)
    # most ways to fill a stage are part of no good step: what is far above the bound is listed where no step is near it
    most_ms = min(cutoff_ms, NEAR_FACTOR * bound.step_ms)
    try:
        while True:
            options = options_below(segments, most_ms, stop)
            if options is not None:
                search = OrderSearch(
                    problem, options, bound.step_ms, stop_search, on_better, cutoff_ms, gap_fraction, most_ms
                )
                search.seed = SEEDS * (seed % MOST_SEEDS)
                if hint is not None:
                    search.adopt(hint)
                search.search()
                hint = search.placement
            upper_ms = cutoff_ms if search is None else search.upper_ms
            if upper_ms <= most_ms or stop():
                break
            most_ms = upper_ms
    except TooManyPatterns:
        if search is None or search.placement is None:
            reason = "" if stop() else "the ways to fill a stage are too many to be listed"
            solve_s = time.monotonic() - began
            return PlacementResult("unknown", None, None, np.inf, bound.step_ms, solve_s, reason=reason)
    else:
        if search is None:  # nothing is at most most_ms
            status: Status = "dominated" if most_ms >= cutoff_ms else "unknown"
            return PlacementResult(status, None, None, np.inf, most_ms, time.monotonic() - began, proof="orders")
        search.prove()
    return replace(_result(search), solve_s=time.monotonic() - began)


def _result(search: OrderSearch | VSearch) -> PlacementResult:
    lower_ms = search.lower_ms
    shown = PlacementResult(
        "unknown", None, None, np.inf, lower_ms, 0.0, num_bounds=search.num_leaves, reason=search.reason, proof="orders"
    )
    if search.placement is None:
        is_dominated = np.isfinite(search.upper_ms) and lower_ms >= search.upper_ms * (
            1.0 - max(search.gap_fraction, OPTIMAL_GAP_FRACTION)
        )
        return replace(shown, status="dominated") if is_dominated else shown
    placement, timeline = search.placement, simulate(search.problem, search.placement)
    if search.problem.num_chunks == 1:
        placement, timeline = hold_less(search.problem, placement, timeline)
    is_optimal = lower_ms >= timeline.step_ms * (1.0 - OPTIMAL_FRACTION)
    return replace(
        shown,
        status="optimal" if is_optimal else "feasible",
        placement=placement,
        timeline=timeline,
        step_ms=timeline.step_ms,
        lower_bound_ms=min(lower_ms, timeline.step_ms),
    )
