"""`explain JOB --config PLAN.json`: where the step goes, how sure that is, and why it is not another plan."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.api import EXPLAIN_LIMIT_S
from mm_autoparallel.cli.arguments import count, seconds
from mm_autoparallel.cli.job_words import add_set_argument, parse_changes
from mm_autoparallel.cli.output import print_document, print_parts
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import Progress, warn
from mm_autoparallel.signals import stop_on_signal

if TYPE_CHECKING:
    from mm_autoparallel.model.job.job import Job

SPACE_SCHEMA = "mm-autoparallel/space/1"
HELP = "tell why a plan is as fast as it is, how sure that is, and why it is not another"
DESCRIPTION = (
    "Tell where a step of JOB under a plan goes and what its longest path is, which stage's memory holds it back, what "
    "it owes to each cost source, whether other plans are within its error and which measurement would settle that."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB")
    add_set_argument(parser)
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="PLAN.json",
        help="the plan to explain; once more for each plan that it is held against",
    )
    parser.add_argument(
        "--space", action="store_true", help="list what a plan of the job decides instead: its range, and if searched"
    )
    parser.add_argument("--why-not", metavar="PP=8,TP=4", help="the sizes of a strategy that the plan is held against")
    parser.add_argument("--top-k", type=count, metavar="K", help="hold it against the best K plans of a search too")
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=EXPLAIN_LIMIT_S,
        metavar="S",
        help="end each search after S seconds (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read, search what is asked for, measure, print."""
    from mm_autoparallel.api import explain, load_solver, read_plan
    from mm_autoparallel.api.explained import list_parts
    from mm_autoparallel.api.jobs import read_job
    from mm_autoparallel.planner.search.candidate import progress_line

    job = read_job(arguments.job, parse_changes(arguments.set))
    if arguments.space:
        return _print_space(arguments, job)
    if not arguments.config:
        raise JobError("--config PLAN.json is missing: the plan to explain; --space needs none")
    plans = {str(path): read_plan(path, job) for path in arguments.config}
    load_solver()
    with Progress() as progress, stop_on_signal() as stop:
        explanation = explain(
            job,
            plans,
            why_not=arguments.why_not,
            top_k=arguments.top_k,
            time_limit_s=arguments.time_limit,
            should_stop=stop.is_set,
            on_progress=lambda state: progress.show(partial(progress_line, state)),
        )
    warn(explanation.warnings)
    if arguments.json:
        print_document(explanation.document())
    else:
        print_parts(list_parts(explanation))
    return 0


def _print_space(arguments: argparse.Namespace, job: Job) -> int:
    from mm_autoparallel.planner.explain.variables import list_variables

    for flag in ("config", "why_not", "top_k"):
        if getattr(arguments, flag):
            raise JobError(f"--space is of the job alone; leave out --{flag.replace('_', '-')}")
    variables = list_variables(job)
    if arguments.json:
        print_document({"schema": SPACE_SCHEMA, "variables": [one.document() for one in variables]})
        return 0
    from rich.table import Table

    table = Table(
        "decided", "by", "values", "where", title=f"{len(variables)} variables of a plan", title_justify="left"
    )
    for one in variables:
        table.add_row(one.name, "search" if one.searched else "job", one.values, one.where)
    print_parts([table])
    return 0
