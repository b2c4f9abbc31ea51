"""MindSpeed-MM 2.x, as it is registered: its model.json, its launch scripts, and a plan in both."""

from __future__ import annotations

from collections.abc import Sequence

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind, PlanFiles
from mm_autoparallel.model.readers.model_form import ModelForm

_ROUNDED = frozenset({"recompute_stages"})
_REFUSED = frozenset(
    (
        *(
            "partial_group",
            "gpipe",
            "low_memory_chunks",
            "split_backwards",
            "pieces",
            "ring",
            "all_to_all",
            "all_gather",
            "hierarchical",
        ),
        *("whole_experts", "dispatcher", "token_overlap", "zero_2", "zero_3", "zero_2_pipeline", "zero_3_pipeline"),
        *("kept_weights", "shards", "selective_all", "selective_some", "activation", "offload", "recompute_offload"),
        *("swap_attention", "swap_some"),
        *("optimizer_offload", "rank_order", "precision", "graphs", "user_buffers"),
    )
)


def _models() -> Sequence[ModelForm]:
    from mm_autoparallel.integrations.mindspeed_mm.model_reader import is_mindspeed_mm, read_mindspeed_mm

    return [ModelForm("MindSpeed-MM's model.json has text_decoder", is_mindspeed_mm, read_mindspeed_mm)]


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.launch_script import SUFFIXES, find_devices, read_launch_script
    from mm_autoparallel.integrations.mindspeed_mm.script_files import (
        describe_script,
        planned_files,
        read_script_plan,
        write_script_plan,
    )

    return [
        LaunchKind(
            title="a launch script of MindSpeed-MM (.sh)",
            is_one=lambda path: path.suffix in SUFFIXES,
            find_devices=lambda path: find_devices(read_launch_script(path)),
            describe=describe_script,
            read_plan=read_script_plan,
            planned_files=planned_files,
            write_plan=write_script_plan,
            asked_last=True,
        )
    ]


def _plan_files() -> PlanFiles:
    from mm_autoparallel.integrations.mindspeed_mm.plan_files import read_plan_back, write_plan

    return PlanFiles("model.json", write_plan, read_plan_back)


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.mindspeed_mm.plan_files import export_patch

    return Exporter(("2.x",), "model.json pretrain.sh", None, export_patch, _ROUNDED, _REFUSED, by_module="2.x")


def _linter() -> Linter:
    from mm_autoparallel.integrations.file_rules import CONTRADICTED, KEY_TWICE
    from mm_autoparallel.integrations.megatron_core.file_rules import OF_KIND
    from mm_autoparallel.integrations.megatron_core.linted_launch import CHOICES, locate
    from mm_autoparallel.integrations.mindspeed_mm.said import find

    return Linter((*OF_KIND, CONTRADICTED, KEY_TWICE), find, locate, choices=CHOICES)


FRAMEWORK = Framework(
    "MindSpeed-MM 2.x",
    models=_models,
    launches=_launches,
    plan_files=_plan_files,
    exporter=_exporter,
    linter=_linter,
)
