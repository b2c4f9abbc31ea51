"""What a stage holds once, however many blocks ask for it, and what a device keeps outside the allocator, by cause.

- Workspaces of matrix products. PyTorch allocates one for each handle, and has a handle for each thread that computes:
  the one that runs forward and autograd's, which runs backward (aten/src/ATen/cuda/CublasHandlePool.cpp;
  `Device.matrix_workspace_bytes`; 32 MiB under CUBLAS_WORKSPACE_CONFIG=:4096:8, which determinism asks for).
  TransformerEngine has one of its own (transformer_engine/pytorch/cpp_extensions/gemm.py).
- Dummy gradients. With gradient_fusion TransformerEngine hands autograd one tensor in the shape of each weight, shared
  by all weights of that shape, and never frees it (pytorch/module/base.py, get_dummy_wgrad; Megatron-LM takes the
  head's from there too, core/tensor_parallel/layers.py).
- The score buffer of Megatron-LM's own attention, which is kept for the next layer
  (core/transformer/dot_product_attention.py, get_global_memory_buffer).
- The tensors of the micro-batch that is being worked on: tokens, labels and positions of 8 bytes, a loss mask of 4, and
  where attention is not fused a mask of one byte for every pair of tokens (Megatron-LM, training/utils.py,
  get_batch_on_this_tp_rank), on the first and the last stage.
- The mask of one byte for every pair of tokens that a Llama of MindFormers makes of each micro-batch for all its layers
  (mindformers/models/llama/llama.py); one counts here, those of more in flight do not.
"""

from __future__ import annotations

from mm_autoparallel.model.blocks.chain import (
    Attention,
    Block,
    Experts,
    OutputHead,
    PredictionModule,
    TokenEmbedding,
    Traced,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.job.cluster import Device
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import ELEMENT_BYTES, Share
from mm_autoparallel.units import MIB

DETERMINISTIC_WORKSPACE_BYTES = 32 * MIB
"""Eight buffers of 4096 KiB."""

_HOPPER_WORKSPACE_BYTES = 32 * MIB
"""PyTorch's, by which devices with TransformerEngine's larger workspace are told."""

OPEN_SEGMENTS_BYTES = (2 + 20) * MIB
"""Segments that PyTorch's allocator reserves for small tensors and for those of 1 to 10 MiB, of which one each is
partly empty (c10/cuda/CUDACachingAllocator.cpp, kSmallBuffer, kLargeBuffer); what fragments beside is left by
`Cluster.memory_fraction`."""

_GROUPED_STREAMS = 4
"""Streams on which TransformerEngine multiplies experts' matrices, each with a workspace (get_num_cublas_streams)."""

SHARED_MASK = "attention mask of all layers"

_BATCH_BYTES_PER_TOKEN = 8 + 8 + 8 + 4


def list_held_once(
    block: Block, tokens: TokenCounts, share: Share, workload: Workload, device: Device
) -> tuple[tuple[str, float], ...]:
    """Names and bytes of what `block` makes its stage hold once, for micro-batches of `tokens` per sample."""
    if tokens.layer_tokens == 0:
        return ()
    held: dict[str, float] = {}
    layer = _layer_of(block)
    by_engine = workload.stack == "megatron-te" and layer is not None
    if device.matrix_workspace_bytes:
        if by_engine:
            held["TransformerEngine's workspace"] = engine_workspace_bytes(device)
        if layer and by_engine and isinstance(layer.mlp, Experts):
            held["TransformerEngine's workspaces of experts"] = _GROUPED_STREAMS * engine_workspace_bytes(device)
        if not (by_engine and _is_all_engine(block, workload)) and not isinstance(block.structure, TokenEmbedding):
            num_threads = 2 if block.has_backward else 1
            held["PyTorch's workspaces"] = num_threads * matrix_workspace_bytes(device, workload)
    if share.shared_gradients and block.trainable and (by_engine or isinstance(block.structure, OutputHead)):
        held |= _list_dummy_gradients(block, tokens, share)
    scores = workload.stack == "megatron-local" and workload.attention == "unfused"
    if scores and layer and isinstance(layer.attention, Attention):
        pairs_count = share.mbs * tokens.layer_tokens * tokens.span_tokens / share.cp
        held["score buffer"] = ELEMENT_BYTES * pairs_count * layer.attention.num_heads / share.tp
    if share.graph and not share.mask_compression and layer and isinstance(layer.attention, Attention):
        held[SHARED_MASK] = share.rows(tokens.layer_tokens) * tokens.span_tokens
    text_end = isinstance(block.structure, Traced) and block.kind in ("text_pre", "text_post")
    if text_end or isinstance(block.structure, (TokenEmbedding, OutputHead)):
        mask_bytes = tokens.layer_tokens**2 if workload.attention == "unfused" else 0
        held["micro-batch"] = share.mbs * (_BATCH_BYTES_PER_TOKEN * tokens.layer_tokens + mask_bytes) / share.cp
    return tuple(held.items())


def matrix_workspace_bytes(device: Device, workload: Workload) -> float:
    """PyTorch's workspace of one thread that multiplies matrices."""
    return float(DETERMINISTIC_WORKSPACE_BYTES if workload.deterministic else device.matrix_workspace_bytes)


def engine_workspace_bytes(device: Device) -> float:
    """TransformerEngine's: 4 MiB, from Hopper on 32 MiB and 1 KiB."""
    return 32.0 * MIB + 1024 if device.matrix_workspace_bytes >= _HOPPER_WORKSPACE_BYTES else 4.0 * MIB


def count_communicators(strategy: Strategy, tied: bool, dealing_ranks: int = 1) -> int:
    """Communicators of one device: of all ranks, and of each group of several in which it computes.

    tensor, context and pipeline parallel, the ranks with the same weights, model parallel ranks (the gradients' norm),
    the ranks of a tied table, and expert parallel (Megatron-LM, core/parallel_state.py; HCCL and NCCL make one when it
    is first used). dealing_ranks: as Strategy's; beside a ring these have one, and the ranks of the ring another.
    """
    is_hierarchical = 1 < dealing_ranks < strategy.cp
    groups = (
        strategy.world_size,
        strategy.tp,
        strategy.cp,
        strategy.pp,
        strategy.dp * strategy.cp,
        strategy.tp * strategy.pp,
        strategy.pp if tied else 1,
        strategy.ep,
        strategy.expert_dp if strategy.ep > 1 else 1,
        strategy.shard,
        strategy.dp * strategy.cp // strategy.shard if strategy.shard else 1,
    )
    return sum(size > 1 for size in groups) + (2 if is_hierarchical else 0) + _count_layer_groups(strategy)


def _count_layer_groups(strategy: Strategy) -> int:
    """Groups that layers' other layouts add: each tensor, context and data parallel size that has none yet."""
    own = strategy.layout
    sizes = {("tp", own.tp), ("cp", own.cp), ("dp", own.dp * own.cp)}
    added = {pair for of in strategy.layouts for pair in (("tp", of.tp), ("cp", of.cp), ("dp", of.dp * of.cp))}
    return sum(size > 1 for _, size in added - sizes)


def count_communicator_kinds(strategy: Strategy) -> int:
    """How many kinds of groups of several ranks a device computes in: tensor, context, pipeline, data and expert
    parallel."""
    of_layers = (strategy.layout, *strategy.layouts)
    groups = (max(of.tp for of in of_layers), max(of.cp for of in of_layers), strategy.pp)
    return sum(size > 1 for size in (*groups, max(of.dp * of.cp for of in of_layers), strategy.ep))


def _layer_of(block: Block) -> TransformerLayer | None:
    """The transformer layer that `block` is or contains."""
    structure = block.structure
    if isinstance(structure, PredictionModule):
        return structure.layer
    return structure if isinstance(structure, TransformerLayer) else None


def _is_all_engine(block: Block, workload: Workload) -> bool:
    """Whether every product of a layer is TransformerEngine's: those of routers and of unfused attention are not."""
    structure = block.structure
    dense = isinstance(structure, TransformerLayer) and not isinstance(structure.mlp, Experts)
    return dense and workload.attention == "flash"


def _list_dummy_gradients(block: Block, tokens: TokenCounts, share: Share) -> dict[str, float]:
    """One bf16 gradient for each shape of a weight; routers and gates, with few outputs, have none."""
    layer = _layer_of(block)
    others = (layer.mlp.num_experts, 1) if layer and isinstance(layer.mlp, Experts) else ()
    shapes = {
        (product.output_count, product.input_count)
        for product in list_operators(block.structure, tokens, share).products
        if product.output_count not in others
    }
    return {f"dummy gradient {rows:g} x {columns:g}": ELEMENT_BYTES * rows * columns for rows, columns in shapes}
