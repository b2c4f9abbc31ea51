"""Holds plans in PaddleNLP's arguments against its trainer: what they become, and what it asks fleet for.

python tests/frameworks/paddlenlp_parser.py --environment DIR [--plans 40] [--seed 1]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from held_against import main

from mm_autoparallel.planner.plan import Plan

OWN = {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "bf16": True, "do_train": True}


def expect(plan: Plan) -> dict[str, Any]:
    """Sizes and batches; the degrees of fleet (dp, mp, pp, sharding, sep)."""
    strategy = plan.strategy
    shares = strategy.zero > 0 and strategy.dp > 1
    replicas = [1, strategy.dp] if shares else [strategy.dp, 1]
    found: dict[str, Any] = {
        "tp": strategy.tp,
        "pp": strategy.pp,
        "sep": strategy.cp,
        "sequences": strategy.tp > 1 and strategy.sequence_parallel,
        "sharding": [f"stage{strategy.zero}"] if shares else [],
        "batch": plan.global_batch_size,
        "again": any(plan.recompute["text"]),
    }
    if strategy.tp * strategy.pp * strategy.cp > 1:
        found["fleet"] = [replicas[0], strategy.tp, strategy.pp, replicas[1], strategy.cp]
    if strategy.pp > 1:
        found["outside"] = "sharding_first" if strategy.rank_order == "tp-cp-ep-pp-dp" else "pp_first"
    return found


if __name__ == "__main__":
    into = {"arguments.json": json.dumps(OWN, indent=2)}
    sys.exit(main("paddle", expect, version="3.0", read_back="arguments.json", into=into, probe_name="paddlenlp"))
