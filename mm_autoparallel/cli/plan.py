"""`plan JOB`: search the strategies that a job allows, and write the best plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli import plan_script
from mm_autoparallel.cli.arguments import count, seconds
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import check_writable, say, warn, writing
from mm_autoparallel.signals import stop_on_signal

if TYPE_CHECKING:
    from mm_autoparallel.search.cache import SolvedCache
    from mm_autoparallel.search.engines.ray_cluster import RayCluster
    from mm_autoparallel.search.result import SearchResult

#: The exit code of a check that found a bound to be wrong, as of any crash: it is a bug.
CONTRADICTED = 1
_HERE = Path()
"""The default of --out, known by its identity: a person's own `--out .` is meant."""

HELP = "find the best plan of a job and write it"
DESCRIPTION = (
    "Search the whole space of strategies that JOB allows, and write auto_parallel_search_optimal_config.json: the "
    "best plan, its simulated step, and a bound that says how much faster any plan could be at most."
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
        "--time-limit", type=seconds, metavar="S", help="end with the best so far after S seconds (default: a minute)"
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
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    plan_script.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Search, write the result file, print. A search without a plan leaves an older result file as it is."""
    from mm_autoparallel.job.job import read_job
    from mm_autoparallel.plan import RESULT_FILE, write_result
    from mm_autoparallel.search.watched import check_watched, search_watched
    from mm_autoparallel.simulate.twice import answer_twice

    plan_script.check_arguments(arguments)
    of_script, job = None, None
    if arguments.script is None:
        job = read_job(arguments.job)
    else:
        arguments.out = plan_script.OUT if arguments.out is _HERE else arguments.out
        of_script = plan_script.read_script_job(arguments)
        job = of_script.job
        warn(of_script.notes)
    path = arguments.out / RESULT_FILE
    for written in (path, arguments.log_bounds):
        if written is not None:
            check_writable(written)
    cluster, cache = _connect(arguments), _open_cache(arguments.cache)
    check = None
    with stop_on_signal() as stop:
        result = search_watched(job, arguments.time_limit, stop.is_set, arguments.top_k, cluster, cache)
        if arguments.check_eliminated:
            check = check_watched(job, result, arguments.check_eliminated, stop.is_set, cluster)

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_result(path, result.plan, result.figures)
    warn(result.warnings)
    twice = answer_twice(job, result.estimates[0])
    outcome = of_script.write(result, arguments.out, arguments.overwrite) if of_script else None
    if arguments.json:
        more = ({"check": asdict(check)} if check else {}) | ({"script": outcome.document()} if outcome else {})
        print_document(search_document(result) | {"unstated": [answer.document() for answer in twice]} | more)
    else:
        _print_tables(result)
        for answer in twice:
            print_line(answer.words)
        if outcome:
            outcome.print()
    if check:
        from mm_autoparallel.search.watched import describe_check

        say(describe_check(check, result))
    if arguments.log_bounds:
        _write_bounds(arguments.log_bounds, result)
        say(f"wrote {arguments.log_bounds}")
    for written in (path, *(outcome.files if outcome else ())):
        say(f"wrote {written}")
    return CONTRADICTED if check and check.mistakes else 0


def _connect(arguments: argparse.Namespace) -> RayCluster | None:
    """The Ray cluster that is asked for. Raises JobError where there is none, or it cannot be used."""
    if arguments.engine != "ray":
        if arguments.ray_address:
            raise JobError("--ray-address names a Ray cluster, and --engine is local; add --engine ray or leave it out")
        return None
    from mm_autoparallel.search.engines.ray_cluster import connect

    return connect(arguments.ray_address)


def _open_cache(folder: Path | None) -> SolvedCache | None:
    """The cache of `folder`; what of it cannot be used is told at once. Raises JobError where it cannot be one."""
    if folder is None:
        return None
    from mm_autoparallel.search.cache import SolvedCache

    cache = SolvedCache(folder)
    warn(cache.warnings)
    cache.warnings.clear()
    return cache


def _write_bounds(path: Path, result: SearchResult) -> None:
    from mm_autoparallel.files import write_text_atomically
    from mm_autoparallel.search.candidate import bound_rows

    with writing(path):
        write_text_atomically(path, "".join(json.dumps(row) + "\n" for row in bound_rows(result.candidates)))


def search_document(result: SearchResult) -> dict[str, Any]:
    """What `--json` prints: the result file's keys, then how the search ended, the best plans, and every candidate."""
    from mm_autoparallel.plan import plan_document
    from mm_autoparallel.reports.estimates import estimate_document
    from mm_autoparallel.search.candidate import candidate_rows

    return plan_document(result.plan, result.figures) | {
        "stopped": result.stopped,
        "elapsed_s": round(result.elapsed_s, 3),
        "warnings": list(result.warnings),
        "robust": result.robust.document() if result.robust else None,
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
    print_line(describe_end(result))
