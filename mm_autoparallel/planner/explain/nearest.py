"""The strategy that a person means who changes some sizes of another: those, and else as little as may be."""

from __future__ import annotations

from dataclasses import fields

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.explain.why_not import Wish, describe_wish, match_strategies
from mm_autoparallel.planner.first_plan import first_plan
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.search.space import strategy_key

_DERIVED = ("dp", "schedule", "orders")
"""What follows from the other fields, and so is no likeness."""


def resize_plan(job: Job | CostModel, present: Strategy, wish: Wish, flag: str = "--sizes") -> Plan:
    """A first plan of the strategy that `nearest_strategy` finds. Raises as it and `first_plan` do."""
    costs = CostModel.of(job)
    return first_plan(costs, nearest_strategy(costs.job, present, wish, flag))


def nearest_strategy(job: Job, present: Strategy, wish: Wish, flag: str = "--sizes") -> Strategy:
    """The lawful strategy with the sizes of `wish` that has most other fields as `present` has them; of equally near
    ones the plainest. flag: what messages call the wish.

    Raises PlanError with the law against it where none is lawful, JobError where no product of sizes makes the devices.
    """
    entries, _ = match_strategies(job, wish, flag)
    lawful = [entry.strategy for entry in entries if entry.reason is None]

    def distance(strategy: Strategy) -> tuple[int, tuple[int | str, ...]]:
        kept = [field.name for field in fields(Strategy) if field.name not in (*wish, *_DERIVED)]
        return sum(getattr(strategy, name) != getattr(present, name) for name in kept), strategy_key(strategy)

    if not lawful:
        closest = min(entries, key=lambda entry: distance(entry.strategy))
        raise PlanError(f"{flag} {describe_wish(wish)}: {closest.reason}")
    return min(lawful, key=distance)
