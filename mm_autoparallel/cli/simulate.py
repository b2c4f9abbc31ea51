"""`simulate JOB --config PLAN.json`: play a plan, edited or not, and show where its step goes."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.job_words import add_set_argument, parse_changes
from mm_autoparallel.cli.output import print_document, print_parts
from mm_autoparallel.reports.terminal import check_writable, warn, writing

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


def run(arguments: argparse.Namespace) -> int:
    """Simulate, warn, print, write trace and picture. A plan beyond its memory is simulated too, and marked."""
    from mm_autoparallel.api import read_plan, simulate
    from mm_autoparallel.api.jobs import read_job

    for path in (arguments.trace, arguments.svg):
        if path is not None:
            check_writable(path)
    job = read_job(arguments.job, parse_changes(arguments.set))
    simulation = simulate(job, read_plan(arguments.config, job), name=str(arguments.config))
    warn(simulation.warnings)
    for path, write in ((arguments.trace, simulation.write_trace), (arguments.svg, simulation.write_svg)):
        if path is not None:
            with writing(path):
                write(path)
    if arguments.json:
        print_document(simulation.document())
    else:
        print_parts([simulation.renderable(), *(answer.words for answer in simulation.unstated)])
    return 0
