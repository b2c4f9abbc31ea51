"""Block and Chain: the model as pipeline stages see it, one sequence of blocks in the order data flows.

A block says what it computes (its structure), on how many tokens (its modality), and what training asks of it
(weight gradient, input gradient). Costs are looked up or computed from it elsewhere; nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

Structured = TypeVar("Structured")
Norm = Literal["rms", "layer"]
Role = Literal["pre", "layer", "post"]


def structured(kind: type[Structured], noun: object, **more: Any) -> Structured:
    """A `kind` (of the dataclasses below) with the sizes that `noun` of a job has under the same names, and `more`."""
    names = {field.name for field in fields(kind)} - more.keys()  # type: ignore[arg-type]  # kinds are dataclasses
    return kind(**{name: getattr(noun, name) for name in names if hasattr(noun, name)}, **more)


@dataclass(frozen=True)
class Attention:
    """Self-attention. `span_tokens` None: a token sees its whole sample (text) or image (vision); else a window.

    key_bias False: where there is a qkv_bias, the key has none. qk_norm: queries and keys are normalised, each `head`
    by itself or over their whole width (`hidden`). rotary: queries and keys are rotated.
    output_gate: the output is weighted by numbers that the query's matrix makes beside.
    What eager code keeps: joint_qkv: one matrix makes query, key and value. packed: that, and spans attend one after
    the other.
    """

    num_heads: int
    num_kv_groups: int
    head_dim: int
    qkv_bias: bool = False
    key_bias: bool = True
    output_bias: bool = False
    qk_norm: Literal["head", "hidden"] | None = None
    causal: bool = True
    span_tokens: int | None = None
    rotary: bool = True
    joint_qkv: bool = False
    packed: bool = False
    output_gate: bool = False


@dataclass(frozen=True)
class DeltaAttention:
    """Attention by a gated delta rule (arXiv:2412.06464): every value head has a matrix for its memory.

    conv_width: tokens that a convolution mixes of query, key and value before. There are whole value heads to a key.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    causal: bool = True
    span_tokens: None = None


@dataclass(frozen=True)
class LatentAttention:
    """Self-attention whose queries, keys and values go through compressed vectors, with `norms` of these or without.

    q_lora_rank 0: the query is not compressed. A head's query and key have nope_dim numbers and rope_dim more that are
    rotated, of which the key's are one for all heads; its value has value_dim.
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norms: bool = True
    output_bias: bool = False
    causal: bool = True
    span_tokens: None = None


@dataclass(frozen=True)
class FeedForward:
    """Two matrices (three when gated) of width `ffn_size`. quick_gelu: activated by x·sigmoid(1.702·x).

    tanh_gelu: by x/2·(1 + tanh(…)), operator by operator.
    """

    ffn_size: int
    gated: bool = True
    bias: bool = False
    quick_gelu: bool = False
    tanh_gelu: bool = False


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: `top_k` of `num_experts` feed-forwards per token, a router, an optional shared one.

    shared_gate: the shared one's output is weighted by one number a token. fp32_router: eager code runs the router's
    product on fp32 copies. max_groups, num_groups: a token's experts lie in so many groups of
    so many (job/layers.py).
    """

    num_experts: int
    top_k: int
    expert: FeedForward
    shared: FeedForward | None = None
    shared_gate: bool = False
    fp32_router: bool = False
    max_groups: int = 0
    num_groups: int = 0


@dataclass(frozen=True)
class Adapters:
    """Pairs of matrices of `rank` beside a layer's own `targets` (job/model.py), which alone train. dropout: before."""

    rank: int
    targets: tuple[str, ...]
    dropout: bool = False


@dataclass(frozen=True)
class TransformerLayer:
    """norm → attention → residual → norm → feed-forward or experts → residual.

    post_norms: both branches are normed before they are added. layer_scale: a learned factor per channel on both
    residual branches. modulated: norms have no weights, and a matrix makes of the condition two shifts, scales and
    gates (adaLN-Zero).
    """

    hidden_size: int
    norm: Norm
    attention: Attention | LatentAttention | DeltaAttention
    mlp: FeedForward | Experts
    post_norms: bool = False
    layer_scale: bool = False
    modulated: bool = False
    adapters: Adapters | None = None


@dataclass(frozen=True)
class PatchEmbedding:
    """Image patches (`in_features` numbers each) → hidden; `num_positions` learned positions (0: rotary).

    class_token: one more token an image. norm: after it all. num_labels: a condition is made besides, of embedded
    labels and of the time step by two matrices (DiT; 0: none). rotary_dim: numbers of a head that the layers rotate by
    angles which are computed here (0: none).
    """

    in_features: int
    hidden_size: int
    bias: bool = False
    num_positions: int = 0
    class_token: bool = False
    norm: Norm | None = None
    num_labels: int = 0
    rotary_dim: int = 0


@dataclass(frozen=True)
class AudioStem:
    """Two 1-d convolutions of kernel 3 over mel frames (the second of stride 2), then added positions.

    conv_channels: not 0 for three 2-d ones of kernel 3 and stride 2, of so many channels, and a matrix without bias.
    """

    num_mel_bins: int
    hidden_size: int
    num_positions: int = 0
    conv_channels: int = 0

    @property
    def num_conv_bins(self) -> int:
        """Of what the last of the three convolutions leaves of the mel bins: each halves them, rounded up."""
        return -(-self.num_mel_bins // 8)


@dataclass(frozen=True)
class TokenEmbedding:
    """A vocabulary table; `num_positions` learned positions and `num_types` token types, one each of which is added.

    rotary_dim: as in PatchEmbedding. own_positions: each sample of a micro-batch has angles of its own.
    """

    vocab_size: int
    hidden_size: int
    num_positions: int = 0
    num_types: int = 0
    rotary_dim: int = 0
    own_positions: bool = False

    @property
    def num_added(self) -> int:
        """Vectors that are added, which belong to no head."""
        return self.num_positions + self.num_types


@dataclass(frozen=True)
class Projector:
    """Norm over `norm_size`, merge `merge_tokens` neighbours into one, then `layer_sizes[0] → layer_sizes[1] → …`.

    Merging joins tokens where `layer_sizes[0]` is `merge_tokens` encoder widths, and averages them where it is one.
    Without layer_sizes it is a norm and no more. num_special_tokens: learned output vectors that belong to it.
    replicated: plain matrices, of which every tensor parallel rank holds the whole (else column, then row parallel).
    gated_ffn_size: of a gated feed-forward without biases behind, and then only the first matrix has one.
    convolutions: widths around those (model/job/model.py) that merge before the matrices.
    """

    norm: Norm | None
    norm_size: int
    merge_tokens: int
    layer_sizes: tuple[int, ...]
    bias: bool = True
    num_special_tokens: int = 0
    replicated: bool = False
    gated_ffn_size: int = 0
    convolutions: tuple[int, ...] = ()


@dataclass(frozen=True)
class OutputHead:
    """Final norm, vocabulary projection and cross-entropy; `tied` shares the embedding's table.

    masked: as BERT's, before the projection a square matrix, GELU and a norm; a bias per word; and of each sample's
    first token a square matrix and a classifier of two.
    """

    vocab_size: int
    hidden_size: int
    norm: Norm
    tied: bool = False
    masked: bool = False


@dataclass(frozen=True)
class ImageHead:
    """Final norm and a matrix with a bias to `num_outputs`: of one token a sample where `pooled`, into a cross-entropy;

    else of every token, into a squared error. modulated: as the layers, by one shift and one scale.
    """

    num_outputs: int
    hidden_size: int
    norm: Norm
    pooled: bool = True
    modulated: bool = False


@dataclass(frozen=True)
class PredictionModule:
    """Predicts one token more: the norms of the last hidden state and of the next token's embedding, joined and

    projected to the width of one, pass a layer and a norm, then a head and its cross-entropy. Embedding and head are
    those of the model; `tied`: the two are one.
    """

    layer: TransformerLayer
    vocab_size: int
    tied: bool = False


@dataclass(frozen=True)
class Traced:
    """A part known from traces alone: `parameter_count` parameters, `hidden_size` numbers a token handed on.

    table_count: parameters of a vocabulary table that its two ends share; holds_table: this one counts it. projects: it
    gives an encoder's tokens to the decoder.
    """

    hidden_size: int
    parameter_count: int
    table_count: int = 0
    holds_table: bool = False
    projects: bool = False


Structure = (
    TransformerLayer
    | PatchEmbedding
    | AudioStem
    | TokenEmbedding
    | Projector
    | OutputHead
    | ImageHead
    | PredictionModule
    | Traced
)


@dataclass(frozen=True)
class Block:
    """`count` consecutive equal parts of one modality.

    `name` is unique in its chain; blocks of equal structure share a `kind` (what profiles are keyed by).
    `trainable`: has weight gradients and optimizer state (of a layer's adapters alone, where it has them).
    `propagates_gradient`: something that its input depends on trains, so it must compute the gradient of its input. A
    block with neither has no backward and keeps no activations.
    `attach`: must share a pipeline stage with its neighbour. `pinned`: must lie in the last stage.
    """

    name: str
    kind: str
    modality: str
    role: Role
    structure: Structure
    count: int = 1
    trainable: bool = True
    propagates_gradient: bool = True
    attach: Literal["previous", "next"] | None = None
    pinned: Literal["last"] | None = None

    @property
    def has_backward(self) -> bool:
        return self.trainable or self.propagates_gradient


@dataclass(frozen=True)
class Chain:
    """Blocks in the order data flows: encoders (`vision`, `audio`), then `text`; of each `*_pre`, layers, `*_post`."""

    blocks: tuple[Block, ...]

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(block.modality for block in self.blocks))

    def num_layers(self, modality: str) -> int:
        """Layers of `modality`, its pre and post blocks not counted."""
        return sum(b.count for b in self.blocks if b.modality == modality and b.role == "layer")

    def sends_gradient(self, index: int) -> bool:
        """True if a gradient crosses a cut right after block `index`: something up to there trains."""
        return any(block.trainable for block in self.blocks[: index + 1])
