"""Galvatron, as it is registered: strategies of one kind for all layers as plans, its search by verbs of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind

VERSIONS = ("2.4", "paddle")


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.galvatron.plans import (
        describe_launch,
        export_patch,
        is_strategy,
        read_launch_plan,
    )
    from mm_autoparallel.integrations.patching import planned_files, write_patched

    return [
        LaunchKind(
            title="a strategy of Galvatron's (galvatron_config_….json)",
            is_one=is_strategy,
            find_devices=lambda _: (None, None),
            describe=describe_launch,
            read_plan=read_launch_plan,
            planned_files=planned_files,
            write_plan=partial(write_patched, export_patch, VERSIONS[0]),
            takes=frozenset({"seq_length"}),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.galvatron.plans import JSON, REFUSED, export_new, export_patch

    return Exporter(VERSIONS, JSON, export_new, export_patch, frozenset(), frozenset(REFUSED), by_layer=True)


FRAMEWORK = Framework(
    "Galvatron (Hetu-Galvatron 2.4)",
    launches=_launches,
    exporter=_exporter,
    verbs=("galvatron-search", "galvatron-score", "galvatron-profiles"),
)
