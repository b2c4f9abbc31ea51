"""The best plans of a search, ranked once more by their steps over drawn batches (`search.objective`).

The search ranks by the step of mean samples. What is proven of that holds for batches too, as far as Jensen's
inequality goes: for every plan, its placement, order and dealing fixed, the mean step over batches is at least the step
with expected durations (planner/over_batches.py), so at least `least_mean_fraction` times the step of mean samples, of
which the search knows a bound over all plans. It bounds cvar too, the mean of the worst, and says nothing of p95.

Means are known up to what a few hundred batches leave open: what is ruled out is so with MARGIN standard errors to
spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.uneven import uneven_factor
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.planner.drawn_batches import DrawnBatches, draw_batches
from mm_autoparallel.planner.evaluate import Estimate, evaluate, plan_from_placement
from mm_autoparallel.planner.over_batches import StepOverBatches, least_mean_fraction
from mm_autoparallel.planner.search.batch_ranking import BatchRanking
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.result import SearchResult
from mm_autoparallel.planner.search.robust import find_contenders

MOST_PLAYED = 16
"""Plans that are played over drawn batches. Assumed: some tenths of a second each."""
PLACING_S = 3.0
"""For placing those that the search had no need to place. Assumed."""
MARGIN = 3.0
"""Standard errors by which a bound must lie above the best: one in a thousand is wrong."""


def rank_over_batches(
    found: SearchResult,
    costs: CostModel,
    pipelines: Sequence[Pipeline],
    top_k: int,
    is_late: Callable[[], bool],
) -> SearchResult:
    """The result with its plans ranked by `search.objective`; as it is where the job has none.

    pipelines: of the search. is_late: whether no further plan is to be played; the answer of the search always is.
    """
    objective = costs.job.search.objective
    if objective is None:
        return found
    drawn, is_proven = draw_batches(costs), objective != "p95"
    fraction = least_mean_fraction(drawn)
    played: list[tuple[float, int, Estimate]] = []
    surely_ms = math.inf  # the best that was played is no worse
    expect = _Expectation(costs.job, drawn, found.estimates[0])
    plans = sorted(_list_plans(found, costs, pipelines, is_late, expect), key=lambda plan: plan[0])
    for place in sorted(range(len(plans)), key=lambda at: plans[at][0] * expect(plans[at][2].plan.strategy)):
        _, price, estimate = plans[place]
        if len(played) >= MOST_PLAYED or (played and is_late()):
            break
        is_enough = is_proven and len(played) >= top_k
        if is_enough and estimate.batch_steps.at_mean_ms(drawn) * price >= surely_ms:
            continue
        over = estimate.over_batches
        assert over is not None  # the job has samples
        played.append((over.of(objective) * price, place, estimate))
        surely_ms = min(surely_ms, (over.of(objective) + MARGIN * _error_ms(over, objective)) * price)
    played.sort(key=lambda one: one[:2])
    rank_ms, place, answer = played[0]
    step_rank_ms = plans[place][0]
    lawful = [p for p in pipelines if p.twin is None]
    out = [p for p in lawful if p.infeasible or (is_proven and p.bound_ms * fraction >= surely_ms)]
    goal = replace(
        found.objective,
        step_ms=answer.step_ms,
        rank_ms=step_rank_ms,
        rank_bound_ms=min(found.objective.rank_bound_ms, step_rank_ms),
    )
    return replace(
        found,
        estimates=tuple(estimate for _, _, estimate in played[:top_k]),
        objective=goal,
        lower_bound_ms=goal.rank_bound_ms * (goal.step_ms / goal.rank_ms),
        robust=found.robust if answer is found.estimates[0] else None,  # it weighs the other answer
        warnings=(*answer.warnings, *found.warnings[len(found.estimates[0].warnings) :]),
        batch_ranking=BatchRanking(
            objective=objective,
            rank_ms=rank_ms,
            bound_ms=fraction * found.objective.rank_bound_ms if is_proven else None,
            orders=tuple(place for _, place, _ in played),
            num_ruled_out=sum(len(p.strategies) for p in out),
            num_open=sum(len(p.strategies) for p in lawful) - sum(len(p.strategies) for p in out),
        ),
    )


class _Expectation:
    """How many times the step of mean samples a strategy is expected to take, before it is played: by the spread of
    what one sample takes, in the answer's shares of encoder and decoder (costs/uneven.py)."""

    def __init__(self, job: Job, drawn: DrawnBatches, answer: Estimate) -> None:
        works = dict.fromkeys(drawn.load_factor, 0.0)
        for block in answer.problem.chain:
            works[block.modality] += block.count * (block.forward_ms + block.backward_ms)
        loads = sum(works[name] * loads for name, loads in drawn.load_factor.items())
        self.spread_fraction = float(np.std(loads) / np.mean(loads))
        self.workload = job.workload

    def __call__(self, strategy: Strategy) -> float:
        spread_fraction = self.spread_fraction / math.sqrt(strategy.mbs)
        return uneven_factor(
            self.workload.model_copy(update={"length_spread_fraction": spread_fraction}), strategy.of_decoder()
        )


def _error_ms(over: StepOverBatches, objective: str) -> float:
    return over.cvar95_error_ms if objective == "cvar" else over.error_ms


def _list_plans(
    found: SearchResult,
    costs: CostModel,
    pipelines: Sequence[Pipeline],
    is_late: Callable[[], bool],
    expect: _Expectation,
) -> Iterator[tuple[float, float, Estimate]]:
    """What mean samples rank a plan at, the price of its chance to run out of memory, and the plan: the answer, those
    near it, and those that the search has met, under each strategy that has the same pipeline, for these are dealt
    otherwise.
    """
    caution, batch = Caution(costs.job), costs.job.workload.global_batch_size
    known = set[Strategy]()

    def priced(estimate: Estimate) -> tuple[float, float, Estimate]:
        known.add(estimate.plan.strategy)
        price = caution.price_factor(estimate.oom_probability)
        return estimate.step_ms * price, price, estimate

    yield from map(priced, found.estimates)
    of = costs, pipelines, found.estimates[0], found.objective.rank_ms, is_late
    near_plans = find_contenders(*of, placing_s=PLACING_S, expect=expect)
    for near in near_plans:
        if near.plan.strategy not in known:
            yield priced(near)
    met: list[tuple[float, Problem, Placement, Strategy]] = [
        (p.rank_ms, p.problem, p.placement, strategy)
        for p in pipelines
        if p.twin is None and p.placement is not None and p.problem is not None
        for strategy in p.strategies
    ]
    for _, problem, placement, strategy in sorted(met, key=lambda one: one[0] * expect(one[3]))[: 2 * MOST_PLAYED]:
        if strategy in known:
            continue
        estimate = evaluate(costs, plan_from_placement(problem, placement, strategy, batch))
        if estimate.fits and caution.allows(estimate.oom_probability):
            yield priced(estimate)
