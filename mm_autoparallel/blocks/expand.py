"""expand: the model as one chain of blocks in the order data flows, each modality through its own function."""

from __future__ import annotations

from mm_autoparallel.blocks.audio import expand_audio
from mm_autoparallel.blocks.chain import Block, Chain
from mm_autoparallel.blocks.text import expand_text
from mm_autoparallel.blocks.vision import expand_vision
from mm_autoparallel.job.model import Encoder, Model, Patches


def expand(model: Model) -> Chain:
    """Encoders in the model's order, then text: `*_pre`, runs of equal layers, `*_post` of each."""
    encoders = [block for encoder in model.encoders for block in _expand_encoder(encoder)]
    text = expand_text(model.text, encoders_train=any(block.trainable for block in encoders))
    return Chain(tuple(encoders + text))


def _expand_encoder(encoder: Encoder) -> list[Block]:
    if isinstance(encoder.stem, Patches):
        return expand_vision(encoder, encoder.stem)
    return expand_audio(encoder, encoder.stem)
