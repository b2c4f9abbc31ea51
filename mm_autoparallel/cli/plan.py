"""`plan JOB`: search the strategies that a job allows, and write the best plan."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mm_autoparallel.cli import plan_script
from mm_autoparallel.cli.arguments import count, seconds
from mm_autoparallel.cli.job_words import (
    PATH,
    add_model_arguments,
    add_set_argument,
    add_shared_arguments,
    describe_flags,
    parse_changes,
)
from mm_autoparallel.cli.output import print_document, print_parts, print_timeline
from mm_autoparallel.planner.search import DEFAULT_TIME_LIMIT_S
from mm_autoparallel.reports.terminal import Progress, check_writable, say, warn, write_file, writing
from mm_autoparallel.signals import stop_on_signal

#: The exit code of a check that found a bound to be wrong, as of any crash: it is a bug.
CONTRADICTED = 1
_HERE = Path()
"""The default of --out, known by its identity: a person's own `--out .` is meant."""

HELP = "find the best plan of a job and write it"
DESCRIPTION = (
    "Search the whole space of strategies that JOB, or a model given by --model, allows, and write "
    "auto_parallel_search_optimal_config.json: the best plan, its simulated step, and a bound that says how much "
    "faster any plan could be at most."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB", nargs="?")
    parser.add_argument(
        "--out",
        type=Path,
        default=_HERE,
        metavar="DIR",
        help="where to write (default: here; with --script the folder `planned`)",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        metavar="S",
        help=f"end with the best so far after S seconds (default: {DEFAULT_TIME_LIMIT_S:g})",
    )
    parser.add_argument(
        "--top-k",
        type=count,
        default=1,
        metavar="K",
        help="how many of the best plans to show, and of runs to try first to name (three at least)",
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="where candidates are solved (default: this machine)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="the Ray cluster of --engine ray (default: RAY_ADDRESS, else the one that this machine is part of)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="keep solved problems there, and use those kept (default: none)",
    )
    parser.add_argument(
        "--log-bounds",
        type=Path,
        metavar="FILE",
        help="write a line of JSON for each lawful candidate: what bounds it, by how much, and what was reached then",
    )
    parser.add_argument(
        "--check-eliminated",
        type=count,
        metavar="N",
        help="place N random candidates that bounds eliminated, and fail if one contradicts its bound or the answer",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write one HTML file about the best plans")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    plan_script.add_arguments(parser)
    add_set_argument(parser)
    add_model_arguments(parser, required=False)
    add_shared_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Search, write the result file, print. A search without a plan leaves an older result file as it is."""
    from mm_autoparallel.api import load_solver, plan, report
    from mm_autoparallel.api.jobs import read_job
    from mm_autoparallel.planner.plan import RESULT_FILE
    from mm_autoparallel.planner.search.candidate import progress_line

    plan_script.check_arguments(arguments)
    of_script = None
    if arguments.script is not None:
        arguments.out = plan_script.OUT if arguments.out is _HERE else arguments.out
        of_script = plan_script.read_script_job(arguments)
        job = of_script.job
        warn(of_script.notes)
    elif arguments.model is not None:
        job = describe_flags(arguments).parse(PATH)
    else:
        job = read_job(arguments.job, parse_changes(arguments.set))
    path = arguments.out / RESULT_FILE
    for written in (path, arguments.log_bounds, arguments.report):
        if written is not None:
            check_writable(written)
    check = None
    load_solver()
    with Progress() as progress, stop_on_signal() as stop:
        progress.show("listing the strategies")
        result = plan(
            job,
            time_limit_s=arguments.time_limit,
            on_progress=lambda state: progress.show(partial(progress_line, state)),
            top_k=arguments.top_k,
            should_stop=stop.is_set,
            engine=arguments.engine,
            ray_address=arguments.ray_address,
            cache=arguments.cache,
        )
        progress.close()
        if arguments.check_eliminated:
            check = result.check_eliminated(
                arguments.check_eliminated,
                stop.is_set,
                lambda done, of: progress.show(f"{done} of {of} eliminated candidates placed"),
            )

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        result.write(path)
    if arguments.report is not None:
        command = shlex.join(["mm-autoparallel", "report", "--config", str(path), str(arguments.job or "JOB")])
        with writing(arguments.report):
            report(job, found=result, command=command).write(arguments.report)
    warn(result.warnings)
    outcome = of_script.write(result, arguments.out, arguments.overwrite) if of_script else None
    if arguments.json:
        more = ({"check": asdict(check)} if check else {}) | ({"script": outcome.document()} if outcome else {})
        print_document(result.document() | more)
    else:
        print_parts([*result.renderables(), *(answer.words for answer in result.best[0].unstated)])
        print_timeline(result.best[0].estimate)
        if outcome:
            outcome.print()
    if check:
        say(result.describe_check(check))
    if arguments.log_bounds:
        write_file(arguments.log_bounds, "".join(json.dumps(row) + "\n" for row in result.bound_rows()))
        say(f"wrote {arguments.log_bounds}")
    for written in (path, *((arguments.report,) if arguments.report else ()), *(outcome.files if outcome else ())):
        say(f"wrote {written}")
    return CONTRADICTED if check and check.mistakes else 0
