"""Place a problem: rounds of growing work, in each of which every method of the table that is able to goes on.

The largest of the methods' bounds counts, and the best of their placements. `methods` says which method works on what,
`run` what they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mm_autoparallel.pipeline.placement.incumbents.anneal import Annealer
from mm_autoparallel.pipeline.placement.infeasible import explain_windows
from mm_autoparallel.pipeline.placement.methods import METHODS, Method
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.result import (
    NOTHING_KNOWN,
    OPTIMAL_GAP_FRACTION,
    Known,
    PlacementResult,
    Status,
    infeasible_result,
)
from mm_autoparallel.pipeline.placement.run import Run, rounds
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.placement.tidy import drop_needless_modes
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.loads import equal_graphs
from mm_autoparallel.pipeline.simulate.step import simulate

#: Local searches side by side, each with a seed of its own. A fixed number, so that every machine finds the same.
NUM_ANNEALERS = 2


def place(
    problem: Problem,
    time_limit_s: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_better: Callable[[float, Placement], None] = lambda *_: None,
    cutoff_ms: float = np.inf,
    gap_fraction: float = 0.0,
    hint: Placement | None = None,
    latest_cutoff_ms: Callable[[], float] = lambda: np.inf,
    methods: Sequence[Method] = METHODS,
    known: Known = NOTHING_KNOWN,
) -> PlacementResult:
    """The fastest placement of `problem` that fits its memory, with a bound on all others.

    time_limit_s: wall time after which the best so far is returned with its gap. should_stop: polled several times a
    second. cutoff_ms: steps that are not below it are of no interest; where there are none, the result has no
    placement, status "dominated" and about the cutoff as its bound. gap_fraction: the search may end this close to
    the best. on_better: called with each better placement and its step.
    hint: a placement to begin with. latest_cutoff_ms: asked as often as should_stop for a lower cutoff that others have
    reached meanwhile; a placement found before may then be above it, and is still told. methods: those that may be
    used, in their order; where some are left out, a search without a limit may have no end. known: what placing
    goes on from.
    Raises JobError where the problem contradicts itself (pins against the order).
    """
    if problem.encoders:
        from mm_autoparallel.pipeline.placement.bubbles.placing import place_beside  # loads OR-Tools

        return place_beside(problem, time_limit_s, should_stop, min(cutoff_ms, latest_cutoff_ms()), gap_fraction)
    given_by = find_schedule(problem.schedule, problem.num_chunks).given_by
    if given_by == "placement":
        from mm_autoparallel.pipeline.placement.orders.placing import place_orders  # loads OR-Tools

        return place_orders(
            problem, time_limit_s, should_stop, on_better, cutoff_ms, gap_fraction, hint, latest_cutoff_ms, known.seed
        )
    began = time.monotonic()
    deadline = began + time_limit_s if time_limit_s is not None else np.inf
    segments = cut_into_segments(problem)
    reason = explain_windows(segments)
    if reason:
        return replace(infeasible_result(reason), solve_s=time.monotonic() - began)

    def stop() -> bool:
        stopped = time.monotonic() > deadline or should_stop()
        run.upper_ms = min(run.upper_ms, latest_cutoff_ms())
        return stopped

    graphs = equal_graphs(problem)
    run = Run(
        segments,
        frozenset(method.name for method in methods),
        *graphs,
        annealers=[Annealer(segments, *graphs, seed) for seed in range(NUM_ANNEALERS)],
        should_stop=stop,
        left_s=lambda: deadline - time.monotonic(),
        on_better=on_better,
        gap_fraction=gap_fraction,
        upper_ms=cutoff_ms,
        lower_ms=known.lower_ms,
        cuts=list(known.cuts),
    )
    if hint is not None:
        run.offer(hint)
    _search(run, methods)
    return replace(_result(run), solve_s=time.monotonic() - began)


def _search(run: Run, methods: Sequence[Method]) -> None:
    """Improve and prove, round by round, until done, told to stop, or nothing fits at all."""
    for number, work in enumerate(rounds(run.segments.problem.num_chunks)):
        if number and run.done:
            return
        run.round_number = number
        for method in methods:
            if not method.able(run):
                continue
            try:
                method.advance(run, work)
            except TooManyPatterns:
                run.too_many_ms[method.name] = run.upper_ms
                proves = any(each.proof != "none" and each.able(run) for each in methods)
                run.ended = run.segments.has_layouts and not proves and not run.should_stop()
                run.reason = "the mixes of layouts of a stage are too many to be listed" if run.ended else ""
            if run.ended or run.should_stop() or (method.proof != "none" and run.done):
                return


def _result(run: Run) -> PlacementResult:
    """What a run has found and shown."""
    if run.infeasible is not None:
        return run.infeasible
    shown = PlacementResult(
        "unknown", None, None, np.inf, run.lower_ms, 0.0, run.num_cuts, run.num_bounds, run.reason, proof=run.proof,
        cuts=tuple(run.cuts),
    )  # fmt: skip
    if run.best is None:
        return replace(shown, status="dominated") if run.has_step and run.done else shown
    best = (
        run.best if run.segments.is_plain or run.segments.has_layouts else drop_needless_modes(run.segments, run.best)
    )
    timeline = simulate(run.segments.problem, best)
    status: Status = "optimal" if run.lower_ms >= timeline.step_ms * (1.0 - OPTIMAL_GAP_FRACTION) else "feasible"
    return replace(
        shown,
        status=status,
        placement=best,
        timeline=timeline,
        step_ms=timeline.step_ms,
        lower_bound_ms=min(run.lower_ms, timeline.step_ms),
        prices=run.fractions.proof() if run.fractions and run.proof == "prices" else None,
    )
