"""MindSpeed-MM's FSDP trainer, as it is registered: its launch script or its YAML, and a plan in that YAML."""

from __future__ import annotations

from collections.abc import Sequence

from mm_autoparallel.integrations.framework import Framework, LaunchKind


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.mindspeed_mm_fsdp import launch_files

    return [
        LaunchKind(
            title="a launch script of its FSDP trainer (.sh), or that trainer's YAML",
            is_one=launch_files.is_launch,
            find_devices=launch_files.find_launched_devices,
            describe=launch_files.describe_launch,
            read_plan=launch_files.read_launch_plan,
            planned_files=launch_files.planned_files,
            write_plan=launch_files.write_launch_plan,
        )
    ]


FRAMEWORK = Framework("MindSpeed-MM's FSDP trainer", launches=_launches)
