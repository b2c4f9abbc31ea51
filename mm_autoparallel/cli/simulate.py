"""`simulate JOB --config PLAN.json`: play a plan, edited or not, and show where its step goes."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "simulate a plan and show where its step goes"
DESCRIPTION = (
    "Simulate one training step of JOB under a plan: the step and where it goes, and per stage its layers, recompute, "
    "time, bubble and peak memory against the limit."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB")
    parser.add_argument("--config", type=Path, required=True, metavar="PLAN.json", help="the plan to simulate")
    parser.add_argument("--trace", type=Path, metavar="OUT.json", help="write the timeline for Perfetto")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
