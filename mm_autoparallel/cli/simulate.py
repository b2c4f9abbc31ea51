"""`simulate JOB --config PLAN.json`: play a plan, edited or not, and show where its step goes."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import PlanError
from mm_autoparallel.reports.terminal import check_writable, warn, writing

HELP = "simulate a plan and show where its step goes"
DESCRIPTION = (
    "Simulate one training step of JOB under a plan: the step and where it goes, and per stage its layers, recompute, "
    "time, bubble and peak memory against the limit."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB")
    parser.add_argument("--config", type=Path, required=True, metavar="PLAN.json", help="the plan to simulate")
    parser.add_argument("--trace", type=Path, metavar="OUT.json", help="write the timeline for Perfetto")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, warn, print, write the trace. A plan beyond its memory is simulated too, and marked."""
    from mm_autoparallel.job.job import read_job
    from mm_autoparallel.plan import read_plan

    if arguments.trace is not None:
        check_writable(arguments.trace)
    job = read_job(arguments.job)
    plan = read_plan(arguments.config, job)

    from mm_autoparallel.reports.estimates import estimate_document, render_estimate
    from mm_autoparallel.simulate.compiled import announce_compilation
    from mm_autoparallel.simulate.evaluate import evaluate
    from mm_autoparallel.simulate.twice import answer_twice

    announce_compilation("engine.play")
    try:
        estimate = evaluate(job, plan)
    except PlanError as error:
        raise PlanError(f"plan {arguments.config}: {error}") from None
    warn(estimate.warnings)
    if arguments.trace is not None:
        from mm_autoparallel.reports.trace import write_trace

        with writing(arguments.trace):
            write_trace(arguments.trace, estimate.problem, estimate.timeline)
    twice = answer_twice(job, estimate)
    if arguments.json:
        print_document(estimate_document(estimate) | {"unstated": [answer.document() for answer in twice]})
    else:
        from mm_autoparallel.reports.console import print_rich

        print_rich(render_estimate(estimate))
        for answer in twice:
            print_line(answer.words)
    return 0
