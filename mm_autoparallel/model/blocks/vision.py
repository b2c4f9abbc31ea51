"""Vision: patches become tokens, layers attend within an image or a window of it, a projector makes text tokens."""

from __future__ import annotations

from mm_autoparallel.model.blocks.chain import Block, PatchEmbedding
from mm_autoparallel.model.blocks.encoder import expand_encoder
from mm_autoparallel.model.blocks.layers import count_rotated
from mm_autoparallel.model.job.model import Encoder, Patches


def expand_vision(encoder: Encoder, stem: Patches) -> list[Block]:
    """`vision_pre` (patch embedding), the layers, `vision_post` (projector)."""
    embedding = PatchEmbedding(
        in_features=stem.in_features,
        hidden_size=encoder.layers.hidden_size,
        bias=stem.bias,
        num_positions=stem.num_positions,
        class_token=stem.class_token,
        norm=stem.norm,
        rotary_dim=count_rotated(encoder.layers),
    )
    return expand_encoder(encoder, embedding)
