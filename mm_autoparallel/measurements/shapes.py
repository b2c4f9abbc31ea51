"""A vision-language model from the sizes that a table gives of its two towers, `32/1280/5120/16/0/4/0/32`.

What sizes do not say (norms, biases, positions, the projector) follows from the family of the tower, as its code has
it: transformers' Qwen2-VL and InternVL, MindSpeed-MM's model.json files, CLIP (Radford et al. 2021, arXiv:2103.00020),
and Megatron-LM's LLaVA (pretrain_vlm.py).
"""

from __future__ import annotations

from typing import Any

from mm_autoparallel.measurements.table import Row, Unrepresentable

_PATCH_NUMBERS, _VIDEO_PATCH_NUMBERS = 3 * 14 * 14, 3 * 2 * 14 * 14
"""Of a patch of 14 x 14 pixels in three colours; Qwen's cover two frames."""

_VISION = ["layers", "hidden", "ffn", "heads", "gated", "merged", "window", "full"]
_TEXT = ["layers", "hidden", "ffn", "heads", "kv", "head_size", "vocabulary", "gated"]
_TOWERS = "qwen2 (Qwen2-VL, Qwen2.5-VL), ivit (InternViT), clip, vit (Megatron-LM's CLIP)"


def model_of(row: Row, tp: int) -> dict[str, Any]:
    """The inline model of the columns `vision`, `vision_shape`, `text` and `text_shape`, nothing of it frozen but the
    projector of Qwen2-VL, which its model.json freezes with the tower. tp: vocabularies are padded for it.

    Raises TableError where a shape is none, Unrepresentable for a tower or decoder that is not known by its sizes.
    """
    text = _text(row, tp)
    return {"name": row.text("model"), "encoders": [_vision(row, text)], "text": text}


def _vision(row: Row, text: dict[str, Any]) -> dict[str, Any]:
    family, sizes = row.text("vision"), _sizes(row, "vision_shape", _VISION)
    hidden, out, merged = sizes["hidden"], text["layers"]["hidden_size"], sizes["merged"]
    layers: dict[str, Any] = {
        "num_layers": sizes["layers"],
        "hidden_size": hidden,
        "ffn_size": sizes["ffn"],
        "num_heads": sizes["heads"],
        "norm": "layer",
        "gated": bool(sizes["gated"]),
        "mlp_bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "rotary": False,
    }
    if sizes["window"]:
        every = sizes["layers"] // max(sizes["full"], 1)
        full_layers = [(index + 1) * every - 1 for index in range(sizes["full"])]
        layers["window"] = {"num_tokens": sizes["window"], "full_layers": full_layers}
    num_positions = row.count("patches_per_image")
    stem: dict[str, Any] = {"type": "patches", "in_features": _PATCH_NUMBERS, "bias": True}
    joined = hidden * merged
    projector: dict[str, Any] = {"merge_tokens": merged, "layer_sizes": [joined, out, out], "replicated": True}
    more: dict[str, Any] = {}
    if family.startswith("qwen2"):
        norm = "rms" if sizes["gated"] else "layer"
        layers |= {"norm": norm, "rotary": True, "packed": True, "quick_gelu": not sizes["gated"]}
        stem = {"type": "patches", "in_features": _VIDEO_PATCH_NUMBERS}
        projector = {"merge_tokens": merged, "norm": norm, "norm_size": hidden, "layer_sizes": [joined, joined, out]}
    elif family.startswith("ivit"):
        stem |= {"num_positions": num_positions + 1, "class_token": True}
        layers["layer_scale"] = True
        if hidden == 3200:  # InternViT-6B, whose config.json differs from the 300M one's in this
            layers |= {"norm": "rms", "qkv_bias": False, "qk_norm": "hidden"}
        projector |= {"norm": "layer", "norm_size": joined}
    elif family.startswith("clip"):
        stem = {"type": "patches", "in_features": _PATCH_NUMBERS, "num_positions": num_positions, "class_token": True}
        stem["norm"] = "layer"
        more["final_norm"] = "layer"
    elif family.startswith("vit"):
        stem["num_positions"] = num_positions
        projector["layer_sizes"] = [joined, text["layers"]["ffn_size"], out]
        del projector["replicated"]
    else:
        raise Unrepresentable(f"the vision tower {family!r} is not known by its sizes; known are {_TOWERS}")
    return {"name": "vision", "stem": stem, "layers": layers, "projector": projector, "freeze": False, **more}


def _text(row: Row, tp: int) -> dict[str, Any]:
    sizes = _sizes(row, "text_shape", _TEXT)
    family, gated = row.text("text"), bool(sizes["gated"])
    if family.startswith("qwen3"):
        raise Unrepresentable(
            f"the text decoder {family!r} has layers of linear attention, whose sizes the table does not give"
        )
    vocab_size = sizes["vocabulary"]
    layers: dict[str, Any] = {
        "num_layers": sizes["layers"],
        "hidden_size": sizes["hidden"],
        "ffn_size": sizes["ffn"],
        "num_heads": sizes["heads"],
        "num_kv_groups": sizes["kv"],
        "head_dim": sizes["head_size"],
        "norm": "rms",
        "gated": gated,
    }
    if family.startswith("qwen2"):
        layers["qkv_bias"] = True
    if not gated:
        layers |= {"norm": "layer", "mlp_bias": True, "qkv_bias": True, "output_bias": True}
    # config.json of Qwen/Qwen2-VL-2B-Instruct: the small one ties its head
    tied = family == "qwen2_2b"
    return {"vocab_size": -(-vocab_size // tp) * tp, "tied": tied, "layers": layers}


def _sizes(row: Row, column: str, names: list[str]) -> dict[str, int]:
    """The cell's numbers by name. Raises TableError where there are others, Unrepresentable for routed experts."""
    parts = row.text(column).split("/")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts) or len(parts) < len(names):
        raise row.error(column, f"{row.text(column)!r} is no {'/'.join(names)}, whole numbers all")
    if len(parts) > len(names):
        raise Unrepresentable(f"{column} {row.text(column)} has experts, of which a table of shapes says too little")
    return dict(zip(names, map(int, parts), strict=True))
