"""Sample and SampleCost: one sample of a data set, and what encoder and decoder take for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_TOKENS = 10**9
"""Of a sample, and patches of an image. Assumed: a thousand times the longest context there is."""

PATCHES_A_TOKEN_SIDE = 2
"""An image's patches are merged two by two into one token (Qwen2-VL, arXiv:2409.12191, section 2.1)."""

FRAMES_A_PATCH = 2
"""Frames of a video that a patch joins (the same section)."""

AUDIO_TOKENS_PER_S = 25.0
"""A token of the decoder stands for 40 ms of audio (Qwen2.5-Omni, arXiv:2503.20215, section 2.2)."""


def count_audio_tokens(seconds: Floats, tokens_per_s: float) -> Floats:
    """[.] what recordings of so many seconds become, rounded up. A millionth of a token is a rounding error: 0.28 s at
    25 a second are 7 tokens, and their product in floating point is above 7."""
    tokens: Floats = np.ceil(np.round(seconds * tokens_per_s, 6))
    return tokens


@dataclass(frozen=True)
class Sample:
    """One sample: an image is `patches` of one attention span, in the order in which the sample holds them. So are
    those frames of a video that a patch joins.

    tokens: of the decoder's sequence, where they are known; else text_tokens and what images and audio become.
    audio_s: seconds of each recording.
    """

    patches: tuple[int, ...] = ()
    text_tokens: int = 0
    tokens: int | None = None
    audio_s: tuple[float, ...] = ()

    def num_tokens(self, merge: int = PATCHES_A_TOKEN_SIDE, audio_tokens_per_s: float = AUDIO_TOKENS_PER_S) -> int:
        """Of the decoder's sequence: an image of p patches becomes p / merge² tokens, rounded up, and so does audio."""
        if self.tokens is not None:
            return self.tokens
        return self.text_tokens + self.media_tokens(merge**2, audio_tokens_per_s)

    def media_tokens(self, merge_tokens: int, audio_tokens_per_s: float) -> int:
        """What its images and audio become: of an image, as many tokens as `merge_tokens` patches each make."""
        images = sum(-(-image // merge_tokens) for image in self.patches)
        if not self.audio_s:
            return images
        return images + int(count_audio_tokens(np.array(self.audio_s), audio_tokens_per_s).sum())


@dataclass(frozen=True)
class SampleCost:
    """Forward and backward, in ms, of the whole encoder for an image and of the whole decoder for a sequence.

    image_ms: (a2, a1, a0): a2·p² + a1·p + a0 for an image of p patches. token_ms: (b2, b1): b2·t² + b1·t for a sequence
    of t tokens. merge_tokens: patches of an image that become one token there, where a sample does not say its tokens
    (Qwen2-VL 4, LLaVA 1). Stages take their share by their count of layers of that modality.
    """

    image_ms: tuple[float, float, float]
    token_ms: tuple[float, float]
    encoder_frozen: bool = False
    """Nothing of the encoder trains: image_ms is of the forward alone."""
    merge_tokens: int = PATCHES_A_TOKEN_SIDE**2

    def images_ms(self, patches: Floats) -> Floats:
        """[.] of each image."""
        square, linear, fixed = self.image_ms
        taken: Floats = square * patches**2 + linear * patches + fixed
        return taken

    def sequences_ms(self, tokens: Floats) -> Floats:
        """[.] of each sequence."""
        square, linear = self.token_ms
        taken: Floats = square * tokens**2 + linear * tokens
        return taken

    def encoder_ms(self, sample: Sample) -> float:
        """Of all images of `sample`."""
        return float(self.images_ms(np.array(sample.patches, dtype=np.float64)).sum())

    def decoder_ms(self, sample: Sample) -> float:
        """Of the sample's sequence."""
        tokens = sample.tokens
        if tokens is None:
            tokens = sample.text_tokens + sample.media_tokens(self.merge_tokens, AUDIO_TOKENS_PER_S)
        return float(self.sequences_ms(np.array([tokens], dtype=np.float64))[0])
