"""Reads MindSpeed-MM's model.json: the vision-language families of its examples/ folder.

Keys are Megatron's TransformerConfig names, part by part (model_layers.py, model_vision.py); what a file
leaves out is as these two programs have it: no gated feed-forward, biases on, LayerNorm, vision and audio frozen,
projector and text not (pretrain_vlm.py), an output table of its own (mindspeed_mm/models/vlm_model.py).
`pipeline_num_layers` is what a plan decides, so not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_autoparallel.integrations.mindspeed_mm.model_layers import LATENT_SIZES, read_layers
from mm_autoparallel.integrations.mindspeed_mm.model_mcore import is_mcore, read_mcore
from mm_autoparallel.integrations.mindspeed_mm.model_vision import read_vision
from mm_autoparallel.model.job.layers import Window
from mm_autoparallel.model.job.model import Decoder, Encoder, MelFrames, Model, Projector
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.model_form import ModelForm


def is_mindspeed_mm(document: Mapping[str, Any]) -> bool:
    """True for a mapping with MindSpeed-MM's parts."""
    return "text_decoder" in document


def read_mindspeed_mm(file: Section) -> Model:
    """The model in a MindSpeed-MM model.json. Raises JobError naming the key that is missing, mistyped or unknown."""
    if is_mcore(file):
        return read_mcore(file)
    for part in ("text_encoder", "video_encoder"):
        if file.has(part):
            raise file.refuse(
                part, "only image_encoder, audio_encoder and text_decoder can be planned; null is expected"
            )
    encoders = []
    if file.has("image_encoder"):
        encoders.append(read_vision(file.section("image_encoder")))
    if file.has("audio_encoder"):
        encoders.append(_read_audio(file.section("audio_encoder").section("audio_encoder")))
    decoder = file.section("text_decoder")
    family = file.text("model_id", decoder.text("model_id", "mindspeed-mm"))
    return Model(
        name=f"{family}-{file.path.stem.removeprefix('model_')}", encoders=tuple(encoders), text=_read_text(decoder)
    )


_FOUR_NORMS = ("glm4v_lm",)
"""Decoders whose layers norm both branches before the residual too. Their rotary positions turn half of each head; the
whole is counted here, which is a little more to read and write."""

_LATENT_DECODERS = ("deepseek",)
"""Decoders whose class has latent attention whatever the file says (mindspeed_mm/models/common/module_spec)."""


def _read_text(decoder: Section) -> Decoder:
    if decoder.text("model_id", "") in _LATENT_DECODERS and not decoder.flag("multi_latent_attention", False):
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in LATENT_SIZES)
        raise decoder.refuse(
            "model_id",
            f"its attention is latent, and the launch script has the sizes ({flags}): plan that (--script), or add the "
            "keys multi_latent_attention and those sizes",
        )
    vocabulary = "language_vocab_size" if decoder.has("language_vocab_size") else "vocab_size"
    return Decoder(
        vocab_size=decoder.count(vocabulary),
        layers=read_layers(decoder, qk_norm="head", post_norms=decoder.text("model_id", "") in _FOUR_NORMS),
        tied=not decoder.flag("untie_embeddings_and_output_weights", True),
        num_mtp=decoder.number("mtp_num_layers", 0),
        freeze=decoder.flag("freeze", False),
    )


def _read_audio(encoder: Section) -> Encoder:
    """The audio tower of Qwen2.5-Omni: Whisper's stem, attention within chunks, pairs of tokens averaged, one matrix.

    A chunk is 2 · n_window mel frames, so n_window tokens (transformers, Qwen2_5OmniAudioEncoder.forward).
    """
    width, freeze = encoder.count("hidden_size"), encoder.flag("freeze", True)
    window = Window(num_tokens=encoder.count("n_window", 100))
    return Encoder(
        name="audio",
        stem=MelFrames(num_mel_bins=encoder.count("num_mel_bins", 128)),
        layers=read_layers(encoder, qk_norm="head", window=window, rotary=False),
        projector=Projector(
            norm="layer",
            norm_size=width,
            merge_tokens=2,
            layer_sizes=(width, encoder.count("output_dim")),
            num_special_tokens=2,
            replicated=True,
            freeze=freeze,
        ),
        freeze=freeze,
    )


MODELS = (ModelForm("MindSpeed-MM's model.json has text_decoder", is_mindspeed_mm, read_mindspeed_mm),)
