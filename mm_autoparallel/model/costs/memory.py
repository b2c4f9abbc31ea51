"""Static bytes of parameters: weights, gradients and optimizer state, by what trains and what ZeRO shards.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5): stage 0 keeps all of it on every data-parallel rank,
stage 1 shards the optimizer state, stage 2 gradients too and stage 3 weights too, over the z ranks that hold the same
weights: data- and context-parallel ones, and of routed experts those that hold the same part of the same experts
(Megatron-LM, core/parallel_state.py, expert data parallel), or fewer where these hold several copies (Strategy.shard).
With the default bytes that is 2 + 4 + 12, 2 + 4 + 12/z, 2 + (4 + 12)/z and (2 + 4 + 12)/z per parameter. A framework
that keeps the fp32 copy in the bf16 weights' place (MindSpeed's --reuse-fp32-param; FSDP2 around fp32 weights, which
are cast where they are gathered) saves 2 of the 12: state it as optimizer_bytes. Gradients that are not fp32 are copied
for the optimizer's step alone, when no activations are held, and do not count.

Beside its shards a stage then holds the whole gradients of the block that computes them and of the one whose are being
reduced, and the whole weights of the block at work and of the one that is gathered ahead (list_whole; Megatron-FSDP's
double buffer, core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py; FSDP2 prefetches one module). Weights
kept from forward to backward (reshard false) stay whole in all blocks, beside their shards. Optimizer states on the
host take nothing of the device; with them lie there the gradients that have come and the weights that go back
(model/costs/communication.py, host_optimizer_ms).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mm_autoparallel.model.blocks.chain import (
    Block,
    Experts,
    OutputHead,
    PredictionModule,
    Structure,
    TokenEmbedding,
    Traced,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import MINDSPEED, Workload

_STATE_BYTES = 4.0
"""Adam's states are fp32."""

_MOMENT_BYTES = 2 * _STATE_BYTES
"""Both moments, where there is more than them; of smaller states half is taken for the weights' copy (assumed)."""


@dataclass(frozen=True)
class StaticBytes:
    """What parameters keep on one device through the whole step. moment_bytes: the part of optimizer_bytes that Adam's

    first step makes (its moments; the fp32 copies of weights are there before). host_bytes: on the host beside that.
    """

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    moment_bytes: float = 0.0
    host_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def count_held_parameters(
    block: Block, parameter_count: float, strategy: Strategy, table_count: float | None = None
) -> float:
    """Parameters on one device, given the block's own `parameter_count` there and that of the vocabulary table.

    A tied head holds a copy of the embedding's table where the two can lie on different stages, and none where there is
    one stage (Megatron-LM, core/models/common/language_module). Prediction modules share one such copy, which is the
    head's where that has one.
    """
    head = block.structure
    if isinstance(head, Traced):
        copied = head.table_count if strategy.pp > 1 and not head.holds_table else 0
        return parameter_count + copied
    if isinstance(head, OutputHead) and head.tied:
        vocab_size, hidden_size, num_sharing = head.vocab_size, head.hidden_size, 1
    elif isinstance(head, PredictionModule) and not head.tied:
        vocab_size, hidden_size, num_sharing = head.vocab_size, head.layer.hidden_size, block.count
    else:
        return parameter_count
    if strategy.pp == 1:
        return parameter_count
    if table_count is None:
        table_count = count_parameters(TokenEmbedding(vocab_size, hidden_size), strategy.tp)
    return parameter_count + table_count / num_sharing


def sharded_over(strategy: Strategy, expert: bool = False) -> int:
    """Ranks among which the optimizer state of one parameter divides. expert: of a routed expert."""
    if strategy.zero == 0:
        return 1
    if expert and (strategy.ep > 1 or not strategy.shard):
        return strategy.expert_dp
    return strategy.shard_ranks


def static_bytes(
    held_count: float,
    trainable: bool,
    workload: Workload,
    strategy: Strategy,
    expert_count: float = 0.0,
    frozen_count: float = 0.0,
    each_weight_bytes: float | None = None,
) -> StaticBytes:
    """What `held_count` parameters, `expert_count` of them routed experts, keep; frozen ones are weights alone.

    frozen_count: how many of them do not train although the block does; then no expert does. each_weight_bytes: of one
    weight (None: as the workload says).
    """
    each_weight_bytes = workload.weight_bytes if each_weight_bytes is None else each_weight_bytes
    sharded_count = _count_sharded(held_count, expert_count, strategy)
    weight_count = held_count
    if strategy.zero == 3:
        weight_count = sharded_count
        if not strategy.reshard:
            weight_count += count_scattered(held_count, expert_count, strategy)
    trained_count = held_count - frozen_count if trainable else 0.0
    trained_shard_count = sharded_count
    if frozen_count or not trainable:
        trained_shard_count = _count_sharded(trained_count, 0.0, strategy)
    weight_bytes = weight_count * each_weight_bytes
    if workload.stack == "mindspeed-fsdp" or (workload.stack == "mindspeed-mm" and strategy.zero == 3):
        # shards are fp32, and cast where they are gathered
        weight_bytes += (sharded_count - trained_shard_count) * max(0.0, _STATE_BYTES - workload.weight_bytes)
    if not trainable:
        return StaticBytes(weight_bytes, 0.0, 0.0)
    sharded_count = trained_shard_count
    gradient_bytes = (sharded_count if strategy.zero >= 2 else trained_count) * workload.gradient_bytes
    if strategy.optimizer_offload:
        each_bytes = workload.optimizer_bytes + workload.gradient_bytes + workload.weight_bytes
        host_bytes = sharded_count * each_bytes
        return StaticBytes(weight_bytes, gradient_bytes, 0.0, host_bytes=host_bytes)
    return StaticBytes(
        weight_bytes,
        gradient_bytes,
        sharded_count * workload.optimizer_bytes,
        sharded_count * (_MOMENT_BYTES if workload.optimizer_bytes > _MOMENT_BYTES else workload.optimizer_bytes / 2),
    )


def _count_sharded(held_count: float, expert_count: float, strategy: Strategy) -> float:
    """Parameters of which one rank holds what is sharded."""
    dense_count = (held_count - expert_count) / sharded_over(strategy)
    return dense_count + expert_count / sharded_over(strategy, expert=True)


def count_scattered(held_count: float, expert_count: float, strategy: Strategy) -> float:
    """Parameters of which other ranks hold a part, where ZeRO shards them: what is gathered and reduced."""
    dense_count = held_count - expert_count if sharded_over(strategy) > 1 else 0.0
    return dense_count + (expert_count if sharded_over(strategy, expert=True) > 1 else 0.0)


def list_whole(
    blocks: Sequence[Block],
    scattered_counts: Sequence[float],
    workload: Workload,
    strategy: Strategy,
    trained_counts: Sequence[float] | None = None,
    gathered_bytes: Sequence[float] = (),
    by_modality: bool = False,
) -> list[tuple[tuple[str, float], ...]]:
    """Per block of a chain, names and bytes of what ZeRO 2 and 3 make its stage hold whole while it works.

    scattered_counts: count_scattered of one of each block. Its neighbour counts, in either pass, with the larger one;
    a frozen one has weights, and no gradients.
    trained_counts: the same of what trains of it, None where all does. gathered_bytes: of one weight of each block
    (empty: as the workload says). by_modality: whether each modality is a module of its own: nothing of one is gathered
    ahead, or still reduced, while another works.
    """
    modalities = [block.modality if by_modality else "" for block in blocks]
    trained_counts = scattered_counts if trained_counts is None else trained_counts
    reduced_counts = [n if block.trainable else 0.0 for block, n in zip(blocks, trained_counts, strict=True)]
    held = []
    for index, block in enumerate(blocks):
        named = []
        if strategy.zero == 3 and strategy.reshard:
            each_bytes = gathered_bytes[index] if gathered_bytes else workload.weight_bytes
            named.append(("gathered weights", _count_whole(block, index, scattered_counts, modalities) * each_bytes))
        if strategy.zero >= 2 and block.trainable:
            whole_count = _count_whole(block, index, reduced_counts, modalities)
            named.append(("gradients being reduced", whole_count * workload.gradient_bytes))
        held.append(tuple(named))
    return held


def _count_whole(block: Block, index: int, counts: Sequence[float], modules: Sequence[str]) -> float:
    """Of the block at `index` and the larger of its neighbours in the same one of `modules`."""
    beside = (at for at in (index - 1, index + 1) if 0 <= at < len(counts))
    near = [counts[at] for at in beside if modules[at] == modules[index]]
    near += [counts[index]] if block.count > 1 else []
    return counts[index] + max(near, default=0.0) if counts[index] else 0.0


def step_bytes(
    block: Block, held_count: float, expert_count: float, workload: Workload, strategy: Strategy
) -> tuple[float, float]:
    """What passes while Adam updates a block: of all its weights together, and of one weight alone.

    PyTorch's AdamW (torch/optim/adamw.py, foreach, its default) holds the square roots of all second moments at once;
    an optimizer of one's own that takes one flat weight of FSDP after the other (StackFacts.updates) those of a block.
    MindSpeed updates one weight after the other (mindspeed/optimizer/adamw.py), each by a kernel that works in one fp32
    tensor of its size (assumed: CANN's ApplyAdamWV2 takes its workspace from PyTorch's allocator). Megatron-LM's fused
    Adam works in place.
    """
    if not block.trainable or strategy.optimizer_offload:
        return 0.0, 0.0
    if workload.stack == "transformers":
        roots_bytes = _STATE_BYTES * _count_sharded(held_count, expert_count, strategy)
        return (0.0, roots_bytes) if workload.known_facts.updates == "each" else (roots_bytes, 0.0)
    if workload.stack in (*MINDSPEED, "mindspeed-fsdp"):
        largest_count = count_largest_weight(block.structure, strategy.tp, strategy.expert_tp)
        if strategy.zero == 3:  # of every weight a rank updates its shard
            return 0.0, _STATE_BYTES * min(largest_count, _count_sharded(held_count, expert_count, strategy))
        return 0.0, _STATE_BYTES * min(largest_count, held_count)
    return 0.0, 0.0


def count_largest_weight(structure: Structure, tp: int, expert_tp: int) -> float:
    """Numbers of the largest matrix that one rank holds of a block: a table, or the first of a feed-forward."""
    if isinstance(structure, (TokenEmbedding, OutputHead)):
        return structure.vocab_size * structure.hidden_size / tp
    layer = structure.layer if isinstance(structure, PredictionModule) else structure
    if not isinstance(layer, TransformerLayer):
        return float(count_parameters(structure, tp))
    if isinstance(layer.mlp, Experts):
        parts = [(layer.mlp.expert, expert_tp)] + ([(layer.mlp.shared, tp)] if layer.mlp.shared else [])
    else:
        parts = [(layer.mlp, tp)]
    return max(layer.hidden_size * part.ffn_size * (2 if part.gated else 1) / ranks for part, ranks in parts)
