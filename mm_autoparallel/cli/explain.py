"""`explain JOB --config PLAN.json`: where the step goes, how sure that is, and why it is not another plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.cli.arguments import count, seconds
from mm_autoparallel.cli.output import print_document
from mm_autoparallel.errors import NoFeasiblePlan, PlanError, Unfinished
from mm_autoparallel.reports.terminal import say, warn
from mm_autoparallel.signals import stop_on_signal

if TYPE_CHECKING:
    from collections.abc import Callable

    from mm_autoparallel.job.job import Job
    from mm_autoparallel.plan import Plan

HELP = "tell why a plan is as fast as it is, how sure that is, and why it is not another"
DESCRIPTION = (
    "Tell where a step of JOB under a plan goes and what its longest path is, which stage's memory holds it back, what "
    "it owes to each cost source, whether other plans are within its error and which measurement would settle that."
)
DEFAULT_TIME_LIMIT_S = 20.0
"""Of each search that an answer needs. Assumed: three of them make a person wait a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB")
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        action="append",
        metavar="PLAN.json",
        help="the plan to explain; once more for each plan that it is held against",
    )
    parser.add_argument("--why-not", metavar="PP=8,TP=4", help="the sizes of a strategy that the plan is held against")
    parser.add_argument("--top-k", type=count, metavar="K", help="hold it against the best K plans of a search too")
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=DEFAULT_TIME_LIMIT_S,
        metavar="S",
        help="end each search after S seconds (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read, search what is asked for, measure, print."""
    from mm_autoparallel.job.job import read_job
    from mm_autoparallel.plan import read_plan

    job = read_job(arguments.job)
    plans = {str(path): read_plan(path, job) for path in arguments.config}

    from mm_autoparallel.search.explain.headroom import find_headroom
    from mm_autoparallel.search.explain.sensitivity import find_sensitivity
    from mm_autoparallel.search.explain.teaching import find_teaching
    from mm_autoparallel.search.explain.why_not import explain_why_not, parse_wish
    from mm_autoparallel.search.watched import compile_search

    wish = parse_wish(arguments.why_not) if arguments.why_not is not None else None
    compile_search()
    with stop_on_signal() as stop:
        if arguments.top_k is not None:
            plans |= _search_rivals(job, plans, arguments.top_k, arguments.time_limit, stop.is_set)
        for name, plan in plans.items():
            _check_plan(job, name, plan)
        sensitivity = find_sensitivity(job, list(plans.values()))
        estimate = sensitivity.estimates[0]
        teaching = find_teaching(job, list(plans.values()))
        headroom = find_headroom(estimate, arguments.time_limit, stop.is_set)
        why_not = None
        if wish is not None:
            why_not = explain_why_not(job, estimate, wish, arguments.time_limit, stop.is_set)
    warn(estimate.warnings)

    from mm_autoparallel.cli.explained import Explanation, explanation_document, print_explanation

    explanation = Explanation(job, tuple(plans), sensitivity, headroom, wish, why_not, teaching)
    if arguments.json:
        print_document(explanation_document(explanation))
    else:
        print_explanation(explanation)
    return 0


def _check_plan(job: Job, name: str, plan: Plan) -> None:
    """Raises PlanError with the plan's name where it cannot be simulated."""
    from mm_autoparallel.simulate.evaluate import evaluate

    try:
        evaluate(job, plan)
    except PlanError as error:
        raise PlanError(f"plan {name}: {error}") from None


def _search_rivals(
    job: Job, known: dict[str, Plan], top_k: int, time_limit_s: float, should_stop: Callable[[], bool]
) -> dict[str, Plan]:
    """The best plans of a search that are not among `known`, by name. One that finds nothing is said, and no end."""
    from mm_autoparallel.search.watched import search_watched

    try:
        result = search_watched(job, time_limit_s, should_stop, top_k)
    except (NoFeasiblePlan, Unfinished) as error:
        say(f"no plan to hold it against: {error}")
        return {}
    given = list(known.values())
    found = ((f"number {rank} of a search", one.plan) for rank, one in enumerate(result.estimates, start=1))
    rivals = {name: plan for name, plan in found if plan not in given}
    if not rivals:
        say(f"the best plans of a search, {top_k} asked for, are those that are given")
    return rivals
