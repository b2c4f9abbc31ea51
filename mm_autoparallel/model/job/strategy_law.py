"""The law that a strategy must obey: which rule it breaks first, in a sentence with the numbers.

The rules are those of Megatron-LM and MindSpeed-MM, where one tensor parallel size holds for every modality.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any

from mm_autoparallel.model.job import mindspeed_mm_law
from mm_autoparallel.model.job.arrangement_law import arrangement_reasons
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.context_law import context_reasons
from mm_autoparallel.model.job.division_law import division_reasons
from mm_autoparallel.model.job.expert_law import expert_reasons
from mm_autoparallel.model.job.fact_law import overlap_reasons
from mm_autoparallel.model.job.layer_layout import layer_wise_reasons
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.overlaps import choice_reasons
from mm_autoparallel.model.job.precision import precision_reasons
from mm_autoparallel.model.job.schedule_law import schedule_reasons
from mm_autoparallel.model.job.sharding import sharding_reasons
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, RANK_ORDERS, Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.pipeline.schedules.catalog import MAX_ACTIONS

_ORDERED_BY = ("schedule", "orders")
_but_its_order = attrgetter(*(field.name for field in fields(Strategy) if field.name not in _ORDERED_BY))


def unlawful_reason(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> str | None:
    """The first rule that `strategy` breaks, in a sentence with the numbers; None where it is lawful."""
    return Laws(model, cluster, workload).unlawful_reason(strategy)


class Laws:
    """Those of one model on one cluster, for many strategies: what hangs on no order is found out once for all orders
    of the same sizes."""

    def __init__(self, model: Model, cluster: Cluster, workload: Workload) -> None:
        self._job = model, cluster, workload
        self._known: dict[tuple[Any, ...], str | None] = {}

    def unlawful_reason(self, strategy: Strategy) -> str | None:
        """As the function of that name."""
        if strategy.arrangement:
            return _too_small(strategy) or _break_arrangement(*self._job, strategy)
        sizes = _but_its_order(strategy)
        if sizes not in self._known:
            self._known[sizes] = _too_small(strategy) or next(self._break_any_order(strategy), None)
        return self._known[sizes] or next(self._break_in_order(strategy), None)

    def _break_any_order(self, strategy: Strategy) -> Iterator[str]:
        model, cluster, workload = self._job
        yield from _break_cluster(cluster, strategy)
        yield from division_reasons(model, workload, strategy)
        yield from expert_reasons(model, workload, strategy)
        yield from context_reasons(model, cluster, workload, strategy)
        yield from sharding_reasons(model, cluster, workload, strategy)

    def _break_in_order(self, strategy: Strategy) -> Iterator[str]:
        model, cluster, workload = self._job
        yield from _break_workload(workload, strategy)
        yield from precision_reasons(model, cluster, workload, strategy)
        yield from overlap_reasons(workload, strategy)
        yield from choice_reasons(workload, strategy)
        yield from mindspeed_mm_law.strategy_reasons(model, workload, strategy)
        yield from _break_layouts(model, cluster, workload, strategy)


def _too_small(strategy: Strategy) -> str | None:
    for name in ("pp", "tp", "dp", "mbs", "cp", "ep", "vpp"):
        value = getattr(strategy, name)
        if value < 1:
            return f"{name.upper()} is {value}; it must be at least 1"
    return None


def _break_arrangement(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> str | None:
    """Its own rules, and those of the decoder with nothing before it but encoders on its stages."""
    arrangement = strategy.arrangement
    assert arrangement is not None
    if strategy.pp <= arrangement.num_stages_apart:
        return (
            f"PP {strategy.pp} counts the encoder's {arrangement.num_stages_apart} stages and leaves the decoder none"
        )
    if reason := next(arrangement_reasons(model, cluster, workload, strategy), None):
        return reason
    chained = {part for one in arrangement.each if one.in_chain for part in one.encoder.parts}
    alone = model.model_copy(update={"encoders": tuple(e for e in model.encoders if e.name in chained)})
    return unlawful_reason(alone, cluster, workload, strategy.of_decoder())


def _break_layouts(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Each layout must be lawful by itself, of the same devices and samples, and the stack must run several."""
    if not strategy.layouts:
        return
    yield from layer_wise_reasons(workload)
    if strategy.vpp > 1:
        yield f"layers of one stage are shared in several ways with one chunk a stage alone, and VPP is {strategy.vpp}"
    if strategy.shard or strategy.etp:
        yield "layers of one stage are shared in several ways without shards (SHARD) and ETP of their own"
    own, samples = strategy.layout, strategy.mbs * strategy.dp
    for layout in strategy.layouts:
        if layout == own:
            yield f"layout {layout.name} is the strategy's own, in which layers are that name no other"
        elif layout.num_devices != own.num_devices:
            yield f"layout {layout.name} shares {layout.num_devices} devices, and a stage has {own.num_devices}"
        elif samples % layout.dp:
            yield f"layout {layout.name}: its {layout.dp} data parallel ranks do not divide {samples} samples"
        elif reason := unlawful_reason(model, cluster, workload, strategy.in_layout(layout)):
            yield f"layout {layout.name}: {reason}"


def _break_cluster(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    world = strategy.world_size
    if world > cluster.num_devices:
        yield (
            f"PP {strategy.pp} x TP {strategy.tp} x CP {strategy.cp} x DP {strategy.dp} needs {world} devices, and the "
            f"cluster has {cluster.num_devices}"
        )
    if world <= cluster.num_devices and (uneven_reason := cluster.uneven_reason(world)):
        yield uneven_reason
    widest = cluster.max_tensor_parallel
    if strategy.tp > widest:
        yield f"TP {strategy.tp} is wider than the {widest} devices that tensor parallel groups may span"
    if min(world, widest) % strategy.tp:
        yield f"TP {strategy.tp} does not divide the {widest} devices of a node, so groups would straddle two nodes"
    yield from _break_rank_order(strategy)
    if cluster.node_groups and world <= cluster.num_devices:
        yield from _break_kinds(cluster, strategy)


def _break_rank_order(strategy: Strategy) -> Iterator[str]:
    """Megatron-LM, core/parallel_state.py: pipelines of experts and of all else must be the same ranks."""
    if strategy.rank_order not in RANK_ORDERS:
        yield f"rank order {strategy.rank_order!r} is not known; known are {', '.join(RANK_ORDERS)}"
    elif strategy.rank_order != DEFAULT_RANK_ORDER and strategy.pp > 1 and strategy.expert_dp != strategy.dp:
        yield (
            f"rank order {strategy.rank_order} needs as many replicas of experts as of all else, and CP {strategy.cp}, "
            f"EP {strategy.ep} and ETP {strategy.expert_tp} make {strategy.expert_dp} of them beside DP {strategy.dp}"
        )


def _break_kinds(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    """One pipeline problem stands for all replicas, so the ranks of a stage must be of one kind."""
    if strategy.rank_order not in RANK_ORDERS:
        return
    kinds = cluster.kinds
    spans = [(kind.ranks.start, kind.ranks.stop) for kind in kinds]
    for stage in range(strategy.pp):
        runs = strategy.stage_runs(stage)
        held = [i for i, (first, end) in enumerate(spans) if any(run.start < end and first < run.stop for run in runs)]
        for index in held[1:]:
            if (kinds[index].device, kinds[index].time_factor) != (kinds[held[0]].device, kinds[held[0]].time_factor):
                yield (
                    f"stage {stage} has its ranks {runs[0][0]} to {runs[-1][-1]} on nodes of different kinds, those of "
                    f"node_groups[{held[0]}] and of node_groups[{index}]; a stage must lie in one kind"
                )


def _break_workload(workload: Workload, strategy: Strategy) -> Iterator[str]:
    batch, seq_length = workload.global_batch_size, workload.seq_length
    if batch % (strategy.dp * strategy.mbs):
        yield (
            f"global_batch_size {batch} is no multiple of DP {strategy.dp} x MBS {strategy.mbs} = "
            f"{strategy.dp * strategy.mbs}"
        )
    if workload.sequence_parallel and strategy.sequence_parallel and seq_length % (strategy.cp * strategy.tp):
        yield (
            f"seq_length {seq_length} is no multiple of CP {strategy.cp} x TP {strategy.tp} = "
            f"{strategy.cp * strategy.tp}, which share each sequence"
        )
    num_microbatches = strategy.num_microbatches(batch)
    num_actions = 2 * strategy.pp * strategy.vpp * num_microbatches
    if num_actions > MAX_ACTIONS:
        yield (
            f"PP {strategy.pp} x VPP {strategy.vpp} with {num_microbatches:,} micro-batches makes {num_actions:,} "
            f"forwards and backwards a step; at most {MAX_ACTIONS:,} are simulated"
        )
    yield from schedule_reasons(workload, strategy)
    if strategy.vpp > 1 and strategy.pp == 1:
        yield f"VPP {strategy.vpp} needs more than one pipeline stage, and PP is 1"
    if strategy.vpp > 1 and num_microbatches < strategy.pp:
        yield f"VPP {strategy.vpp} needs at least PP = {strategy.pp} micro-batches, and there are {num_microbatches}"
