"""What a block computes and keeps, as lists of operators: nothing here knows a device or a time.

A block is its matrix products, its attention, the bytes its memory-bound operators move, the tensors it keeps from
forward to backward, and its largest passing working sets. The rules of what is kept are those of Korthikanti et al.
2022 (arXiv:2205.05198, section 4): a product keeps its input for the gradient of its weight, attention and every
non-linear operator keep what their own gradient needs, and sequence parallelism divides what lies between the
tensor-parallel regions. There is no dropout, so there are no masks.
"""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT_BYTES = 2
"""Activations are bf16."""


@dataclass(frozen=True)
class Share:
    """The part of a micro-batch that one device handles: `mbs` samples, divided by tensor and context parallel.

    sequence_parallel: norms, residuals and layer boundaries are divided by `tp` too. fused_attention: flash attention,
    which keeps no score matrices but `statistics_bytes` per token and head.
    """

    mbs: int = 1
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    fused_attention: bool = True
    statistics_bytes: float = 4.0

    @property
    def sp(self) -> int:
        """What norms, residuals and layer boundaries are divided by."""
        return self.tp if self.sequence_parallel else 1

    def rows(self, tokens_per_sample: float) -> float:
        """Tokens of this device's context-parallel part, over all samples of the micro-batch."""
        return self.mbs * tokens_per_sample / self.cp


@dataclass(frozen=True)
class MatrixProduct:
    """`row_count` tokens of `input_count` numbers become `output_count` each, by `num_weights` such weights (experts).

    gathered_bytes: input that the tensor-parallel ranks share: all-gathered before under sequence parallelism, and its
    gradient summed. summed_bytes: output that they sum. entry: the first product of a block, which computes no gradient
    of its input where nothing before the block trains.
    """

    row_count: float
    input_count: float
    output_count: float
    num_weights: int = 1
    gathered_bytes: float = 0.0
    summed_bytes: float = 0.0
    entry: bool = False

    @property
    def flops(self) -> float:
        return 2 * self.row_count * self.input_count * self.output_count

    @property
    def moved_bytes(self) -> float:
        """Operands and result, once each."""
        weight_count = self.num_weights * self.input_count * self.output_count
        return ELEMENT_BYTES * (self.row_count * (self.input_count + self.output_count) + weight_count)


@dataclass(frozen=True)
class AttentionProduct:
    """Scores and weighted values.

    ring_bytes: key and value of this device's tokens, passed on in each of cp − 1 steps of ring attention (0: none).
    """

    forward_flops: float
    backward_flops: float
    ring_bytes: float


@dataclass(frozen=True)
class Stream:
    """A memory-bound operator: bytes read and written in forward and backward; weight_bytes: more where it trains."""

    name: str
    forward_bytes: float
    backward_bytes: float
    weight_bytes: float = 0.0


@dataclass(frozen=True)
class Saved:
    """A tensor kept from forward to backward; `for_weight`: only the gradient of a weight needs it."""

    name: str
    size_bytes: float
    for_weight: bool = False


@dataclass(frozen=True)
class Passing:
    """Bytes alive at one moment beyond what the block keeps; what it kept and has freed by then is taken off.

    weight_bytes: added where weights train: their gradients, less the inputs kept for them and freed by then.
    """

    moment: str
    size_bytes: float
    weight_bytes: float = 0.0


@dataclass(frozen=True)
class Operators:
    """All operators of a block.

    forward_only, with_backward: its working sets where it has no backward and where it has one. input_bytes: its input,
    what it keeps where it is recomputed; output_bytes: what the next block gets. exchanged_bytes: a tensor of this size
    is gathered and one is summed by the tensor-parallel ranks, in forward and again in backward, beside the products.
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

    def kept_bytes(self, trainable: bool) -> float:
        """Kept per micro-batch by a block that has a backward; a frozen one keeps no inputs of weights."""
        return sum(saved.size_bytes for saved in self.saved if trainable or not saved.for_weight)

    def working_bytes(self, trainable: bool, has_backward: bool) -> float:
        """The largest working set beyond what is kept."""
        if not has_backward:
            return max((passing.size_bytes for passing in self.forward_only), default=0.0)
        passing_bytes = (p.size_bytes + (p.weight_bytes if trainable else 0) for p in self.with_backward)
        return max(passing_bytes, default=0.0)


def norm_statistics_bytes(norm: str) -> int:
    """What a norm keeps per token besides its input: fp32 1/rms, or fp32 mean and 1/deviation."""
    return 8 if norm == "layer" else 4


def stream_norm(name: str, element_count: float) -> Stream:
    """Forward reads and writes; backward reads input and gradient and writes a gradient."""
    return Stream(name, 2 * ELEMENT_BYTES * element_count, 3 * ELEMENT_BYTES * element_count)
