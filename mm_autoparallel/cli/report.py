"""`report JOB`: one HTML file that shows plans of a job to whoever opens it."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path

from mm_autoparallel.cli.arguments import seconds
from mm_autoparallel.cli.job_words import add_set_argument, parse_changes
from mm_autoparallel.planner.search import DEFAULT_TIME_LIMIT_S
from mm_autoparallel.reports.terminal import Progress, check_writable, say, warn, writing
from mm_autoparallel.signals import stop_on_signal

OUT = Path("plan.html")
HELP = "write one HTML file that explains plans to a colleague"
DESCRIPTION = (
    "Write one HTML file about plans of JOB, which opens from disk without a network: the verdict, the timeline of "
    "each plan, memory over time and by cause, layers of every stage, the searched strategies and why each was left "
    "out, where groups lie on the cluster, and what the figures hang on."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB")
    add_set_argument(parser)
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="PLAN.json",
        help="a plan to show; once more for each that is held against it (default: the best plan of a search)",
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="what to write (default: %(default)s)")
    parser.add_argument(
        "--no-search", action="store_true", help="show the plans of --config alone, not the searched space"
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        metavar="S",
        help=f"end the search after S seconds (default: {DEFAULT_TIME_LIMIT_S:g})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, search, write."""
    from mm_autoparallel.api import load_solver, read_plan, report
    from mm_autoparallel.api.jobs import read_job
    from mm_autoparallel.errors import JobError
    from mm_autoparallel.files import read_text
    from mm_autoparallel.planner.search.candidate import progress_line

    if arguments.no_search and not arguments.config:
        raise JobError("--no-search leaves nothing to show; name a plan by --config, or leave it out")
    check_writable(arguments.out)
    job = read_job(arguments.job, parse_changes(arguments.set))
    plans = {str(path): read_plan(path, job) for path in arguments.config}
    load_solver()
    with Progress() as progress, stop_on_signal() as stop:
        page = report(
            job,
            plans or None,
            search=not arguments.no_search,
            time_limit_s=arguments.time_limit,
            should_stop=stop.is_set,
            on_progress=lambda state: progress.show(partial(progress_line, state)),
            texts={str(path): read_text(path, "plan", "JSON file") for path in arguments.config},
            command=_command(arguments),
        )
    with writing(arguments.out):
        page.write(arguments.out)
    warn(page.report.warnings)
    say(f"wrote {arguments.out}")
    return 0


def _command(arguments: argparse.Namespace) -> str:
    """The call, as a shell takes it."""
    words = ["mm-autoparallel", "report", str(arguments.job)]
    for path in arguments.config:
        words += ["--config", str(path)]
    for word in arguments.set:
        words += ["--set", word]
    words += ["--no-search"] if arguments.no_search else []
    words += ["--time-limit", f"{arguments.time_limit:g}"] if arguments.time_limit else []
    return shlex.join([*words, *(["--out", str(arguments.out)] if arguments.out != OUT else [])])
