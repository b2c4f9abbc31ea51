"""Runs of equal transformer layers: what is common to the layers of every modality."""

from __future__ import annotations

from itertools import groupby

from mm_autoparallel.model.blocks import chain
from mm_autoparallel.model.job.layers import Layers


def expand_layers(
    modality: str, layers: Layers, causal: bool, trainable: bool, propagates_gradient: bool
) -> list[chain.Block]:
    """The layers of one modality as blocks, one for each run of consecutive layers of equal structure.

    A kind is called `vision_layer` where the modality has but one, else by what sets it apart: `vision_window_layer`,
    `text_expert_layer`. A block is called like its kind, with its first layer's number where the kind has several runs.
    """
    names = [_kind_words(layers, index) for index in range(layers.num_layers)]
    several_kinds = len(set(names)) > 1
    runs = [(words, list(indices)) for words, indices in groupby(range(layers.num_layers), key=lambda i: names[i])]
    blocks = []
    for words, indices in runs:
        kind = "_".join([modality, *(words if several_kinds else ()), "layer"])
        again = sum(other == words for other, _ in runs) > 1
        blocks.append(
            chain.Block(
                name=f"{kind}_{indices[0]}" if again else kind,
                kind=kind,
                modality=modality,
                role="layer",
                structure=layer_structure(layers, indices[0], causal),
                count=len(indices),
                trainable=trainable,
                propagates_gradient=propagates_gradient,
            )
        )
    return blocks


def count_rotated(layers: Layers) -> int:
    """Numbers of a head that are rotated by their position."""
    if layers.latent:
        return layers.latent.qk_rope_head_dim
    return layers.head_dim if layers.rotary else 0


def _kind_words(layers: Layers, index: int) -> tuple[str, ...]:
    words = []
    if layers.window:
        words.append("full" if index in layers.window.full_layers else "window")
    if layers.delta:
        words.append("full" if index in layers.delta.full_layers else "delta")
    if layers.experts:
        words.append("dense" if index in layers.experts.dense_layers else "expert")
    return tuple(words)


def layer_structure(layers: Layers, index: int, causal: bool) -> chain.TransformerLayer:
    """The layer of number `index`, counted from 0."""
    mlp: chain.FeedForward | chain.Experts = _feed_forward(layers, layers.ffn_size)
    if layers.experts and index not in layers.experts.dense_layers:
        shared_size = layers.experts.shared_ffn_size
        mlp = chain.Experts(
            num_experts=layers.experts.num_experts,
            top_k=layers.experts.top_k,
            expert=_feed_forward(layers, layers.experts.ffn_size),
            shared=_feed_forward(layers, shared_size) if shared_size else None,
            shared_gate=layers.experts.shared_gate,
            fp32_router=layers.experts.fp32_router,
            max_groups=layers.experts.max_groups,
        )
    return chain.TransformerLayer(
        hidden_size=layers.hidden_size,
        norm=layers.norm,
        attention=_attention(layers, index, causal),
        mlp=mlp,
        post_norms=layers.post_norms,
        layer_scale=layers.layer_scale,
        modulated=layers.modulated,
    )


def _attention(
    layers: Layers, index: int, causal: bool
) -> chain.Attention | chain.LatentAttention | chain.DeltaAttention:
    latent, delta = layers.latent, layers.delta
    if delta and index not in delta.full_layers:
        return chain.DeltaAttention(
            num_key_heads=delta.num_key_heads,
            num_value_heads=delta.num_value_heads,
            key_head_dim=delta.key_head_dim,
            value_head_dim=delta.value_head_dim,
            conv_width=delta.conv_width,
            causal=causal,
        )
    if latent:
        return chain.LatentAttention(
            num_heads=layers.num_heads,
            q_lora_rank=latent.q_lora_rank,
            kv_lora_rank=latent.kv_lora_rank,
            nope_dim=latent.qk_nope_head_dim,
            rope_dim=latent.qk_rope_head_dim,
            value_dim=latent.v_head_dim,
            norms=latent.norms,
            output_bias=layers.output_bias,
            causal=causal,
        )
    windowed = layers.window and index not in layers.window.full_layers
    return chain.Attention(
        num_heads=layers.num_heads,
        num_kv_groups=layers.num_kv_groups,
        head_dim=layers.head_dim,
        qkv_bias=layers.qkv_bias,
        key_bias=layers.key_bias,
        output_bias=layers.output_bias,
        qk_norm=layers.qk_norm,
        causal=causal,
        span_tokens=layers.window.num_tokens if layers.window and windowed else None,
        rotary=layers.rotary,
        joint_qkv=layers.joint_qkv,
        packed=layers.packed,
        output_gate=layers.output_gate,
    )


def _feed_forward(layers: Layers, ffn_size: int) -> chain.FeedForward:
    return chain.FeedForward(
        ffn_size=ffn_size,
        gated=layers.gated,
        bias=layers.mlp_bias,
        quick_gelu=layers.quick_gelu,
        tanh_gelu=layers.tanh_gelu,
    )
