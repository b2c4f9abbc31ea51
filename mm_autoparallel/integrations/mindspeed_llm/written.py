"""A plan as files for MindSpeed-LLM: a new launch script, or a person's own with the plan in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePath

from mm_autoparallel.integrations.export import only, patched_launch
from mm_autoparallel.integrations.file_rules import OLD
from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.integrations.launch_script import SUFFIXES, find_devices, read_launch_script
from mm_autoparallel.integrations.megatron_core.file_findings import find_of_kind
from mm_autoparallel.integrations.megatron_core.file_rules import OF_KIND
from mm_autoparallel.integrations.megatron_core.launch import (
    ENTRY,
    describe_launch,
    is_mindspeed,
    patch_launch,
    read_launch_plan,
)
from mm_autoparallel.integrations.megatron_core.linted_launch import CHOICES, locate
from mm_autoparallel.integrations.megatron_core.written import LAUNCH, export_flags
from mm_autoparallel.integrations.mindspeed_llm.dialect import MINDSPEED
from mm_autoparallel.planner.plan import Plan

TUNES = "posttrain_gpt.py"
"""Trains on instructions, or on preferences (mindspeed_llm/tasks/posttrain/launcher.py)."""
_CHECKED = ("read back: the flags as written give the plan that they are said to run",)


def is_launch(path: Path) -> bool:
    """Whether the script at `path` starts posttrain_gpt.py, or pretrain_gpt.py with flags of MindSpeed-LLM alone."""
    if path.suffix not in SUFFIXES:
        return False
    script = read_launch_script(path)
    started = script.started()
    entry = PurePath(started[0].text).name if started else ""
    return entry == TUNES or (entry == ENTRY and is_mindspeed(script))


def export_new(plan: Plan, target: Target) -> Exported:
    """`launch.sh`, which starts pretrain_gpt.py with the flags, and these a line each. Raises PlanError."""
    return export_flags(plan, target, MINDSPEED)


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """The script at the one of `paths` with `plan` in it. Raises JobError or PlanError."""
    (path,) = only(paths, "MindSpeed-LLM", "a launch script")
    script, decided, notes = patch_launch(path, plan, target.job, MINDSPEED)
    return Exported({path: script.text}, decided.plan, decided.approximations, _CHECKED, decided.unchecked, notes)


__all__ = ["LAUNCH", "export_new", "export_patch", "is_launch"]


_REFUSED = frozenset(
    (
        *("partial_group", "encoder_first", "encoder_stages", "gpipe", "pieces", "low_memory_chunks"),
        *("split_backwards", "zero_2", "zero_3", "zero_2_pipeline", "zero_3_pipeline", "kept_weights", "shards"),
        *("optimizer_offload", "selective_all", "selective_some", "offload", "recompute_offload", "precision"),
        *("graphs", "dispatcher", "token_overlap", "swap_some", "user_buffers"),
    )
)
EXPORTER = Exporter(("26.1",), LAUNCH, export_new, export_patch, frozenset({"recompute_stages"}), _REFUSED)
LAUNCHES = (
    patched_launch(
        "a launch script of MindSpeed-LLM's pretrain_gpt.py or posttrain_gpt.py (.sh)",
        is_launch,
        partial(describe_launch, dialect=MINDSPEED),
        partial(read_launch_plan, dialect=MINDSPEED),
        EXPORTER,
        lambda path: find_devices(read_launch_script(path)),
    ),
)
LINTER = Linter((*OF_KIND, OLD), partial(find_of_kind, dialect=MINDSPEED), locate, choices=CHOICES)
