"""torch, as it is registered: decision, schedule and code of a training on torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence

from mm_autoparallel.integrations.framework import Exporter, Framework, LaunchKind

VERSIONS = ("2.13",)


def _launches() -> Sequence[LaunchKind]:
    from mm_autoparallel.integrations.torch.read import describe_launch, find_devices, is_planned, read_launch_plan
    from mm_autoparallel.integrations.torch.written import planned_files, write_beside

    return [
        LaunchKind(
            title="planned.json of export --to torch",
            is_one=is_planned,
            find_devices=find_devices,
            describe=describe_launch,
            read_plan=read_launch_plan,
            planned_files=planned_files,
            write_plan=write_beside,
            takes=frozenset({"seq_length"}),
        )
    ]


def _exporter() -> Exporter:
    from mm_autoparallel.integrations.torch.read import PLANNED
    from mm_autoparallel.integrations.torch.written import REFUSED, ROUNDED, export_new

    return Exporter(VERSIONS, PLANNED, export_new, None, ROUNDED, frozenset(REFUSED))


FRAMEWORK = Framework("torch.distributed.pipelining (torch 2.13)", launches=_launches, exporter=_exporter)
