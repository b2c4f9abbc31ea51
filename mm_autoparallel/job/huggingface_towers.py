"""Hugging Face configs of GLM-4.1V, GLM-4.5V and Mistral 3 (Magistral), whose towers take images of any size.

Sizes as Glm4vVisionModel, PixtralVisionModel and Mistral3MultiModalProjector of transformers 5 build them.
"""

from __future__ import annotations

from dataclasses import replace

from mm_autoparallel.job.foreign import Section
from mm_autoparallel.job.huggingface_defaults import GLM4V_VISION, PIXTRAL
from mm_autoparallel.job.huggingface_text import count_heads, is_tied, read_text, text_section
from mm_autoparallel.job.layers import Layers
from mm_autoparallel.job.model import Decoder, Encoder, Model, Patches, Projector


def read_glm4v(file: Section) -> Model:
    """GLM-4.1V, dense with four norms a layer, and GLM-4.5V with experts. Half of each head is rotated in both, counted

    as the whole: a little more to read and write.
    """
    experts = file.text("model_type", "").startswith("glm4v_moe")
    part = text_section(file, "glm4v_moe_text" if experts else "glm4v_text")
    text = read_text(part, tied=is_tied(file, "text_config", False))
    layers = text.layers.model_copy(update={"output_bias": False, "post_norms": not experts})
    if part.flag("use_qk_norm", False):
        layers = layers.model_copy(update={"qk_norm": "head"})
    return Model(encoders=(_glm4v_tower(file),), text=text.model_copy(update={"layers": layers}))


def _glm4v_tower(file: Section) -> Encoder:
    """The convolution that merges tokens behind the last norm is part of the projector here."""
    part = file.section("vision_config", GLM4V_VISION)
    width, out, patch_size = part.count("hidden_size"), part.count("out_hidden_size"), part.side("patch_size")
    merge, bias = part.count("spatial_merge_size", 2), part.flag("attention_bias", False)
    layers = Layers(
        num_layers=part.layers("depth"),
        hidden_size=width,
        ffn_size=out,
        num_heads=count_heads(part, "num_heads", width),
        norm="rms",
        qkv_bias=bias,
        packed=True,
    )
    stem = Patches(
        in_features=part.count("in_channels", 3) * part.count("temporal_patch_size", 2) * patch_size**2,
        bias=True,
        num_positions=(part.side("image_size") // patch_size) ** 2,
        norm="rms",
    )
    projector = Projector(
        norm="layer",
        norm_size=out,
        merge_tokens=merge**2,
        layer_sizes=(width * merge**2, out, out),
        replicated=True,
        gated_ffn_size=part.count("intermediate_size"),
    )
    return Encoder(name="vision", stem=stem, layers=layers, final_norm="rms", projector=projector)


def read_mistral3(file: Section) -> Model:
    """Pixtral's tower, whose tokens a matrix merges before the projector's two, and Mistral's decoder."""
    part = replace(file.section("vision_config"), defaults=PIXTRAL)
    if part.text("model_type", "pixtral") != "pixtral":
        raise part.refuse("model_type", "pixtral is expected")
    text = text_section(file, "mistral")
    width, text_width = part.count("hidden_size"), text.count("hidden_size")
    merge = file.count("spatial_merge_size", 2) ** 2
    layers = Layers(
        num_layers=part.layers("num_hidden_layers"),
        hidden_size=width,
        ffn_size=part.count("intermediate_size"),
        num_heads=count_heads(part, "num_attention_heads", width),
        head_dim=part.number("head_dim", 0),
        norm="rms",
        packed=True,
    )
    projector = Projector(
        norm="rms",
        norm_size=width,
        merge_tokens=merge,
        layer_sizes=(width * merge, width, text_width, text_width),
        bias=False,
        replicated=True,
    )
    if file.flag("multimodal_projector_bias", False):
        raise file.refuse("multimodal_projector_bias", "a projector without biases is expected")
    stem = Patches(in_features=part.count("num_channels") * part.side("patch_size") ** 2, norm="rms")
    decoder: Decoder = read_text(text, tied=is_tied(file, "text_config", False))
    return Model(encoders=(Encoder(name="vision", stem=stem, layers=layers, projector=projector),), text=decoder)
