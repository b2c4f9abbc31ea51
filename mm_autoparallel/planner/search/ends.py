"""How a strategy ended: what the search knows of its pipeline, as the result tells it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.plan import PROVEN_GAP_FRACTION
from mm_autoparallel.planner.search.agenda import Agenda
from mm_autoparallel.planner.search.candidate import Candidate, Status
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.scouting import was_placed
from mm_autoparallel.planner.search.space import describe_strategy


def list_ends(
    agenda: Agenda, cutoff_ms: float, worth_ms: float, gap_fraction: float, stopped: str
) -> Iterator[Candidate]:
    """The ends of all strategies that were listed, in their order, and of the branches that were not. worth_ms: what is
    not below it is as good as the cutoff."""
    now = cutoff_ms, gap_fraction, stopped
    ends = {s: candidate_of(p, s, *now) for p in agenda.pipelines if p.twin is None for s in p.strategies}
    for strategy, reason in ((entry.strategy, entry.reason) for entry in agenda.entries):
        if reason is not None:
            yield Candidate(strategy, "unlawful", reason)
        elif strategy in agenda.overfull:
            yield Candidate(strategy, "infeasible", agenda.overfull[strategy], bounded_by="profile")
        else:
            yield ends[strategy]
    yield from agenda.branches.candidates(cutoff_ms, worth_ms, stopped)


def candidate_of(
    pipeline: Pipeline, strategy: Strategy, cutoff_ms: float, gap_fraction: float, stopped: str
) -> Candidate:
    """The end of one of its strategies; cutoff_ms is then the step of the last of the best plans."""
    found_ms = pipeline.step_ms if pipeline.placement is not None else None
    is_best_known = found_ms is not None and pipeline.is_closed(np.inf, gap_fraction)
    closed = pipeline.is_closed(cutoff_ms, gap_fraction)
    is_left_open = closed and pipeline.bound_ms < (1.0 - PROVEN_GAP_FRACTION) * min(cutoff_ms, pipeline.rank_ms)
    first = pipeline.strategies[0]
    twin = "" if strategy is first else f"; the same pipeline as {describe_strategy(first)}"
    status: Status = "unfinished"
    if pipeline.infeasible:
        status, reason = "infeasible", pipeline.reason
    elif is_left_open:
        reason = f"what is left of it ranks at {pipeline.bound_ms:.3f} ms at least, and no bound here says more"
    elif is_best_known and (was_placed(pipeline) or pipeline.rank_ms <= cutoff_ms):
        status, reason = "solved", f"its best placement takes {found_ms:.3f} ms"
    elif closed:
        no_less = f"{_who_says(pipeline)} no placement is below {pipeline.bound_ms:.3f} ms"
        status, reason = "dominated", f"{no_less}, and {cutoff_ms:.3f} ms is reached"
    else:
        reason = pipeline.reason or f"the search ended first: {stopped}"
    return Candidate(
        strategy=strategy,
        status=status,
        reason=reason + twin,
        num_microbatches=pipeline.num_microbatches,
        bound_ms=None if pipeline.infeasible else pipeline.bound_ms,
        step_ms=found_ms,
        rank_ms=None if found_ms is None else pipeline.rank_ms,
        peak_bytes=_peak_of(pipeline),
        overflow_bytes=pipeline.overflow_bytes,
        solve_s=pipeline.solve_s,
        bounded_by=pipeline.bounded_by,
        cutoff_ms=(cutoff_ms if pipeline.cutoff_ms is None else pipeline.cutoff_ms) if closed else None,
        was_placed=was_placed(pipeline),
    )


def _peak_of(pipeline: Pipeline) -> float | None:
    """What the stage of its best placement holds that is fullest, measured by its limit; None without a placement."""
    problem, placement = pipeline.problem, pipeline.placement
    if problem is None or placement is None:
        return None
    peaks = simulate(problem, placement).peak_memory_bytes
    return float(peaks[np.argmax(peaks / np.array(problem.memory_limit_bytes))])


def _who_says(pipeline: Pipeline) -> str:
    if pipeline.bounded_by == "placing":
        return "placing it proved that"
    if pipeline.bounded_by == "another strategy":
        assert pipeline.better is not None
        if pipeline.better.strategies[0].schedule != pipeline.strategies[0].schedule:
            return f"its order is one of those that {pipeline.better.name} may run in, at the same costs, and of these"
        return f"no time or byte of it is below that of {pipeline.better.name}, of which"
    return f"its bound ({pipeline.bounded_by}) says that"
