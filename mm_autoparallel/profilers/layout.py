"""Where a live model keeps its repeated layers: by its class where that is known, else by searching its ModuleLists.

A Layout that the user gives is checked and taken. Otherwise a known class says in which part of the model each
modality lives, and any other model is searched: the words in a list's path say which modality its layers are of, and
each modality takes the list with the most parameters. What is not clear is refused, with all lists that were seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.profilers.subject import Layout

Layers = nn.ModuleList | nn.Sequential


@dataclass(frozen=True)
class Family:
    """A known class of models: modality → the subtree with its layers, or its `*_post`; the first there counts."""

    layers: Mapping[str, tuple[str, ...]]
    post: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_QWEN_VL = Family(
    layers={
        "vision": ("model.visual.blocks", "visual.blocks"),
        "text": ("model.language_model.layers", "model.layers"),
    },
    post={"vision": ("model.visual.merger", "visual.merger")},
)
_LLAVA = Family(
    layers={"vision": ("model.vision_tower", "vision_tower"), "text": ("model.language_model", "language_model")},
    post={"vision": ("model.multi_modal_projector", "multi_modal_projector")},
)

FAMILIES: Mapping[str, Family] = {
    "Qwen2VLForConditionalGeneration": _QWEN_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_VL,
    "Qwen3VLForConditionalGeneration": _QWEN_VL,
    "LlavaForConditionalGeneration": _LLAVA,
    "InternVLForConditionalGeneration": _LLAVA,
    "VLMModel": Family(
        layers={
            "vision": ("image_encoder.encoder.blocks.layers", "image_encoder.encoder"),
            "audio": ("audio_encoder.encoder.blocks.layers", "audio_encoder.encoder"),
            "text": ("text_decoder.decoder.layers",),
        },
        post={"vision": ("image_encoder.projector",), "audio": ("audio_encoder",)},
    ),
}
"""By the name of the model's class or a base of it. Hugging Face transformers 5.23, as second paths those before 4.52
(src/transformers/models/*/modeling_*.py); MindSpeed-MM 2.x (mindspeed_mm/models/: vlm_model.py, vision/vision_model.py,
audio/audio_model.py, common/mm_gpt_model.py)."""

WORDS: Mapping[str, tuple[str, ...]] = {
    "vision": ("vision", "visual", "vit", "image", "clip", "siglip"),
    "audio": ("audio", "speech", "whisper"),
    "text": ("text", "language", "llm", "lm", "decoder", "gpt", "llama"),
}
"""Words of a path that name a modality, tried in this order (`image_decoder` is vision). assumed"""

RIVAL_FRACTION = 0.5
"""A second list of a modality, with more than this part of the first one's parameters, is not passed over. assumed"""


def find_layout(model: nn.Module, given: Layout | None = None) -> Layout:
    """The Layout of `model`; `given` is returned if it fits.

    Raises ProfileError where a given path is wrong or no layers are found for sure; it names the lists that were seen.
    """
    if given is not None:
        _check(model, given)
        return given
    families = (FAMILIES[base.__name__] for base in type(model).__mro__ if base.__name__ in FAMILIES)
    known = (_family_layout(model, family) for family in families)
    found = next((layout for layout in known if layout is not None), None) or _search(model)
    _check(model, found)
    return found


def layers_of(model: nn.Module, layout: Layout) -> dict[str, tuple[nn.Module, ...]]:
    """Modality → its layers in `model`, for a Layout that find_layout has checked."""
    lists = {modality: cast(Layers, model.get_submodule(path)) for modality, path in layout.layers.items()}
    return {modality: tuple(layers) for modality, layers in lists.items()}


def structural_kind(layer: nn.Module) -> str:
    """A hash that layers of equal structure share (16 hexadecimal digits).

    Equal are: the classes of all modules in it by name, the shapes and types of parameters and buffers, and settings
    that are whole numbers, words, truth values or None. Numbers that count layers are left out, and so are fractions
    (drop path rates grow with depth and cost nothing).
    """
    lines = []
    for name, module in layer.named_modules():
        lines.append(f"{name}: {type(module).__module__}.{type(module).__qualname__}")
        lines += [f"{name}.{key} = {value!r}" for key, value in sorted(_settings(module).items())]
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        lines.append(f"{name}: {tuple(tensor.shape)} {tensor.dtype}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _settings(module: nn.Module) -> dict[str, object]:
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return {
        key: value
        for key, value in public.items()
        if (value is None or isinstance(value, (bool, int, str))) and not _counts_layers(key)
    }


def _counts_layers(key: str) -> bool:
    words = key.lower().split("_")
    return key == "training" or bool({"idx", "index", "id", "number"} & set(words))


def _check(model: nn.Module, given: Layout) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    if not given.layers or list(given.layers)[-1] != "text":
        raise ProfileError(
            f"Layout.layers names {list(given.layers)}: it must name the list of layers of each modality in the order "
            f"data flows, and `text` last. {_tell_lists(model)}"
        )
    for modality, path in given.layers.items():
        wrong = _wrong_list(modules.get(path))
        if wrong:
            raise ProfileError(f"The layers of {modality} are said to be `{path}`, but {wrong}. {_tell_lists(model)}")
    for modality, path in given.post.items():
        if modality not in given.layers or modality == "text":
            raise ProfileError(
                f"Layout.post names {modality!r}, but only encoders of Layout.layers end in a module: "
                f"{[name for name in given.layers if name != 'text']}."
            )
        if path not in modules:
            raise ProfileError(f"Layout.post of {modality} is said to be `{path}`, but the model has no such module.")
    owner: dict[nn.Module, str] = {}
    for modality, layers in layers_of(model, given).items():
        for index, layer in enumerate(layers):
            if layer in owner:
                raise ProfileError(
                    f"Layer {index} of {modality} (`{given.layers[modality]}`) is the same module as {owner[layer]}: "
                    "layers that share all their weights cannot be placed apart."
                )
            owner[layer] = f"layer {index} of {modality}"


def _wrong_list(module: nn.Module | None) -> str:
    """Why `module` is no list of layers; empty where it is one."""
    if module is None:
        return "the model has no such module"
    if not isinstance(module, Layers):
        return f"that is no ModuleList, it is a {type(module).__name__}"
    return "" if len(module) else "that list is empty"


def _family_layout(model: nn.Module, family: Family) -> Layout | None:
    """None where the model has no text layers where the family has them: another class of that name."""
    modules = dict(model.named_modules())
    layers: dict[str, str] = {}
    for modality, places in family.layers.items():
        place = next((path for path in places if path in modules), None)
        if place is None:
            continue
        inside = {path: found for path, found in _lists(model).items() if f"{path}.".startswith(f"{place}.")}
        if inside:
            layers[modality] = max(inside, key=lambda path: _num_parameters(inside[path]))
    if "text" not in layers:
        return None
    post = {
        modality: path
        for modality, places in family.post.items()
        if modality in layers
        for path in [next((place for place in places if place in modules), None)]
        if path is not None
    }
    return Layout(layers, post)


def _search(model: nn.Module) -> Layout:
    """The biggest list of equal layers of each modality; a list without any of the WORDS is text where no other is."""
    lists = {path: found for path, found in _lists(model).items() if len(found) > 1 and _alike(found)}
    by_modality: dict[str, list[str]] = {}
    for path in sorted(lists, key=lambda path: -_num_parameters(lists[path])):
        by_modality.setdefault(_modality(path), []).append(path)
    unnamed = by_modality.pop("", [])
    if unnamed and "text" not in by_modality:
        by_modality["text"] = unnamed
    elif unnamed and _num_parameters(lists[unnamed[0]]) > RIVAL_FRACTION * max(
        _num_parameters(lists[paths[0]]) for paths in by_modality.values()
    ):
        raise ProfileError(f"`{unnamed[0]}` holds layers of which no word says the modality. {_tell_lists(model)}")
    if "text" not in by_modality:
        raise ProfileError(f"No list of repeated text layers was found in {type(model).__name__}. {_tell_lists(model)}")
    for modality, (first, *others) in by_modality.items():
        if others and _num_parameters(lists[others[0]]) > RIVAL_FRACTION * _num_parameters(lists[first]):
            raise ProfileError(
                f"The layers of {modality} may be at `{first}` or at `{others[0]}`: one of them must be named. "
                f"{_tell_lists(model)}"
            )
    order = [path for path in lists if path in {paths[0] for paths in by_modality.values()}]
    modality_of = {paths[0]: modality for modality, paths in by_modality.items()}
    encoders = {modality_of[path]: path for path in order if modality_of[path] != "text"}
    return Layout({**encoders, "text": by_modality["text"][0]})


def _lists(model: nn.Module) -> dict[str, Layers]:
    """Path → list of modules with parameters, in the model's order; lists inside a list's layers are not counted."""
    found: dict[str, Layers] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        plain = isinstance(module, nn.Sequential) and not _alike(module)
        if isinstance(module, Layers) and len(module) and not inside and not plain and _num_parameters(module):
            found[path] = module
    return found


def _alike(layers: Layers) -> bool:
    """True where all are of one class: their structure may differ (window and full attention, dense and expert)."""
    return len({type(layer) for layer in layers}) == 1 and next(iter(layers)).__class__ not in {nn.Linear, nn.Conv2d}


def _modality(path: str) -> str:
    pieces = [piece for word in path.lower().split(".") for piece in [word, *word.split("_")]]
    for modality, words in WORDS.items():
        if any(piece.startswith(word) for piece in pieces for word in words):
            return modality
    return ""


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _tell_lists(model: nn.Module) -> str:
    """What there is and how to name it, for the end of an error."""
    seen = [f"`{path}` ({len(found)} × {type(next(iter(found))).__name__})" for path, found in _lists(model).items()]
    return (
        f"ModuleLists of {type(model).__name__}: {', '.join(seen) if seen else 'none'}. Name the right ones as "
        'Layout(layers={"vision": PATH, "text": PATH}) in the script, or with '
        "`--auto-parallel-layers vision=PATH text=PATH`."
    )
