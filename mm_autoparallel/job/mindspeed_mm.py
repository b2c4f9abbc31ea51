"""Reads MindSpeed-MM's model.json: the vision-language families of its examples/ folder.

Keys are Megatron's TransformerConfig names, part by part; what a file leaves out is as these two programs have it: no
gated feed-forward, biases on, LayerNorm, vision and audio frozen, projector and text not (pretrain_vlm.py), an
output table of its own (mindspeed_mm/models/vlm_model.py). `pipeline_num_layers` is what a plan decides, so not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mm_autoparallel.job.foreign import Section
from mm_autoparallel.job.model import (
    Decoder,
    Encoder,
    Experts,
    Layers,
    MelFrames,
    Model,
    Norm,
    Patches,
    Projector,
    Window,
)

NORMS: dict[str, Norm] = {"RMSNorm": "rms", "LayerNorm": "layer"}


def is_mindspeed_mm(document: Mapping[str, Any]) -> bool:
    """True for a mapping with MindSpeed-MM's parts."""
    return "text_decoder" in document


def read_mindspeed_mm(file: Section) -> Model:
    """The model in a MindSpeed-MM model.json. Raises JobError naming the key that is missing, mistyped or unknown."""
    for part in ("text_encoder", "video_encoder"):
        if file.has(part):
            raise file.refuse(
                part, "only image_encoder, audio_encoder and text_decoder can be planned; null is expected"
            )
    encoders = []
    if file.has("image_encoder"):
        encoders.append(_read_vision(file.section("image_encoder")))
    if file.has("audio_encoder"):
        encoders.append(_read_audio(file.section("audio_encoder").section("audio_encoder")))
    decoder = file.section("text_decoder")
    family = file.text("model_id", decoder.text("model_id", "mindspeed-mm"))
    return Model(
        name=f"{family}-{file.path.stem.removeprefix('model_')}", encoders=tuple(encoders), text=_read_text(decoder)
    )


def _read_text(decoder: Section) -> Decoder:
    return Decoder(
        vocab_size=decoder.count("vocab_size"),
        layers=_read_layers(decoder, qk_norm="head"),
        tied=not decoder.flag("untie_embeddings_and_output_weights", True),
        freeze=decoder.flag("freeze", False),
    )


def _read_layers(part: Section, qk_norm: str, **more: Any) -> Layers:
    """The transformer layers of one part, with `more` fields that its family fixes."""
    hidden_size, num_heads = part.count("hidden_size"), part.count("num_attention_heads")
    if not part.has("kv_channels") and hidden_size % num_heads:
        raise part.refuse("num_attention_heads", f"it must divide hidden_size {hidden_size}, or kv_channels be given")
    if part.flag("multi_latent_attention", False):
        raise part.refuse("multi_latent_attention", "latent attention is read from config.json or Megatron's arguments")
    num_kv_groups = num_heads
    if part.flag("group_query_attention", part.has("num_query_groups")):
        num_kv_groups = part.count("num_query_groups")
    if num_heads % num_kv_groups:
        raise part.refuse("num_query_groups", f"it must divide num_attention_heads {num_heads}")
    bias = part.flag("add_bias_linear", not part.flag("disable_bias_linear", False))
    fields: dict[str, Any] = {
        "num_layers": part.layers("num_layers"),
        "hidden_size": hidden_size,
        "ffn_size": part.count("ffn_hidden_size"),
        "num_heads": num_heads,
        "num_kv_groups": num_kv_groups,
        "head_dim": part.count("kv_channels", hidden_size // num_heads),
        "norm": _read_norm(part),
        "gated": part.flag("gated_linear_unit", False),
        "mlp_bias": bias,
        "qkv_bias": part.flag("add_qkv_bias", bias),
        "output_bias": bias,
        "qk_norm": qk_norm if part.flag("qk_layernorm", False) else None,
        "experts": _read_experts(part),
    }
    return Layers(**(fields | more))


def _read_norm(part: Section) -> Norm:
    name = part.text("normalization", "LayerNorm")
    if name not in NORMS:
        raise part.refuse("normalization", f"one of {', '.join(NORMS)} is expected")
    return NORMS[name]


def _read_experts(part: Section) -> Experts | None:
    """Experts under the names of Megatron (moe_*) or of Hugging Face, which MindSpeed-MM takes too."""
    if not part.has("num_moe_experts"):
        return None
    num_layers = part.layers("num_layers")
    ffn_size = part.count("moe_ffn_hidden_size", part.count("moe_intermediate_size", part.count("ffn_hidden_size")))
    num_experts, top_k = part.count("num_moe_experts"), part.count("moe_router_topk", 2)
    if top_k > num_experts:
        raise part.refuse("moe_router_topk", f"it is at most num_moe_experts {num_experts}")
    num_dense = part.number("first_k_dense_replace", 0)
    if num_dense > num_layers:
        raise part.refuse("first_k_dense_replace", f"it is at most num_layers {num_layers}")
    pattern = part.content.get("moe_layer_freq")
    if isinstance(pattern, list):
        if len(pattern) != num_layers or any(item not in (0, 1) for item in pattern):
            raise part.refuse("moe_layer_freq", f"a list of {num_layers} zeros and ones is expected, or a whole number")
        dense = [index for index, item in enumerate(pattern) if item == 0]
    else:
        every = part.count("moe_layer_freq", 1)
        dense = [index for index in range(num_layers) if index % every]
    return Experts(
        num_experts=num_experts,
        top_k=top_k,
        ffn_size=ffn_size,
        shared_ffn_size=part.number(
            "moe_shared_expert_intermediate_size", part.number("n_shared_experts", 0) * ffn_size
        ),
        dense_layers=tuple(sorted({*range(num_dense), *dense})),
    )


def _read_vision(image_encoder: Section) -> Encoder:
    encoder, projector = image_encoder.section("vision_encoder"), image_encoder.section("vision_projector")
    family = encoder.text("model_id", "")
    if family not in VISION_FAMILIES:
        raise encoder.refuse("model_id", f"one of {', '.join(VISION_FAMILIES)} is expected")
    return VISION_FAMILIES[family](encoder, projector)


def _read_qwen2vit(encoder: Section, projector: Section) -> Encoder:
    """The vision tower of Qwen2-VL and Qwen2.5-VL: rotary positions, and window attention in the latter."""
    patch_size, merge = encoder.side("patch_size"), encoder.count("spatial_merge_size", 2)
    window = None
    if encoder.has("window_attn_size"):
        # Windows are whole merged tokens wide: Qwen2.5-VL, get_window_index.
        side = encoder.count("window_attn_size") // merge // patch_size * merge
        if side < 1:
            raise encoder.refuse("window_attn_size", f"one merged token, {merge * patch_size} pixels, is the least")
        window = Window(num_tokens=side**2, full_layers=_read_full_layers(encoder))
    # Qwen2-VL's activation; the gated feed-forward is Qwen2.5-VL's
    quick_gelu = not encoder.flag("gated_linear_unit", False)
    in_features = encoder.count("in_channels", 3) * encoder.count("temporal_patch_size", 2) * patch_size**2
    return Encoder(
        name="vision",
        stem=Patches(in_features=in_features),
        layers=_read_layers(encoder, qk_norm="head", window=window, packed=True, quick_gelu=quick_gelu),
        final_norm=_read_norm(encoder) if encoder.flag("post_layer_norm", False) else None,
        projector=_read_projector(projector, encoder.count("hidden_size"), merge**2),
        freeze=encoder.flag("freeze", True),
    )


def _read_full_layers(encoder: Section) -> tuple[int, ...]:
    num_layers, full_layers = encoder.layers("num_layers"), encoder.indices("fullatt_block_indexes")
    if any(index >= num_layers for index in full_layers):
        raise encoder.refuse("fullatt_block_indexes", f"layers are 0 to {num_layers - 1}")
    return full_layers


def _read_internvit(encoder: Section, projector: Section) -> Encoder:
    """InternViT: class token, learned positions, layer scale; pixel shuffle merges tokens before the projector.

    All biases but those of query, key and value are fixed (OpenGVLab/InternViT-6B-448px-V1-5, modeling_intern_vit.py).
    """
    patch_size, image_size = encoder.side("patch_size"), encoder.side("image_size")
    if image_size % patch_size:
        raise encoder.refuse("image_size", f"a multiple of patch_size {patch_size} is expected")
    merge = encoder.ratio("downsample_ratio", 0.5) ** 2
    width = encoder.count("hidden_size")
    fixed = {"mlp_bias": True, "output_bias": True, "gated": False, "layer_scale": True, "rotary": False}
    layers = _read_layers(encoder, qk_norm="hidden", **fixed)
    return Encoder(
        name="vision",
        stem=Patches(
            in_features=encoder.count("num_channels", 3) * patch_size**2,
            bias=True,
            num_positions=(image_size // patch_size) ** 2 + 1,
            class_token=True,
        ),
        layers=layers,
        final_norm=_read_norm(encoder) if encoder.flag("post_layer_norm", False) else None,
        projector=_read_projector(projector, width, merge),
        freeze=encoder.flag("freeze", True),
    )


VISION_FAMILIES: dict[str, Callable[[Section, Section], Encoder]] = {
    "qwen2vit": _read_qwen2vit,
    "qwen2_5_vit": _read_qwen2vit,  # the name of the same class from 2.3.0 on
    "InternViT": _read_internvit,
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
        norm=_read_norm(projector) if family == "lnmlp" else None,
        norm_size=projector.count("input_size") if family == "lnmlp" else 0,
        merge_tokens=merge_tokens,
        layer_sizes=(joined, inner, projector.count("hidden_size")),
        bias=projector.flag("add_bias_linear", True),
        freeze=freeze,
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
        layers=_read_layers(encoder, qk_norm="head", window=window, rotary=False),
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
