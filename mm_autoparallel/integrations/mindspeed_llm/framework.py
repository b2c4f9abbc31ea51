"""MindSpeed-LLM, as it is registered: launch scripts of pretrain_gpt.py and posttrain_gpt.py, and a plan in them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind

VERSIONS = ("26.1",)

_ROUNDED = frozenset({"recompute_stages"})
_REFUSED = frozenset(
    {
        *("partial_group", "encoder_first", "encoder_stages", "gpipe", "pieces", "low_memory_chunks"),
        "split_backwards",
        *("zero_2", "zero_3", "zero_2_pipeline", "zero_3_pipeline", "kept_weights", "shards", "optimizer_offload"),
        *("selective_all", "selective_some", "offload", "recompute_offload", "precision", "graphs"),
        *("dispatcher", "token_overlap", "swap_some", "user_buffers"),
    }
)


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.launch_script import find_devices, read_launch_script
    from mm_autoparallel.integrations.megatron_core.launch import describe_launch, read_launch_plan
    from mm_autoparallel.integrations.mindspeed_llm.dialect import MINDSPEED
    from mm_autoparallel.integrations.mindspeed_llm.written import export_patch, is_launch
    from mm_autoparallel.integrations.patching import planned_files, write_patched

    return [
        LaunchKind(
            title="a launch script of MindSpeed-LLM's pretrain_gpt.py or posttrain_gpt.py (.sh)",
            is_one=is_launch,
            find_devices=lambda path: find_devices(read_launch_script(path)),
            describe=partial(describe_launch, dialect=MINDSPEED),
            read_plan=partial(read_launch_plan, dialect=MINDSPEED),
            planned_files=planned_files,
            write_plan=partial(write_patched, export_patch, VERSIONS[0]),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.mindspeed_llm.written import LAUNCH, export_new, export_patch

    return Exporter(VERSIONS, LAUNCH, export_new, export_patch, _ROUNDED, _REFUSED)


def _linter() -> Linter:
    from mm_autoparallel.integrations.file_rules import OLD
    from mm_autoparallel.integrations.megatron_core.file_findings import find_of_kind
    from mm_autoparallel.integrations.megatron_core.file_rules import OF_KIND
    from mm_autoparallel.integrations.megatron_core.linted_launch import CHOICES, locate
    from mm_autoparallel.integrations.mindspeed_llm.dialect import MINDSPEED

    return Linter((*OF_KIND, OLD), partial(find_of_kind, dialect=MINDSPEED), locate, choices=CHOICES)


FRAMEWORK = Framework("MindSpeed-LLM 26.1", launches=_launches, exporter=_exporter, linter=_linter)
