"""`verify CERTIFICATE.json`: check a proof without the solver that found it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import seconds
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import PlanError

if TYPE_CHECKING:
    from mm_autoparallel.placement.proof.verify import Verification

HELP = "check the certificate of a placement"
DESCRIPTION = (
    "Check the certificate that `place --certificate` wrote: that the placement fits its problem, takes the time it "
    "claims, and that no other takes less than its bound. The solvers that found it are not used: the bound is "
    "confirmed by the simulator with a second solver or a search of its own. Exit code 0 says that everything claimed "
    "is confirmed."
)
SCHEMA = "mm-autoparallel/verification/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("certificate", type=Path, metavar="CERTIFICATE.json")
    parser.add_argument(
        "--time-limit", type=seconds, default=600.0, metavar="S", help="give the bound up after S seconds"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Verify and print. What is refused or left open is an error; with --json its reason is also in the document."""
    from mm_autoparallel.placement.proof.certificate import read_certificate
    from mm_autoparallel.placement.proof.verify import verify
    from mm_autoparallel.simulate.compiled import announce_compilation

    certificate = read_certificate(arguments.certificate)
    announce_compilation("engine.play")
    try:
        verification = verify(certificate, arguments.time_limit)
    except PlanError as error:
        if arguments.json:
            print_document({"schema": SCHEMA, "verified": False, "reason": str(error)})
        raise PlanError(f"certificate {arguments.certificate}: {error}") from None
    if arguments.json:
        print_document(verification_document(verification))
    else:
        _print_words(verification)
    return 0


def verification_document(verification: Verification) -> dict[str, Any]:
    """What `--json` prints for a certificate whose claims are all confirmed."""
    return {
        "schema": SCHEMA,
        "verified": True,
        "step_ms": verification.step_ms,
        "lower_bound_ms": verification.lower_bound_ms,
        "gap_fraction": verification.gap_fraction,
        "method": verification.method,
        "num_cuts": verification.num_cuts,
        "seconds": round(verification.verify_s, 3),
    }


def _print_words(verification: Verification) -> None:
    print_line(f"placement confirmed: it fits its memory and takes {verification.step_ms:.3f} ms a step")
    if verification.lower_bound_ms is None or verification.gap_fraction is None:
        print_line("no bound is claimed")
        return
    how = {
        "cuts": f"a second solver finds none that keeps {verification.num_cuts} paths shorter",
        "tree": "a search of its own finds none",
        "mixtures": "mean paths of its own pass it on every placement",
        "prices": "the prices of its parts show that of every placement",
    }[verification.method]
    print_line(
        f"bound confirmed: no placement is below {verification.lower_bound_ms:.3f} ms "
        f"(gap {verification.gap_fraction * 100:.3f} %); {how} ({verification.verify_s:.2f} s)"
    )
