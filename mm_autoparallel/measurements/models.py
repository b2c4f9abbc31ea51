"""Models that tables and the command line call by name."""

from __future__ import annotations

import copy
import re
from typing import Any

from mm_autoparallel.measurements.table import Unrepresentable
from mm_autoparallel.measurements.text_models import TEXT_MODELS
from mm_autoparallel.measurements.vision_models import VISION_MODELS
from mm_autoparallel.validation import nearest

_NAMED = {**TEXT_MODELS, **VISION_MODELS}

_SYNONYMS = {
    "llama318b": "llama3-8b",
    "llama3170b": "llama3-70b",
    "llama31405b": "llama3-405b",
    "gpt3": "gpt3-175b",
    "mtnlg": "turing-530b",
    "qwen257b": "qwen2-7b",
    "qwen2572b": "qwen2-72b",
    "moonlight16ba3b": "moonlight-16b",
    "kimi1t": "kimi-k2",
    "llama3370b": "llama3-70b",
    "internvl2llama376b": "internvl2-76b",
    "internvl258b": "internvl2-8b",
    "internvl2526b": "internvl2-26b",
    "internvl2538b": "internvl3-38b",
    "internvl2578b": "internvl3-78b",
}
"""Other spellings, without punctuation: Llama 3.1 has the sizes of Llama 3 (arXiv:2407.21783), Qwen 2.5 those of Qwen 2
(arXiv:2412.15115), InternVL 2.5 those of InternVL 2 or 3 (arXiv:2412.05271, table 2)."""


_TRAINED_FURTHER = re.compile(r"(instruct|chat|thinking|base|hf|v\d\d|\d{4})$")
"""Ends of names, without punctuation, that change no size: what a model was trained to do, in which form, and when."""


def list_models() -> tuple[str, ...]:
    """The names that `find_model` knows."""
    return tuple(_NAMED)


def find_model(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """The inline model that somebody calls `name`, cut to its first `num_layers`. Case and punctuation say nothing, nor
    does how a model was trained further: `Qwen/Qwen2.5-VL-7B-Instruct` ends in a name that is known.

    Raises Unrepresentable for a name that is not known, naming those that are.
    """
    known = {_plain(key): key for key in _NAMED} | _SYNONYMS
    plain = _plain(name)
    while plain not in known and _TRAINED_FURTHER.search(plain):
        plain = _TRAINED_FURTHER.sub("", plain)
    plain = plain if plain in known else plain.removeprefix("meta")
    if plain not in known:
        raise Unrepresentable(
            f"the model {name!r} is not known{nearest(name.lower(), list(_NAMED))}; known are {', '.join(_NAMED)}"
        )
    model = copy.deepcopy(_NAMED[known[plain]][0])
    model["name"] = known[plain]
    return cut_layers(model, num_layers)


def cut_layers(model: dict[str, Any], num_layers: int | None) -> dict[str, Any]:
    """`model` with `num_layers` text layers, its first dense ones kept as far as they go; as it is for None."""
    if num_layers is not None:
        layers = model["text"]["layers"]
        layers["num_layers"] = num_layers
        if "experts" in layers:
            dense = layers["experts"]["dense_layers"]
            layers["experts"]["dense_layers"] = [index for index in dense if index < num_layers]
    return model


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
