"""Holds exported plans against Colossal-AI: the plugin that planned_plugin.py calls, built for every stage.

python tests/frameworks/colossalai_parser.py --environment DIR [--plans 40] [--seed 1]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from held_against import main

from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER
from mm_autoparallel.planner.plan import Plan


def expect(plan: Plan) -> dict[str, Any]:
    """Sizes, and of each stage the layers that it holds and recomputes, chunk by chunk; which rank follows the first of
    a pipeline."""
    strategy, held, again = plan.strategy, plan.layers["text"], plan.recompute["text"]
    divides = strategy.tp > 1 and strategy.sequence_parallel
    modes = {"all_to_all": "all_to_all", "ring": "ring_attn"}
    found: dict[str, Any] = {
        "sizes": [strategy.tp, strategy.pp, strategy.cp, strategy.dp],
        "zero": strategy.zero,
        "offload": strategy.optimizer_offload,
        "mode": modes[strategy.cp_kind or "ring"] if strategy.cp > 1 else "split_gather" if divides else None,
    }
    if strategy.pp > 1:
        inner = 1 if strategy.rank_order != DEFAULT_RANK_ORDER else strategy.dp
        found["next"] = strategy.tp * strategy.cp * inner
        found["mbs"] = strategy.mbs
        found["held"], found["again"] = [*held], [*again] if any(again) else []
    return found


def usual(plan: Plan) -> Plan:
    """Drawn plans recompute with one stage too, and divide sequences beside CP; neither has a keyword."""
    strategy = plan.strategy
    if strategy.pp == 1:
        plan = replace(plan, recompute={key: (0,) * len(each) for key, each in plan.recompute.items()})
    divides = strategy.sequence_parallel and strategy.cp == 1
    return replace(plan, strategy=replace(strategy, sequence_parallel=divides))


if __name__ == "__main__":
    sys.exit(main("colossalai", expect, change=usual))
