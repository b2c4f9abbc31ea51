"""Megatron-LM's pretrain_gpt.py on megatron-core 0.16, as it is registered: its launch scripts, and a plan as flags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind

VERSIONS = ("0.16",)

ROUNDED = frozenset({"recompute_stages", "selective_some"})
REFUSED = frozenset(
    [
        "partial_group",
        "encoder_first",
        "encoder_stages",
        "gpipe",
        "pieces",
        "low_memory_chunks",
        "split_backwards",
        "zero_2_pipeline",
        "zero_3_pipeline",
        "kept_weights",
        "shards",
        "activation",
        "offload",
        "swap_attention",
        "swap_some",
        "recompute_offload",
        "precision",
        "graphs",
        "fused_products",
    ]
)


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.launch_script import find_devices
    from mm_autoparallel.integrations.megatron_core.launch import (
        describe_launch,
        is_launch,
        read_launch_plan,
        read_training,
    )
    from mm_autoparallel.integrations.megatron_core.written import export_patch, planned_files
    from mm_autoparallel.integrations.patching import write_patched

    return [
        LaunchKind(
            title="a launch script of Megatron-LM's pretrain_gpt.py (.sh), or MODEL_ARGS in YAML",
            is_one=is_launch,
            find_devices=lambda path: find_devices(read_training(path)),
            describe=describe_launch,
            read_plan=read_launch_plan,
            planned_files=planned_files,
            write_plan=partial(write_patched, export_patch, VERSIONS[0]),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.megatron_core.written import LAUNCH, export_new, export_patch

    return Exporter(VERSIONS, LAUNCH, export_new, export_patch, ROUNDED, REFUSED)


def _linter() -> Linter:
    from mm_autoparallel.integrations.megatron_core.file_findings import find
    from mm_autoparallel.integrations.megatron_core.file_rules import RULES
    from mm_autoparallel.integrations.megatron_core.linted_launch import CHOICES, locate, spell

    return Linter(RULES, find, locate, spell, CHOICES)


FRAMEWORK = Framework("Megatron-LM on megatron-core 0.16", launches=_launches, exporter=_exporter, linter=_linter)
