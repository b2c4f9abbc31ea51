"""Python that a plan is written as: its numbers stand there as one literal, which is read again and never run."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_text
from mm_autoparallel.planner.plan import Plan

PLAN = "PLAN"
MAX_PYTHON_BYTES = 500_000
"""Assumed: of a file of settings. Its syntax tree takes some 350 times that."""


def format_plan(plan: Plan) -> str:
    """`PLAN = {...}`: of each modality, its layers by virtual stage and how many of them recompute."""
    rows = "".join(
        f'    "{modality}": {{"layers": {list(counts)}, "recompute": {list(plan.recompute[modality])}}},\n'
        for modality, counts in plan.layers.items()
    )
    return f"{PLAN} = {{\n{rows}}}\n"


def read_python(path: Path) -> ast.Module:
    """The Python file at `path`, which is never run. Raises JobError where it is none, or too large."""
    try:
        return _parse(read_text(path, "file", "Python", max_bytes=MAX_PYTHON_BYTES))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as failure:
        raise JobError(f"{path} is no Python that can be read: {failure}") from None


@lru_cache(maxsize=2)
def _parse(text: str) -> ast.Module:
    """Of files with many configurations, which are read one by one; nobody changes a tree."""
    return ast.parse(text)


def assigns(path: Path, name: str) -> bool:
    """Whether the Python file at `path` assigns to `name` at its top. Raises JobError as `read_python`."""
    return any(_is_assigned(node, name) for node in read_python(path).body)


def _is_assigned(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == name for one in node.targets)


def read_literal(path: Path, name: str = PLAN) -> Any:
    """What the Python file at `path` assigns to `name`, a literal. Raises JobError where it does not."""
    tree = read_python(path)
    for node in tree.body:
        if isinstance(node, ast.Assign) and _is_assigned(node, name):
            try:
                found = ast.literal_eval(node.value)
                json.dumps(found, allow_nan=False)  # ValueError or TypeError for what no document holds
                return found
            except (ValueError, TypeError, RecursionError, MemoryError):
                raise JobError(
                    f"{path}: line {node.lineno} gives {name} no plain value; finite numbers are expected"
                ) from None
    raise JobError(f"{path} assigns nothing to {name}")


def read_lists(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Layers and recompute that `format_plan` wrote into the file at `path`. Raises JobError or PlanError."""
    found = read_literal(path)
    if not isinstance(found, dict) or not found:
        raise PlanError(f"{path}: {PLAN} is no mapping of modalities")
    return (
        {str(modality): _counts(each, "layers", path) for modality, each in found.items()},
        {str(modality): _counts(each, "recompute", path) for modality, each in found.items()},
    )


def _counts(section: Any, key: str, path: Path) -> tuple[int, ...]:
    counts = section.get(key) if isinstance(section, Mapping) else None
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts) or not counts:
        raise PlanError(f"{path}: {PLAN} has no list of whole numbers under {key}")
    return tuple(counts)
