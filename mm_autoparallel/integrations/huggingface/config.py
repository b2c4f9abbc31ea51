"""Reads a Hugging Face config.json.

Read are Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni, Qwen3-VL, Qwen3.5 and 3.6, InternVL, LLaVA, Kimi-VL and Kimi-K2.5,
DeepSeek-VL2, GLM-4.1V, GLM-4.5V, Mistral 3 and Step3-VL (towers.py), Qwen3-Omni and Qwen3-ASR (speech.py), models of
text alone (text.py), and ViT that classifies images.

A key that a file leaves out takes the default of its configuration class in transformers (defaults.py), for OpenGVLab's
own code of its. Such files know nothing of freezing: vision and audio count as frozen, projector and text as trained,
as MindSpeed-MM has it, unless the job says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from mm_autoparallel.integrations.huggingface import towers
from mm_autoparallel.integrations.huggingface.defaults import (
    CLIP,
    CLIP_OF_LLAVA,
    INTERNVIT_NATIVE,
    INTERNVIT_OPENGVLAB,
    PIXTRAL,
    QWEN2_5_VISION,
    QWEN2_AUDIO,
    QWEN2_VISION,
    QWEN3_5_VISION,
    QWEN3_VISION,
    SPEECH_ALIASES,
    TOWER_ALIASES,
    VIT,
)
from mm_autoparallel.integrations.huggingface.hub_cache import name_in_cache
from mm_autoparallel.integrations.huggingface.speech import read_qwen3_asr, read_qwen3_omni
from mm_autoparallel.integrations.huggingface.text import (
    OF_QWEN,
    OF_WHISPER,
    TEXT_FAMILIES,
    as_text,
    count_heads,
    is_tied,
    read_sizes,
    read_text,
    text_section,
)
from mm_autoparallel.model.job.layers import Layers, Window
from mm_autoparallel.model.job.model import Decoder, Encoder, Images, MelFrames, Model, Projector
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.validation import nearest


def is_huggingface(document: Mapping[str, Any]) -> bool:
    """True for a mapping that names a transformers model class or type."""
    return "model_type" in document or "architectures" in document


def read_huggingface(file: Section) -> Model:
    """The model in a config.json. Raises JobError naming the key that is missing, mistyped or of an unknown family."""
    model_type = file.text("model_type", "")
    if model_type not in FAMILIES:
        hint = nearest(model_type, list(FAMILIES))
        raise file.refuse("model_type", f"one of {', '.join(FAMILIES)} is expected{hint}")
    stem = name_in_cache(file.path) or (file.path.parent.name if file.path.stem == "config" else file.path.stem)
    model = FAMILIES[model_type](file)
    return model.model_copy(update={"name": f"{model_type}-{stem}" if stem else model_type})


def _read_qwen2_vl(file: Section) -> Model:
    text = read_text(text_section(file, "qwen2_vl_text"), tied=is_tied(file, "text_config", False))
    part = file.section("vision_config", QWEN2_VISION, TOWER_ALIASES)
    width, merge = part.count("embed_dim"), part.count("spatial_merge_size", 2)
    layers = Layers(
        num_layers=part.layers("depth"),
        hidden_size=width,
        ffn_size=int(width * part.count("mlp_ratio")),
        num_heads=count_heads(part, "num_heads", width),
        **towers.VIT_LAYERS,
        quick_gelu=True,
        packed=True,
    )
    projector = towers.qwen_merger(width, merge, part.count("hidden_size"), "layer")
    vision = Encoder(name="vision", stem=towers.video_patches(part), layers=layers, projector=projector)
    return Model(encoders=(vision,), text=text)


def _read_qwen2_5_vl(file: Section) -> Model:
    text = read_text(text_section(file, "qwen2_5_vl_text"), tied=is_tied(file, "text_config", False))
    return Model(encoders=(_qwen2_5_vision(file),), text=text)


def _read_qwen2_5_omni(file: Section) -> Model:
    """The thinker, which is what is trained on text; talker and vocoder are models of their own."""
    thinker = file.section("thinker_config", {}) if file.has("thinker_config") else file
    text = read_text(text_section(thinker, "qwen2_5_omni_text"), tied=is_tied(thinker, "", False))
    part = thinker.section("audio_config", QWEN2_AUDIO, SPEECH_ALIASES)
    width = part.count("d_model")
    layers = Layers(
        **read_sizes(part, width, OF_WHISPER),
        **towers.VIT_LAYERS,
        key_bias=False,
        # Chunks of 2 · n_window mel frames are n_window tokens (Qwen2_5OmniAudioEncoder.forward).
        window=Window(num_tokens=part.count("n_window")),
        rotary=False,
    )
    projector = Projector(
        norm="layer",
        norm_size=width,
        merge_tokens=2,
        layer_sizes=(width, part.count("output_dim")),
        num_special_tokens=2,
        replicated=True,
        freeze=True,
    )
    stem = MelFrames(num_mel_bins=part.count("num_mel_bins"))
    audio = Encoder(name="audio", stem=stem, layers=layers, projector=projector)
    return Model(encoders=(_qwen2_5_vision(thinker), audio), text=text)


def _qwen2_5_vision(file: Section) -> Encoder:
    part = file.section("vision_config", QWEN2_5_VISION, TOWER_ALIASES)
    width, merge = part.count("hidden_size"), part.count("spatial_merge_size", 2)
    layers = Layers(
        **read_sizes(part, width, OF_QWEN),
        norm="rms",
        mlp_bias=True,
        qkv_bias=True,
        output_bias=True,
        window=towers.read_window(part, "window_size", "depth"),
        packed=True,
    )
    projector = towers.qwen_merger(width, merge, part.count("out_hidden_size"), "rms")
    return Encoder(name="vision", stem=towers.video_patches(part), layers=layers, projector=projector)


def _read_qwen3_vl(file: Section) -> Model:
    """Qwen3-VL, and Qwen3.5 with the same vision but for inner projectors; Qwen3.6 is of Qwen3.5's type."""
    model_type = file.text("model_type", "")
    text = read_text(text_section(file, f"{model_type}_text"), tied=is_tied(file, "text_config", False))
    defaults = QWEN3_5_VISION if model_type.startswith("qwen3_5") else QWEN3_VISION
    vision = towers.read_qwen3_tower(file.section("vision_config", defaults, TOWER_ALIASES))
    return Model(encoders=(vision,), text=text)


def _read_internvl(file: Section) -> Model:
    """The form of transformers itself: vision_config of type internvl_vision, text_config of any known type."""
    text = text_section(file, "qwen2")
    part = file.section("vision_config", INTERNVIT_NATIVE)
    renamed = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization"}
    content = {renamed.get(key, key): value for key, value in part.content.items()}
    vision = _internvit(replace(part, content=content), file, text.count("hidden_size"))
    return Model(encoders=(vision,), text=read_text(text, tied=is_tied(file, "text_config", True)))


def _read_internvl_chat(file: Section) -> Model:
    """The form of OpenGVLab's own code: vision_config of type intern_vit_6b, llm_config."""
    text = as_text(file.section("llm_config"))
    vision = _internvit(file.section("vision_config", INTERNVIT_OPENGVLAB), file, text.count("hidden_size"))
    return Model(encoders=(vision,), text=read_text(text, tied=text.flag("tie_word_embeddings", False)))


def _internvit(part: Section, file: Section, text_width: int) -> Encoder:
    width, stem = part.count("hidden_size"), towers.square_patches(part, bias=True)
    norms = {"layer_norm": "layer", "rms_norm": "rms"}
    if part.text("norm_type", "") not in norms:
        raise part.refuse("norm_type", "one of layer_norm, rms_norm is expected")
    layers = Layers(
        **read_sizes(part, width),
        norm="layer" if part.text("norm_type", "") == "layer_norm" else "rms",
        gated=False,
        mlp_bias=True,
        qkv_bias=part.flag("qkv_bias", False),
        output_bias=True,
        qk_norm="hidden" if part.flag("qk_normalization", False) else None,
        layer_scale=True,
        rotary=False,
    )
    merge = file.ratio("downsample_ratio", 0.5) ** 2
    projector = Projector(
        norm="layer",
        norm_size=width * merge,
        merge_tokens=merge,
        layer_sizes=(width * merge, text_width, text_width),
        replicated=True,
    )
    return Encoder(name="vision", stem=stem, layers=layers, projector=projector)


def _read_llava(file: Section) -> Model:
    """Two plain matrices behind CLIP (LLaVA 1.5), whose last norm is there though its output goes unused, or behind
    Pixtral's tower (mistral-community/pixtral-12b)."""
    text = text_section(file, "llama")
    part = file.section("vision_config", CLIP if file.has("vision_config") else CLIP_OF_LLAVA)
    tower = part.text("model_type", LLAVA_TOWERS[0])
    final_norm: Literal["layer"] | None = None
    if tower == "pixtral":
        stem, layers = towers.pixtral_tower(replace(part, defaults=PIXTRAL))
    elif tower == "clip_vision_model":
        stem, final_norm = towers.square_patches(part, whole=False, norm="layer"), "layer"
        layers = Layers(
            **read_sizes(part, part.count("hidden_size")), **towers.VIT_LAYERS, rotary=False, quick_gelu=True
        )
    else:
        raise part.refuse("model_type", f"one of {', '.join(LLAVA_TOWERS)} is expected")
    text_width = text.count("hidden_size")
    projector = Projector(
        layer_sizes=(layers.hidden_size, text_width, text_width),
        bias=file.flag("multimodal_projector_bias", True),
        replicated=True,
    )
    vision = Encoder(name="vision", stem=stem, layers=layers, final_norm=final_norm, projector=projector)
    return Model(encoders=(vision,), text=read_text(text, tied=is_tied(file, "text_config", False)))


LLAVA_TOWERS = ("clip_vision_model", "pixtral")
"""Types of a LLaVA's `vision_config` that are read here; one with another tower goes by its class (generic.py)."""


def _read_vit(file: Section) -> Model:
    """ViTForImageClassification: a class for each label that the file names, two where it names none."""
    part = replace(file, defaults=VIT)
    width, stem = part.count("hidden_size"), towers.square_patches(part, bias=True)
    layers = Layers(
        **read_sizes(part, width),
        **towers.VIT_LAYERS | {"qkv_bias": part.flag("qkv_bias", True)},
        rotary=False,
    )
    labels = part.section("id2label", {}).content
    images = Images(stem=stem, num_outputs=part.count("num_labels", len(labels) or 2))
    return Model(text=Decoder(layers=layers, images=images, causal=False))


FAMILIES: dict[str, Callable[[Section], Model]] = {
    "qwen2_vl": _read_qwen2_vl,
    "qwen2_5_vl": _read_qwen2_5_vl,
    "qwen2_5_omni": _read_qwen2_5_omni,
    "qwen2_5_omni_thinker": _read_qwen2_5_omni,
    "qwen3_vl": _read_qwen3_vl,
    "qwen3_vl_moe": _read_qwen3_vl,
    "qwen3_5": _read_qwen3_vl,
    "qwen3_5_moe": _read_qwen3_vl,
    "kimi_k25": towers.read_kimi,
    "kimi_vl": towers.read_kimi,
    "deepseek_vl_v2": towers.read_deepseek_vl2,
    "internvl": _read_internvl,
    "internvl_chat": _read_internvl_chat,
    "llava": _read_llava,
    "glm4v": towers.read_glm4v,
    "glm4v_moe": towers.read_glm4v,
    "mistral3": towers.read_mistral3,
    "qwen3_omni_moe": read_qwen3_omni,
    "qwen3_omni_moe_thinker": read_qwen3_omni,
    "qwen3_asr": read_qwen3_asr,
    "step_robotics": towers.read_step3_vl,
    "vit": _read_vit,
} | TEXT_FAMILIES
