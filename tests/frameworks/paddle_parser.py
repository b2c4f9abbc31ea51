"""Holds exported plans against PaddleFormers: what its arguments become, what it asks fleet for, and paddle's own cut.

python tests/frameworks/paddle_parser.py --environment DIR [--plans 40] [--seed 1]
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import Any

from held_against import main

from mm_autoparallel.planner.plan import Plan


def expect(plan: Plan) -> dict[str, Any]:
    """Sizes and batches; the degrees of fleet (dp, mp, pp, sharding, sep, ep); where uneven stages begin and end."""
    strategy, held = plan.strategy, plan.layers["text"]
    shares = strategy.zero > 0 and strategy.dp > 1
    replicas = [1, strategy.dp] if shares else [strategy.dp, 1]
    again = ["full", "uniform", 1] if any(plan.recompute["text"]) else [None, None, None]
    found = {
        "tp": strategy.tp,
        "pp": strategy.pp,
        "vpp": strategy.vpp,
        "sep": strategy.cp,
        "sequences": strategy.tp > 1 and strategy.sequence_parallel,
        "sharding": [f"stage{strategy.zero}"] if shares else [],
        "replicas": replicas,
        "batch": plan.global_batch_size,
        "again": again,
    }
    if strategy.tp * strategy.pp * strategy.cp * strategy.ep > 1:
        found["fleet"] = [replicas[0], strategy.tp, strategy.pp, replicas[1], strategy.cp, strategy.ep]
    if strategy.pp > 1:
        found["outside"] = "sharding_first" if strategy.rank_order == "tp-cp-ep-pp-dp" else "pp_first"
    if strategy.pp > 1 and len({*held}) > 1:
        found["cuts"] = [0, *list(accumulate(held, initial=1))[1:-1], sum(held) + 3]
    return found


if __name__ == "__main__":
    sys.exit(main("paddle", expect))
