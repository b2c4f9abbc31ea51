"""A plan as overrides of a Megatron-Bridge recipe: new files, or a person's own YAML of overrides."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.export import only
from mm_autoparallel.integrations.framework import Exported, Target
from mm_autoparallel.integrations.megatron_bridge.config import flatten
from mm_autoparallel.integrations.megatron_bridge.fields import to_fields, to_flags
from mm_autoparallel.integrations.megatron_core.decided import Decided, decide
from mm_autoparallel.integrations.megatron_core.dialect import without_mindspeed
from mm_autoparallel.integrations.megatron_core.launch import ENTRY
from mm_autoparallel.integrations.megatron_core.passed import read_passed
from mm_autoparallel.integrations.megatron_core.read import check_read_back
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.integrations.yaml_text import KeyPath, set_file_values
from mm_autoparallel.planner.plan import Plan

OVERRIDES, PLANNED = "overrides.txt", "planned.yaml"

_CHECKED = ("read back: the fields as written give the plan that they are said to run",)
_OVERLAPS = (
    "a recipe's comm_overlap, where it has one, decides the overlap of transfers and gradients again; the fields that "
    "are written hold where it is null"
)


def export_new(plan: Plan, target: Target) -> Exported:
    """`planned.yaml`, for --config-file, and `overrides.txt`, the same as words. Raises PlanError as `decide` does."""
    decided, fields = _decide(plan, target)
    header = "".join(f"# {line}\n" for line in (*target.describe(decided.plan), *decided.approximations))
    words = "".join(f"{field}={_spell(value)}\n" for field, value in fields.items())
    texts = {
        Path(PLANNED): header + yaml.safe_dump(_nest(fields), sort_keys=False),
        Path(OVERRIDES): header + words,
    }
    note = f"start a recipe with one of both: --config-file {PLANNED}, or behind its name $(grep -v '^#' {OVERRIDES})"
    return _export(decided, target, texts, fields, (note,))


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """The YAML at the one of `paths` with `plan` in it. Raises JobError where it is none, PlanError as `decide`."""
    (path,) = only(paths, "Megatron-Bridge", "its YAML")
    if path.suffix not in (".yaml", ".yml"):
        raise JobError(f"{path}: a plan is written into YAML of overrides; for a recipe's Python give {PLANNED}")
    before = read_document(path, "configuration")
    decided, fields = _decide(plan, target)
    there = {field for field, _ in flatten(before, f"configuration {path}")}
    changes: dict[KeyPath, Any] = {
        tuple(field.split(".")): value
        for field, value in fields.items()
        if value not in (None, False) or field in there
    }
    text = set_file_values(path, "configuration", changes)
    return _export(decided, target, {path: text}, fields, ())


def decide_values(plan: Plan, target: Target) -> dict[str, Any]:
    """The fields that the plan decides. Raises PlanError."""
    return _decide(plan, target)[1]


def _decide(plan: Plan, target: Target) -> tuple[Decided, dict[str, Any]]:
    decided = without_mindspeed(decide(plan, target.job))
    return decided, to_fields({**decided.values, **decided.usual})


def _export(
    decided: Decided, target: Target, texts: Mapping[Path, str], fields: Mapping[str, Any], notes: tuple[str, ...]
) -> Exported:
    lines = " \\\n  ".join(to_flags(fields, PLANNED))
    script = LaunchScript(Path(PLANNED), f"torchrun {ENTRY} \\\n  {lines}\n")
    strategy = decided.plan.strategy
    check_read_back(read_passed(script, strategy.world_size), decided.plan, target.job)
    notes = (f"start it on {strategy.world_size} devices", *notes, _OVERLAPS)
    return Exported(dict(texts), decided.plan, decided.approximations, _CHECKED, decided.unchecked, notes)


def _nest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Section → its fields; a section that is one value as it is."""
    nested: dict[str, Any] = {}
    for field, value in fields.items():
        section, _, key = field.partition(".")
        if key:
            nested.setdefault(section, {})[key] = value
        else:
            nested[section] = value
    return nested


def _spell(value: Any) -> str:
    """As Hydra's words have it."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def planned_files(path: Path, out: Path, _: Given) -> tuple[Path, ...]:
    """What `plan --script` will write. Raises JobError where a plan is written into YAML alone."""
    if path.suffix not in (".yaml", ".yml"):
        raise JobError(
            f"{path}: a plan is written into YAML of overrides; export --to megatron-bridge writes new files"
        )
    return (out / path.name,)
