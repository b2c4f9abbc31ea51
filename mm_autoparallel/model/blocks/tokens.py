"""TokenCounts: how many tokens each part of a modality handles for one sample."""

from __future__ import annotations

from dataclasses import dataclass

from mm_autoparallel.model.job.model import Encoder, Modality, Patches
from mm_autoparallel.model.job.traced_model import TracedEncoder
from mm_autoparallel.model.job.workload import Workload


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of one sample.

    input_tokens: patches or mel frames into the stem (text: tokens). layer_tokens: through the layers. output_tokens:
    out of the projector (text: into the loss). num_spans: images, recordings or packed samples they divide into; full
    attention stays inside one.
    """

    input_tokens: int
    layer_tokens: int
    output_tokens: int
    num_spans: int

    @property
    def span_tokens(self) -> int:
        """Tokens that one token of a full-attention layer sees (the largest span, where they do not divide evenly)."""
        return -(-self.layer_tokens // self.num_spans)


def count_tokens(modality: Modality, workload: Workload) -> TokenCounts:
    """What `modality` handles for one sample of `workload`.

    An encoder's tokens are those it gives the text decoder times the tokens its projector merges, and one class token
    an image where it has one. Two mel frames make one audio token, or eight (MelFrames.conv_channels). Several encoders
    of images each make all that images occupy, unless the workload gives each its own (encoder_tokens_per_sample).
    """
    if isinstance(modality, TracedEncoder):
        return _count_traced(modality, workload)
    if not isinstance(modality, Encoder):
        length, images = workload.seq_length, modality.images
        if images is None:
            return TokenCounts(length, length, length, num_spans=workload.samples_per_sequence)
        return TokenCounts(length - int(images.stem.class_token), length, 1 if images.pooled else length, num_spans=1)
    output_tokens = workload.handed_tokens(modality.name, modality.media)
    if isinstance(modality.stem, Patches):
        num_spans = workload.images_per_sample
        patches = output_tokens * modality.projector.merge_tokens
        class_tokens = num_spans if modality.stem.class_token and output_tokens else 0
        return TokenCounts(patches, patches + class_tokens, output_tokens, num_spans)
    num_spans = workload.audios_per_sample
    layer_tokens = output_tokens * modality.projector.merge_tokens
    return TokenCounts(modality.stem.frames_per_token * layer_tokens, layer_tokens, output_tokens, num_spans)


def _count_traced(encoder: TracedEncoder, workload: Workload) -> TokenCounts:
    """All counts are the text tokens that it gives: what runs through its layers is in their traces."""
    if encoder.kind == "text":
        return TokenCounts(workload.seq_length, workload.seq_length, workload.seq_length, num_spans=1)
    images = encoder.kind == "images"
    tokens = workload.image_tokens_per_sample if images else workload.audio_tokens_per_sample
    return TokenCounts(tokens, tokens, tokens, workload.images_per_sample if images else workload.audios_per_sample)
