"""What encoders have in common: a stem, layers, what follows the layers, and which of it sees gradients.

An encoder depends on its own input alone, so another encoder that trains before it in the chain gives it no gradient.
"""

from __future__ import annotations

from mm_autoparallel.model.blocks.chain import AudioStem, Block, PatchEmbedding, Projector
from mm_autoparallel.model.blocks.layers import expand_layers
from mm_autoparallel.model.job import model
from mm_autoparallel.model.job.model import Encoder


def expand_encoder(encoder: Encoder, stem: PatchEmbedding | AudioStem) -> list[Block]:
    """`NAME_pre` on the stage of the first layer; the layers; the rest on the stage of the last layer.

    The rest is a final norm that is no part of the projector, the inner projectors (they read inner layers, but count
    as held and run beside the main one), and `NAME_post`, the projector.
    """
    name, trains = encoder.name, not encoder.freeze
    moves = trains or encoder.train_positions
    pre = Block(f"{name}_pre", f"{name}_pre", name, "pre", stem, 1, moves, propagates_gradient=False, attach="next")
    layers = expand_layers(name, encoder.layers, causal=False, trainable=trains, propagates_gradient=moves)
    post = []
    if encoder.final_norm:
        norm = Projector(encoder.final_norm, encoder.layers.hidden_size, merge_tokens=1, layer_sizes=())
        post.append(_post_block(f"{name}_norm", name, norm, trains, moves))
    if encoder.deepstack:
        inner, count = _projector(encoder.deepstack), encoder.num_deepstack
        post.append(_post_block(f"{name}_deepstack", name, inner, not encoder.deepstack.freeze, moves, count))
    main = _projector(encoder.projector)
    post.append(_post_block(f"{name}_post", name, main, not encoder.projector.freeze, moves))
    return [pre, *layers, *post]


def _post_block(
    kind: str, modality: str, structure: Projector, trainable: bool, propagates_gradient: bool, count: int = 1
) -> Block:
    return Block(kind, kind, modality, "post", structure, count, trainable, propagates_gradient, attach="previous")


def _projector(projector: model.Projector) -> Projector:
    return Projector(
        norm=projector.norm,
        norm_size=projector.norm_size,
        merge_tokens=projector.merge_tokens,
        layer_sizes=projector.layer_sizes,
        bias=projector.bias,
        num_special_tokens=projector.num_special_tokens,
        replicated=projector.replicated,
        gated_ffn_size=projector.gated_ffn_size,
        convolutions=projector.convolutions,
    )
