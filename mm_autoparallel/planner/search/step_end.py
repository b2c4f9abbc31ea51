"""The best plans of a search, ranked once more by how far apart their steps are (`search.step_end: post_validation`).

Placements and orders are those of the fastest step by itself, which the search finds and proves. Steps that follow each
other without waiting are as far apart as the stage that is longest at work takes (Timeline.post_validated_ms), and no
plan of the space has them closer than the work of its busiest stage (placement/bounds/apart.py): nothing of that bound
rests on what is known of single steps, and a gap may stay between both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.least_step import LeastSteps
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.pipeline.placement.bounds.apart import apart_bound_ms
from mm_autoparallel.planner.evaluate import Estimate, evaluate, plan_from_placement
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.over_batches import rank_over_batches
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.result import SearchResult
from mm_autoparallel.planner.search.robust import NEAR_FRACTION, find_contenders
from mm_autoparallel.planner.search.step_end_ranking import StepEndRanking

PLACING_S = 3.0
"""For placing those that the search had no need to place. Assumed."""


def rank_again(
    found: SearchResult,
    costs: CostModel,
    pipelines: Sequence[Pipeline],
    top_k: int,
    is_late: Callable[[], bool],
) -> SearchResult:
    """The result with its plans ranked as `search.step_end`, or else `search.objective`, says; as it is where neither
    asks for another ranking. pipelines: of the search. is_late: whether no further plan is to be looked at."""
    if costs.job.search.step_end == "barrier":
        return rank_over_batches(found, costs, pipelines, top_k, is_late)
    caution = Caution(costs.job)
    prices = [
        (estimate, caution.price_factor(estimate.oom_probability))
        for estimate in _list_plans(found, costs, pipelines, is_late)
    ]
    prices.sort(key=lambda one: one[0].step_ms * one[1])
    ranked = sorted(
        (estimate.timeline.post_validated_ms * price, place, estimate, price)
        for place, (estimate, price) in enumerate(prices)
    )
    rank_ms, _, answer, price = ranked[0]
    goal = replace(
        found.objective,
        step_ms=answer.step_ms,
        rank_ms=answer.step_ms * price,
        rank_bound_ms=min(found.objective.rank_bound_ms, answer.step_ms * price),
    )
    return replace(
        found,
        estimates=tuple(estimate for _, _, estimate, _ in ranked[:top_k]),
        objective=goal,
        lower_bound_ms=goal.rank_bound_ms * (goal.step_ms / goal.rank_ms),
        robust=None,  # it weighs single steps
        warnings=(*answer.warnings, *found.warnings[len(found.estimates[0].warnings) :]),
        step_end=StepEndRanking(
            apart_ms=answer.timeline.post_validated_ms,
            rank_ms=rank_ms,
            rank_bound_ms=_bound_ms(costs, pipelines, rank_ms, is_late),
            orders=tuple(place for _, place, _, _ in ranked),
        ),
    )


def _list_plans(
    found: SearchResult, costs: CostModel, pipelines: Sequence[Pipeline], is_late: Callable[[], bool]
) -> Iterator[Estimate]:
    """The answer, those whose single steps are so near that theirs may be closer, and those that the search has met."""
    caution, batch, known = Caution(costs.job), costs.job.workload.global_batch_size, set()
    answer = found.estimates[0]
    near_fraction = max(NEAR_FRACTION, answer.step_ms / answer.timeline.post_validated_ms - 1.0)
    near = find_contenders(
        costs,
        pipelines,
        answer,
        found.objective.rank_ms,
        is_late,
        near_fraction=near_fraction,
        placing_s=PLACING_S,
    )
    for estimate in (*found.estimates, *near):
        if estimate.plan.strategy not in known:
            known.add(estimate.plan.strategy)
            yield estimate
    for pipeline in sorted(pipelines, key=lambda one: one.rank_ms):
        if pipeline.twin or pipeline.placement is None or pipeline.problem is None or is_late():
            continue
        if known.isdisjoint(pipeline.strategies):
            plan = plan_from_placement(pipeline.problem, pipeline.placement, pipeline.strategies[0], batch)
            estimate = evaluate(costs, plan)
            if estimate.fits and caution.allows(estimate.oom_probability):
                yield estimate


def _bound_ms(costs: CostModel, pipelines: Sequence[Pipeline], rank_ms: float, is_late: Callable[[], bool]) -> float:
    """No plan ranks below: of each strategy that may fit by its work, at most rank_ms."""
    least, bound_ms = LeastSteps(costs), math.inf
    for pipeline in pipelines:
        if pipeline.twin or pipeline.infeasible:
            continue
        strategy = pipeline.strategies[0]
        try:
            least_ms = least.least_ms(strategy)
            if least_ms < min(rank_ms, bound_ms) and not is_late():
                problem = pipeline.problem or build_problem(costs, strategy)
                least_ms = max(least_ms, apart_bound_ms(problem))
        except ProfileError:  # of which the search says that it cannot be planned
            least_ms = math.inf
        bound_ms = min(bound_ms, least_ms)
    return min(rank_ms, bound_ms)
