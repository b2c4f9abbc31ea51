"""Runs of equal transformer layers: what is common to the layers of every modality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
    runs = [*_list_runs(layers)]
    numbers = Counter(words for words, _, _ in runs)
    blocks = []
    for words, first, count in runs:
        kind = "_".join([modality, *(words if len(numbers) > 1 else ()), "layer"])
        blocks.append(
            chain.Block(
                name=f"{kind}_{first}" if numbers[words] > 1 else kind,
                kind=kind,
                modality=modality,
                role="layer",
                structure=layer_structure(layers, first, causal),
                count=count,
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


def _list_runs(layers: Layers) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """(what sets them apart, number of the first, how many) of each run of equal layers."""
    if not (layers.window or layers.delta or layers.experts):
        yield (), 0, layers.num_layers
        return
    first = 0
    for words, run in groupby(_kind_words(layers, index) for index in range(layers.num_layers)):
        count = sum(1 for _ in run)
        yield words, first, count
        first += count


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
        shared = _feed_forward(layers, shared_size) if shared_size else None
        expert = _feed_forward(layers, layers.experts.ffn_size)
        mlp = chain.structured(chain.Experts, layers.experts, expert=expert, shared=shared)
    return chain.structured(chain.TransformerLayer, layers, attention=_attention(layers, index, causal), mlp=mlp)


def _attention(
    layers: Layers, index: int, causal: bool
) -> chain.Attention | chain.LatentAttention | chain.DeltaAttention:
    latent, delta = layers.latent, layers.delta
    if delta and index not in delta.full_layers:
        return chain.structured(chain.DeltaAttention, delta, causal=causal)
    if latent:
        return chain.structured(
            chain.LatentAttention,
            latent,
            num_heads=layers.num_heads,
            nope_dim=latent.qk_nope_head_dim,
            rope_dim=latent.qk_rope_head_dim,
            value_dim=latent.v_head_dim,
            output_bias=layers.output_bias,
            causal=causal,
        )
    windowed = layers.window and index not in layers.window.full_layers
    span_tokens = layers.window.num_tokens if layers.window and windowed else None
    return chain.structured(chain.Attention, layers, causal=causal, span_tokens=span_tokens)


def _feed_forward(layers: Layers, ffn_size: int) -> chain.FeedForward:
    return chain.structured(chain.FeedForward, layers, ffn_size=ffn_size, bias=layers.mlp_bias)
