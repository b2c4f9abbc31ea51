"""transformers from 4.45 to 5: all that its releases name differently or lack, in one file.

A config.json may have the keys of a newer release than the one that is installed, and the other way round. Newer
releases read what older ones wrote; what older ones cannot read is told to them in their own keys.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from mm_autoparallel.errors import ProfileError

Document = dict[str, Any]


def read_config(document: Mapping[str, Any]) -> Any:
    """The configuration of the config.json `document`, by the class that the installed release has for it.

    Raises ValueError for a model type that the release lacks, a value of the wrong kind, and keys that it cannot be
    told; transformers 5 raises errors of its own for values, too.
    """
    import transformers

    model_type = str(document["model_type"])
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} has no model type {model_type!r}; install a release that has it"
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    own = copy.deepcopy(dict(document))
    if is_older_than(5):
        own = older_keys(own, config_class)
        _check_kinds(own, config_class)
    return config_class.from_dict(own)


def make_model(config: Any, text_alone: bool, dtype: torch.dtype, attention: str) -> nn.Module:
    """The model that has `config`, with random weights; attention: `sdpa` or `eager`."""
    import transformers

    images = "AutoModelForVision2Seq" if is_older_than(4, 47) else "AutoModelForImageTextToText"
    make: Any = getattr(transformers, "AutoModelForCausalLM" if text_alone else images)
    named = {"torch_dtype" if is_older_than(4, 56) else "dtype": dtype}
    live: nn.Module = make.from_config(config, attn_implementation=attention, **named)
    return live


def check_attention(attention: str) -> None:
    """Raises ProfileError for `sdpa` where the installed transformers takes no fused attention from this PyTorch."""
    import transformers

    is_there = getattr(transformers.utils, "is_torch_sdpa_available", lambda: True)  # until 4
    if attention == "sdpa" and not is_there():
        raise ProfileError(
            f"transformers {transformers.__version__} takes no fused attention from PyTorch {torch.__version__} "
            "(2.1.1 has it); install a newer one, or give the job workload.attention: unfused"
        )


def fitting(inputs: Mapping[str, Tensor], live: nn.Module) -> dict[str, Tensor]:
    """Of `inputs` those that the model's forward names (`mm_token_type_ids` from 5 on)."""
    named = inspect.signature(live.forward).parameters
    return {name: tensor for name, tensor in inputs.items() if name in named}


def no_init_weights() -> AbstractContextManager[None]:
    """Within it, models are made without giving their weights values."""
    module: Any = import_module(f"transformers.{'modeling_utils' if is_older_than(5) else 'initialization'}")
    held: AbstractContextManager[None] = module.no_init_weights()
    return held


def head_sizes() -> tuple[str, ...]:
    """The attributes by which attention's forward passes reshape what heads give; a rank has its part of each."""
    return ("num_heads", "embed_dim", *(("num_key_value_heads", "hidden_size") if is_older_than(5) else ()))


def keeps_its_width(attention: nn.Module) -> bool:
    """Whether its forward gives what comes from all heads the width of its input, so that no rank can have a part."""
    return is_older_than(5) and type(attention).__name__.startswith("CLIP")


def is_older_than(*release: int) -> bool:
    """Whether the installed transformers comes before `release` (major, minor)."""
    import transformers

    numbers = transformers.__version__.split(".")[: len(release)]
    return tuple(int(number) for number in numbers) < release


# ------------------------------------------------------------------------------------------------ keys of releases < 5


def older_keys(document: Document, config_class: Any) -> Document:
    """`document` in the keys of transformers 4."""
    parameters = inspect.signature(config_class).parameters
    text = document.get("text_config")
    if isinstance(text, dict) and "tie_word_embeddings" in document:  # which is asked of the part until 5
        text.setdefault("tie_word_embeddings", document["tie_word_embeddings"])
    if isinstance(text, dict) and "text_config" not in parameters:  # until 4.51 Qwen's sizes of text lie outside
        document = {**text, **{key: value for key, value in document.items() if key != "text_config"}}
    for part in (document, *document.values()):
        if isinstance(part, dict) and "rope_parameters" in part:
            part.update(_older_rope(part.pop("rope_parameters")))
    if "image_seq_length" in parameters and "image_seq_length" not in document:
        document |= _image_length(document.get("vision_config"))
    return document


def _older_rope(rope: Any) -> Document:
    """`rope_parameters` as `rope_theta`, `partial_rotary_factor` and `rope_scaling`."""
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"rope_parameters is {rope!r}; a mapping of numbers is expected: before transformers 5 all layers turn by "
            "the same angles"
        )
    outside = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in outside}
    return outside | ({"rope_scaling": scaling} if scaling.keys() - {"rope_type"} else {})


def _image_length(vision: Any) -> Document:
    """LLaVA's tokens of an image, which until 4.51 tells it whether tokens stand for images already."""
    side, patch = (vision.get(key) for key in ("image_size", "patch_size")) if isinstance(vision, dict) else (0, 0)
    if not isinstance(side, int) or not isinstance(patch, int) or patch <= 0:
        return {}
    return {"image_seq_length": (side // patch) ** 2}


def _check_kinds(document: Mapping[str, Any], config_class: Any) -> None:
    """transformers 5 checks all values when it reads them; before, a wrong one is found wherever it is used."""
    from transformers import CONFIG_MAPPING

    for key, parameter in inspect.signature(config_class).parameters.items():
        usual, value = parameter.default, document.get(key)
        if isinstance(usual, (bool, int, float)) and isinstance(value, str):
            raise ValueError(f"{key} is {value!r}; a value like {usual!r} is expected")
        if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING:
            _check_kinds(value, CONFIG_MAPPING[value["model_type"]])
