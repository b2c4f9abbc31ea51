"""The frameworks a plan can be written for, by the name people give them, and the launches that can be planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.export import Export
from mm_autoparallel.integrations.mindspeed_mm.launch_script import find_devices, read_launch_script
from mm_autoparallel.integrations.mindspeed_mm.plan_files import read_plan_back, write_plan
from mm_autoparallel.integrations.mindspeed_mm.script_files import (
    describe_script,
    planned_files,
    read_script_plan,
    write_script_plan,
)
from mm_autoparallel.integrations.mindspeed_mm_fsdp import launch_files as fsdp
from mm_autoparallel.planner.plan import Plan


@dataclass(frozen=True)
class LaunchKind:
    """A kind of file that starts a training, as `plan --script FILE` takes it.

    is_one: whether the file at a path is of this kind. find_devices: nodes and devices a node that it asks for, None
    where only the machine knows. describe: what it trains. read_plan: the plan that it trains under by itself; raises
    PlannerError where that cannot be told. planned_files: what writing a plan into a folder will write. write_plan:
    (plan, file, folder, what a person said beside the file, overwrite) → what was written.
    """

    title: str
    is_one: Callable[[Path], bool]
    find_devices: Callable[[Path], tuple[int | None, int | None]]
    describe: Callable[[Path, Given], Described]
    read_plan: Callable[[Path, Given], Plan]
    planned_files: Callable[[Path, Path, Given], tuple[Path, ...]]
    write_plan: Callable[[Plan, Path, Path, Given, bool], Export]


@dataclass(frozen=True)
class Framework:
    """A framework whose training is described by two files: the model, and the script that launches it.

    write_plan: (plan, model file, launch script, folder to write to, overwrite) → what was written.
    read_plan: (model file, launch script, world size where the script leaves it to the machine) → the plan they run.
    launches: the kinds of files that start it; the first that knows a file counts.
    """

    title: str
    model_file: str
    write_plan: Callable[[Plan, Path, Path, Path, bool], Export]
    read_plan: Callable[[Path, Path, int | None], Plan]
    launches: tuple[LaunchKind, ...] = ()


FRAMEWORKS: dict[str, Framework] = {
    "mindspeed-mm": Framework(
        "MindSpeed-MM 2.x",
        "model.json",
        write_plan,
        read_plan_back,
        (
            LaunchKind(
                "a launch script of its FSDP trainer (.sh), or that trainer's YAML",
                fsdp.is_launch,
                fsdp.find_launched_devices,
                fsdp.describe_launch,
                fsdp.read_launch_plan,
                fsdp.planned_files,
                fsdp.write_launch_plan,
            ),
            LaunchKind(
                "a launch script of MindSpeed-MM (.sh)",
                lambda path: path.suffix in (".sh", ".bash", ""),
                lambda path: find_devices(read_launch_script(path)),
                describe_script,
                read_script_plan,
                planned_files,
                write_script_plan,
            ),
        ),
    ),
}


def find_launch(path: Path) -> LaunchKind:
    """The kind of launch that the file at `path` is. Raises JobError where it is none that is known."""
    kinds = [kind for framework in FRAMEWORKS.values() for kind in framework.launches]
    for kind in kinds:
        if kind.is_one(path):
            return kind
    raise JobError(f"{path} is no file that starts a training; known are {', '.join(kind.title for kind in kinds)}")
