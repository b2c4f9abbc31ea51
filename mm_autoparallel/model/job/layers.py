"""Layers: the transformer layers of one modality, and what stands in them: attention of several kinds, experts."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from mm_autoparallel.records import Count, Few, Flag, Noun, Number

Norm = Literal["rms", "layer"]


class Window(Noun):
    """Layers attend within windows of `num_tokens`, those in `full_layers` (counted from 0) over the whole image."""

    num_tokens: Count
    full_layers: tuple[Number, ...] = ()


class Experts(Noun):
    """Layers have `num_experts` feed-forwards of width `ffn_size`, `top_k` of them used per token.

    shared_ffn_size: width of a feed-forward that every token passes besides (0: none; several make one). shared_gate:
    its output is weighted by one learned number a token. fp32_router: eager code runs the router's product on fp32
    copies (DeepSeek). dense_layers: layers that keep the plain feed-forward of the modality, counted from 0.
    max_groups: the router picks a token's experts out of so many groups at most, which are dealt to nodes (0: it does
    not; DeepSeek-V3, arXiv:2412.19437, section 2.1.2; its config's topk_group), of num_groups of equal size (0: as many
    as there are nodes; its config's n_group).
    """

    num_experts: Count
    top_k: Count
    ffn_size: Count
    shared_ffn_size: Number = 0
    shared_gate: Flag = False
    fp32_router: Flag = False
    dense_layers: tuple[Number, ...] = ()
    max_groups: Number = 0
    num_groups: Number = 0

    @model_validator(mode="after")
    def _check(self) -> Experts:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is more than num_experts {self.num_experts}")
        if self.num_groups and self.num_experts % self.num_groups:
            raise ValueError(f"num_groups {self.num_groups} must divide num_experts {self.num_experts}")
        if self.num_groups and self.max_groups > self.num_groups:
            raise ValueError(f"max_groups {self.max_groups} is more than num_groups {self.num_groups}")
        return self


class LatentAttention(Noun):
    """Queries, keys and values through compressed vectors (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    q_lora_rank: width of the compressed query (0: it is not compressed). kv_lora_rank: of key and value together.
    qk_nope_head_dim, qk_rope_head_dim: a head's query and key without and with rotation; the rotated key is one for all
    heads. v_head_dim: a head's value. norms: of the compressed vectors.
    """

    q_lora_rank: Number = 0
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    norms: Flag = True


class DeltaAttention(Noun):
    """Layers attend by a gated delta rule (Yang et al. 2024, arXiv:2412.06464), those in `full_layers` as others do.

    num_value_heads: a multiple of num_key_heads. conv_width: tokens that a convolution mixes before.
    """

    num_key_heads: Count
    num_value_heads: Count
    key_head_dim: Count
    value_head_dim: Count
    conv_width: Count = 4
    full_layers: tuple[Number, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> DeltaAttention:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads {self.num_value_heads} is no multiple of num_key_heads {self.num_key_heads}"
            )
        return self


class Layers(Noun):
    """`num_layers` transformer layers: norm → attention → residual → norm → feed-forward or experts → residual.

    num_kv_groups 0: as many as heads. head_dim 0: hidden_size / num_heads. gated: three matrices in the feed-forward,
    else two. post_norms: both branches are normed before the residual too (GLM-4). key_bias False: where there is a
    qkv_bias, the key has none (Whisper). qk_norm: queries and keys are normalised, each `head` by itself or over
    their whole width (`hidden`). layer_scale: a learned factor per channel on both residual branches. rotary:
    queries and keys are rotated by their position. latent: attention through compressed vectors, which then gives
    the sizes of heads (num_kv_groups and head_dim are left out). delta: layers that attend by a gated delta rule.
    output_gate: attention's output is weighted by the layer's input. modulated: norms have no weights; a matrix in
    each layer makes of a condition what shifts, scales and gates both its halves (adaLN-Zero of DiT,
    arXiv:2212.09748, section 3.2).

    What eager code keeps (Workload.implementation) depends on four things more. quick_gelu: the activation is computed
    as x·sigmoid(1.702·x). tanh_gelu: as x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))), operator by operator. joint_qkv: one
    matrix makes query, key and value. packed: that, and images lie behind each other in one sequence and attend one
    after the other.
    """

    num_layers: Few
    hidden_size: Count
    ffn_size: Count
    num_heads: Count
    num_kv_groups: Number = 0
    head_dim: Number = 0
    norm: Norm
    gated: Flag = True
    mlp_bias: Flag = False
    qkv_bias: Flag = False
    key_bias: Flag = True
    output_bias: Flag = False
    qk_norm: Literal["head", "hidden"] | None = None
    post_norms: Flag = False
    layer_scale: Flag = False
    rotary: Flag = True
    quick_gelu: Flag = False
    tanh_gelu: Flag = False
    joint_qkv: Flag = False
    packed: Flag = False
    modulated: Flag = False
    latent: LatentAttention | None = None
    delta: DeltaAttention | None = None
    output_gate: Flag = False
    window: Window | None = None
    experts: Experts | None = None

    @model_validator(mode="after")
    def _complete_and_check(self) -> Layers:
        if self.latent:
            self._check_latent(self.latent)
            object.__setattr__(self, "head_dim", self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim)
        if not self.num_kv_groups:
            object.__setattr__(self, "num_kv_groups", self.num_heads)
        if not self.head_dim:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is no multiple of num_heads {self.num_heads}; mend one or give "
                    "head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_groups:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_groups {self.num_kv_groups}")
        if self.delta and (self.latent or self.window):
            raise ValueError("layers with a delta rule know no latent attention and no window; leave them out")
        if self.modulated and (self.layer_scale or self.norm != "layer"):
            raise ValueError("modulated layers have layer norms and no layer_scale")
        for key, indices in (
            ("window.full_layers", self.window.full_layers if self.window else ()),
            ("delta.full_layers", self.delta.full_layers if self.delta else ()),
            ("experts.dense_layers", self.experts.dense_layers if self.experts else ()),
        ):
            beyond = [index for index in indices if index >= self.num_layers]
            if beyond:
                raise ValueError(f"{key} names layer {beyond[0]} and layers are 0 to {self.num_layers - 1}")
        return self

    def _check_latent(self, latent: LatentAttention) -> None:
        whole = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        if self.num_kv_groups not in (0, self.num_heads) or self.head_dim not in (0, whole):
            raise ValueError(
                f"latent attention has a key for each of {self.num_heads} heads of {whole} numbers; leave "
                "num_kv_groups and head_dim out"
            )
        if self.qkv_bias or self.qk_norm or self.window:
            raise ValueError("latent attention knows no qkv_bias, qk_norm or window; leave them out")
