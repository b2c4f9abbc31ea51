"""`doctor`: what works on this machine, tried as `plan` uses it."""

from __future__ import annotations

import argparse

from mm_autoparallel.cli.output import print_document, print_text
from mm_autoparallel.errors import JobError

HELP = "try what planning needs on this machine"
DESCRIPTION = (
    "Try what planning needs: packages, folders, registered frameworks, compiled kernels, solver and checkers, on a "
    "small job; and tell which optional parts (torch and its devices, Ray, HiGHS, shell completion) are there. Exit "
    "code 0 says that nothing is broken, 2 that something is."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Try and print."""
    from mm_autoparallel.api.doctor import diagnose

    found = diagnose()
    if arguments.json:
        print_document(found.to_dict())
    else:
        print_text(found.table())
    return 0 if found.works else JobError.exit_code
