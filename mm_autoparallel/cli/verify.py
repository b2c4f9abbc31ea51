"""`verify CERTIFICATE.json`: check a proof without the solver that found it."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "check the certificate of a placement"
DESCRIPTION = (
    "Check the certificate that `place --certificate` wrote: that the placement fits its problem, takes the time it "
    "claims, and that the proof holds. The simulator alone is used, not the solver that found the placement."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("certificate", type=Path, metavar="CERTIFICATE.json")
