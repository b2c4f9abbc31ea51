"""Hugging Face configs of GLM-4.1V, GLM-4.5V, Mistral 3 (Magistral) and Step3-VL, whose towers take images of any size,

of DeepSeek-VL2, whose tower is SigLIP's, and of Kimi-VL and Kimi-K2.5; the tower that Qwen3-VL, Qwen3.5 and Qwen3-Omni
share. Sizes as Glm4vVisionModel, PixtralVisionModel, Mistral3MultiModalProjector, Qwen3VLVisionModel and
Step3p7VisionModel of transformers 5 build them; of DeepSeek-VL2 and Kimi-VL as the code beside their files does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mm_autoparallel.integrations.huggingface.defaults import (
    GLM4V_VISION,
    KIMI_VISION,
    MISTRAL_OF_MISTRAL3,
    PIXTRAL,
    PIXTRAL_OF_MISTRAL3,
    STEP3_VISION,
    TOWER_ALIASES,
)
from mm_autoparallel.integrations.huggingface.text import (
    OF_QWEN,
    as_text,
    count_heads,
    is_tied,
    read_sizes,
    read_text,
    text_section,
)
from mm_autoparallel.model.job.layers import Layers, Window
from mm_autoparallel.model.job.model import Decoder, Encoder, Model, Patches, Projector
from mm_autoparallel.model.readers.foreign import Section

VIT_LAYERS: dict[str, Any] = {
    "norm": "layer",
    "gated": False,
    "mlp_bias": True,
    "qkv_bias": True,
    "output_bias": True,
}
"""Layers of a tower as ViT has them: LayerNorm, two matrices, a bias everywhere (Dosovitskiy et al. 2021)."""


def video_patches(part: Section, **more: Any) -> Patches:
    """Patches over time too, with `more` of them; the channels' key was renamed between versions."""
    channels = part.count("in_channels", part.count("in_chans", 3))
    in_features = channels * part.count("temporal_patch_size", 2) * part.side("patch_size") ** 2
    return Patches(in_features=in_features, **more)


def square_patches(part: Section, *, whole: bool = True, **more: Any) -> Patches:
    """Of an image of one size, with a position each, and a token for its class. whole: patches fill the image."""
    patch_size, image_size = part.side("patch_size"), part.side("image_size")
    if whole and image_size % patch_size:
        raise part.refuse("image_size", f"a multiple of patch_size {patch_size} is expected")
    num_positions = (image_size // patch_size) ** 2 + 1
    in_features = part.count("num_channels", 3) * patch_size**2
    return Patches(in_features=in_features, num_positions=num_positions, class_token=True, **more)


def read_window(part: Section, window: str, num_layers: str) -> Window:
    """Attention of Qwen2.5-VL's tower; `window` and `num_layers` are what the file calls these.

    Windows are whole merged tokens wide (Qwen2_5_VisionTransformer.get_window_index).
    """
    merge, patch_size = part.count("spatial_merge_size", 2), part.side("patch_size")
    side = part.count(window) // merge // patch_size * merge
    if side < 1:
        raise part.refuse(window, f"one merged token, {merge * patch_size} pixels, is the least")
    full_layers = part.indices("fullatt_block_indexes")
    if any(index >= part.layers(num_layers) for index in full_layers):
        raise part.refuse("fullatt_block_indexes", f"layers are 0 to {part.count(num_layers) - 1}")
    return Window(num_tokens=side**2, full_layers=full_layers)


def qwen_merger(width: int, merge: int, out: int, norm: Any) -> Projector:
    """The Qwen patch merger: norm, join merge × merge tokens, a square matrix, one to the text's width."""
    joined = width * merge**2
    return Projector(norm=norm, norm_size=width, merge_tokens=merge**2, layer_sizes=(joined, joined, out))


def read_qwen3_tower(part: Section) -> Encoder:
    """Learned and rotary positions, and a projector on each of some inner layers."""
    width, merge, out = part.count("hidden_size"), part.count("spatial_merge_size", 2), part.count("out_hidden_size")
    layers = Layers(
        **read_sizes(part, width, OF_QWEN),
        **VIT_LAYERS,
        packed=True,
    )
    stem = video_patches(part, bias=True, num_positions=part.number("num_position_embeddings", 0))
    main = qwen_merger(width, merge, out, "layer")
    num_deepstack = len(part.indices("deepstack_visual_indexes"))
    # The inner mergers normalise joined tokens, the main one single ones (Qwen3VLMoeVisionPatchMerger).
    inner = main.model_copy(update={"norm_size": width * merge**2})
    return Encoder(
        name="vision",
        stem=stem,
        layers=layers,
        projector=main,
        deepstack=inner if num_deepstack else None,
        num_deepstack=num_deepstack,
    )


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
    part = file.section("vision_config", GLM4V_VISION, TOWER_ALIASES)
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
    num_positions = (part.side("image_size") // patch_size) ** 2
    stem = video_patches(part, bias=True, num_positions=num_positions, norm="rms")
    projector = Projector(
        norm="layer",
        norm_size=out,
        merge_tokens=merge**2,
        layer_sizes=(width * merge**2, out, out),
        replicated=True,
        gated_ffn_size=part.count("intermediate_size"),
    )
    return Encoder(name="vision", stem=stem, layers=layers, final_norm="rms", projector=projector)


def pixtral_tower(part: Section) -> tuple[Patches, Layers]:
    """Pixtral's tower of native resolution (transformers, models/pixtral/modeling_pixtral.py): patches without bias, a
    norm before the first layer and none behind the last. part: vision_config. Raises JobError naming a wrong key."""
    width = part.count("hidden_size")
    layers = Layers(
        **read_sizes(part, width),
        head_dim=part.number("head_dim", 0),
        norm="rms",
        packed=True,
    )
    return Patches(in_features=part.count("num_channels") * part.side("patch_size") ** 2, norm="rms"), layers


def read_mistral3(file: Section) -> Model:
    """Pixtral's tower, whose tokens a matrix merges before the projector's two, and Mistral's decoder.

    Its class ties the embeddings where nothing is said of it; published files have a text_config, say nothing of it,
    and come with weights that are not tied.
    """
    part = file.section("vision_config", PIXTRAL if file.has("vision_config") else PIXTRAL_OF_MISTRAL3)
    if part.text("model_type", "pixtral") != "pixtral":
        raise part.refuse("model_type", "pixtral is expected")
    text = text_section(file, "mistral", MISTRAL_OF_MISTRAL3)
    stem, layers = pixtral_tower(part)
    width, text_width = layers.hidden_size, text.count("hidden_size")
    merge = file.count("spatial_merge_size", 2) ** 2
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
    decoder: Decoder = read_text(text, tied=is_tied(file, "text_config", not file.has("text_config")))
    return Model(encoders=(Encoder(name="vision", stem=stem, layers=layers, projector=projector),), text=decoder)


def read_step3_vl(file: Section) -> Model:
    """Step3-VL: a perception encoder (arXiv:2504.13181) with learned and rotary positions and layer scale, two

    convolutions that halve an image's sides, a matrix, and Qwen3. Its own code (StepRoboticsVisionEncoder) has the
    tower and the convolutions of Step3p7VisionModel in transformers.
    """
    part = file.section("vision_config", STEP3_VISION)
    width, patch_size = part.count("width"), part.side("patch_size")
    for key, expected in (("use_cls_token", False), ("use_abs_posemb", True), ("use_rope2d", True)):
        if part.flag(key, expected) != expected:
            raise part.refuse(key, f"{str(expected).lower()} is expected")
    if file.count("understand_projector_stride", 2) != 2:
        raise file.refuse("understand_projector_stride", "convolutions that halve an image's sides, 2, is expected")
    layers = Layers(
        num_layers=part.layers("layers"),
        hidden_size=width,
        ffn_size=int(width * part.factor("mlp_ratio", 8960 / 1536)),
        num_heads=count_heads(part, "heads", width),
        **VIT_LAYERS,
        layer_scale=True,
        quick_gelu=True,
        joint_qkv=True,
    )
    stem = Patches(
        in_features=part.count("num_channels") * patch_size**2,
        num_positions=(part.side("image_size") // patch_size) ** 2,
        norm="layer" if part.flag("use_ln_pre", True) else None,
    )
    text = text_section(file, "qwen3")
    projector = Projector(
        merge_tokens=16,
        layer_sizes=(4 * width, text.count("hidden_size")),
        bias=file.flag("projector_bias", False),
        convolutions=(width, 2 * width, 4 * width),
        replicated=True,
    )
    vision = Encoder(
        name="vision",
        stem=stem,
        layers=layers,
        final_norm="layer" if part.flag("use_ln_post", False) else None,
        projector=projector,
    )
    return Model(encoders=(vision,), text=read_text(text, tied=is_tied(file, "text_config", False)))


_SIGLIP = {
    "siglip_so400m_patch14_384": {"patch_size": 14, "image_size": 384, "width": 1152, "layers": 27, "ffn_size": 4304},
    "siglip_so400m_patch14_224": {"patch_size": 14, "image_size": 224, "width": 1152, "layers": 27, "ffn_size": 4304},
    "siglip_large_patch16_384": {"patch_size": 16, "image_size": 384, "width": 1024, "layers": 24, "ffn_size": 4096},
}
"""SigLIP's towers by name, with 16 heads each (arXiv:2303.15343; google/siglip-so400m-patch14-384)."""


def read_siglip(part: Section, projector: Section) -> Encoder:
    """SigLIP, whose sizes stand behind its name where `part` leaves them out, and DeepSeek-VL2's projector.

    Its pooling head is built but takes no part, and is not counted.
    """
    name = part.text("model_name", "siglip_so400m_patch14_384")
    if name not in _SIGLIP:
        raise part.refuse("model_name", f"one of {', '.join(_SIGLIP)} is expected")
    part = replace(part, defaults=_SIGLIP[name])
    patch_size, width = part.count("patch_size"), part.count("width")
    layers = Layers(
        num_layers=part.layers("num_layers" if part.has("num_layers") else "layers"),
        hidden_size=width,
        ffn_size=int(width * part.factor("mlp_ratio", 4.0)) if part.has("mlp_ratio") else part.count("ffn_size"),
        num_heads=part.count("heads", 16),
        **VIT_LAYERS,
        rotary=False,
        joint_qkv=True,
    )
    return Encoder(
        name="vision",
        stem=Patches(
            in_features=3 * patch_size**2,
            bias=True,
            num_positions=(part.count("image_size") // patch_size) ** 2,
        ),
        layers=layers,
        final_norm="layer",
        projector=_read_deepseek_projector(projector, width),
    )


def _read_deepseek_projector(projector: Section, width: int) -> Projector:
    """downsample_ratio² tokens joined, plain matrices, and learned tokens for ends of lines and views."""
    if projector.text("projector_type", "downsample_mlp_gelu") != "downsample_mlp_gelu":
        raise projector.refuse("projector_type", "downsample_mlp_gelu is expected")
    if projector.count("input_dim", width) != width:
        raise projector.refuse("input_dim", f"the vision encoder is {width} wide")
    out, merge = projector.count("n_embed", 2048), projector.count("downsample_ratio", 2) ** 2
    inner = [out * projector.count("mlp_ratio", 1)] * (projector.layers("depth", 2) - 1)
    return Projector(
        merge_tokens=merge, layer_sizes=(width * merge, *inner, out), num_special_tokens=2, replicated=True
    )


def read_deepseek_vl2(file: Section) -> Model:
    """DeepSeek-VL2 (arXiv:2412.10302): SigLIP and a decoder of DeepSeek-V2's kind, whose smallest attends without

    compressed vectors (use_mla).
    """
    text = file.section("language_config")
    text = as_text(text, text.text("model_type", "deepseek_v2"))
    if not text.flag("use_mla", True):
        latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        kept = {key: value for key, value in text.content.items() if key not in latent}
        text = replace(text, content=kept, defaults={k: v for k, v in text.defaults.items() if k not in latent})
    vision = read_siglip(file.section("vision_config", {}), file.section("projector_config", {}))
    return Model(encoders=(vision,), text=read_text(text, tied=text.flag("tie_word_embeddings", False)))


def _merged(part: Section) -> int:
    """Tokens that become one: a rectangle of them, merge_kernel_size."""
    sides = part.indices("merge_kernel_size")
    if len(sides) != 2 or 0 in sides:
        raise part.refuse("merge_kernel_size", "two whole numbers, at least 1, are expected")
    return math.prod(sides)


def read_kimi(file: Section) -> Model:
    """A vision tower and DeepSeek-V3: Kimi-VL (arXiv:2504.07491) and Kimi-K2.5.

    Sizes of the tower as transformers calls them, or as Moonshot's own code does (vt_, init_).
    """
    decoder = text_section(file, "deepseek_v3")
    # Kimi-VL's language model looks for the tie in its own part alone
    tied = is_tied(file, "text_config", file.text("model_type", "") == "kimi_k25")
    text = read_text(decoder, tied=tied)
    part = file.section("vision_config", KIMI_VISION)
    own = {key.removeprefix("vt_").removeprefix("init_"): value for key, value in part.content.items()}
    part = replace(part, content=own | {key: value for key, value in part.content.items() if key not in own})
    width, merge = part.count("hidden_size"), _merged(part)
    layers = Layers(
        **read_sizes(part, width),
        **VIT_LAYERS,
        tanh_gelu=True,
        packed=True,
    )
    stem = Patches(
        in_features=3 * part.side("patch_size") ** 2,
        bias=True,
        num_positions=part.count("pos_emb_height") * part.count("pos_emb_width"),
    )
    joined = width * merge
    projector = Projector(
        norm="layer",
        norm_size=width,
        merge_tokens=merge,
        layer_sizes=(joined, joined, text.layers.hidden_size),
        replicated=True,
    )
    vision = Encoder(name="vision", stem=stem, layers=layers, final_norm="layer", projector=projector)
    return Model(encoders=(vision,), text=text)
