"""Holds exported configurations against torchtitan's newest code, which no release has (torchtitan_parser.py has 0.3).

python tests/frameworks/torchtitan_main_parser.py --environment DIR --checkout DIR [--plans 40] [--seed 1]

The environment is that of 0.3: its torch runs the code of the checkout too.
"""

from __future__ import annotations

import sys
from typing import Any

import torchtitan_parser
from held_against import main

from mm_autoparallel.integrations.torchtitan.config import MAIN
from mm_autoparallel.planner.plan import Plan


def expect(plan: Plan) -> dict[str, Any]:
    """As of 0.3; batches are MBS, samples of a step, and micro-batches where there is a pipeline."""
    rounds = plan.num_microbatches if plan.strategy.pp > 1 else 1
    return torchtitan_parser.expect(plan) | {"batch": [plan.strategy.mbs, plan.global_batch_size, rounds]}


if __name__ == "__main__":
    sys.exit(main("torchtitan", expect, version=MAIN, of_checkout=True))
