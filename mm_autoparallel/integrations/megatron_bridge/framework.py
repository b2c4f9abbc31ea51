"""Megatron-Bridge, as it is registered: its configurations, and a plan as overrides of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind

VERSIONS = ("0.3", "0.6")


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.megatron_bridge.config import find_started_devices, is_config
    from mm_autoparallel.integrations.megatron_bridge.dialect import describe_config, read_config_plan
    from mm_autoparallel.integrations.megatron_bridge.written import export_patch, planned_files
    from mm_autoparallel.integrations.patching import write_patched

    return [
        LaunchKind(
            title="a configuration of Megatron-Bridge (YAML, overrides, a recipe's Python, a script that starts it)",
            is_one=is_config,
            find_devices=find_started_devices,
            describe=describe_config,
            read_plan=read_config_plan,
            planned_files=planned_files,
            write_plan=partial(write_patched, export_patch, VERSIONS[0]),
            takes=frozenset({"beside", "entry", "seq_length"}),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.megatron_bridge.mimo import VERSION
    from mm_autoparallel.integrations.megatron_bridge.written import PLANNED, export_new, export_patch
    from mm_autoparallel.integrations.megatron_core.framework import REFUSED, ROUNDED

    return Exporter(VERSIONS, PLANNED, export_new, export_patch, ROUNDED, REFUSED, by_module=VERSION)


def _linter() -> Linter:
    from mm_autoparallel.integrations.config_files import spell_by
    from mm_autoparallel.integrations.config_said import RULES, locate_by
    from mm_autoparallel.integrations.file_rules import PADDING
    from mm_autoparallel.integrations.megatron_bridge.said import KEYS, find
    from mm_autoparallel.integrations.megatron_bridge.written import decide_values

    return Linter((*RULES, PADDING), find, locate_by(KEYS), spell_by(decide_values))


FRAMEWORK = Framework("Megatron-Bridge 0.3", launches=_launches, exporter=_exporter, linter=_linter)
