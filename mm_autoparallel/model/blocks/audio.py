"""Audio: mel frames become tokens by convolutions, layers attend within chunks, a projector makes text tokens."""

from __future__ import annotations

from mm_autoparallel.model.blocks.chain import AudioStem, Block
from mm_autoparallel.model.blocks.encoder import expand_encoder
from mm_autoparallel.model.job.model import Encoder, MelFrames


def expand_audio(encoder: Encoder, stem: MelFrames) -> list[Block]:
    """`audio_pre` (convolutions), the layers, `audio_post` (projector)."""
    convolutions = AudioStem(
        num_mel_bins=stem.num_mel_bins,
        hidden_size=encoder.layers.hidden_size,
        num_positions=stem.num_positions,
        conv_channels=stem.conv_channels,
    )
    return expand_encoder(encoder, convolutions)
