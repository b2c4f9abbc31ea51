"""A configuration of Megatron-Bridge as plain fields: YAML, overrides in Hydra's form, or a recipe's Python.

YAML: what a run saves, or what a script takes over its recipe (--config-file). Overrides: `model.seq_length=4096`,
lines of a text file. Python: recipes.py. Nothing is run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.files import describe_value, read_document, read_text
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.launch_script import find_devices, read_launch_script
from mm_autoparallel.integrations.megatron_bridge import mimo
from mm_autoparallel.integrations.megatron_bridge.fields import CHUNKS, FIELDS, LAYOUT, to_flags
from mm_autoparallel.integrations.megatron_bridge.launch import SCRIPTS, is_script, read_script
from mm_autoparallel.integrations.megatron_bridge.recipes import RETURNED, Unread, find_recipe, read_recipe
from mm_autoparallel.integrations.megatron_core.launch import ENTRY
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.validation import nearest

_READ = frozenset(field for names in FIELDS.values() for field in names)
_OF_MODEL = frozenset(field for field in _READ if field.startswith("model."))
SECTIONS = {field.partition(".")[0] for field in _READ} | {
    *("mixed_precision", "comm_overlap", "dataset", "scheduler", "logger", "tokenizer", "rng", "profiling"),
    *("validation", "rerun_state_machine", "ft", "straggler", "nvrx_straggler", "peft", "inprocess_restart"),
    *("tensor_inspect", "optimizer_config_override_provider", "env_vars", "inprocess_restart", "data_parallel_size"),
}
"""megatron/bridge/training/config.py, ConfigContainer; validation, env_vars: of later releases."""
YAML, _OVERRIDES, _PYTHON = (".yaml", ".yml"), (".txt", ".overrides"), (".py",)
_DEEPEST = 3
"""Dots in the field that is a module of MIMO's section."""
NEAR = 0.9
"""Likeness above which a field is a misspelling: no two fields of 0.3.1 that decide, or with one that does, are."""
_OVERRIDE = re.compile(r"\+{0,2}(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)|~(?P<left_out>[A-Za-z_][\w.]*)")


def is_config(path: Path) -> bool:
    """Whether the file at `path` is one of Megatron-Bridge's."""
    try:
        if path.suffix in SCRIPTS:
            return is_script(path)
        if path.suffix in YAML:
            document = read_document(path, "configuration")
            model, known = document.get("model"), _OF_MODEL | {mimo.SECTION}
            return isinstance(model, dict) and (
                "megatron.bridge" in str(document.get("_target_", model.get("_target_", "")))
                or (set(document) <= SECTIONS | {"_target_"} and any(f"model.{key}" in known for key in model))
            )
        if path.suffix in _OVERRIDES:
            text = read_text(path, "overrides", "text")
            return mimo.SECTION in text or any(f"{field}=" in text for field in _OF_MODEL)
        return path.suffix in _PYTHON and all(
            word in read_text(path, "file", "Python") for word in ("megatron.bridge", RETURNED)
        )
    except PlannerError:
        return False


def find_started_devices(path: Path) -> tuple[int | None, int | None]:
    """Nodes and devices a node that a launch script starts; None where only the machine knows."""
    return find_devices(read_launch_script(path)) if path.suffix in SCRIPTS else (None, None)


def open_config(path: Path, given: Given) -> LaunchScript:
    """The configuration at `path`, with those beside it over it, as a launch script that passes Megatron-LM's flags.

    Raises JobError naming the field, line or function that cannot be read.
    """
    return to_script(read_known(path, given), path)


def read_known(path: Path, given: Given) -> dict[str, Any]:
    """What the configuration at `path` and those beside it set, and the length of a sample; all of it is known.

    Raises JobError naming the field, line or function that cannot be read.
    """
    fields = read_fields(path, given)
    stages = (fields.get("model.pipeline_model_parallel_size"), fields.get(CHUNKS))
    if isinstance(fields.get(LAYOUT), Unread) and stages[0] in (None, 1) and stages[1] in (None, 1):
        del fields[LAYOUT]  # whatever it is, one stage holds all
    unread = next((field for field in fields if field in _READ and isinstance(fields[field], Unread)), None)
    if unread:
        raise JobError(f"{fields[unread].where}: {unread} is {fields[unread].expression}, known only when the recipe "
                       "runs; write the value itself there, or in overrides beside it")  # fmt: skip
    fields = {field: value for field, value in fields.items() if not isinstance(value, Unread)}
    length = fields.get("model.seq_length") or fields.get("dataset.seq_length") or given.seq_length
    return fields | {"model.seq_length": length}


def read_fields(path: Path, given: Given) -> dict[str, Any]:
    """What the configuration at `path` sets, and what the files beside it set over it."""
    found: dict[str, Any] = {}
    recipes = [each for each in given.beside if each.suffix in _PYTHON]
    for one in (path, *(each for each in given.beside if each not in recipes)):
        if one.suffix in _PYTHON:
            found |= read_recipe(one, recipes, given.entry)
        elif one.suffix in SCRIPTS:
            found |= _read_started(one, recipes, given.entry)
        elif one.suffix in YAML:
            found |= dict(flatten(read_document(one, "configuration"), f"configuration {one}"))
        else:
            found |= _read_overrides(one)
    return found


def _read_started(path: Path, recipes: Sequence[Path], entry: str | None) -> dict[str, Any]:
    """What the launch script at `path` sets over its recipe, which is in one of the files `recipes`."""
    fields, recipe = read_script(path)
    if not recipe:
        return fields
    found = find_recipe(entry or recipe, recipes)
    if found is None:
        hint = "name it with --entry, and give" if "$" in recipe else "give"
        raise JobError(f"launch script {path}: it starts the recipe {entry or recipe}, which is in none of the files "
                       f"beside it; {hint} the recipe's Python too")  # fmt: skip
    main, name = found
    return read_recipe(main, [each for each in recipes if each != main], name) | fields


def to_script(fields: Mapping[str, Any], path: Path) -> LaunchScript:
    """A launch script, called `path` in messages, that passes Megatron-LM's flags of `fields`."""
    lines = (f"torchrun {ENTRY}", *to_flags(fields, f"configuration {path}"))
    return LaunchScript(path, " \\\n  ".join(lines) + "\n")


def flatten(document: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Fields of a configuration's sections; what is a mapping below them stays one value, as members of enumerations
    do. Raises JobError for a section that there is not."""
    for section, values in document.items():
        if section not in SECTIONS and section != "_target_":
            raise JobError(f"{where}: {section} is no section of it{nearest(str(section), sorted(SECTIONS))}")
        if isinstance(values, Mapping):
            for key, value in values.items():
                yield from _list_fields(f"{section}.{key}", value, where)
        else:
            yield section, values


def _list_fields(field: str, value: Any, where: str) -> Iterator[tuple[str, Any]]:
    deepest = 1 if field == mimo.PROVIDER else _DEEPEST if field.startswith(mimo.SECTION) else 0
    if isinstance(value, Mapping) and field.count(".") <= deepest:
        for key, below in value.items():
            yield from _list_fields(f"{field}.{key}", below, where)
    else:
        _check_spelling(field.replace(f"{mimo.PROVIDER}.", "model."), where)
        yield field, value


def _check_spelling(field: str, where: str) -> None:
    """Raises JobError for a field that is nearly one that decides; Megatron-Bridge takes unknown ones of a YAML as well
    and does nothing with them."""
    near = difflib.get_close_matches(field, _READ, n=1, cutoff=NEAR) if field not in _READ else []
    if near:
        raise JobError(f'{where}: {field} is not known there and would decide nothing (did you mean "{near[0]}"?)')


def _read_overrides(path: Path) -> dict[str, Any]:
    """Values are YAML's, which Hydra's are for what is read here."""
    lines = []
    for number, line in enumerate(read_text(path, "overrides", "text").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        match = _OVERRIDE.fullmatch(text)
        if text and not match:
            raise JobError(
                f"overrides {path}: line {number} is {describe_value(text)}; section.field=value is expected"
            )
        key = match["key"] or match["left_out"] if match else ""
        if match and key.partition(".")[0] not in SECTIONS:
            raise JobError(f"overrides {path}: line {number}: {key} is in no section of a configuration")
        if match:
            _check_spelling(key.replace(f"{mimo.PROVIDER}.", "model."), f"overrides {path}: line {number}")
            lines.append(f"{key}: {match['value'] or 'null'}\n")
    return read_document(path, "overrides", part="".join(lines)) if lines else {}
