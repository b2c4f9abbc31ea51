"""PaddlePaddle, as it is registered: training arguments of PaddleFormers and PaddleNLP, in JSON or YAML."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mm_autoparallel.integrations.findings import Linter
from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind

VERSIONS = ("1.2", "3.0")


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.paddle.read import describe_launch, is_arguments, read_launch_plan
    from mm_autoparallel.integrations.paddle.written import export_patch
    from mm_autoparallel.integrations.patching import planned_files, write_patched

    return [
        LaunchKind(
            title="arguments of PaddleFormers' or PaddleNLP's trainer (JSON or YAML)",
            is_one=is_arguments,
            find_devices=lambda _: (None, None),
            describe=describe_launch,
            read_plan=read_launch_plan,
            planned_files=planned_files,
            write_plan=partial(write_patched, export_patch, VERSIONS[0]),
            takes=frozenset({"seq_length"}),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.paddle.read import ARGUMENTS
    from mm_autoparallel.integrations.paddle.written import REFUSED, ROUNDED, export_new, export_patch

    return Exporter(VERSIONS, ARGUMENTS, export_new, export_patch, ROUNDED, frozenset(REFUSED))


def _linter() -> Linter:
    from mm_autoparallel.integrations.config_files import spell_by
    from mm_autoparallel.integrations.config_said import make_linter
    from mm_autoparallel.integrations.paddle.said import KEYS, KNOWN_KEYS, read_said
    from mm_autoparallel.integrations.paddle.written import decide_values

    return make_linter(read_said, KEYS, spell_by(decide_values), KNOWN_KEYS)


FRAMEWORK = Framework("PaddleFormers 1.2 and PaddleNLP 3.0", launches=_launches, exporter=_exporter, linter=_linter)
