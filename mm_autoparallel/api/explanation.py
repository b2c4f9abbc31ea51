"""Explanation: what `explain` found of plans, and how it is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from mm_autoparallel.api import simulate
from mm_autoparallel.api.explained import explanation_document, list_parts
from mm_autoparallel.api.results import Result
from mm_autoparallel.errors import NoFeasiblePlan, Unfinished
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.explain.headroom import Headroom, find_headroom
from mm_autoparallel.planner.explain.modules import Wish
from mm_autoparallel.planner.explain.overlaps import OverlapsTaken, find_overlaps
from mm_autoparallel.planner.explain.sensitivity import Sensitivity, find_sensitivity
from mm_autoparallel.planner.explain.teaching import Teaching, find_teaching
from mm_autoparallel.planner.explain.why_not import WhyNot, explain_why_not, parse_wish
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.search.candidate import Progress
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.watched import compile_search
from mm_autoparallel.reports.console import draw_text
from mm_autoparallel.reports.html import render_paragraph, render_table
from mm_autoparallel.reports.timeline import render_timeline
from mm_autoparallel.streams import say


@dataclass(frozen=True, eq=False)
class Explanation(Result):
    """Everything that one call of `explain` found. names: of the plans, in the order of sensitivity.estimates."""

    job: Job
    names: tuple[str, ...]
    sensitivity: Sensitivity
    headroom: Headroom
    wish: Wish | None
    why_not: WhyNot | None
    teaching: Teaching
    overlaps: OverlapsTaken | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.sensitivity.estimates[0].warnings

    def table(self) -> str:
        """All of it as plain text."""
        return draw_text(*list_parts(self))

    def document(self) -> dict[str, Any]:
        """What `explain --json` prints. Plans are named by their place in `plans`; what is unknown is null."""
        return explanation_document(self)

    def _repr_html_(self) -> str:
        return "".join(
            render_table(part) if isinstance(part, Table) else render_paragraph(str(part))
            for part in list_parts(self)
            if part != ""
        ) + render_timeline(self.sensitivity.estimates[0].problem, self.sensitivity.estimates[0].timeline)


def explain_plans(
    job: Job,
    plans: Mapping[str, Plan],
    why_not: str | None,
    top_k: int | None,
    time_limit_s: float,
    should_stop: Callable[[], bool],
    on_progress: Callable[[Progress], None],
) -> Explanation:
    """`explain` of the face for plans by name. Raises as it does."""
    wish = parse_wish(why_not) if why_not is not None else None
    compile_search(job.schedules, job.search.max_vpp)
    if top_k is not None:
        plans = {**plans, **_search_rivals(job, plans, top_k, time_limit_s, should_stop, on_progress)}
    for name, plan in plans.items():
        simulate(job, plan, name=name)
    costs = CostModel(job)
    sensitivity = find_sensitivity(costs, list(plans.values()))
    estimate = sensitivity.estimates[0]
    teaching = find_teaching(job, list(plans.values()))
    headroom = find_headroom(estimate, time_limit_s, should_stop)
    other = explain_why_not(costs, estimate, wish, time_limit_s, should_stop) if wish is not None else None
    overlaps = find_overlaps(costs, estimate)
    return Explanation(job, tuple(plans), sensitivity, headroom, wish, other, teaching, overlaps)


def _search_rivals(
    job: Job,
    known: Mapping[str, Plan],
    top_k: int,
    time_limit_s: float,
    should_stop: Callable[[], bool],
    on_progress: Callable[[Progress], None],
) -> dict[str, Plan]:
    """The best plans of a search that are not among `known`, by name. One that finds nothing is said, and no end."""
    try:
        result = search(job, time_limit_s, should_stop, on_progress, top_k)
    except (NoFeasiblePlan, Unfinished) as error:
        say(f"no plan to hold it against: {error}")
        return {}
    given = list(known.values())
    found = ((f"number {rank} of a search", one.plan) for rank, one in enumerate(result.estimates, start=1))
    rivals = {name: plan for name, plan in found if plan not in given}
    if not rivals:
        say(f"the best plans of a search, {top_k} asked for, are those that are given")
    return rivals
