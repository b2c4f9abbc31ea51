"""A configuration of Megatron-Bridge as plain fields: YAML, overrides in Hydra's form, or a recipe's Python.

YAML: what a run saves, or what a script takes over its recipe (--config-file). Overrides: `model.seq_length=4096`,
lines of a text file. Python: a function that returns a ConfigContainer, whose assignments of values are read; those of
the functions that it calls too, where they are in the files that are given. Nothing is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.files import describe_value, read_document, read_text
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_bridge.fields import FIELDS, to_flags
from mm_autoparallel.integrations.megatron_core.launch import ENTRY
from mm_autoparallel.integrations.python_text import read_python
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.validation import nearest

SECTIONS = frozenset({field.partition(".")[0] for names in FIELDS.values() for field in names}) | {
    *("mixed_precision", "comm_overlap", "dataset", "scheduler", "logger", "tokenizer", "rng", "profiling"),
    *("validation", "rerun_state_machine", "ft", "straggler", "nvrx_straggler", "peft", "inprocess_restart"),
    *("tensor_inspect", "optimizer_config_override_provider", "env_vars", "inprocess_restart", "data_parallel_size"),
}
"""megatron/bridge/training/config.py, ConfigContainer; validation, env_vars: of later releases."""
_YAML, _OVERRIDES, _PYTHON = (".yaml", ".yml"), (".txt", ".overrides"), (".py",)
_OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[A-Za-z_][\w.]*)(?:=(?P<value>.*))?")
_RETURNED = "ConfigContainer"


def is_config(path: Path) -> bool:
    """Whether the file at `path` is one of Megatron-Bridge's."""
    try:
        if path.suffix in _YAML:
            document = read_document(path, "configuration")
            model = document.get("model")
            return isinstance(model, dict) and (
                "megatron.bridge" in str(document.get("_target_", model.get("_target_", "")))
                or (set(document) <= SECTIONS | {"_target_"} and any(f"model.{key}" in _OF_MODEL for key in model))
            )
        if path.suffix in _OVERRIDES:
            return any(f"{field}=" in read_text(path, "overrides", "text") for field in _OF_MODEL)
        return path.suffix in _PYTHON and all(
            word in read_text(path, "file", "Python") for word in ("megatron.bridge", _RETURNED)
        )
    except PlannerError:
        return False


_OF_MODEL = frozenset(field for names in FIELDS.values() for field in names if field.startswith("model."))


def open_config(path: Path, given: Given) -> LaunchScript:
    """The configuration at `path`, with those beside it over it, as a launch script that passes Megatron-LM's flags.

    Raises JobError naming the field, line or function that cannot be read.
    """
    fields = read_fields(path, given)
    length = fields.get("model.seq_length") or fields.get("dataset.seq_length") or given.seq_length
    fields |= {"model.seq_length": length}
    lines = to_flags(fields, f"configuration {path}")
    return LaunchScript(path, f"torchrun {ENTRY} \\\n  " + " \\\n  ".join(lines) + "\n")


def read_fields(path: Path, given: Given) -> dict[str, Any]:
    """What the configuration at `path` sets, and what the files beside it set over it."""
    found: dict[str, Any] = {}
    recipes = [each for each in given.beside if each.suffix in _PYTHON]
    for one in (path, *(each for each in given.beside if each not in recipes)):
        if one.suffix in _PYTHON:
            found |= _Recipes([one, *recipes]).read(one, given.entry)
        elif one.suffix in _YAML:
            found |= dict(flatten(read_document(one, "configuration"), f"configuration {one}"))
        else:
            found |= _read_overrides(one)
    return found


def flatten(document: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Fields of a configuration's sections; what is a mapping below them stays one value, as members of enumerations
    do. Raises JobError for a section that there is not."""
    for section, values in document.items():
        if section not in SECTIONS and section != "_target_":
            raise JobError(f"{where}: {section} is no section of it{nearest(str(section), sorted(SECTIONS))}")
        if isinstance(values, Mapping):
            yield from ((f"{section}.{key}", value) for key, value in values.items())
        else:
            yield section, values


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
        if match and match["key"].partition(".")[0] not in SECTIONS:
            raise JobError(f"overrides {path}: line {number}: {match['key']} is in no section of a configuration")
        if match:
            lines.append(f"{match['key']}: {'null' if match['sign'] == '~' else match['value']}\n")
    return read_document(path, "overrides", part="".join(lines)) if lines else {}


class _Recipes:
    """Functions of recipes, by name, and what they set."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._functions = {
            node.name: (node, path)
            for path in reversed(paths)
            for node in read_python(path).body
            if isinstance(node, ast.FunctionDef)
        }

    def read(self, path: Path, entry: str | None) -> dict[str, Any]:
        """What the recipe `entry` of `path` sets. Raises JobError where it is not the only one, or not read."""
        names = list_entries(path)
        if entry is None and len(names) != 1:
            raise JobError(f"{path}: {len(names)} functions return a {_RETURNED}{': ' if names else ''}"
                           f"{', '.join(names)}; say which with --entry")  # fmt: skip
        name = entry or names[0]
        if name not in names:
            raise JobError(f"{path}: --entry {name}: no function of that name returns a {_RETURNED}"
                           f"{nearest(name, names)}; known are {', '.join(names) or 'none'}")  # fmt: skip
        return self._follow(name, ())

    def _follow(self, name: str, above: tuple[str, ...]) -> dict[str, Any]:
        function, path = self._functions[name]
        where = f"{path}: {name}"
        if name in above:
            raise JobError(f"{where} calls itself")
        if function.args.args or function.args.kwonlyargs or function.args.kwarg:
            raise JobError(f"{where} takes arguments, so what it sets is known only when it runs")
        variable, found = "", dict[str, Any]()
        for node in function.body:
            target = _target_of(node)
            value = getattr(node, "value", None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, ast.Call) and "." not in target:
                called = ast.unparse(value.func).rpartition(".")[2]
                if called == _RETURNED:
                    variable, found = target, dict(_keywords(value))
                elif called in self._functions and not value.args and not value.keywords:
                    variable, found = target, self._follow(called, (*above, name))
                elif not variable and called.startswith("_") and not value.args:
                    variable = target  # a common base, whose file is not given
            elif target.startswith(f"{variable}.") and value is not None:
                found |= _set(target.partition(".")[2], value, f"{path}: line {node.lineno}")
            elif not isinstance(node, _LEAVES_FIELDS) and variable and _mentions(node, variable):
                raise JobError(f"{path}: line {node.lineno}: what {name} sets there is known only when it runs")
        if not variable:
            raise JobError(f"{where} makes no configuration that is read: no call of {_RETURNED} or of a function")
        return found


_LEAVES_FIELDS = (ast.Return, ast.Expr, ast.Assign, ast.AnnAssign)


def list_entries(path: Path) -> list[str]:
    """Functions of the file at `path` that return a ConfigContainer."""
    return [
        node.name
        for node in read_python(path).body
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) == _RETURNED
    ]


def _target_of(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return ast.unparse(node.targets[0])
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else ""


def _mentions(node: ast.stmt, variable: str) -> bool:
    """Whether a branch or loop sets a field that is read."""
    return any(
        _target_of(each).startswith(f"{variable}.") and _target_of(each).partition(".")[2] in _READ
        for each in ast.walk(node)
        if isinstance(each, ast.stmt)
    )


_READ = frozenset(field for names in FIELDS.values() for field in names)


def _keywords(call: ast.Call) -> Iterator[tuple[str, Any]]:
    """Fields of `ConfigContainer(train=TrainingConfig(…), …)`."""
    for each in call.keywords:
        if isinstance(each.value, ast.Call):
            for inner in each.value.keywords:
                yield from _set(f"{each.arg}.{inner.arg}", inner.value, f"line {each.value.lineno}").items()
        elif each.arg:
            yield from _set(each.arg, each.value, f"line {each.value.lineno}").items()


def _set(key: str, node: ast.expr, where: str) -> Mapping[str, Any]:
    """The value of a field, where it stands there. Raises JobError where a decided one does not."""
    try:
        return {key: ast.literal_eval(node)}
    except (ValueError, TypeError, RecursionError, MemoryError):
        if key not in _READ:
            return {}
    raise JobError(f"{where}: {key} is {ast.unparse(node)[:80]}, known only when it runs; write the value itself there")
