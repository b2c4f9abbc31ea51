"""`simulate JOB --config PLAN.json`: play a plan, edited or not, and show where its step goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.cli.job_words import add_set_argument, parse_changes
from mm_autoparallel.cli.output import print_document, print_line, print_parts, print_timeline
from mm_autoparallel.cli.watching import look_at, wait_for_save
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.reports.terminal import check_writable, say, warn, writing
from mm_autoparallel.signals import interrupted_by_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mm_autoparallel.api.results import Simulation

HELP = "simulate a plan and show where its step goes"
DESCRIPTION = (
    "Simulate one training step of JOB under a plan: the step and where it goes, and per stage its layers, recompute, "
    "time, bubble and peak memory against the limit."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB")
    add_set_argument(parser)
    parser.add_argument("--config", type=Path, required=True, metavar="PLAN.json", help="the plan to simulate")
    parser.add_argument("--trace", type=Path, metavar="OUT.json", help="write the timeline for Perfetto")
    parser.add_argument("--svg", type=Path, metavar="OUT.svg", help="write the timeline as a picture")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="do it again whenever the plan or the job is saved, and tell what the step changed, until Ctrl-C",
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate, warn, write trace and picture, print. A plan beyond its memory is simulated too, and marked."""
    if arguments.watch and arguments.json:
        raise JobError("--watch prints again and again, and --json promises one document; leave one of them out")
    for path in (arguments.trace, arguments.svg):
        if path is not None:
            check_writable(path)
    if arguments.watch:
        return _watch(arguments)
    simulation = _simulate(arguments)
    if arguments.json:
        print_document(simulation.document())
    else:
        _print(simulation)
    return 0


def _simulate(arguments: argparse.Namespace) -> Simulation:
    """The plan as its file has it now, its warnings told, its trace and picture written."""
    from mm_autoparallel.api import read_plan, simulate
    from mm_autoparallel.api.jobs import read_job

    job = read_job(arguments.job, parse_changes(arguments.set))
    simulation = simulate(job, read_plan(arguments.config, job), name=str(arguments.config))
    warn(simulation.warnings)
    for path, write in ((arguments.trace, simulation.write_trace), (arguments.svg, simulation.write_svg)):
        if path is not None:
            with writing(path):
                write(path)
    return simulation


def _print(simulation: Simulation) -> None:
    print_parts([simulation.renderable(), *(answer.words for answer in simulation.unstated)])
    print_timeline(simulation.estimate)


def _watch(arguments: argparse.Namespace) -> int:
    """Simulate each version of plan and job until a signal comes, which is no failure once one was printed.

    What is wrong with a version is said, and the watch goes on; but a file that is missing at the start is a mistyped
    name.
    """
    paths = (arguments.config, arguments.job)
    steps_ms: list[float] = []
    try:
        with interrupted_by_signals():
            seen = look_at(paths)
            is_mistyped = None in seen
            while True:
                try:
                    simulation = _simulate(arguments)
                except PlannerError as error:
                    if is_mistyped:
                        raise
                    say(str(error))
                else:
                    _print(simulation)
                    if steps_ms:
                        print_line(describe_version(simulation.step_ms, steps_ms))
                    steps_ms.append(simulation.step_ms)
                say(f"waiting until {' or '.join(map(str, paths))} is saved; Ctrl-C ends")
                seen = wait_for_save(paths, seen)
    except KeyboardInterrupt:
        if not steps_ms:
            raise
        return 0


def describe_version(step_ms: float, before_ms: Sequence[float]) -> str:
    """`version 3: step -12.50 ms (-0.1 %) against the version before, +80.00 ms (+0.9 %) against the first`."""
    from mm_autoparallel.reports.estimates import signed_step

    against = [("the version before", before_ms[-1]), *([("the first", before_ms[0])] if before_ms[1:] else [])]
    told = [f"{signed_step(step_ms, ms)} against {of}" for of, ms in against]
    return f"version {len(before_ms) + 1}: step {', '.join(told)}"
