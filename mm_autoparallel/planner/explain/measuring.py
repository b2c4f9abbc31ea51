"""Where a cost source would be measured, in words and as the command that does it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from mm_autoparallel.model.costs.cost_source import BlockPoint, CostSource, MessagePoint, UpdatePoint
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.units import format_bytes

_MOST_KINDS = 3
"""Of blocks that a run measures, which are named. Assumed: those after them matter less."""


def describe_point(source: CostSource) -> str:
    """`TP 4, CP 1, MBS 2, 4096 tokens`, or `all_gather among 8 ranks of node, 128.0 MiB`."""
    at = source.at
    if isinstance(at, BlockPoint):
        experts = [f"EP {at.ep}"] if at.ep > 1 else []
        experts += [f"ETP {at.etp}"] if at.etp not in (0, at.point.tp) else []
        return ", ".join([str(at.point), *experts])
    if isinstance(at, UpdatePoint):
        return f"TP {at.tp}, state shared by {at.num_shards}"
    inside = f", {at.inside} in each group below" if at.inside > 1 else ""
    operations = " and ".join(at.operations)
    return f"{operations} among {at.num_ranks} ranks of {at.level}{inside}, {format_bytes(at.size_bytes)}"


def describe_run(sources: Sequence[CostSource], job: Job, builds_model: bool) -> str:
    """What to run to measure `sources`, which one run measures together, the most important first.

    builds_model: `mm-autoparallel profile` can build the job's model.
    """
    if isinstance(sources[0].at, MessagePoint):
        return _describe_network_run(sources, sources[0].at, job, builds_model)
    blocks = [one for one in sources if isinstance(one.at, BlockPoint)]
    named = [f"{one.name} at {describe_point(one)}" for one in (blocks or sources)[:1]]
    named += [one.name for one in (blocks or sources)[1:_MOST_KINDS]]
    what = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
    tp, cp, mbs, ep = _division(sources[0])
    if cp > 1 or ep > 1:
        return (
            f"{what}: time its forward and backward in your training code; `profile` measures blocks at CP 1 and EP 1 "
            "alone"
        )
    if builds_model:
        return f"{what}: `mm-autoparallel profile {shlex.quote(str(job.path))} --tp {tp} --mbs {mbs}`"
    return f"{what}: your pretrain script with --auto-parallel-mm measures TP {tp} MBS {mbs}, on one node too"


def _describe_network_run(sources: Sequence[CostSource], at: MessagePoint, job: Job, builds_model: bool) -> str:
    largest = max((one.at for one in sources if isinstance(one.at, MessagePoint)), key=lambda at: at.size_bytes)
    operations = dict.fromkeys(
        name for one in sources if isinstance(one.at, MessagePoint) for name in one.at.operations
    )
    what = (
        f"{' and '.join(operations)} among {at.num_ranks} ranks of {at.level}"
        f"{f' ({at.inside} in each group below)' if at.inside > 1 else ''}, messages of up to "
        f"{format_bytes(largest.size_bytes)} (for {', '.join(one.name for one in sources)})"
    )
    levels = [level.name for level in job.cluster.levels]
    if at.level == levels[0]:
        number = "two devices" if at.num_ranks == 2 else f"{at.num_ranks} devices"
        if builds_model:
            return (
                f"{what}: `mm-autoparallel profile {shlex.quote(str(job.path))}` where {number} of one node are visible"
            )
        return f"{what}: your pretrain script with --auto-parallel-mm where {number} of one node are visible"
    below = job.cluster.levels[max(0, levels.index(at.level) - 1)] if at.level in levels else job.cluster.levels[0]
    num_groups = math.ceil(at.num_ranks / at.inside)
    num_nodes = max(2, num_groups * below.num_devices // job.cluster.devices_per_node)
    return (
        f"{what}: your pretrain script with --auto-parallel-mm --nnodes {num_nodes}, started on {num_nodes} such nodes"
    )


def _division(source: CostSource) -> tuple[int, int, int, int]:
    """TP, CP, MBS and EP."""
    at = source.at
    if isinstance(at, BlockPoint):
        return at.point.tp, at.point.cp, at.point.mbs, at.ep
    assert isinstance(at, UpdatePoint)
    return at.tp, 1, at.mbs, 1
