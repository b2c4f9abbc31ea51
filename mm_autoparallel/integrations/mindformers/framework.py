"""MindFormers, as it is registered: its pretrain YAML, and verbs of its own that search divisions of one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind

VERSIONS = ("1.x",)


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.mindformers.launch import (
        describe_launch,
        export_patch,
        find_devices,
        is_launch,
        read_launch_plan,
    )
    from mm_autoparallel.integrations.patching import planned_files, write_patched

    return [
        LaunchKind(
            title="a pretrain YAML of MindFormers",
            is_one=is_launch,
            find_devices=find_devices,
            describe=describe_launch,
            read_plan=read_launch_plan,
            planned_files=planned_files,
            write_plan=partial(write_patched, export_patch, VERSIONS[0]),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.mindformers.launch import REFUSED, export_patch

    return Exporter(VERSIONS, "pretrain.yaml", None, export_patch, frozenset(), frozenset(REFUSED))


def _linter() -> Linter:
    from mm_autoparallel.integrations.config_files import locate_by

    keys = {
        "recompute": ("recompute",),
        "layers": ("offset", "pipeline_stage_offset", "pipeline_stage"),
        "tp": ("model_parallel", "tensor_model_parallel_size"),
        "pp": ("pipeline_stage", "pipeline_model_parallel_size"),
        "mbs": ("batch_size", "micro_batch_size"),
        "global_batch_size": ("micro_batch_num", "global_batch_size"),
        "zero": ("enable_parallel_optimizer",),
    }
    return Linter((), lambda *_: (), locate_by(keys))


FRAMEWORK = Framework(
    "MindFormers",
    verbs=("nd-search", "pipeline-search", "rank"),
    launches=_launches,
    exporter=_exporter,
    linter=_linter,
)
