"""Holds exported plans against torchtitan: its configuration manager, and its law of parallel sizes.

python tests/frameworks/torchtitan_parser.py --environment DIR [--plans 40] [--seed 1]

torchtitan_0_2_parser.py does so for TOMLs of 0.2, torchtitan_main_parser.py for the newest code.
"""

from __future__ import annotations

import sys
from typing import Any

from held_against import main

from mm_autoparallel.planner.plan import Plan


def expect(plan: Plan, is_toml: bool = False) -> dict[str, Any]:
    """Sizes, what each part holds, batches, and the layers that run again."""
    strategy, held = plan.strategy, plan.layers["text"]
    shard = (strategy.shard or strategy.dp * strategy.cp) if strategy.zero == 3 else 1
    shards = shard // strategy.cp if strategy.zero == 3 else 1
    names = [[f"layers.{sum(held[:part]) + index}" for index in range(count)] for part, count in enumerate(held)]
    again = [name for part, number in zip(names, plan.recompute["text"], strict=True) for name in part[:number]]
    found = {
        "copies": strategy.dp // shards,
        "shards": shards,
        "reshard": "always" if strategy.reshard else "never",
        "tp": strategy.tp,
        "cp": strategy.cp,
        "ep": strategy.ep,
        "pp": strategy.pp,
        "parts": names if strategy.pp > 1 else [],
        "again": ("full" if again else "none") if is_toml else again,
    }
    if strategy.pp > 1:
        found["batch"] = [strategy.mbs * plan.num_microbatches, plan.global_batch_size, strategy.mbs]
    return found if is_toml else found | {"sequences": strategy.sequence_parallel}


if __name__ == "__main__":
    sys.exit(main("torchtitan", expect))
