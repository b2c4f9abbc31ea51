"""Text: the token embedding, which image and audio tokens join, the decoder's layers, the head with the loss."""

from __future__ import annotations

from mm_autoparallel.blocks.chain import Block, OutputHead, TokenEmbedding
from mm_autoparallel.blocks.layers import expand_layers
from mm_autoparallel.job.model import Decoder


def expand_text(decoder: Decoder, encoders_train: bool) -> list[Block]:
    """`text_pre` on the stage of the first layer, the layers, `text_post` in the last stage.

    encoders_train: something that gives tokens to the decoder trains, so gradients go back through all of it even where
    the decoder itself is frozen.
    """
    trains, width, norm = not decoder.freeze, decoder.layers.hidden_size, decoder.layers.norm
    reached = trains or encoders_train
    table = TokenEmbedding(decoder.vocab_size, width)
    head = OutputHead(decoder.vocab_size, width, norm, tied=decoder.tied)
    layers = expand_layers("text", decoder.layers, causal=True, trainable=trains, propagates_gradient=reached)
    return [
        Block("text_pre", "text_pre", "text", "pre", table, 1, trains, encoders_train, attach="next"),
        *layers,
        Block("text_post", "text_post", "text", "post", head, 1, trains, reached, pinned="last"),
    ]
