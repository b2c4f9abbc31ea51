"""DeepSpeed, as it is registered: ds_config.json, and the layers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind

VERSIONS = ("0.19",)


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.deepspeed.read import describe_launch, is_config, read_launch_plan
    from mm_autoparallel.integrations.deepspeed.written import export_patch
    from mm_autoparallel.integrations.patching import planned_files, write_patched

    return [
        LaunchKind(
            title="a configuration of DeepSpeed (JSON)",
            is_one=is_config,
            find_devices=lambda _: (None, None),
            describe=describe_launch,
            read_plan=read_launch_plan,
            planned_files=planned_files,
            write_plan=partial(write_patched, export_patch, VERSIONS[0]),
            takes=frozenset({"beside", "seq_length", "global_batch_size", "micro_batch_size"}),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.deepspeed.read import CONFIG
    from mm_autoparallel.integrations.deepspeed.written import REFUSED, export_new, export_patch

    return Exporter(VERSIONS, CONFIG, export_new, export_patch, frozenset(), frozenset(REFUSED))


def _linter() -> Linter:
    from mm_autoparallel.integrations.config_files import locate_by, spell_by
    from mm_autoparallel.integrations.deepspeed.read import BATCH, MICRO_BATCH, ZERO
    from mm_autoparallel.integrations.deepspeed.written import decide_values

    keys = {"mbs": (MICRO_BATCH,), "global_batch_size": (BATCH,), "zero": (ZERO,), "tp": ("autotp_size",)}
    return Linter((), lambda *_: (), locate_by(keys), spell_by(decide_values))


FRAMEWORK = Framework("DeepSpeed 0.19", launches=_launches, exporter=_exporter, linter=_linter)
