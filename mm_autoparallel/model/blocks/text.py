"""Text: the token embedding, which image and audio tokens join, the decoder's layers, modules that predict one token

more each, the head with the loss. Or, in its place, images alone.
"""

from __future__ import annotations

from mm_autoparallel.model.blocks import chain
from mm_autoparallel.model.blocks.layers import count_rotated, expand_layers, layer_structure
from mm_autoparallel.model.job.model import Decoder, Images


def expand_text(decoder: Decoder, encoders_train: bool, own_positions: bool = False) -> list[chain.Block]:
    """`text_pre` on the stage of the first layer, the layers, `text_mtp` and `text_post` in the last stage.

    encoders_train: something that gives tokens to the decoder trains, so gradients go back through all of it even where
    the decoder itself is frozen. own_positions: samples differ in the positions of their tokens.
    """
    trains, width, norm = not decoder.freeze, decoder.layers.hidden_size, decoder.layers.norm
    reached = trains or encoders_train
    if decoder.images:
        return _expand_images(decoder, decoder.images)
    table = chain.TokenEmbedding(
        decoder.vocab_size,
        width,
        decoder.num_positions,
        num_types=2 if decoder.masked else 0,
        rotary_dim=count_rotated(decoder.layers),
        own_positions=own_positions,
    )
    head = chain.OutputHead(decoder.vocab_size, width, norm, tied=decoder.tied, masked=decoder.masked)
    layers = expand_layers("text", decoder.layers, decoder.causal, trainable=trains, propagates_gradient=reached)
    post = [chain.Block("text_post", "text_post", "text", "post", head, 1, trains, reached, pinned="last")]
    if decoder.num_mtp:
        last = layer_structure(decoder.layers, decoder.layers.num_layers - 1, decoder.causal)
        module = chain.PredictionModule(last, decoder.vocab_size, decoder.tied)
        count = decoder.num_mtp
        post.insert(
            0, chain.Block("text_mtp", "text_mtp", "text", "post", module, count, trains, reached, pinned="last")
        )
    pre = chain.Block("text_pre", "text_pre", "text", "pre", table, 1, trains, encoders_train, attach="next")
    return [pre, *layers, *post]


def _expand_images(decoder: Decoder, images: Images) -> list[chain.Block]:
    """As text: patches become tokens, and the head gives classes or patches."""
    trains, width, patches = not decoder.freeze, decoder.layers.hidden_size, images.stem
    stem = chain.structured(chain.PatchEmbedding, patches, hidden_size=width, num_labels=images.num_labels)
    head = chain.ImageHead(images.num_outputs, width, decoder.layers.norm, images.pooled, decoder.layers.modulated)
    return [
        chain.Block("text_pre", "text_pre", "text", "pre", stem, 1, trains, propagates_gradient=False, attach="next"),
        *expand_layers("text", decoder.layers, causal=False, trainable=trains, propagates_gradient=trains),
        chain.Block("text_post", "text_post", "text", "post", head, 1, trains, trains, pinned="last"),
    ]
