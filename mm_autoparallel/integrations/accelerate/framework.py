"""Hugging Face accelerate, as it is registered: its configuration file, of FSDP2, of Megatron-LM and of DeepSpeed."""

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
    from mm_autoparallel.integrations.accelerate.said import KEYS, KNOWN, read_said
    from mm_autoparallel.integrations.accelerate.written import spell
    from mm_autoparallel.integrations.config_said import make_linter

    return make_linter(read_said, KEYS, spell, KNOWN)


FRAMEWORK = Framework("Hugging Face accelerate 1.15", launches=_launches, exporter=_exporter, linter=_linter)
