"""Static bytes of parameters: weights, gradients and optimizer state, by what trains and what ZeRO shards.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5): stage 0 keeps all of it on every data-parallel rank,
stage 1 shards the optimizer state over the data- and context-parallel ranks, which all hold the same weights.
With the default bytes that is 2 + 4 + 12 and 2 + 4 + 12/(dp·cp) per parameter. A framework that keeps the fp32 copy in
the bf16 weights' place (MindSpeed's --reuse-fp32-param) saves 2 of the 12: state it as optimizer_bytes.
"""

from __future__ import annotations

from mm_autoparallel.blocks.chain import Block, OutputHead, TokenEmbedding
from mm_autoparallel.blocks.parameters import count_parameters
from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.job.workload import Workload


def count_held_parameters(
    block: Block, parameter_count: float, strategy: Strategy, table_count: float | None = None
) -> float:
    """Parameters on one device, given the block's own `parameter_count` there and that of the vocabulary table.

    A tied head holds a copy of the embedding's table where the two can lie on different stages, and none where there is
    one stage (Megatron-LM, core/models/common/language_module).
    """
    head = block.structure
    if isinstance(head, OutputHead) and head.tied and strategy.pp > 1:
        if table_count is None:
            table_count = count_parameters(TokenEmbedding(head.vocab_size, head.hidden_size), strategy.tp)
        return parameter_count + table_count
    return parameter_count


def sharded_over(strategy: Strategy) -> int:
    """Ranks among which the optimizer state of one parameter divides."""
    return strategy.dp * strategy.cp if strategy.zero >= 1 else 1


def static_bytes(held_count: float, trainable: bool, workload: Workload, strategy: Strategy) -> float:
    """Bytes that `held_count` parameters keep on one device through the whole step; frozen ones are weights alone."""
    per_parameter_bytes = workload.weight_bytes
    if trainable:
        per_parameter_bytes += workload.gradient_bytes + workload.optimizer_bytes / sharded_over(strategy)
    return held_count * per_parameter_bytes
