"""Sizes: the Qwen2-VL models that can be trained here, as Hugging Face's config.json writes them.

One mapping serves both readers: transformers builds the modules from it, the planner reads the same keys.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import Qwen2VLConfig

from failures import TrainingError
from mm_autoparallel.model.job.layers import Layers, Norm
from mm_autoparallel.model.job.model import Patches
from mm_autoparallel.model.readers.model_file import read_model

_TEXT = {
    "model_type": "qwen2_vl_text",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
_VISION = {
    "model_type": "qwen2_vl_vision",
    "depth": 32,
    "embed_dim": 1280,
    "num_heads": 16,
    "mlp_ratio": 4,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
}


def _real(hidden_size: int, ffn_size: int, num_layers: int, num_heads: int, num_kv_groups: int, vocab_size: int) -> Any:
    """A published size: the vision tower is the same in all of them, but for the width it projects to."""
    return {
        "model_type": "qwen2_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": False,
        "vision_config": _VISION | {"hidden_size": hidden_size},
        "text_config": _TEXT
        | {
            "hidden_size": hidden_size,
            "intermediate_size": ffn_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_groups,
            "vocab_size": vocab_size,
        },
    }


MODEL_SIZES: dict[str, dict[str, Any]] = {
    # Small enough for one CPU core, and every size divides among four ranks.
    "tiny": {
        "model_type": "qwen2_vl",
        "vision_config": _VISION | {"depth": 8, "embed_dim": 192, "num_heads": 8, "hidden_size": 256},
        "text_config": _TEXT
        | {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 4096,
            "max_position_embeddings": 4096,
            "rope_parameters": _TEXT["rope_parameters"] | {"mrope_section": [4, 6, 6]},  # type: ignore[operator]
        },
        "image_token_id": 4092,
        "video_token_id": 4093,
        "vision_start_token_id": 4094,
        "vision_end_token_id": 4095,
        "tie_word_embeddings": False,
    },
    # config.json of Qwen/Qwen2-VL-{2B,7B,72B}-Instruct. The published 2B shares one table between embedding and
    # output; here it has two, so that each pipeline stage owns what it trains.
    "2b": _real(1536, 8960, 28, 12, 2, 151936),
    "7b": _real(3584, 18944, 28, 28, 4, 152064),
    "72b": _real(8192, 29568, 80, 64, 8, 152064),
}


def change_text(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config.json with other sizes of its text part.

    A changed vocabulary moves the four special tokens below its end where they would lie beyond it, a changed width
    is the vision tower's output too, and the rotary sections follow the head's size. Raises TrainingError where the
    changed sizes do not go together.
    """
    document = copy.deepcopy(document)
    text = document["text_config"]
    text.update(changes)
    if text["hidden_size"] % text["num_attention_heads"]:
        raise TrainingError(f"--hidden-size {text['hidden_size']} is no multiple of --num-attention-heads")
    if text["num_attention_heads"] % text["num_key_value_heads"]:
        raise TrainingError(
            f"--num-attention-heads {text['num_attention_heads']} is no multiple of the {text['num_key_value_heads']} "
            "key and value groups; give --num-query-groups"
        )
    document["vision_config"]["hidden_size"] = text["hidden_size"]
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    side = half * 3 // 8  # of the half head, time has 1/4, height and width 3/8 each in the published models
    text["rope_parameters"]["mrope_section"] = [half - 2 * side, side, side]
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    if max(document[key] for key in special) >= text["vocab_size"]:
        document.update({key: text["vocab_size"] - 4 + place for place, key in enumerate(special)})
    return document


def read_document(path: Path) -> dict[str, Any]:
    """The config.json of the model in a file: MindSpeed-MM's model.json, or a Hugging Face config.json.

    Raises JobError where the file is no model, TrainingError where it is another model than a Qwen2-VL.
    """
    model = read_model(path)
    text, encoders = model.text.layers, model.encoders
    if len(encoders) != 1 or encoders[0].name != "vision" or not isinstance(encoders[0].stem, Patches):
        raise TrainingError(f"--mm-model {path}: {model.name} has no single vision encoder, and a Qwen2-VL has.")
    vision, projector = encoders[0].layers, encoders[0].projector
    joined = vision.hidden_size * projector.merge_tokens
    expected = {
        "the text layers": (_form(text), ("rms", True, False, True, False, None, None)),
        "the vision layers": (_form(vision), ("layer", False, True, True, True, None, None)),
        "the projector": (projector.layer_sizes, (joined, joined, text.hidden_size)),
        "the patches": (encoders[0].stem.in_features, _VISION["in_channels"] * 2 * _VISION["patch_size"] ** 2),
        "what follows the vision layers": (encoders[0].final_norm or encoders[0].deepstack, None),
    }
    for what, (found, right) in expected.items():
        if found != right:
            raise TrainingError(f"--mm-model {path}: {what} of {model.name} are {found}; a Qwen2-VL has {right}.")
    document = copy.deepcopy(MODEL_SIZES["72b"])
    document["vision_config"].update(
        depth=vision.num_layers,
        embed_dim=vision.hidden_size,
        num_heads=vision.num_heads,
        mlp_ratio=vision.ffn_size // vision.hidden_size,
    )
    document["text_config"].update(
        hidden_size=text.hidden_size,
        intermediate_size=text.ffn_size,
        num_hidden_layers=text.num_layers,
        num_attention_heads=text.num_heads,
        num_key_value_heads=text.num_kv_groups,
        vocab_size=model.text.vocab_size,
    )
    return document


def _form(layers: Layers) -> tuple[Norm | bool | str | None, ...]:
    """What sets one family's layers apart from another's, without their sizes."""
    window, experts = layers.window, layers.experts
    norm, biases = layers.norm, (layers.mlp_bias, layers.qkv_bias, layers.output_bias)
    return (norm, layers.gated, *biases, layers.qk_norm, None if window is None and experts is None else "window")


def make_config(document: dict[str, Any]) -> Qwen2VLConfig:
    """The transformers configuration of a config.json, with attention through scaled_dot_product_attention."""
    config = Qwen2VLConfig(**copy.deepcopy(document))
    for part in (config, config.vision_config, config.text_config):
        part._attn_implementation = "sdpa"
    return config
