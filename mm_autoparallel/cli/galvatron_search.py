"""`galvatron-search CONFIG.yaml [KEY=VALUE…]` or `--paddle`: Galvatron's space, searched exactly."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import count, seconds
from mm_autoparallel.cli.galvatron_options import add_space, read_space
from mm_autoparallel.cli.galvatron_score import describe_plan, describe_score, document_score
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import Interrupted, NoFeasiblePlan, Unfinished
from mm_autoparallel.reports.terminal import say, writing
from mm_autoparallel.signals import stop_on_signal

if TYPE_CHECKING:
    from mm_autoparallel.integrations.galvatron.score import Extensions
    from mm_autoparallel.integrations.galvatron.search import Found

HELP = "search Galvatron's space exactly, from its own files"
DESCRIPTION = (
    "Read Galvatron's search configuration and profiles, and find the strategy of every layer that its own cost model "
    "says is fastest, with a proof. The JSON that its runtime trains under goes where its own search puts it."
)
SCHEMA = "mm-autoparallel/galvatron-search/1"
_WORTH_TELLING = 1.01
"""How many times its step a plan takes, once all is counted, before the options are named. Assumed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options; what is overridden is written as for Galvatron's own search."""
    add_space(parser)
    parser.add_argument(
        "--uneven", type=count, metavar="N", help="let stages hold up to N layers more or fewer than even ones"
    )
    parser.add_argument(
        "--count-every-stage", action="store_true", help="any stage may be the slowest, not the first or last alone"
    )
    parser.add_argument("--count-resharding", action="store_true", help="count what changes of degree send on a stage")
    parser.add_argument(
        "--whole-samples", action="store_true", help="leave out data parallel sizes that cut a micro-batch's samples"
    )
    parser.add_argument("--time-limit", type=seconds, metavar="S", help="end after S seconds with the best so far")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="where the strategy goes (default: where Galvatron's own search writes it, over an older one)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is at --out")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read, search, write the strategy. Exit code 3 where nothing fits."""
    from mm_autoparallel.integrations.export import write_files
    from mm_autoparallel.integrations.galvatron.score import Extensions

    began_s = time.monotonic()
    extensions = Extensions(
        arguments.reserve_fraction,
        arguments.uneven or 0,
        arguments.count_every_stage,
        arguments.count_resharding,
        arguments.whole_samples,
    )
    space = read_space(arguments, extensions)
    with stop_on_signal() as stop:

        def should_stop() -> bool:
            return stop.is_set() or (
                arguments.time_limit is not None and time.monotonic() - began_s > arguments.time_limit
            )

        found = space.search(should_stop)
        if found.best is None and should_stop():
            raise (Interrupted if stop.is_set() else Unfinished)("stopped before any plan was found")
    if found.best is None:
        raise NoFeasiblePlan(
            f"no strategy fits {space.limit_mib} MiB of a device ({space.reserve_mib} MiB are kept free) in any of "
            f"{found.num_spaces} spaces; more devices, a smaller batch or more micro-batches take less"
        )
    path = arguments.out or space.out
    with writing(path.parent):
        write_files({path: space.format(found.best.plan)}, arguments.overwrite or arguments.out is None)
    if arguments.json:
        print_document({"schema": SCHEMA, **document_score(found.best), **_document(found), "file": str(path)})
        return 0
    for line in (*describe_plan(found.best.plan), *describe_score(found.best), *_describe(found, extensions)):
        print_line(line)
    space.tell(found.best.plan)
    say(f"{found.num_spaces} spaces, {time.monotonic() - began_s:.1f} s; wrote {path}")
    return 0


def _document(found: Found) -> dict[str, Any]:
    assert found.best is not None
    return {
        "status": "proven" if found.is_proven else "not proven",
        "searched_step_s": found.searched_s,
        "lower_bound_s": found.bound_per_sample_s * found.best.plan.num_samples,
        "gap": found.gap_fraction,
        "spaces": found.num_spaces,
        "nodes": found.num_nodes,
        "left_out": dict(sorted(found.left_out.items())),
    }


def _describe(found: Found, extensions: Extensions) -> list[str]:
    """What was searched, how sure the answer is, and what was not counted."""
    lines = []
    counted = [
        words
        for is_on, words in (
            (extensions.counts_every_stage or extensions.spread, "every stage as the slowest"),
            (extensions.counts_resharding, "resharding"),
        )
        if is_on
    ]
    if not counted and found.best is not None and found.best.whole_step_s > found.best.step_s * _WORTH_TELLING:
        lines.append("--count-every-stage and --count-resharding search with what Galvatron's formula leaves out")
    if counted:
        lines.append(f"searched with {' and '.join(counted)} counted: {found.searched_s:.6f} s")
    if found.is_proven:
        lines.append("proven: no plan of this space is faster")
    else:
        lines.append(f"not proven: a plan of this space may be up to {found.gap_fraction:.3%} faster")
    lines += [f"left out {number} times: {reason}" for reason, number in sorted(found.left_out.items())]
    return lines
