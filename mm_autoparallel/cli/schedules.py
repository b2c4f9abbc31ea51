"""`schedules export SOURCE --to torch` and `schedules import FILE.csv`: orders as files that frameworks run."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.arguments import count
from mm_autoparallel.cli.output import print_document, print_line, print_text
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import check_writable, say, warn, write_file

HELP = "write orders of forwards and backwards for a framework, and read them"
DESCRIPTION = (
    "export writes the order of a schedule, of a problem or of a placement as the CSV that "
    "torch.distributed.pipelining runs; import reads such a CSV, checks that every action is there once and that the "
    "order ends, and prints it as a text for each stage, as a problem file has it under orders."
)

_EXPORT_ONLY = ("framework", "stages", "chunks", "micro_batches", "placed", "frozen_stages", "out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("direction", choices=("export", "import"), metavar="export|import")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="export: a schedule's name, a PROBLEM.json, or what `place --json` printed of an order; import: a CSV",
    )
    parser.add_argument("--to", dest="framework", choices=("torch",), help="export: the framework")
    parser.add_argument("--stages", type=count, metavar="N", help="export: stages, of a schedule by name")
    parser.add_argument("--chunks", type=count, metavar="N", help="export: chunks of each stage (default: the fewest)")
    parser.add_argument("--micro-batches", type=count, metavar="N", help="export: of a schedule by name")
    parser.add_argument(
        "--placed", type=Path, metavar="RESULT.json", help="export: what `place PROBLEM.json --json` printed"
    )
    parser.add_argument(
        "--frozen-stages",
        type=int,
        metavar="N",
        help="export: virtual stages in front that train nothing (default: as the problem's placement has it)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="export: write to this file, and print nothing")
    parser.add_argument("--json", action="store_true", help="import: print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Export or import."""
    return _export(arguments) if arguments.direction == "export" else _import(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from mm_autoparallel.api.schedules import Sizes, export_schedule

    if arguments.framework is None:
        raise JobError("schedules export: --to is missing: torch")
    if arguments.json:
        raise JobError("schedules export: --json goes with import; a CSV is written")
    if (arguments.frozen_stages or 0) < 0:
        raise JobError(f"--frozen-stages {arguments.frozen_stages} is below 0")
    if arguments.out is not None:
        check_writable(arguments.out)
    sizes = Sizes(arguments.stages, arguments.chunks, arguments.micro_batches)
    text, notes = export_schedule(arguments.source, sizes, arguments.placed, arguments.frozen_stages)
    warn(notes)
    if arguments.out is None:
        print_text(text)
    else:
        write_file(arguments.out, text)
        say(f"wrote {arguments.out}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from mm_autoparallel.api.schedules import import_schedule

    for name in _EXPORT_ONLY:
        if getattr(arguments, name) is not None:
            option = "--to" if name == "framework" else f"--{name.replace('_', '-')}"
            raise JobError(f"schedules import: {option} goes with export")
    document = import_schedule(arguments.source)
    if arguments.json:
        print_document(document)
    else:
        for order in document["orders"]:
            print_line(order)
    return 0
