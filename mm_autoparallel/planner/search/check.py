"""Check what bounds eliminated: place some of it after all, and see that none beats the answer or its own bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.pipeline.solve.engines.engine import Engine
from mm_autoparallel.pipeline.solve.task import Answer, Task
from mm_autoparallel.planner.plan import PROVEN_GAP_FRACTION
from mm_autoparallel.planner.search.candidate import Candidate
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.result import SearchResult
from mm_autoparallel.planner.search.space import describe_strategy

#: How long each is placed; most are settled in a fraction of it. Assumed.
CHECK_S = 3.0
#: What is left of a bound that rounding may have raised: sums of the same times in another order.
KEEP = 1.0 - 1e-9


@dataclass(frozen=True)
class Check:
    """What placing `num_checked` of `num_eliminated` candidates showed.

    num_settled: those that the solver proved not to be faster than the answer, or not to fit. fastest_ms: the least
    step found, None where none fits. mistakes: a sentence for each that is below the answer's bound or its own, or that
    fits where nothing should.
    """

    num_eliminated: int
    num_checked: int
    num_settled: int
    fastest_ms: float | None
    mistakes: tuple[str, ...]


def check_eliminated(
    job: Job | CostModel,
    result: SearchResult,
    number: int,
    engine: Engine,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    seed: int = 0,
) -> Check:
    """Place `number` of the candidates that `result` eliminated without a solver, chosen by `seed`, each from nothing.

    engine: where; it is closed at the end. Stopped early, it tells of those placed by then.
    """
    eliminated = [c for c in result.candidates if c.is_eliminated and c.bounded_by != "profile"]
    chosen = random.Random(seed).sample(eliminated, min(number, len(eliminated)))
    answers: dict[int, Answer] = {}
    costs = CostModel.of(job)
    given = 0
    try:
        while True:
            while given < len(chosen) and engine.free:
                problem = build_problem(costs, chosen[given].strategy)
                engine.give(Task(given, problem, np.inf, PROVEN_GAP_FRACTION, CHECK_S))
                given += 1
            answer = engine.wait()
            if answer is None:
                break
            if answer.is_last:
                answers[answer.number] = answer
                on_progress(len(answers), len(chosen))
    finally:
        engine.close()
    lower_bound_ms, caution = result.objective.rank_bound_ms, Caution(costs.job)

    def rank_ms(number: int, answer: Answer) -> float:
        if answer.placement is None or caution.is_off:
            return answer.step_ms
        problem = build_problem(costs, chosen[number].strategy)
        return caution.rank_ms(answer.step_ms, caution.fill_of(problem, answer.placement, chosen[number].strategy))

    mistakes = [_mistake(chosen[i], rank_ms(i, answer), lower_bound_ms) for i, answer in sorted(answers.items())]
    return Check(
        num_eliminated=len(eliminated),
        num_checked=len(answers),
        num_settled=sum(a.infeasible or a.lower_bound_ms >= lower_bound_ms * KEEP for a in answers.values()),
        fastest_ms=min((answer.step_ms for answer in answers.values() if answer.placement), default=None),
        mistakes=tuple(filter(None, mistakes)),
    )


def _mistake(candidate: Candidate, rank_ms: float, lower_bound_ms: float) -> str:
    """What is wrong with having eliminated it, of which a plan ranks at rank_ms; empty where nothing is."""
    name, step_ms = describe_strategy(candidate.strategy), rank_ms
    if np.isinf(rank_ms):
        return ""
    if candidate.status == "infeasible":
        return f"{name} was called infeasible, and a placement of {step_ms:.3f} ms fits"
    least_ms = max(lower_bound_ms, candidate.bound_ms or 0.0)
    if step_ms < least_ms * KEEP:
        return f"{name} was bounded by {least_ms:.3f} ms, and a placement of it takes {step_ms:.3f} ms"
    return ""
