"""Hugging Face configs of Qwen3-Omni's thinker and of Qwen3-ASR, which share a tower for speech (arXiv:2509.17765).

Of Qwen3-Omni the thinker alone counts, which is what is trained on text; talker and vocoder are models of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_autoparallel.integrations.huggingface.defaults import (
    QWEN3_ASR_AUDIO,
    QWEN3_AUDIO,
    QWEN3_VISION,
    SPEECH_ALIASES,
    TOWER_ALIASES,
)
from mm_autoparallel.integrations.huggingface.text import (
    OF_WHISPER,
    is_tied,
    read_sizes,
    read_text,
    text_section,
)
from mm_autoparallel.integrations.huggingface.towers import VIT_LAYERS, read_qwen3_tower
from mm_autoparallel.model.job.layers import Layers, Window
from mm_autoparallel.model.job.model import Encoder, MelFrames, Model, Projector
from mm_autoparallel.model.readers.foreign import Section

_QWEN3_OF_ASR: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""What transformers' Qwen3ASRConfig puts in where text_config is missing as a whole."""


def read_qwen3_omni(file: Section) -> Model:
    """The thinker: towers for images and speech, a decoder with experts."""
    thinker = file.section("thinker_config", {}) if file.has("thinker_config") else file
    text = read_text(text_section(thinker, "qwen3_omni_moe_text"), tied=is_tied(thinker, "", False))
    vision = read_qwen3_tower(thinker.section("vision_config", QWEN3_VISION, TOWER_ALIASES))
    return Model(encoders=(vision, _read_speech_tower(thinker, QWEN3_AUDIO)), text=text)


def read_qwen3_asr(file: Section) -> Model:
    """In the form of Qwen's own code (thinker_config), or of transformers."""
    if file.has("thinker_config"):
        thinker = file.section("thinker_config")
        text = read_text(text_section(thinker, "qwen3_asr_text"), tied=is_tied(thinker, "text_config", False))
        return Model(encoders=(_read_speech_tower(thinker, QWEN3_AUDIO),), text=text)
    text = read_text(text_section(file, "qwen3", _QWEN3_OF_ASR), tied=is_tied(file, "", True))
    return Model(encoders=(_read_speech_tower(file, QWEN3_ASR_AUDIO),), text=text)


def _read_speech_tower(file: Section, defaults: Mapping[str, Any]) -> Encoder:
    """Chunks of 2 · n_window mel frames go through the convolutions by themselves, and layers attend within the tokens

    of n_window_infer frames (Qwen3OmniMoeAudioEncoder.forward).
    """
    part = file.section("audio_config", defaults, SPEECH_ALIASES)
    width, chunk = part.count("d_model"), 2 * part.count("n_window")
    chunk_tokens = -(-chunk // 8)
    if part.count("n_window_infer") % chunk:
        raise part.refuse("n_window_infer", f"a multiple of two times n_window, {chunk}, is expected")
    layers = Layers(
        **read_sizes(part, width, OF_WHISPER),
        **VIT_LAYERS,
        window=Window(num_tokens=chunk_tokens * (part.count("n_window_infer") // chunk)),
        rotary=False,
    )
    projector = Projector(
        norm="layer",
        norm_size=width,
        layer_sizes=(width, width, part.count("output_dim")),
        replicated=True,
        freeze=True,
    )
    stem = MelFrames(num_mel_bins=part.count("num_mel_bins"), conv_channels=part.count("downsample_hidden_size"))
    return Encoder(name="audio", stem=stem, layers=layers, projector=projector)
