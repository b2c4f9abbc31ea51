"""Encoders of images and audio: a stem, layers, what follows the layers, and which of it sees gradients.

An encoder depends on its own input alone, so another encoder that trains before it in the chain gives it no gradient.
"""

from __future__ import annotations

from mm_autoparallel.model.blocks.chain import AudioStem, Block, PatchEmbedding, Projector, structured
from mm_autoparallel.model.blocks.layers import count_rotated, expand_layers
from mm_autoparallel.model.job.model import Encoder, Patches


def expand_encoder(encoder: Encoder) -> list[Block]:
    """`NAME_pre` on the stage of the first layer; the layers; the rest on the stage of the last layer.

    The rest is a final norm that is no part of the projector, the inner projectors (they read inner layers, but count
    as held and run beside the main one), and `NAME_post`, the projector.
    """
    name, trains = encoder.name, not encoder.freeze
    moves = trains or encoder.train_positions
    pre, stem = f"{name}_pre", _stem(encoder)
    first = Block(pre, pre, name, "pre", stem, 1, moves, propagates_gradient=False, attach="next")
    layers = expand_layers(name, encoder.layers, causal=False, trainable=trains, propagates_gradient=moves)
    post = []
    if encoder.final_norm:
        norm = Projector(encoder.final_norm, encoder.layers.hidden_size, merge_tokens=1, layer_sizes=())
        post.append(_post_block(f"{name}_norm", name, norm, trains, moves))
    if encoder.deepstack:
        inner, count = structured(Projector, encoder.deepstack), encoder.num_deepstack
        post.append(_post_block(f"{name}_deepstack", name, inner, not encoder.deepstack.freeze, moves, count))
    main = structured(Projector, encoder.projector)
    post.append(_post_block(f"{name}_post", name, main, not encoder.projector.freeze, moves))
    return [first, *layers, *post]


def _post_block(
    kind: str, modality: str, structure: Projector, trainable: bool, propagates_gradient: bool, count: int = 1
) -> Block:
    return Block(kind, kind, modality, "post", structure, count, trainable, propagates_gradient, attach="previous")


def _stem(encoder: Encoder) -> PatchEmbedding | AudioStem:
    """Patches become tokens by one matrix, mel frames by convolutions."""
    width = encoder.layers.hidden_size
    if isinstance(encoder.stem, Patches):
        return structured(PatchEmbedding, encoder.stem, hidden_size=width, rotary_dim=count_rotated(encoder.layers))
    return structured(AudioStem, encoder.stem, hidden_size=width)
