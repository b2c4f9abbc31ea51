"""Holds exported plans against accelerate's launcher: the environment it makes of them is the plan.

python tests/frameworks/accelerate_parser.py --environment DIR [--plans 40] [--seed 1]
"""

from __future__ import annotations

import sys
from typing import Any

from held_against import main

from mm_autoparallel.planner.plan import Plan


def expect(plan: Plan) -> dict[str, Any]:
    """The variables that a training starts with."""
    strategy = plan.strategy
    if strategy.zero > 1:
        shard = strategy.shard or strategy.dp * strategy.cp
        sizes = {
            "DP_REPLICATE_SIZE": strategy.dp * strategy.cp // shard,
            "DP_SHARD_SIZE": shard // strategy.cp,
            "TP_SIZE": strategy.tp,
            "CP_SIZE": strategy.cp,
        }
        return {f"PARALLELISM_CONFIG_{key}": str(size) for key, size in sizes.items()} | {
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": str(strategy.reshard).lower(),
            "FSDP_ACTIVATION_CHECKPOINTING": str(any(plan.recompute["text"])).lower(),
            "processes": strategy.world_size,
        }
    sizes = {
        "TP_DEGREE": strategy.tp,
        "PP_DEGREE": strategy.pp,
        "NUM_MICRO_BATCHES": plan.num_microbatches,
        "CONTEXT_PARALLEL_SIZE": strategy.cp,
        "EXPERT_MODEL_PARALLEL_SIZE": strategy.ep,
    }
    return {f"MEGATRON_LM_{key}": str(size) for key, size in sizes.items()} | {"processes": strategy.world_size}


if __name__ == "__main__":
    sys.exit(main("accelerate", expect))
