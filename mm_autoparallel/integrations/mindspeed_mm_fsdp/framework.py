"""The FSDP trainers of MindSpeed-MM and MindSpeed-LLM, as they are registered: launch script or YAML, a plan in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Framework, LaunchKind


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.mindspeed_mm_fsdp import launch_files

    script = LaunchKind(
        title="a launch script of MindSpeed-MM's or MindSpeed-LLM's FSDP trainer (.sh)",
        is_one=launch_files.is_script,
        find_devices=launch_files.find_launched_devices,
        describe=launch_files.describe_launch,
        read_plan=launch_files.read_launch_plan,
        planned_files=launch_files.planned_files,
        write_plan=launch_files.write_launch_plan,
    )
    return [script, replace(script, title="that trainer's YAML", is_one=launch_files.is_yaml, asked_last=True)]


def _linter() -> Linter:
    from mm_autoparallel.integrations.config_said import RULES
    from mm_autoparallel.integrations.mindspeed_mm_fsdp.said import find, locate

    return Linter(RULES, find, locate)


FRAMEWORK = Framework("the FSDP trainers of MindSpeed-MM and MindSpeed-LLM", launches=_launches, linter=_linter)
