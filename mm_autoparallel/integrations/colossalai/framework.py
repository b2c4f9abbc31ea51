"""Colossal-AI, as it is registered: the keywords of HybridParallelPlugin, in JSON or in the Python that calls it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind

VERSIONS = ("0.5",)


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.colossalai.read import describe_launch, is_plugin, read_launch_plan
    from mm_autoparallel.integrations.colossalai.written import export_patch
    from mm_autoparallel.integrations.patching import planned_files, write_patched

    return [
        LaunchKind(
            title="keywords of Colossal-AI's HybridParallelPlugin (JSON, or Python that calls it)",
            is_one=is_plugin,
            find_devices=lambda _: (None, None),
            describe=describe_launch,
            read_plan=read_launch_plan,
            planned_files=planned_files,
            write_plan=partial(write_patched, export_patch, VERSIONS[0]),
            takes=frozenset({"seq_length", "global_batch_size", "micro_batch_size"}),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.colossalai.written import JSON, REFUSED, export_new, export_patch

    return Exporter(VERSIONS, JSON, export_new, export_patch, frozenset(), frozenset(REFUSED))


def _linter() -> Linter:
    from mm_autoparallel.integrations.colossalai.said import KEYS, KNOWN, read_said
    from mm_autoparallel.integrations.colossalai.written import decide_values
    from mm_autoparallel.integrations.config_files import spell_by
    from mm_autoparallel.integrations.config_said import make_linter
    from mm_autoparallel.integrations.file_rules import UNFILLED

    return make_linter(read_said, KEYS, spell_by(decide_values), KNOWN, (UNFILLED,))


FRAMEWORK = Framework("Colossal-AI 0.5", launches=_launches, exporter=_exporter, linter=_linter)
