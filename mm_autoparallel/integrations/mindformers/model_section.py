"""Where a YAML says what model it trains, and the config.json that it takes the rest from.

A YAML of MindFormers before 1.6 names a config class (`type: LlamaConfig`); its experts stand in `moe_config`. Today's
(`use_legacy: False`) give Hugging Face's names, `model_type: "deepseek_v3"`, and what they leave out comes from
`pretrained_model_dir`/config.json, then from the class. What the YAML says overrides config.json, as in MindFormers
(mindformers/models/build_config.py, merge_model_config).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, is_there, read_document
from mm_autoparallel.model.readers.foreign import Section

WHAT = "MindFormers YAML"
CONFIG_JSON = "config.json"

_COMPARED = (
    ("num_layers", "num_hidden_layers"),
    ("hidden_size", "hidden_size"),
    ("num_heads", "num_attention_heads"),
    ("vocab_size", "vocab_size"),
    ("intermediate_size", "intermediate_size"),
)
"""A size as YAMLs with a config class call it, and as config.json does."""


@dataclass(frozen=True)
class ModelSection:
    """family: the config class (`LlamaConfig`) or the model type (`qwen3`). arch: the network's class, if known.

    sizes: the model's keys. experts: the mapping with those of experts. is_mcore: Hugging Face's names count.
    notes: what its reader should know.
    """

    family: str
    arch: str
    sizes: Section
    experts: Section
    is_mcore: bool
    notes: tuple[str, ...] = ()


def read_model_section(
    content: Mapping[str, Any], key: str, document: Mapping[str, Any], path: Path, config_json: Path | None
) -> ModelSection:
    """The model that `content`, the mapping at `key` of the YAML `path`, describes.

    config_json: in place of the one in `pretrained_model_dir`. Raises JobError naming files, keys and values where
    there is none and the YAML leaves the model to it, and where the two are of different models.
    """
    family = content.get("type")
    if isinstance(family, str) and not _says_mcore(document, content):
        moe = document.get("moe_config")
        section = ModelSection(
            family,
            _arch_of(document),
            _section(content, path, key),
            _section(moe if isinstance(moe, Mapping) else {}, path, "moe_config"),
            False,
        )
        if config_json is not None:
            _check_same_sizes(section, config_json, path)
        return section
    found = config_json or _find_config(document, path)
    beside: dict[str, Any] = read_document(found, "config.json") if found is not None else {}
    if found is not None:
        _check_same_type(content, beside, key, path, found)
    merged = beside | {name: value for name, value in content.items() if value is not None}
    model_type = merged.get("model_type")
    if not isinstance(model_type, str):
        raise JobError(f"{WHAT} {path}: {_missing_type(content, document, key)}")
    sizes = _section(merged, path, key)
    return ModelSection(model_type, _name(merged), sizes, sizes, True, _override_notes(content, beside, key, found))


def first_key(section: Section, *names: str) -> str:
    """The one of `names` that the file has, else the one of the defaults; the first where there is none."""
    given = next((name for name in names if section.content.get(name) is not None), None)
    return given or next((name for name in names if section.has(name)), names[0])


def _says_mcore(document: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    return document.get("use_legacy") is False and "model_type" in content


def _section(content: Mapping[str, Any], path: Path, key: str) -> Section:
    """Whole floats (`shared_expert_num: 8.0`) count as the numbers that they are."""
    whole = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in content.items()
    }
    return Section(whole, path, key, what=WHAT)


def _arch_of(document: Mapping[str, Any]) -> str:
    model = document.get("model")
    arch = model.get("arch") if isinstance(model, Mapping) else None
    name = arch.get("type") if isinstance(arch, Mapping) else arch
    return name if isinstance(name, str) else ""


def _name(merged: Mapping[str, Any]) -> str:
    names = merged.get("architectures")
    names = names[0] if isinstance(names, list) and names else names
    return names if isinstance(names, str) else ""


def _find_config(document: Mapping[str, Any], path: Path) -> Path | None:
    """config.json in `pretrained_model_dir`: as it stands, or as seen from the YAML's folder."""
    folder = _model_dir(document)
    for start in (Path(), path.parent) if folder else ():
        if is_there(start / folder / CONFIG_JSON):
            return start / folder / CONFIG_JSON
    return None


def _model_dir(document: Mapping[str, Any]) -> str:
    model = document.get("model")
    held = document.get("pretrained_model_dir") or (
        model.get("pretrained_model_dir") if isinstance(model, Mapping) else None
    )
    return held if isinstance(held, str) else ""


def _missing_type(content: Mapping[str, Any], document: Mapping[str, Any], key: str) -> str:
    folder = _model_dir(document)
    remedy = f"write the folder of its {CONFIG_JSON} there, or give that file to pipeline-search (--model_config FILE)"
    if folder:
        return (
            f"{key}.model_type is missing, so the model is that of pretrained_model_dir {describe_value(folder)}, "
            f"where there is no {CONFIG_JSON}; {remedy}"
        )
    if document.get("use_legacy") is False or "num_hidden_layers" in content:
        return f"{key}.model_type is missing and there is no pretrained_model_dir; {remedy}"
    return f"{key}.type is missing; a config class like LlamaConfig is expected, or model_type with use_legacy: False"


def _check_same_type(content: Mapping[str, Any], beside: Mapping[str, Any], key: str, path: Path, found: Path) -> None:
    said, there = content.get("model_type"), beside.get("model_type")
    if said is None or there is None or said == there:
        return
    sizes = ", ".join(
        f"{name} {describe_value(content[name])} and {describe_value(beside[name])}"
        for _, name in _COMPARED
        if name in content and name in beside and content[name] != beside[name]
    )
    raise JobError(
        f"{WHAT} {path}: {key}.model_type is {describe_value(said)}, and {found} says {describe_value(there)}"
        f"{f' ({sizes})' if sizes else ''}; name the folder of the YAML's own model"
    )


def _check_same_sizes(section: ModelSection, found: Path, path: Path) -> None:
    """A YAML with a config class never takes sizes from config.json: where they differ, it is another model's."""
    beside = read_document(found, "config.json")
    for name, theirs in _COMPARED:
        said, there = section.sizes.content.get(name), beside.get(theirs)
        if said is not None and there is not None and said != there:
            raise JobError(
                f"{WHAT} {path}: {section.sizes.where(name)} is {describe_value(said)}, and {found} says {theirs} "
                f"{describe_value(there)}: they are different models; leave --model_config out, for a YAML with a "
                "config class says all sizes itself"
            )


def _override_notes(
    content: Mapping[str, Any], beside: Mapping[str, Any], key: str, found: Path | None
) -> tuple[str, ...]:
    changed = [
        f"{name} {describe_value(content[name])} (there {describe_value(beside[name])})"
        for _, name in _COMPARED
        if content.get(name) is not None and name in beside and content[name] != beside[name]
    ]
    if not changed:
        return ()
    return (f"{key} overrides {found}, as MindFormers has it: {', '.join(changed)}",)
