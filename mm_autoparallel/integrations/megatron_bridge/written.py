"""A plan as overrides of a Megatron-Bridge recipe: new files, or a person's own YAML of overrides."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.accounting import check_decided
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.export import only, patched_launch
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.integrations.megatron_bridge.config import find_started_devices, flatten, is_config, to_script
from mm_autoparallel.integrations.megatron_bridge.dialect import describe_config, join_modules, read_config_plan
from mm_autoparallel.integrations.megatron_bridge.fields import to_fields
from mm_autoparallel.integrations.megatron_bridge.mimo import VERSION, decide_mimo, is_mimo, take_apart
from mm_autoparallel.integrations.megatron_core.decided import TEXT, Decided, decide, has_experts
from mm_autoparallel.integrations.megatron_core.dialect import without_mindspeed
from mm_autoparallel.integrations.megatron_core.passed import read_passed
from mm_autoparallel.integrations.megatron_core.read import check_overlaps, check_read_back, read_plan
from mm_autoparallel.integrations.megatron_core.written import REFUSED, ROUNDED
from mm_autoparallel.integrations.yaml_text import KeyPath, set_file_values
from mm_autoparallel.planner.plan import Plan

OVERRIDES, PLANNED = "overrides.txt", "planned.yaml"

_CHECKED = ("read back: the fields as written give the plan that they are said to run",)
_OVERLAPS = (
    "a recipe's comm_overlap, where it has one, decides the overlap of transfers, gradients and TP's traffic again; "
    "the fields that are written hold where it is null"
)


_MIMO = (
    "set what is of model.standard_provider before MegatronMIMOProvider.from_standard_provider takes it, which builds "
    "the encoder at once; micro_batch_size counts the samples of all replicas"
)


def export_new(plan: Plan, target: Target) -> Exported:
    """`planned.yaml`, for --config-file, and `overrides.txt`, the same as words. Raises PlanError as `decide` does."""
    decided, fields = _decide(plan, target)
    header = "".join(f"# {line}\n" for line in (*target.describe(decided.plan), *decided.approximations))
    new = {field for field in fields if field.endswith("._target_")}  # Hydra: ++ where a field may not be there
    words = "".join(f"{'++' * (field in new)}{field}={_spell(value)}\n" for field, value in fields.items())
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
    if is_mimo(dict.fromkeys(there, "")) and not plan.strategy.arrangement:
        raise PlanError(f"{path}: its modules have ranks of their own, and the plan is one pipeline; plan with "
                        "search.layouts [disaggregated]")  # fmt: skip
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
    if plan.strategy.arrangement:
        return decide_mimo(plan, target.job)
    decided = without_mindspeed(decide(plan, target.job))
    return decided, to_fields({**decided.values, **decided.usual})


def _export(
    decided: Decided, target: Target, texts: Mapping[Path, str], fields: Mapping[str, Any], notes: tuple[str, ...]
) -> Exported:
    strategy, path = decided.plan.strategy, Path(PLANNED)
    if strategy.arrangement:
        _check_mimo_read_back(decided, target, fields)
        notes = (*notes, _MIMO)
    else:
        check_read_back(read_passed(to_script(fields, path), strategy.world_size), decided.plan, target.job)
        notes = (*notes, _OVERLAPS)
    notes = (f"start it on {strategy.world_size} devices", *notes)
    return Exported(dict(texts), decided.plan, decided.approximations, _CHECKED, decided.unchecked, notes)


def _check_mimo_read_back(decided: Decided, target: Target, fields: Mapping[str, Any]) -> None:
    """Raises Lost naming the first choice that the fields do not say."""
    run, job = decided.plan, target.job
    arrangement = run.strategy.arrangement
    assert arrangement is not None
    modules = take_apart(fields, PLANNED, has_experts(run.strategy, job))
    modules = replace(modules, encoder=replace(modules.encoder, name=arrangement.encoder.name))
    passed = read_passed(to_script(modules.decoder, Path(PLANNED)), modules.world_size)
    check_overlaps(passed, run.strategy)
    decoder = read_plan(passed, modules.world_size, sum(run.layers[TEXT]))
    again = join_modules(decoder, passed, modules, sum(run.layers[arrangement.encoder.name]))
    check_decided(again, replace(run, layers={name: run.layers[name] for name in again.layers}), job)


def _nest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Section → its fields, of which some are mappings themselves; a section that is one value as it is."""
    nested: dict[str, Any] = {}
    for field, value in fields.items():
        *sections, key = field.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
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


EXPORTER = Exporter(("0.3", "0.6"), PLANNED, export_new, export_patch, ROUNDED, REFUSED, by_module=VERSION)
LAUNCHES = (
    patched_launch(
        "a configuration of Megatron-Bridge (YAML, overrides, a recipe's Python, a script that starts it)",
        is_config,
        describe_config,
        read_config_plan,
        EXPORTER,
        find_started_devices,
        planned_files,
        takes=("beside", "entry", "seq_length"),
    ),
)
