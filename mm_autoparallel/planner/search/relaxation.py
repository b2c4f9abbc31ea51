"""When nothing fits: the constraint that binds, and the smallest relaxation over all strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NoReturn

from mm_autoparallel.errors import Interrupted, JobError, NoFeasiblePlan, ProfileError, Unfinished
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job, SearchSpace
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.planner.search.candidate import Candidate
from mm_autoparallel.planner.search.space import describe_strategy, list_space, strategy_key
from mm_autoparallel.units import GB

#: Strategies outside the limits of search that are looked at for one that would fit: some seconds' work.
MAX_OUTSIDE = 2_000


def raise_no_plan(
    job: Job | CostModel,
    candidates: tuple[Candidate, ...],
    suffices: Mapping[Strategy, bool],
    stopped: str,
    should_stop: Callable[[], bool],
) -> NoReturn:
    """Raise NoFeasiblePlan for a search that found no plan; Unfinished or Interrupted where it ended before it knew.

    suffices: of the strategies proven infeasible, whether limits higher by their overflow would do. stopped: why it
    ended. should_stop: once true, what else would do is no longer looked for.
    """
    costs = CostModel.of(job)
    job = costs.job
    lawful = [candidate for candidate in candidates if candidate.status != "unlawful"]
    num_open = sum(candidate.status == "unfinished" for candidate in lawful)
    if num_open:
        if stopped == "finished":
            raise Unfinished(
                f"no plan was found that fits as often as search.fit_probability asks, and of "
                f"{num_open} of {len(lawful)} lawful strategies it is not proven that none does: what placement "
                "limits is a little less than what a device holds; lower fit_probability or name larger devices",
                where=f"job file {job.path}",
            )
        how = {"interrupted": "was interrupted", "time limit": "came to its time limit"}.get(stopped, "was stopped")
        raise (Interrupted if stopped == "interrupted" else Unfinished)(
            f"the search {how} before it found a plan; {num_open} of {len(lawful)} lawful "
            "strategies were not finished, so there may be one",
            where=f"job file {job.path}",
        )
    limited = _fitting_without_host_limit(costs, [candidate.strategy for candidate in lawful], should_stop)
    over = [candidate for candidate in lawful if candidate.overflow_bytes > 0]
    head = f"job file {job.path}: none of the {len(lawful)} lawful strategies fits"
    if not over:
        raise NoFeasiblePlan(f"{head}; for {describe_strategy(lawful[0].strategy)}: {lawful[0].reason}{limited}")
    # One whose overflow is known to suffice comes before one whose true overflow may be larger.
    closest = min(over, key=lambda c: (not suffices.get(c.strategy), c.overflow_bytes, strategy_key(c.strategy)))
    needed_bytes = (job.cluster.memory_limit_bytes + closest.overflow_bytes) / job.cluster.memory_fraction
    would_do = f"devices of {_round_up(needed_bytes / GB)} GB (cluster.device.memory_bytes) would do"
    fitting = _fitting_outside(costs, closest.strategy, should_stop)
    if fitting is not None:
        would_do += f", or {_difference(fitting, closest.strategy)}, which search leaves out"
    raise NoFeasiblePlan(
        f"{head}; {describe_strategy(closest.strategy)} is closest: {closest.reason}; {would_do}{limited}"
    )


def _round_up(value: float) -> float:
    """To one decimal, upwards: what is printed must suffice."""
    return -(-value * 10 // 1) / 10


def _fitting_without_host_limit(
    costs: CostModel, strategies: Sequence[Strategy], should_stop: Callable[[], bool]
) -> str:
    """That one of `strategies`, which bounds rule out, may fit on larger hosts; nothing where that is true of none."""
    job = costs.job
    kinds = job.cluster.kinds
    if all(kind.host_memory_bytes is None for kind in kinds):
        return ""
    groups = tuple(group.model_copy(update={"host_memory_bytes": None}) for group in job.cluster.node_groups)
    cluster = job.cluster.model_copy(update={"host_memory_bytes": None, "node_groups": groups})
    roomy = CostModel(replace(job, cluster=cluster))
    looked_at = takewhile(lambda _: not should_stop(), strategies[:MAX_OUTSIDE])
    fitting = next(
        (one for one in looked_at if not _may_fit(costs, one, should_stop) and _may_fit(roomy, one, should_stop)), None
    )
    if fitting is None:
        return ""
    least_bytes = min(kind.host_memory_bytes for kind in kinds if kind.host_memory_bytes is not None)
    return (
        f"; on nodes with more than {least_bytes / GB:.4g} GB for their hosts (cluster.host_memory_bytes) "
        f"{describe_strategy(fitting)} might fit"
    )


def _fitting_outside(costs: CostModel, closest: Strategy, should_stop: Callable[[], bool]) -> Strategy | None:
    """A strategy that fits and that search leaves out, if there is one; of several, one that changes fewest sizes."""
    job = costs.job

    def look() -> None:
        if should_stop():
            raise Unfinished("what search leaves out was still listed")

    try:
        space = list_space(replace(job, search=SearchSpace(ep=job.search.ep)), look)
    except (JobError, Unfinished):  # not one is lawful, or no time is left to tell
        return None
    lawful = [entry.strategy for entry in space if entry.reason is None]
    lawful.sort(key=lambda strategy: (len(_changed(strategy, closest)), strategy_key(strategy)))
    looked_at = takewhile(lambda _: not should_stop(), lawful[:MAX_OUTSIDE])
    return next((strategy for strategy in looked_at if _may_fit(costs, strategy, should_stop)), None)


def _may_fit(costs: CostModel, strategy: Strategy, should_stop: Callable[[], bool]) -> bool:
    """Whether a bound leaves it possible; where the job's profiles do not reach, or no time is left for the bound,
    nobody knows and it is not offered.
    """
    try:
        problem = build_problem(costs, strategy)
    except ProfileError:
        return False
    return not bound_step(problem, should_stop=should_stop).reason and not should_stop()


def _changed(strategy: Strategy, other: Strategy) -> list[str]:
    names = ("pp", "tp", "cp", "dp", "mbs", "ep", "vpp", "zero")
    return [name for name in names if getattr(strategy, name) != getattr(other, name)]


def _difference(strategy: Strategy, other: Strategy) -> str:
    return " ".join(f"{name.upper()} {getattr(strategy, name)}" for name in _changed(strategy, other))
