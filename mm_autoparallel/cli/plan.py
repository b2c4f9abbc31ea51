"""`plan JOB`: search the strategies that a job allows, and write the best plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.arguments import count, seconds

HELP = "find the best plan of a job and write it"
DESCRIPTION = (
    "Search the whole space of strategies that JOB allows, and write auto_parallel_search_optimal_config.json: the "
    "best plan, its simulated step, and a bound that says how much faster any plan could be at most."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where to write (default: here)")
    parser.add_argument("--time-limit", type=seconds, metavar="S", help="end with the best so far after S seconds")
    parser.add_argument("--top-k", type=count, default=1, metavar="K", help="how many of the best plans to show")
    parser.add_argument("--engine", choices=("local",), default="local", help="where candidates are solved")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
