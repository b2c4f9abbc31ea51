"""Where the figures of a strategy come from: measured, interpolated, traced or analytic, figure by figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mm_autoparallel.model.blocks.chain import Block
from mm_autoparallel.model.costs.communication import data_group
from mm_autoparallel.model.costs.topology import hop_lines, tied_group
from mm_autoparallel.model.job.cluster import Cluster, Device
from mm_autoparallel.model.job.layer_modes import HOST_MODES, LayerMode
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.analytic import rates_of
from mm_autoparallel.model.operators.context_traffic import context_traffic
from mm_autoparallel.model.operators.precision_rates import OPEN_TENSOR_FRACTION
from mm_autoparallel.model.profiles.calibration import Calibration
from mm_autoparallel.model.profiles.collectives import Group
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.model.profiles.lanes import Lanes, Slowdown
from mm_autoparallel.model.profiles.network import NetworkProfile, Operation
from mm_autoparallel.model.profiles.operators.base import OperatorBase
from mm_autoparallel.model.profiles.operators.coverage import Coverage
from mm_autoparallel.model.profiles.operators.times import OperatorTimes

Costs = Sequence[tuple[Block, BlockCost]]
"""Blocks, each with the cost of one of it."""


def block_sources(block: Block, cost: BlockCost, splits: bool = False) -> dict[str, str]:
    """The sources of a block's times and bytes; how its ranks stood and its recompute where a profile says so; and
    where the schedule splits its backward, of what that costs and keeps."""
    sources: dict[str, str] = {"time": cost.time_source, "memory": cost.memory_source}
    if cost.arrangement:
        sources["arrangement"] = cost.arrangement
    if cost.recompute_ms is not None and block.role == "layer" and block.has_backward:
        sources["recompute"] = cost.time_source
    if splits and cost.backward_weight_ms > 0.0:
        is_known = cost.split_extra_ms is not None
        sources["split"] = cost.time_source if is_known else "assumed: splitting costs nothing, and W keeps all"
    return sources


def mode_sources(modes: Sequence[LayerMode], device: Device) -> dict[str, dict[LayerMode, str]]:
    """Under the key `modes`, the source of what each mode but recompute changes; recompute is told by block."""
    words: dict[LayerMode, str] = {
        "selective": "analytic",
        "activation": "analytic",
        **dict.fromkeys(HOST_MODES, f"link to the host: {device.sources.get('host_link_bytes_per_s', 'job file')}"),
    }
    found = {mode: words[mode] for mode in modes if mode in words}
    return {"modes": found} if found else {}


def operator_sources(base: OperatorBase, times: OperatorTimes | None, costs: Costs) -> dict[str, Any]:
    """What an operator base gave: its file, the device and software that its times are of, and what they cover of a
    micro-batch through all blocks."""
    found = (block.count * cost.coverage for block, cost in costs if cost.coverage)
    platform = {"device": times.platform.device, "software": dict(times.platform.software)} if times else {}
    return {"base": str(base.path), **platform, **sum(found, Coverage()).document()}


def optimizer_source(costs: Costs) -> str:
    """The source of the optimizer step, of several blocks several: `measured and analytic`."""
    found = ("analytic" if c.optimizer_ms is None else c.time_source for block, c in costs if block.trainable)
    return _joined(found) or "analytic"


def communication_sources(
    cluster: Cluster,
    calibration: Calibration,
    network: NetworkProfile,
    workload: Workload,
    strategy: Strategy,
    has_tied_table: bool,
) -> dict[str, str | dict[str, str]]:
    """The source of every operation that `strategy` asks of its groups, and of how much compute hides.

    `cluster`: its levels as they are reached. Where blocks were measured among real ranks the operations inside them
    are part of their times.
    """
    rates = rates_of(cluster, calibration, strategy, network, workload)
    data_operations: tuple[Operation, ...] = ("reduce_scatter", "all_gather") if strategy.zero else ("all_reduce",)
    asked: dict[str, tuple[Group, tuple[Operation, ...]]] = {
        "tensor_parallel": (rates.tp_group, ("all_gather", "reduce_scatter")),
        "context_parallel": context_traffic(rates, strategy, workload),
        "expert_parallel": (rates.ep_group, ("all_to_all",)),
        "data_parallel": (data_group(cluster, strategy, network), data_operations),
    }
    if strategy.pp > 1 and has_tied_table:
        asked["tied_table"] = (tied_group(cluster, strategy, network), ("all_reduce",))
    sources: dict[str, str | dict[str, str]] = {
        name: {operation: group.source(operation) for operation in operations}
        for name, (group, operations) in asked.items()
        if group.num_ranks > 1
    }
    if strategy.pp > 1:
        hops = hop_lines(cluster, strategy, network)
        sources["pipeline"] = {"send_recv": _joined(hop.source for hop in hops)}
    sources["overlap"] = "measured" if network.overlaps else "assumed: compute hides all traffic beside it"
    return sources


def list_slowdowns(lanes: Lanes, strategy: Strategy, workload: Workload) -> dict[str, Slowdown]:
    """How much longer computation and the traffic of `strategy` beside it take while both run, by what it is for. What
    stays open beside products in user buffers holds that already."""
    decoder = strategy.of_decoder()
    kind = decoder.facts_of(workload).tp_overlap
    rings = decoder.cp > 1 and decoder.context_kind(workload) in ("ring", "hierarchical")
    exchanges = decoder.ep > 1 and decoder.overlap_of(workload) != "none"
    used = {
        "data": (lanes.shards if decoder.zero >= 2 else lanes.data, decoder.dp * decoder.cp > 1),
        "tensor": (
            lanes.pieces if kind == "mc2" else lanes.tensor,
            decoder.tp > 1 and kind not in OPEN_TENSOR_FRACTION,
        ),
        "context": (lanes.context, rings),
        "experts": (lanes.experts, exchanges),
    }
    return {name: slowdown for name, (slowdown, is_used) in used.items() if is_used}


def slowdown_sources(lanes: Lanes, strategy: Strategy, workload: Workload) -> dict[str, Any]:
    """The same as provenance has it; nothing where nothing is sent beside computation."""
    found = {name: vars(one) for name, one in list_slowdowns(lanes, strategy, workload).items()}
    return {"slowdowns": found} if found else {}


def _joined(sources: Iterable[str]) -> str:
    return " and ".join(sorted(set(sources), reverse=True))
