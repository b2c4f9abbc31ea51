"""`place PROBLEM.json`: the pipeline alone, for people who bring their own numbers."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.arguments import seconds
from mm_autoparallel.cli.output import print_document, print_parts
from mm_autoparallel.errors import Interrupted, NoFeasiblePlan, Unfinished
from mm_autoparallel.reports.terminal import Progress, check_writable, say, writing
from mm_autoparallel.signals import stop_on_signal
from mm_autoparallel.units import format_ms

HELP = "place the layers of a pipeline whose costs are given"
DESCRIPTION = (
    "Choose how many layers of each kind every stage holds and recomputes, so that the step is shortest within the "
    "memory limits; and say how much shorter it could be at most."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("problem", type=Path, metavar="PROBLEM.json")
    parser.add_argument("--time-limit", type=seconds, metavar="S", help="end with the best so far after S seconds")
    parser.add_argument("--certificate", type=Path, metavar="OUT.json", help="write the proof for `verify`")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Place, print, write the certificate. Without a placement the exit code says why there is none."""
    from mm_autoparallel.api import load_solver, place
    from mm_autoparallel.api.placed import read_problem

    problem = read_problem(arguments.problem)
    if arguments.certificate is not None:
        check_writable(arguments.certificate)
    load_solver(for_search=False)
    with Progress() as progress, stop_on_signal() as stop:
        result = place(
            problem,
            time_limit_s=arguments.time_limit,
            should_stop=stop.is_set,
            on_progress=lambda step_ms: progress.show(f"best so far: {format_ms(step_ms)}"),
        )
    found = result.placement is not None
    if arguments.certificate is not None and found:
        with writing(arguments.certificate):
            result.write_certificate(arguments.certificate)
    if arguments.json:
        print_document(result.document())
    elif found:
        print_parts(result.renderables())
    else:
        say(result.describe_failure())
    if found:
        return 0
    if result.status == "infeasible":
        return NoFeasiblePlan.exit_code
    return Interrupted.exit_code if stop.is_set() else Unfinished.exit_code
