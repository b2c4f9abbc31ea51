"""What Megatron-LM's arguments say of precision: its recipe, and what its run does otherwise than the recipe.

Defaults and spellings: megatron/core/transformer/transformer_config.py, whose fields the flags are made of, and
megatron/training/arguments.py; a log prints `fp8` and `fp4` for --fp8-format and --fp4-format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mm_autoparallel.model.job.precision import Precision

_FP8_RECIPES: dict[str, Precision] = {
    "delayed": "fp8_delayed",
    "tensorwise": "fp8_current",
    "blockwise": "fp8_blockwise",
    "mxfp8": "mxfp8",
}
_FP4_RECIPES: dict[str, Precision] = {"nvfp4": "nvfp4"}
_FORMATS = {"fp8": ("e4m3", "hybrid"), "fp4": ("e2m1",)}
_OFF = (None, False, "", "None", "none")
_LAYERS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


@dataclass(frozen=True)
class MegatronPrecision:
    """facts: those of StackFacts that the arguments state."""

    precision: Precision = "bf16"
    facts: dict[str, Any] = field(default_factory=dict)


def read_megatron_precision(arguments: Mapping[str, Any]) -> MegatronPrecision:
    """The precision of `arguments`, whose keys are names of flags with dashes or underscores.

    Raises ValueError, naming the argument, where it asks for what is not represented.
    """
    plain = {key.lstrip("-").replace("-", "_"): value for key, value in arguments.items()}
    formats = {name: plain.get(f"{name}_format", plain.get(name)) for name in _FORMATS}
    asked = {name: value for name, value in formats.items() if value not in _OFF}
    if not asked:
        return MegatronPrecision()
    if len(asked) == 2:
        raise ValueError("fp8_format and fp4_format are both given; Megatron-LM takes one of the two")
    (name, value), *_ = asked.items()
    if value not in _FORMATS[name]:
        raise ValueError(f"{name}_format is {value!r}; one of {', '.join(_FORMATS[name])} is expected")
    recipes = _FP8_RECIPES if name == "fp8" else _FP4_RECIPES
    recipe = plain.get(f"{name}_recipe") or next(iter(recipes))
    if recipe not in recipes:
        raise ValueError(f"{name}_recipe is {recipe!r}, which is not represented; known are {', '.join(recipes)}")
    facts: dict[str, Any] = {"low_parameters": plain.get(f"{name}_param_gather", plain.get(f"{name}_param")) is True}
    if plain.get("first_last_layers_bf16") is True:
        for key in _LAYERS:
            if plain.get(key, 1) != 1:
                raise ValueError(f"{key} is {plain[key]}; 1 is represented, the first and the last layer")
        facts["low_first_last"] = False
    if plain.get("fp8_dot_product_attention") is True or plain.get("fp8_multi_head_attention") is True:
        facts["fp8_attention"] = True
    if plain.get("tp_comm_overlap") is True:
        facts["tp_overlap"] = "user_buffers"
    return MegatronPrecision(recipes[str(recipe)], facts)
