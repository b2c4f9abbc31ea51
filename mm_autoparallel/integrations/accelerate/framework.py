"""Hugging Face accelerate, as it is registered: its configuration file, of FSDP2 and of Megatron-LM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind

VERSIONS = ("1.15",)

_ROUNDED = frozenset({"recompute_stages", "zero_2"})


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.accelerate.read import describe_launch, find_devices, is_config, read_launch_plan
    from mm_autoparallel.integrations.accelerate.written import export_patch
    from mm_autoparallel.integrations.patching import planned_files, write_patched

    return [
        LaunchKind(
            title="a configuration of Hugging Face accelerate (YAML or JSON)",
            is_one=is_config,
            find_devices=find_devices,
            describe=describe_launch,
            read_plan=read_launch_plan,
            planned_files=planned_files,
            write_plan=partial(write_patched, export_patch, VERSIONS[0]),
            takes=frozenset({"seq_length", "global_batch_size", "micro_batch_size"}),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.accelerate.written import CONFIG, REFUSED, export_new, export_patch

    return Exporter(
        VERSIONS, CONFIG, export_new, export_patch, _ROUNDED, frozenset({*REFUSED, "uneven_stages", "all_gather"})
    )


def _linter() -> Linter:
    from mm_autoparallel.integrations.accelerate.written import decide_values
    from mm_autoparallel.integrations.config_files import locate_by, spell_by

    keys = {
        "recompute": ("fsdp_activation_checkpointing", "megatron_lm_recompute_num_layers"),
        "layers": ("megatron_lm_decoder_last_pipeline_num_layers", "megatron_lm_pp_degree"),
        "tp": ("parallelism_config_tp_size", "megatron_lm_tp_degree"),
        "zero": ("distributed_type",),
    }
    return Linter((), lambda *_: (), locate_by(keys), spell_by(decide_values))


FRAMEWORK = Framework("Hugging Face accelerate 1.15", launches=_launches, exporter=_exporter, linter=_linter)
