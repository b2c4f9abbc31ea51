"""`verify CERTIFICATE.json`: check a proof without the solver that found it."""

from __future__ import annotations

import argparse
from pathlib import Path

from mm_autoparallel.cli.arguments import seconds
from mm_autoparallel.cli.output import print_document, print_text
from mm_autoparallel.errors import PlanError

HELP = "check the certificate of a placement"
DESCRIPTION = (
    "Check the certificate that `place --certificate` wrote: that the placement fits its problem, takes the time it "
    "claims, and that no other takes less than its bound. The solvers that found it are not used: the bound is "
    "confirmed by the simulator with a second solver or a search of its own. Exit code 0 says that everything claimed "
    "is confirmed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("certificate", type=Path, metavar="CERTIFICATE.json")
    parser.add_argument(
        "--time-limit", type=seconds, default=600.0, metavar="S", help="give the bound up after S seconds"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Verify and print. What is refused or left open is an error; with --json its reason is also in the document."""
    from mm_autoparallel.api import read_certificate, verify
    from mm_autoparallel.api.placed import VERIFICATION_SCHEMA

    certificate = read_certificate(arguments.certificate)
    try:
        result = verify(certificate, time_limit_s=arguments.time_limit)
    except PlanError as error:
        if arguments.json:
            print_document({"schema": VERIFICATION_SCHEMA, "verified": False, "reason": str(error)})
        raise PlanError(f"certificate {arguments.certificate}: {error}") from None
    if arguments.json:
        print_document(result.document())
    else:
        print_text(result.table())
    return 0
