"""A first plan of a strategy at once, to go on from: for who changes sizes by hand and wants to see what that does."""

from __future__ import annotations

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.pipeline.placement.first import place_at_once
from mm_autoparallel.planner.evaluate import plan_from_placement
from mm_autoparallel.planner.plan import Plan


def first_plan(job: Job | CostModel, strategy: Strategy) -> Plan:
    """A good plan of `strategy`, fitting where one that fits is met; within a tenth of a second, not the best.

    Raises PlanError where the strategy is unlawful for the job or no placement of it is, ProfileError where a profile
    does not fit.
    """
    costs = CostModel.of(job)
    job = costs.job
    reason = unlawful_reason(job.model, job.cluster, job.workload, strategy)
    if reason is not None:
        raise PlanError(f"the strategy does not fit job {job.path}: {reason}")
    problem = build_problem(costs.used_by(strategy), strategy)
    try:
        placement, _ = place_at_once(problem)
    except JobError as error:
        raise PlanError(f"the strategy has no placement: {error}") from None
    return plan_from_placement(problem, placement, strategy, job.workload.global_batch_size)
