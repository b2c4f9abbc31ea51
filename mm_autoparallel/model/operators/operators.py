"""What a block computes and keeps, as lists of operators: nothing here knows a device or a time.

A block is its matrix products, its attention, the bytes its memory-bound operators move, the tensors it keeps from
forward to backward, and its largest passing working sets. The rules of what is kept are those of Korthikanti et al.
2022 (arXiv:2205.05198, section 4): a product keeps its input for the gradient of its weight, attention and every
non-linear operator keep what their own gradient needs, and sequence parallelism divides what lies between the
tensor-parallel regions. A mask of dropout has one byte a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mm_autoparallel.model.job.context_law import repeats_groups
from mm_autoparallel.model.job.precision import RECIPES, Precision
from mm_autoparallel.model.job.stacks import FACTS, AttentionKernel, StackFacts
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import ExpertKind, Overlap, RecomputeOperator, Workload
from mm_autoparallel.model.profiles.collectives import ANY_GROUPS, ExpertGroups

ELEMENT_BYTES = 2
"""Activations are bf16."""


@dataclass(frozen=True)
class Share:
    """The part of a micro-batch that one device handles: `mbs` samples, divided by tensor and context parallel.

    sequence_parallel: norms, residuals and layer boundaries are divided by `tp` too. fused_attention: flash attention,
    which keeps no score matrices but `statistics_bytes` per token and head. hidden_dropout, attention_dropout,
    recompute_operators: as in Workload. eager: layers keep what those of Hugging Face's transformers do. ep, etp: ranks
    that experts are dealt to, and that share one (0: tp). fused_norms: a norm before matrices is part of the first, as
    in TransformerEngine's layers; those before a router or compressing matrices are not. cross_entropy and
    loss_chunk_tokens: as in Workload. shared_gradients: one weight gradient of each shape stands for all
    (TransformerEngine's with gradient_fusion), so none passes. exchanged_heads: context parallel ranks deal heads while
    attention runs: all of them, or `dealing_ranks` neighbours where that is not 0. gathered_keys: they gather all keys
    and values. graph: layers keep what a graph of MindFormers does (mindformers_operators.py). rerun_patterns,
    exchange_patterns: of such a graph, which operators run once more in the backward, and after which ones the exchange
    between ranks does.
    imbalance_factor: tokens of this rank's experts, or places for them, over an even share. mask_compression,
    overlap_all_to_all, ep_kind, token_rearrange, fused_matmul_fraction: as in Workload. facts: of the stack that runs
    it. precision: that of its linear layers.
    """

    mbs: int = 1
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    fused_attention: bool = True
    statistics_bytes: float = 4.0
    hidden_dropout: bool = False
    attention_dropout: bool = False
    recompute_operators: tuple[RecomputeOperator, ...] = ()
    eager: bool = False
    fused_norms: bool = False
    ep: int = 1
    etp: int = 0
    cross_entropy: Literal["unfused", "fused", "transformers", "shifted"] = "unfused"
    loss_chunk_tokens: int = 0
    shared_gradients: bool = False
    exchanged_heads: bool = False
    dealing_ranks: int = 0
    gathered_keys: bool = False
    imbalance_factor: float = 1.0
    overlap_all_to_all: Overlap = "none"
    ep_kind: ExpertKind = "megatron"
    token_rearrange: bool = False
    fused_matmul_fraction: float = 0.0
    graph: bool = False
    mask_compression: bool = False
    rerun_patterns: tuple[str, ...] = ()
    exchange_patterns: tuple[str, ...] = ()
    facts: StackFacts = FACTS["megatron-core"]
    precision: Precision = "bf16"

    @property
    def low(self) -> bool:
        """Whether its linear layers multiply in less than BF16."""
        return self.precision != "bf16"

    @property
    def input_bytes(self) -> float:
        """Of one number that a linear layer keeps of its input."""
        return RECIPES[self.precision].kept_bytes

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self.etp or self.tp

    @property
    def expert_gather(self) -> int:
        """Ranks whose own tokens come together for an expert; without sequence parallelism each has all of them."""
        return self.expert_tp if self.sequence_parallel else 1

    @property
    def sp(self) -> int:
        """What norms, residuals and layer boundaries are divided by."""
        return self.tp if self.sequence_parallel else 1

    @property
    def passing_ranks(self) -> int:
        """Context parallel ranks that hold other keys and values of the same heads while attention runs."""
        return self.cp // (self.dealing_ranks or self.cp) if self.exchanged_heads else self.cp

    def dealt_groups(self, num_heads: float, num_groups: float) -> float:
        """Of keys and values of a tensor parallel rank, as attention takes them: one a head where they are repeated."""
        dealing = self.dealing_ranks or self.cp
        repeated = self.exchanged_heads and repeats_groups(self.facts.repeated_groups, num_groups, dealing)
        return num_heads if repeated else num_groups

    @property
    def unfused_fraction(self) -> float:
        """What fused kernels leave of exposed tensor-parallel traffic."""
        return 1.0 - self.fused_matmul_fraction

    def rows(self, tokens_per_sample: float) -> float:
        """Tokens of this device's context-parallel part, over all samples of the micro-batch."""
        return self.mbs * tokens_per_sample / self.cp


def form_share(
    strategy: Strategy, workload: Workload, statistics_bytes: float, modality: str = "text", node_devices: int = 1
) -> Share:
    """What one device handles of a micro-batch of `modality`; statistics_bytes: of flash attention, per token, head.

    node_devices: those of the innermost level (Strategy.dealing_ranks).
    """
    kind = strategy.context_kind(workload) if strategy.cp > 1 else ""
    return Share(
        mbs=strategy.mbs,
        tp=strategy.tp,
        cp=strategy.cp,
        sequence_parallel=strategy.divides_sequences(workload),
        fused_attention=workload.attention == "flash",
        statistics_bytes=statistics_bytes,
        hidden_dropout=workload.hidden_dropout,
        attention_dropout=workload.attention_dropout,
        recompute_operators=workload.recompute_operators,
        eager=workload.implementation == "transformers",
        fused_norms=workload.stack == "megatron-te",
        ep=strategy.ep,
        etp=strategy.etp,
        cross_entropy=workload.cross_entropy,
        loss_chunk_tokens=workload.loss_chunk_tokens,
        shared_gradients=workload.gradient_fusion and workload.stack == "megatron-te",
        exchanged_heads=kind in ("all_to_all", "hierarchical"),
        dealing_ranks=strategy.dealing_ranks(workload, node_devices) if kind == "hierarchical" else 0,
        gathered_keys=kind == "all_gather",
        imbalance_factor=workload.expert_capacity_factor  # DeepSpeed's experts drop what is beyond their places
        if workload.ep_kind == "deepspeed"
        else min(workload.expert_imbalance_factor, strategy.ep),
        overlap_all_to_all=strategy.overlap_of(workload),
        ep_kind=workload.ep_kind,
        token_rearrange=workload.token_rearrange,
        fused_matmul_fraction=workload.fused_matmul_fraction,
        graph=workload.stack == "mindformers",
        mask_compression=workload.mask_compression,
        facts=strategy.facts_of(workload),
        precision=strategy.precision_of(workload, modality),
    )


@dataclass(frozen=True)
class MatrixProduct:
    """`row_count` tokens of `input_count` numbers become `output_count` each, by `num_weights` such weights (experts).

    gathered_bytes: input that the tensor-parallel ranks share: all-gathered before under sequence parallelism, and its
    gradient summed. summed_bytes: output that they sum. entry: the first product of a block, which computes no gradient
    of its input where nothing before the block trains. trains False: its weights are frozen beside adapters.
    num_linears: matrices that it stands for, each of which may sum the gradient of its input by itself. joined_bytes:
    output that the tensor-parallel ranks gather. tile_rows: rows of each weight are padded to a multiple of it, and all
    weights' tiles run together (0: each weight's rows by themselves). precision: what it multiplies in.
    quantises_input, quantises_gradient: whether it brings its input, and the gradient of its output, into that by
    itself.
    """

    row_count: float
    input_count: float
    output_count: float
    num_weights: int = 1
    gathered_bytes: float = 0.0
    summed_bytes: float = 0.0
    entry: bool = False
    trains: bool = True
    num_linears: int = 1
    joined_bytes: float = 0.0
    tile_rows: int = 0
    precision: Precision = "bf16"
    quantises_input: bool = True
    quantises_gradient: bool = True

    @property
    def flops(self) -> float:
        return 2 * self.row_count * self.input_count * self.output_count

    @property
    def moved_bytes(self) -> float:
        """Operands and result, once each."""
        weight_count = self.num_weights * self.input_count * self.output_count
        operand_bytes = RECIPES[self.precision].kept_bytes
        output_count = self.row_count * self.output_count
        return operand_bytes * (self.row_count * self.input_count + weight_count) + ELEMENT_BYTES * output_count

    @property
    def gather_factor(self) -> float:
        """What tensor parallel ranks gather over what they would in BF16; sums stay what they are."""
        return RECIPES[self.precision].gathered_bytes / ELEMENT_BYTES


@dataclass(frozen=True)
class AttentionProduct:
    """Scores and weighted values, in one kernel where `fused`, else as batched products of whole score matrices.

    ring_bytes: key and value of this device's tokens, passed on in each step of ring attention, of which there is one
    less than ranks that pass (0: none). gathered_bytes: those of all ranks, where they are gathered instead (0: not).
    dealt_bytes: query, key, value and output of this device's tokens, exchanged for heads before and after (0: not).
    kernel: as in StackFacts. key_count: keys that a query may see on one device, 0 where that does not decide.
    query_size, value_size: of one head. time_factor: what sharing it among ranks makes of its time. low: the core
    multiplies in FP8.
    """

    forward_flops: float
    backward_flops: float
    ring_bytes: float
    fused: bool = True
    dealt_bytes: float = 0.0
    kernel: AttentionKernel = ""
    key_count: float = 0.0
    query_size: int = 0
    value_size: int = 0
    gathered_bytes: float = 0.0
    time_factor: float = 1.0
    low: bool = False


@dataclass(frozen=True)
class Stream:
    """A memory-bound operator: bytes read and written in forward and backward; weight_bytes: more where it trains.

    single: it is several operators of PyTorch that run by themselves, all of whose traffic is counted.
    """

    name: str
    forward_bytes: float
    backward_bytes: float
    weight_bytes: float = 0.0
    single: bool = False


@dataclass(frozen=True)
class Saved:
    """A tensor kept from forward to backward; `for_weight`: only the gradient of a weight needs it; `untrained`: of one
    that is frozen beside adapters.
    """

    name: str
    size_bytes: float
    for_weight: bool = False
    untrained: bool = False


@dataclass(frozen=True)
class Passing:
    """Bytes alive at one moment beyond what the block keeps; what it kept and has freed by then is taken off.

    weight_bytes: added where weights train: less what was kept for their gradients and is freed by then.
    gradient_bytes: a weight gradient, there until it is added to the accumulated one.
    """

    moment: str
    size_bytes: float
    weight_bytes: float = 0.0
    gradient_bytes: float = 0.0


@dataclass(frozen=True)
class Operators:
    """All operators of a block.

    forward_only, with_backward: its working sets where it has no backward and where it has one. input_bytes: its input,
    what it keeps where it is recomputed; output_bytes: what the next block gets. exchanged_bytes: a tensor of this size
    is gathered and one is summed by the tensor-parallel ranks, in forward and again in backward, beside the products.
    all_to_all_bytes: what every rank holds of tokens that are sent to their experts' ranks and back, twice in forward
    and twice in backward: copies of each token, which go to experts of these groups. beside: the part of them that can
    run beside these exchanges (the shared expert). rerun: what its backward runs forward once more, because
    recompute_operators says so.
    """

    products: tuple[MatrixProduct, ...] = ()
    attention: AttentionProduct | None = None
    streams: tuple[Stream, ...] = ()
    saved: tuple[Saved, ...] = ()
    forward_only: tuple[Passing, ...] = ()
    with_backward: tuple[Passing, ...] = ()
    input_bytes: float = 0.0
    output_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    all_to_all_bytes: float = 0.0
    copies: int = 1
    groups: ExpertGroups = ANY_GROUPS
    beside: Operators | None = None
    rerun: Operators | None = None

    def kept_bytes(self, trainable: bool) -> float:
        """Kept per micro-batch by a block that has a backward; a frozen one keeps no inputs of weights."""
        return sum(
            saved.size_bytes for saved in self.saved if not saved.for_weight or (trainable and not saved.untrained)
        )

    def working_bytes(self, trainable: bool, has_backward: bool, shared_gradients: bool = False) -> float:
        """The largest working set beyond what is kept. shared_gradients: as in Share."""
        if not has_backward:
            return max((passing.size_bytes for passing in self.forward_only), default=0.0)
        if not trainable:
            return max((passing.size_bytes for passing in self.with_backward), default=0.0)
        gradient_factor = 0.0 if shared_gradients else 1.0
        passing_bytes = (p.size_bytes + p.weight_bytes + gradient_factor * p.gradient_bytes for p in self.with_backward)
        return max(passing_bytes, default=0.0)


def join_reruns(parts: Sequence[Operators | None]) -> Operators | None:
    """What several parts of a block run once more, as one; None where none does. At most one has attention."""
    found = [part for part in parts if part]
    if not found:
        return None
    return Operators(
        products=tuple(product for part in found for product in part.products),
        attention=next((part.attention for part in found if part.attention), None),
        streams=tuple(stream for part in found for stream in part.streams),
        exchanged_bytes=sum(part.exchanged_bytes for part in found),
        all_to_all_bytes=sum(part.all_to_all_bytes for part in found),
        copies=max(part.copies for part in found),
        groups=next((part.groups for part in found if part.all_to_all_bytes), ANY_GROUPS),
    )


def norm_statistics_bytes(norm: str) -> int:
    """What a norm keeps per token besides its input: fp32 1/rms, or fp32 mean and 1/deviation."""
    return 8 if norm == "layer" else 4


def keep_norm(name: str, norm: str, row_count: float, width: float, share: Share) -> tuple[Saved, ...]:
    """What a norm of `row_count` rows keeps of its input.

    Eager code, where it is RMS, as transformers' classes write it (models/llama/modeling_llama.py, LlamaRMSNorm): an
    fp32 copy, 1/rms of each row, and the normed bf16 numbers before they are weighted. Other stacks without a fused
    kernel (StackFacts.norms) keep as much beside the bf16 input, which the sum of residuals holds.
    """
    input_bytes, statistics_bytes = ELEMENT_BYTES * row_count * width, norm_statistics_bytes(norm) * row_count
    in_operators = share.facts.norms == "operators" and not share.eager
    if not in_operators and (not share.eager or norm == "layer"):
        return (Saved(f"{name} input", input_bytes + statistics_bytes),)
    return (
        *((Saved(f"{name} input", input_bytes),) if in_operators else ()),
        Saved(f"{name} input in fp32", 2 * input_bytes + statistics_bytes),
        Saved(f"{name} output before its weight", input_bytes, for_weight=True),
    )


_NORM_PASSES, _NORM_BACKWARD_PASSES = 12, 24
"""How often PyTorch's operators, one by one, read or write the fp32 copy of what a norm works on: the copy, the square,
its mean, 1/rms, the product, the copy back and the weight; in the backward those of each (counted from the operators of
transformers' LlamaRMSNorm)."""


def stream_norm(name: str, element_count: float, norm: str, share: Share) -> Stream:
    """A fused kernel reads and writes in forward; reads input and gradient and writes a gradient in backward. Eager
    code's layer norms are PyTorch's, which are fused.
    """
    if share.facts.norms == "operators" and not (share.eager and norm == "layer"):
        each = 4.0 * element_count
        return Stream(name, _NORM_PASSES * each, _NORM_BACKWARD_PASSES * each, single=True)
    return Stream(name, 2 * ELEMENT_BYTES * element_count, 3 * ELEMENT_BYTES * element_count)
