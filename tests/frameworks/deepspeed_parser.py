"""Holds exported plans against DeepSpeed: its configuration's figures, and the layers that each stage builds.

python tests/frameworks/deepspeed_parser.py --environment DIR [--plans 40] [--seed 1]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import accumulate
from typing import Any

from held_against import main

from mm_autoparallel.planner.plan import Plan


def expect(plan: Plan) -> dict[str, Any]:
    """Figures of the configuration; of each stage, the entries that it builds (an embedding before, a head behind), and
    which of them run again."""
    strategy, held, again = plan.strategy, plan.layers["text"], plan.recompute["text"]
    found: dict[str, Any] = {
        "batch": plan.global_batch_size,
        "mbs": strategy.mbs,
        "micro_batches": plan.num_microbatches,
        "zero": strategy.zero,
        "offload": strategy.optimizer_offload,
        "tp": strategy.tp,
    }
    if strategy.pp == 1:
        return found | {"again": list(range(again[0]))}
    ends = list(accumulate(held, initial=1))
    starts, stops = [0, *ends[1:-1]], [*ends[1:-1], ends[-1] + 1]
    first = [1, *[0] * (strategy.pp - 1)]
    stages = zip(starts, stops, again, first, strict=True)
    return found | {"stages": [[a, b, list(range(at, at + number))] for a, b, number, at in stages]}


def usual(plan: Plan) -> Plan:
    """Drawn plans divide sequences by TP, which AutoTP does not."""
    return replace(plan, strategy=replace(plan.strategy, sequence_parallel=False))


if __name__ == "__main__":
    sys.exit(main("deepspeed", expect, change=usual))
