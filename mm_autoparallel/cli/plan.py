"""`plan JOB`: search the strategies that a job allows, and write the best plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import count, seconds
from mm_autoparallel.cli.output import print_document
from mm_autoparallel.reports.terminal import say, warn, writing
from mm_autoparallel.search.signals import stop_on_signal

if TYPE_CHECKING:
    from mm_autoparallel.search.planner import SearchResult

HELP = "find the best plan of a job and write it"
DESCRIPTION = (
    "Search the whole space of strategies that JOB allows, and write auto_parallel_search_optimal_config.json: the "
    "best plan, its simulated step, and a bound that says how much faster any plan could be at most."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options. `--engine` has one value so far; scripts that name it stay valid when there are more."""
    parser.add_argument("job", type=Path, metavar="JOB")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where to write (default: here)")
    parser.add_argument(
        "--time-limit", type=seconds, metavar="S", help="end with the best so far after S seconds (default: a minute)"
    )
    parser.add_argument("--top-k", type=count, default=1, metavar="K", help="how many of the best plans to show")
    parser.add_argument("--engine", choices=("local",), default="local", help="where candidates are solved")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Search, write the result file, print. NoFeasiblePlan leaves an older result file as it is."""
    with stop_on_signal() as stop:
        from mm_autoparallel.job.job import read_job
        from mm_autoparallel.search.watched import search_watched

        result = search_watched(read_job(arguments.job), arguments.time_limit, stop.is_set, arguments.top_k)

    from mm_autoparallel.plan import RESULT_FILE, write_result

    path = arguments.out / RESULT_FILE
    with writing(path):
        write_result(path, result.plan, result.figures)
    warn(result.warnings)
    if arguments.json:
        print_document(search_document(result))
    else:
        _print_tables(result)
    say(f"wrote {path}")
    return 0


def search_document(result: SearchResult) -> dict[str, Any]:
    """What `--json` prints: the result file's keys, then how the search ended, the best plans, and every candidate."""
    from mm_autoparallel.plan import plan_document
    from mm_autoparallel.reports.estimates import estimate_document
    from mm_autoparallel.search.candidate import candidate_rows

    return plan_document(result.plan, result.figures) | {
        "stopped": result.stopped,
        "elapsed_s": round(result.elapsed_s, 3),
        "warnings": list(result.warnings),
        "best": [estimate_document(estimate) for estimate in result.estimates],
        "candidates": candidate_rows(result.candidates),
    }


def _print_tables(result: SearchResult) -> None:
    from mm_autoparallel.reports.console import print_rich
    from mm_autoparallel.reports.estimates import ranking_table, render_estimate
    from mm_autoparallel.search.watched import describe_end

    if len(result.estimates) > 1:
        print_rich(ranking_table(result.estimates))
    print_rich(render_estimate(result.estimates[0]))
    print(describe_end(result))
