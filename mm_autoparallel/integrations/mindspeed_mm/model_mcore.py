"""The model section of MindSpeed-MM's YAMLs for models under mindspeed_mm/mcore: Qwen3.5 with experts.

Keys are those of the configuration classes beside the model (mcore/models/qwen3_5/qwen35_config.py): Megatron's, with
names of its own for the delta rule. The tower has Qwen3-VL's form without inner projectors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mm_autoparallel.integrations.huggingface.text import count_heads
from mm_autoparallel.integrations.huggingface.towers import VIT_LAYERS, qwen_merger, video_patches
from mm_autoparallel.integrations.mindspeed_mm.model_layers import read_layers
from mm_autoparallel.model.job.layers import DeltaAttention, Layers
from mm_autoparallel.model.job.model import Decoder, Encoder, Model
from mm_autoparallel.model.readers.foreign import Section

FAMILY = "qwen3_5_moe"

_VISION: dict[str, Any] = {
    "num_layers": 27,
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
}


def is_mcore(file: Section) -> bool:
    """Whether `file` is such a section."""
    return file.section("text_decoder", {}).text("model_id", "") == FAMILY and not file.has("init_from_hf_path")


def read_mcore(file: Section) -> Model:
    """The model in the section. Raises JobError naming the key that is missing or mistyped."""
    decoder = file.section("text_decoder")
    vision = _read_tower(file.section("image_encoder").section("vision_encoder", _VISION))
    projector = vision.projector.model_copy(update={"freeze": file.flag("freeze_vision_projection", False)})
    vision = vision.model_copy(update={"projector": projector, "freeze": file.flag("freeze_vision_model", False)})
    return Model(
        name=f"{FAMILY}-{file.path.stem}",
        encoders=(vision,),
        text=Decoder(
            vocab_size=decoder.count("vocab_size"),
            layers=_read_layers(decoder),
            tied=decoder.flag("share_embeddings_and_output_weights", False),
            freeze=file.flag("freeze_language_model", False),
        ),
    )


def _read_tower(part: Section) -> Encoder:
    width, merge = part.count("hidden_size"), part.count("spatial_merge_size")
    for key in ("add_bias_linear", "add_qkv_bias", "add_bias_conv"):
        if not part.flag(key, True):
            raise part.refuse(key, "a tower with biases, true, is expected")
    layers = Layers(
        num_layers=part.layers("num_layers"),
        hidden_size=width,
        ffn_size=part.count("ffn_hidden_size"),
        num_heads=count_heads(part, "num_attention_heads", width),
        **VIT_LAYERS,
        tanh_gelu=True,
        packed=True,
    )
    stem = video_patches(part, bias=True, num_positions=part.count("num_position_embeddings"))
    projector = qwen_merger(width, merge, part.count("out_hidden_size"), "layer")
    return Encoder(name="vision", stem=stem, layers=layers, projector=projector)


def _read_layers(decoder: Section) -> Layers:
    """One layer of linear_attention_freq attends in full, and all have experts.

    What TP has to divide is the width of experts, as there are no other feed-forwards.
    """
    every, num_layers = decoder.count("linear_attention_freq", 4), decoder.layers("num_layers")
    delta = DeltaAttention(
        num_key_heads=decoder.count("linear_num_key_heads"),
        num_value_heads=decoder.count("linear_num_value_heads"),
        key_head_dim=decoder.count("linear_key_head_dim"),
        value_head_dim=decoder.count("linear_value_head_dim"),
        conv_width=decoder.count("linear_conv_kernel_dim", 4),
        full_layers=tuple(index for index in range(num_layers) if (index + 1) % every == 0),
    )
    if not decoder.has("num_moe_experts"):
        raise decoder.refuse("num_moe_experts", f"a number of experts is expected behind {FAMILY}")
    given = replace(decoder, defaults={"ffn_hidden_size": decoder.count("moe_ffn_hidden_size")})
    layers = read_layers(given, qk_norm="head", delta=delta, output_gate=True)
    assert layers.experts is not None
    gated = layers.experts.model_copy(update={"shared_gate": decoder.flag("moe_shared_expert_gate", True)})
    return layers.model_copy(update={"experts": gated})
