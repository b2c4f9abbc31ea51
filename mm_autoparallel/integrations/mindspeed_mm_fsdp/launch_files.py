"""A launch of the FSDP trainer as `plan --script` takes it: its script, or its YAML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.export import Export
from mm_autoparallel.integrations.framework import LaunchKind
from mm_autoparallel.integrations.launch_script import find_devices, read_launch_script
from mm_autoparallel.integrations.mindspeed_mm_fsdp.describe import describe
from mm_autoparallel.integrations.mindspeed_mm_fsdp.launch import read_launch, starts_trainer
from mm_autoparallel.integrations.mindspeed_mm_fsdp.plan_yaml import read_plan_back, write_plan
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.planner.plan import Plan

_YAML, _SCRIPT = (".yaml", ".yml"), (".sh", ".bash", "")


def is_yaml(path: Path) -> bool:
    """Whether the file at `path` is called a YAML."""
    return path.suffix.lower() in _YAML


def is_script(path: Path) -> bool:
    """Whether the file at `path` is a script that starts the trainer. Raises JobError where it cannot be read."""
    return path.suffix.lower() in _SCRIPT and starts_trainer(read_launch_script(path).text)


def find_launched_devices(path: Path) -> tuple[int | None, int | None]:
    """Nodes and devices a node that the script starts; a YAML says neither."""
    return (None, None) if is_yaml(path) else find_devices(read_launch_script(path))


def describe_launch(path: Path, given: Given) -> Described:
    """What the launch at `path` trains. Raises JobError where that is not known, or `given` has what means nothing."""
    if given.max_vpp is not None:
        raise JobError(f"--max-vpp is {given.max_vpp}, and the FSDP trainer that {path} starts has no pipeline")
    return describe(
        path,
        model_config=given.model_config,
        world_size=given.world_size,
        image_tokens=given.image_tokens,
        images=given.images,
    )


def read_launch_plan(path: Path, given: Given) -> Plan:
    """The plan that the launch at `path` trains under by itself."""
    return read_plan_back(path, _model(path, given), given.world_size)


def planned_files(path: Path, out: Path, given: Given) -> tuple[Path, ...]:  # noqa: ARG001 (all kinds are called alike)
    """What write_launch_plan writes into `out`."""
    return (out / read_launch(path).yaml_path.name,)


def write_launch_plan(plan: Plan, path: Path, out: Path, given: Given, overwrite: bool) -> Export:
    """Write the YAML of the launch at `path` with `plan` in it into `out`. Raises as write_plan does."""
    return write_plan(plan, _model(path, given), path, out, overwrite)


def _model(path: Path, given: Given) -> Model:
    model = describe_launch(path, given).model
    assert isinstance(model, Model)
    return model


_LAUNCHED = LaunchKind(
    title="a launch script of MindSpeed-MM's or MindSpeed-LLM's FSDP trainer (.sh)",
    is_one=is_script,
    find_devices=find_launched_devices,
    describe=describe_launch,
    read_plan=read_launch_plan,
    planned_files=planned_files,
    write_plan=write_launch_plan,
)
LAUNCHES = (_LAUNCHED, replace(_LAUNCHED, title="that trainer's YAML", is_one=is_yaml, asked_last=True))
