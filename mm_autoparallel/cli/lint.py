"""`lint FILE...`: what launch files break or waste; for people, for programs, and for code hosts (SARIF)."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.given import add_given, read_given
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.reports.terminal import writing

HELP = "find what launch files break or waste"
DESCRIPTION = (
    "Find what the framework's own parser lets pass and the run does not, and what a run wastes: each with file, line "
    "and the flag that mends it. Nothing is executed. Exit code 1 where something is found."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("file", type=Path, nargs="+", metavar="FILE", help="launch scripts or configurations")
    add_given(parser)
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="RULE", help="a rule left out; may stand again"
    )
    parser.add_argument(
        "--fail-on",
        choices=("error", "warning", "note"),
        default="error",
        help="exit code 1 from this severity on (default: error)",
    )
    parser.add_argument("--format", choices=("text", "sarif", "json"), default="text", help="default: text")
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON or SARIF there, and the text as well")


def run(arguments: argparse.Namespace) -> int:
    """Look, print, count."""
    from mm_autoparallel.api.linted import lint_files, list_lines
    from mm_autoparallel.cli.job_words import read_cluster
    from mm_autoparallel.errors import JobError
    from mm_autoparallel.files import write_text_atomically
    from mm_autoparallel.lint.sarif import sarif_document
    from mm_autoparallel.planner.plan import format_document

    form = "json" if arguments.json else arguments.format
    if arguments.json and arguments.format == "sarif":
        raise JobError("--json and --format sarif both say what is printed; give one")
    if arguments.out is not None and form == "text":
        raise JobError("--out takes JSON or SARIF; give --format sarif beside it")
    named = arguments.device is not None or arguments.cluster is not None
    result = lint_files(
        arguments.file,
        framework=arguments.framework,
        device=arguments.device,
        cluster=read_cluster(arguments.cluster, arguments.device) if named else None,
        given=read_given(arguments),
        ignored=arguments.ignore,
    )
    document = (
        sarif_document(result.findings, result.rules, Path.cwd()) if form == "sarif" else result.document()
    )  # fmt: skip
    if arguments.out is not None:
        with writing(arguments.out):
            write_text_atomically(arguments.out, format_document(document))
    if form != "text" and arguments.out is None:
        print_document(document)
    else:
        for line in list_lines(result):
            print_line(line)
    return int(result.fails(arguments.fail_on))
