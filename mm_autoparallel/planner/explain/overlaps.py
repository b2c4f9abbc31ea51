"""What a plan's overlaps bring: the same layers under every other choice of them within the limits of its search.

An overlap that is left open is so because beside its traffic computation takes so much longer that nothing is won, or
because its stack refuses it there; which it is, the steps and the slow-downs say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.sources import list_slowdowns
from mm_autoparallel.model.job.overlaps import AS_SAID, OVERLAPS
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.lanes import Slowdown
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.search.space import list_entries

_LISTS = (*OVERLAPS, "overlap_all_to_all", "tp_overlap")
"""Of a search."""
AS_IT_IS = "as the workload has them"


@dataclass(frozen=True)
class OtherOverlaps:
    """The plan's layers with other overlaps. step_ms: None where these do not fit or cannot run so, for `reason`."""

    words: str
    step_ms: float | None
    reason: str = ""


@dataclass(frozen=True)
class OverlapsTaken:
    """words: those of the plan. slowdowns: of the lanes that it uses, by name."""

    words: str
    others: tuple[OtherOverlaps, ...]
    slowdowns: Mapping[str, Slowdown]


def find_overlaps(
    costs: CostModel, estimate: Estimate, look: Callable[[], None] = lambda: None
) -> OverlapsTaken | None:
    """None where the search of the job has no choice of overlaps. look: called for each strategy of its space."""
    limits, plan = costs.job.search, estimate.plan
    if all(len(getattr(limits, name) or ()) < 2 for name in _LISTS):
        return None
    bare, others = _without(plan.strategy), []
    for entry in list_entries(costs.job, look, with_several=False):
        strategy = entry.strategy
        if strategy == plan.strategy or _without(strategy) != bare:
            continue
        other, reason = None, entry.reason or ""
        if not reason:
            try:
                other = evaluate(costs, replace(plan, strategy=strategy))
            except PlannerError as failure:
                reason = str(failure)
        fits = other is not None and other.fits
        others.append(OtherOverlaps(_words(strategy), other.step_ms if other and fits else None, reason))
    slowdowns = list_slowdowns(costs.lanes, plan.strategy, costs.workload)
    return OverlapsTaken(_words(plan.strategy), tuple(others), slowdowns)


def _without(strategy: Strategy) -> Strategy:
    return replace(strategy, overlaps=AS_SAID, overlap_all_to_all="", tp_overlap="")


def _words(strategy: Strategy) -> str:
    usual = _without(strategy).choices
    return ", ".join(word for word in strategy.choices if word not in usual) or AS_IT_IS
