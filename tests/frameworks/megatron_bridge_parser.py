"""Holds exported plans against Megatron-Bridge: its overrides, its configuration's checks, its layers of each stage.

python tests/frameworks/megatron_bridge_parser.py --environment DIR [--plans 40] [--seed 1]
"""

from __future__ import annotations

import sys
from typing import Any

from held_against import main

from mm_autoparallel.integrations.megatron_core.flags import SHARDINGS
from mm_autoparallel.planner.plan import Plan


def expect(plan: Plan) -> dict[str, Any]:
    """Sizes, batches, sharding, and the layers of each stage and chunk with those that recompute."""
    strategy = plan.strategy
    found = {
        **{name: getattr(strategy, name) for name in ("pp", "tp", "cp", "ep", "dp", "vpp", "mbs")},
        "batch": plan.global_batch_size,
        "sequences": strategy.tp > 1 and strategy.sequence_parallel,
        "zero": SHARDINGS[strategy.zero] if strategy.zero > 1 else strategy.zero,
        "offloaded": strategy.optimizer_offload,
        "outside": strategy.pp > 1 and strategy.rank_order == "tp-cp-ep-pp-dp",
        "layers": list(plan.layers["text"]),
        "recompute": list(plan.recompute["text"]),
    }
    return {"yaml": found, "words": found}


if __name__ == "__main__":
    sys.exit(main("megatron-bridge", expect))
