"""The vision towers and projectors of MindSpeed-MM's model.json, by its names of their classes."""

from __future__ import annotations

from collections.abc import Callable

from mm_autoparallel.integrations.huggingface.towers import read_siglip, read_window, square_patches, video_patches
from mm_autoparallel.integrations.mindspeed_mm.model_layers import read_layers, read_norm
from mm_autoparallel.model.job.model import Encoder, Patches, Projector
from mm_autoparallel.model.readers.foreign import Section


def read_vision(image_encoder: Section) -> Encoder:
    """The vision encoder of a model.json with its projector. Raises JobError naming the key that is wrong."""
    encoder, projector = image_encoder.section("vision_encoder"), image_encoder.section("vision_projector")
    family = encoder.text("model_id", "")
    if family not in VISION_FAMILIES:
        raise encoder.refuse("model_id", f"one of {', '.join(VISION_FAMILIES)} is expected")
    return VISION_FAMILIES[family](encoder, projector)


def _read_qwen2vit(encoder: Section, projector: Section) -> Encoder:
    """The vision tower of Qwen2-VL and Qwen2.5-VL: rotary positions, and window attention in the latter."""
    merge, window = encoder.count("spatial_merge_size", 2), None
    if encoder.has("window_attn_size"):
        window = read_window(encoder, "window_attn_size", "num_layers")
    # Qwen2-VL's activation; the gated feed-forward is Qwen2.5-VL's
    quick_gelu = not encoder.flag("gated_linear_unit", False)
    return Encoder(
        name="vision",
        stem=video_patches(encoder),
        layers=read_layers(encoder, qk_norm="head", window=window, packed=True, quick_gelu=quick_gelu),
        final_norm=read_norm(encoder) if encoder.flag("post_layer_norm", False) else None,
        projector=_read_projector(projector, encoder.count("hidden_size"), merge**2),
        freeze=encoder.flag("freeze", True),
    )


def _read_internvit(encoder: Section, projector: Section) -> Encoder:
    """InternViT: class token, learned positions, layer scale; pixel shuffle merges tokens before the projector.

    All biases but those of query, key and value are fixed (OpenGVLab/InternViT-6B-448px-V1-5, modeling_intern_vit.py).
    """
    merge = encoder.ratio("downsample_ratio", 0.5) ** 2
    width = encoder.count("hidden_size")
    fixed = {"mlp_bias": True, "output_bias": True, "gated": False, "layer_scale": True, "rotary": False}
    layers = read_layers(encoder, qk_norm="hidden", **fixed)
    return Encoder(
        name="vision",
        stem=square_patches(encoder, bias=True),
        layers=layers,
        final_norm=read_norm(encoder) if encoder.flag("post_layer_norm", False) else None,
        projector=_read_projector(projector, width, merge),
        freeze=encoder.flag("freeze", True),
    )


def _read_qwen3vit(encoder: Section, projector: Section) -> Encoder:
    """The tower of Qwen3-VL: learned and rotary positions, and projectors on inner layers whose outputs the first text

    layers add. Those projectors normalise joined tokens and train; positions train too, from 26.0 on even where the
    tower is frozen (unfreeze_param_names), so that its layers pass gradients on.
    """
    width, merge = encoder.count("hidden_size"), encoder.count("spatial_merge_size", 2)
    main = _read_projector(projector, width, merge**2)
    inner = encoder.indices("deepstack_visual_indexes")
    if any(index >= encoder.layers("num_layers") for index in inner):
        raise encoder.refuse("deepstack_visual_indexes", f"layers are 0 to {encoder.layers('num_layers') - 1}")
    deepstack = main.model_copy(update={"norm_size": width * merge**2, "freeze": False})
    return Encoder(
        name="vision",
        stem=video_patches(
            encoder,
            bias=encoder.flag("add_bias_conv", True),
            num_positions=encoder.count("max_position_embeddings"),
        ),
        layers=read_layers(encoder, qk_norm="head", packed=True, tanh_gelu=True),
        projector=main,
        deepstack=deepstack if inner else None,
        num_deepstack=len(inner),
        freeze=encoder.flag("freeze", True),
        train_positions=True,
    )


def _read_clip(encoder: Section, projector: Section) -> Encoder:
    """CLIP as LLaVA has it: class token, learned positions, a norm before the layers and none behind them."""
    patch_size, width = encoder.side("patch_size"), encoder.count("hidden_size")
    num_patches = (encoder.side("image_size") // patch_size) ** 2
    class_token = encoder.flag("add_class_token", True)
    quick = encoder.text("activation_func", "quick_gelu") == "quick_gelu"
    return Encoder(
        name="vision",
        stem=Patches(
            in_features=3 * patch_size**2,
            num_positions=num_patches + int(class_token),
            class_token=class_token,
            norm=read_norm(encoder),
        ),
        layers=read_layers(encoder, qk_norm="head", rotary=False, quick_gelu=quick),
        projector=_read_projector(projector, width, 1),
        freeze=encoder.flag("freeze", True),
    )


def _read_siglip(encoder: Section, projector: Section) -> Encoder:
    """SigLIP as DeepSeek-VL2 has it, with `DeepSeekVL2MLP`."""
    if encoder.text("embed_layer", "patch") != "patch":
        raise encoder.refuse("embed_layer", "patch is expected")
    if encoder.content.get("select_layer", -1) != -1:
        raise encoder.refuse("select_layer", "the last layer, -1, is expected")
    if projector.text("model_id", "") != "DeepSeekVL2MLP":
        raise projector.refuse("model_id", "DeepSeekVL2MLP is expected behind SigLip")
    vision = read_siglip(encoder, projector)
    frozen = {"projector": vision.projector.model_copy(update={"freeze": projector.flag("freeze", False)})}
    return vision.model_copy(update=frozen | {"freeze": encoder.flag("freeze", True)})


def _read_glm4v(encoder: Section, projector: Section) -> Encoder:
    """The tower of GLM-4.1V: a norm before the layers, learned and rotary positions, RMS norms, a gated feed-forward.

    A convolution merges tokens behind the last norm. It is part of the tower there and of the projector here.
    """
    width, patch_size, merge = (
        encoder.count("hidden_size"),
        encoder.side("patch_size"),
        encoder.count("spatial_merge_size", 2),
    )
    if projector.text("model_id", "") != "GlmMLP":
        raise projector.refuse("model_id", "GlmMLP is expected behind glm4v_vit")
    out = encoder.count("out_hidden_size")
    if projector.count("out_hidden_size") != out:
        raise projector.refuse("out_hidden_size", f"the vision encoder gives tokens of {out}")
    bias = encoder.flag("attention_bias", False)
    norm, num_positions = read_norm(encoder), (encoder.side("image_size") // patch_size) ** 2
    return Encoder(
        name="vision",
        stem=video_patches(encoder, bias=True, num_positions=num_positions, norm=norm),
        layers=read_layers(encoder, qk_norm="head", qkv_bias=bias, output_bias=False, packed=True),
        final_norm=norm,
        projector=Projector(
            norm="layer",
            norm_size=out,
            merge_tokens=merge**2,
            layer_sizes=(width * merge**2, out, out),
            replicated=True,
            gated_ffn_size=projector.count("intermediate_size"),
            freeze=projector.flag("freeze", False),
        ),
        freeze=encoder.flag("freeze", True),
    )


VISION_FAMILIES: dict[str, Callable[[Section, Section], Encoder]] = {
    "qwen2vit": _read_qwen2vit,
    "qwen2_5_vit": _read_qwen2vit,  # the name of the same class from 2.3.0 on
    "InternViT": _read_internvit,
    "qwen3vit": _read_qwen3vit,
    "clip": _read_clip,
    "SigLip": _read_siglip,
    "glm4v_vit": _read_glm4v,
}


def _read_projector(projector: Section, width: int, merge_tokens: int) -> Projector:
    """`lnmlp` and `mlp` (Megatron's feed-forward, with and without a norm), `InternVLMLP` (norm and plain matrices)."""
    family = projector.text("model_id", "")
    freeze = projector.flag("freeze", False)
    joined = width * merge_tokens
    if family == "InternVLMLP":
        if projector.count("vit_hidden_size") != width:
            raise projector.refuse("vit_hidden_size", f"the vision encoder is {width} wide")
        out = projector.count("llm_hidden_size")
        return Projector(
            norm="layer",
            norm_size=joined,
            merge_tokens=merge_tokens,
            layer_sizes=(joined, out, out),
            replicated=True,
            freeze=freeze,
        )
    if family not in ("lnmlp", "mlp"):
        raise projector.refuse("model_id", "one of lnmlp, mlp, InternVLMLP is expected")
    if projector.count("input_size") not in (width, joined):
        raise projector.refuse("input_size", f"the vision encoder gives tokens of {width}")
    # lnmlp normalises single tokens, joins them, and its first matrix is square (multimodal_projector.py).
    inner = projector.count("ffn_hidden_size")
    if family == "lnmlp" and inner != joined:
        raise projector.refuse("ffn_hidden_size", f"{merge_tokens} joined tokens of {width} make {joined}")
    return Projector(
        norm=read_norm(projector) if family == "lnmlp" else None,
        norm_size=projector.count("input_size") if family == "lnmlp" else 0,
        merge_tokens=merge_tokens,
        layer_sizes=(joined, inner, projector.count("hidden_size")),
        bias=projector.flag("add_bias_linear", True),
        freeze=freeze,
    )
