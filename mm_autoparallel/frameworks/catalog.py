"""The frameworks a plan can be written for, by the name people give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.frameworks.export import Export
from mm_autoparallel.frameworks.mindspeed_mm.plan_files import read_plan_back, write_plan
from mm_autoparallel.plan import Plan


@dataclass(frozen=True)
class Framework:
    """A framework whose training is described by two files: the model, and the script that launches it.

    write_plan: (plan, model file, launch script, folder to write to, overwrite) → what was written.
    read_plan: (model file, launch script, world size where the script leaves it to the machine) → the plan they run.
    """

    title: str
    model_file: str
    write_plan: Callable[[Plan, Path, Path, Path, bool], Export]
    read_plan: Callable[[Path, Path, int | None], Plan]


FRAMEWORKS: dict[str, Framework] = {
    "mindspeed-mm": Framework("MindSpeed-MM 2.x", "model.json", write_plan, read_plan_back),
}
