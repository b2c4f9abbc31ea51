"""torchtitan, as it is registered: TOMLs of 0.2, registries of 0.3 and of the newest code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.patching import planned_files, write_patched
    from mm_autoparallel.integrations.torchtitan.config import is_config
    from mm_autoparallel.integrations.torchtitan.read import describe_launch, read_launch_plan
    from mm_autoparallel.integrations.torchtitan.written import export_patch

    return [
        LaunchKind(
            title="a configuration of torchtitan (TOML of 0.2, or a registry of 0.3 or newer)",
            is_one=is_config,
            find_devices=lambda _: (None, None),
            describe=describe_launch,
            read_plan=read_launch_plan,
            planned_files=planned_files,
            write_plan=partial(write_patched, export_patch, "0.2"),
            takes=frozenset({"seq_length", "entry", "beside"}),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.torchtitan.config import VERSIONS
    from mm_autoparallel.integrations.torchtitan.written import CODE, REFUSED, ROUNDED, export_new, export_patch

    return Exporter(VERSIONS, CODE, export_new, export_patch, ROUNDED, frozenset(REFUSED))


def _linter() -> Linter:
    from mm_autoparallel.integrations.config_files import spell_by
    from mm_autoparallel.integrations.config_said import make_linter
    from mm_autoparallel.integrations.file_rules import UNFILLED
    from mm_autoparallel.integrations.torchtitan.config import KNOWN
    from mm_autoparallel.integrations.torchtitan.said import KEYS, find_version, read_said
    from mm_autoparallel.integrations.torchtitan.written import decide_values

    known = {section: names.split() for (section, version), names in KNOWN.items() if version == "0.2"}
    return make_linter(read_said, KEYS, spell_by(decide_values, find_version), known, (UNFILLED,))


FRAMEWORK = Framework("torchtitan 0.2, 0.3 and main", launches=_launches, exporter=_exporter, linter=_linter)
