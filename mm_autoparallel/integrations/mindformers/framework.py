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
    from mm_autoparallel.integrations.config_said import make_linter
    from mm_autoparallel.integrations.file_rules import UNFILLED
    from mm_autoparallel.integrations.mindformers.said import KEYS, KNOWN, read_said

    return make_linter(read_said, KEYS, known=KNOWN, more=(UNFILLED,))


FRAMEWORK = Framework(
    "MindFormers",
    verbs=("nd-search", "pipeline-search", "rank"),
    launches=_launches,
    exporter=_exporter,
    linter=_linter,
)
