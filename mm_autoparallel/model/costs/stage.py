"""build_problem: the one bridge from a job and a strategy to the numbers that are simulated and placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mm_autoparallel.errors import JobError, ProfileError
from mm_autoparallel.model.costs.arranged import build_arranged, crossing_document, keep_decoder
from mm_autoparallel.model.costs.communication import hop_costs, waits_ms
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.cost_source import CostSource, list_cost_sources
from mm_autoparallel.model.costs.doubt import list_doubts, widen
from mm_autoparallel.model.costs.features import list_output_bytes
from mm_autoparallel.model.costs.held_once import OPEN_SEGMENTS_BYTES, count_communicators, list_held_once
from mm_autoparallel.model.costs.held_together import hold_together
from mm_autoparallel.model.costs.layer_layouts import share_layers
from mm_autoparallel.model.costs.low_parameters import gathered_weight_bytes, held_weight_bytes, high_fraction
from mm_autoparallel.model.costs.memory import (
    count_held_parameters,
    count_scattered,
    list_whole,
    static_bytes,
    step_bytes,
)
from mm_autoparallel.model.costs.modes import host_ms_per_byte, most_transient_bytes
from mm_autoparallel.model.costs.replicas import Replicas
from mm_autoparallel.model.costs.scales import PIPELINE, UNSCALED, CostScales
from mm_autoparallel.model.costs.sources import (
    block_sources,
    communication_sources,
    mode_sources,
    operator_sources,
    optimizer_source,
    slowdown_sources,
)
from mm_autoparallel.model.costs.topology import place_groups, stage_host_limits, stage_memory_limits
from mm_autoparallel.model.costs.uneven import at_longest, longest_factor, uneven_factor
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.model.profiles.interval import Interval
from mm_autoparallel.pipeline.footprint import Footprint, sum_held_once
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.schedules.catalog import parts_backwards


def build_problem(job: Job | CostModel, strategy: Strategy, scales: CostScales = UNSCALED) -> Problem:
    """The pipeline of `job` under `strategy`, one ChainBlock per block of the chain, in its order.

    job: or its costs, here and in all that follows, which who builds several problems holds. scales: of single sources.
    Raises JobError where the strategy is unlawful, ProfileError where a profile does not fit, lacks a point, or ran out
    of memory there.
    """
    known = CostModel.of(job)
    job = known.job
    if reason := unlawful_reason(job.model, job.cluster, job.workload, strategy):
        raise JobError(f"no lawful strategy: {reason}", where=f"job file {job.path}")
    known = known.used_by(strategy)
    if reason := known.overfull_reason(strategy):
        raise ProfileError(
            f"{reason}; more tensor parallel ranks or smaller micro-batches may do", where=f"job file {job.path}"
        )
    if strategy.layouts:
        own = build_problem(known, strategy.in_layout(strategy.layout), scales)
        others = {layout: build_problem(known, strategy.in_layout(layout), scales) for layout in strategy.layouts}
        return share_layers(known, strategy, own, others)
    if strategy.arrangement:
        return build_arranged(known, strategy, scales, lambda part: _assemble(_price(known, part, scales, True)))
    return _assemble(_price(known, strategy, scales))


def build_decoder(job: Job | CostModel, strategy: Strategy) -> Problem:
    """The decoder of an arrangement by itself: no figure of it is above the whole problem's. Raises ProfileError."""
    known = CostModel.of(job).used_by(strategy)
    return keep_decoder(known, _assemble(_price(known, strategy.of_decoder(), UNSCALED, True)))


def build_part(known: CostModel, part: Strategy) -> Problem:
    """The whole chain under the plain sizes of one module, lawful for that one alone. known: on all devices that its
    strategy uses. Raises ProfileError."""
    return _assemble(_price(known, part, UNSCALED, True))


def block_costs(job: Job | CostModel, strategy: Strategy) -> dict[str, BlockCost]:
    """The cost of one of each block, by the block's name, with the sources of its figures. Raises ProfileError."""
    known = CostModel.of(job)
    return {block.name: cost for block, cost in zip(known.chain.blocks, known.look_up(strategy), strict=True)}


def describe_provenance(job: Job | CostModel, strategy: Strategy) -> dict[str, Any]:
    """Where figures came from: files, the source of each block's times and bytes, and of all other times."""
    known = CostModel.of(job)
    pairs = list(zip(known.chain.blocks, known.look_up(strategy), strict=True))
    splits = parts_backwards(strategy.schedule, strategy.vpp, strategy.orders)
    return {
        "profiles": [str(path) for path in (*known.table.paths, *known.traced.paths)],
        "blocks": {block.name: block_sources(block, cost, splits) for block, cost in pairs},
        "communication": "analytic"
        if known.network is None
        else {"profile": str(known.network_path)}
        | communication_sources(
            known.cluster, known.calibration, known.network, known.workload, strategy.of_decoder(), known.has_tied_table
        ),
        **({"operators": operator_sources(known.operators, known.traced.times, pairs)} if known.operators else {}),
        "optimizer": "analytic" if strategy.optimizer_offload else optimizer_source(pairs),
        **mode_sources(known.modes, known.cluster.device),
        **({"devices": devices} if (devices := known.devices_of(strategy).document()) else {}),
        **({"crossing": crossing_document(known, strategy)} if strategy.arrangement else {}),
        **slowdown_sources(known.lanes, strategy, known.workload),
        "groups": [place.document() for place in place_groups(known.cluster, strategy, known.network)],
        "calibration": known.calibration.description,
    }


def list_sources(job: Job | CostModel, strategy: Strategy) -> tuple[CostSource, ...]:
    """What the times of `job` under `strategy` stand on: blocks, groups, hops, optimizer. Raises ProfileError."""
    known = CostModel.of(job)
    found = list(zip(known.chain.blocks, known.tokens, known.look_up(strategy), strict=True))
    basis = known.cluster, known.workload, known.calibration, known.network
    if not strategy.arrangement:
        return list_cost_sources(found, *basis, strategy, known.has_tied_table)
    away = [strategy.with_only(one) for one in strategy.arrangement.each if not one.in_chain]
    parts = [(set(one.arrangement.encoder.parts), one.of_encoder()) for one in away if one.arrangement]
    elsewhere = {name for names, _ in parts for name in names}
    after = [one for one in found if one[0].modality not in elsewhere]
    sources = list_cost_sources(after, *basis, strategy.of_decoder(), known.has_tied_table)
    for names, own in parts:
        others = list_cost_sources([one for one in found if one[0].modality in names], *basis, own, False)
        known_names = {source.name for source in sources}  # one name stands for groups of all
        sources = (*sources, *(source for source in others if source.name not in known_names))
    return sources


def find_interval(job: Job | CostModel, strategy: Strategy) -> Interval | None:
    """How far a step may lie from its prediction where any block's time is analytic; None where all were measured."""
    known = CostModel.of(job)
    if not any(cost.time_source == "analytic" for cost in known.look_up(strategy) if cost.forward_ms > 0):
        return None
    facts, host_share = strategy.facts_of(known.workload), known.host_share(strategy)
    doubts = list_doubts(known.chain, facts, known.cluster.device.name, known.calibration, host_share)
    return widen(known.calibration.interval, doubts)


@dataclass(frozen=True, eq=False)
class _Priced:
    """What one of each block costs under a strategy, and what it shares with other stages and replicas.

    table: the cost of the embedding without what is added beside it. microbatch_scale: modality → factors on its times.
    held_count: parameters that a device holds of each block. output_bytes: what crosses a cut after it.
    """

    known: CostModel
    strategy: Strategy
    scales: CostScales
    costs: tuple[BlockCost, ...]
    table: BlockCost
    num_microbatches: int
    microbatch_scale: Mapping[str, tuple[float, ...]]
    held_count: tuple[float, ...]
    footprints: tuple[Footprint, ...]
    output_bytes: tuple[float, ...]
    replicas: Replicas


def _price(known: CostModel, strategy: Strategy, scales: CostScales, is_part: bool = False) -> _Priced:
    """is_part: whether these are sizes of one module, so that nothing is gathered ahead into another."""
    costs = known.look_up(strategy, scales)
    table = known.table_cost(costs)
    num_microbatches = strategy.num_microbatches(known.workload.global_batch_size)
    held_counts = tuple(
        count_held_parameters(block, cost.parameter_count, strategy, table.parameter_count)
        for block, cost in zip(known.chain.blocks, costs, strict=True)
    )
    return _Priced(
        known=known,
        strategy=strategy,
        scales=scales,
        costs=costs,
        table=table,
        num_microbatches=num_microbatches,
        microbatch_scale={name: _microbatch_scale(known, name, num_microbatches) for name in known.chain.modalities},
        held_count=held_counts,
        footprints=_footprints(known, costs, held_counts, strategy, is_part),
        output_bytes=list_output_bytes(known.chain, costs),
        replicas=_replicas(known, table, strategy, scales),
    )


def _assemble(priced: _Priced) -> Problem:
    """The problem of blocks that are priced."""
    known, strategy = priced.known, priced.strategy
    hops = hop_costs(known.cluster, strategy, known.workload, known.network)
    p2p_ms, p2p_ms_per_byte = (tuple(priced.scales.factor(PIPELINE) * hop for hop in figures) for figures in hops)
    waits = waits_ms(known.chain, priced.output_bytes, strategy, known.workload, p2p_ms, p2p_ms_per_byte)
    if any(waits):
        p2p_ms = p2p_ms_per_byte = (0.0,) * len(p2p_ms)
    launches = known.chunk_launches_ms(strategy, priced.scales) if strategy.vpp > 1 else [(0.0, 0.0)] * len(waits)
    pauses = [(wait + more[0], wait + more[1]) for wait, more in zip(waits, launches, strict=True)]
    chain = _list_chain_blocks(priced, pauses)
    context_bytes = float(known.cluster.device.context_bytes)
    dealing_ranks = strategy.dealing_ranks(known.workload, known.cluster.levels[0].num_devices)
    num_communicators = count_communicators(strategy, known.has_tied_table, dealing_ranks)
    communicator_bytes = float(num_communicators * known.cluster.device.communicator_bytes)
    # what any block makes its stage hold once is set aside on every stage
    inside_bytes = sum_held_once(priced.footprints) + OPEN_SEGMENTS_BYTES
    uses_host = any(block.host_static_bytes or any(mode.host_bytes for mode in block.modes) for block in chain)
    return Problem(
        num_stages=strategy.pp,
        num_chunks=strategy.vpp,
        num_microbatches=priced.num_microbatches,
        schedule=strategy.schedule,
        chain=chain,
        memory_limit_bytes=stage_memory_limits(known.cluster, strategy),
        stage_static_bytes=(context_bytes + communicator_bytes + inside_bytes,) * strategy.pp,
        stage_tail_ms=tuple(
            _step_ms(known, strategy) + tail_ms
            for tail_ms in priced.replicas.bucket_tails_ms(known.chain.blocks, priced.costs, priced.microbatch_scale)
        ),
        p2p_ms=p2p_ms,
        p2p_ms_per_byte=p2p_ms_per_byte,
        context_bytes=context_bytes,
        communicator_bytes=communicator_bytes,
        host_ms_per_byte=host_ms_per_byte(known.modes, known.cluster.device) * strategy.pp,
        stage_time_factor=_time_factors(known, strategy),
        host_limit_bytes=stage_host_limits(known.cluster, strategy) if uses_host else (),
        orders=strategy.orders,
    )


def _list_chain_blocks(priced: _Priced, pauses: Sequence[tuple[float, float]]) -> tuple[ChainBlock, ...]:
    """One for each block, in the chain's order. pauses: ms that forward and backward wait for hops or hosts."""
    known, strategy, replicas = priced.known, priced.strategy, priced.replicas
    pairs = list(zip(known.chain.blocks, priced.costs, strict=True))
    at_step = [
        step_bytes(
            block,
            held_count - cost.frozen_count,
            cost.trained_expert_count,
            known.workload,
            known.strategy_of(block, strategy),
        )
        for (block, cost), held_count in zip(pairs, priced.held_count, strict=True)
    ]
    has_once = any(once_bytes for _, once_bytes in at_step)
    modes = known.list_modes(strategy, priced.scales)
    splits = parts_backwards(strategy.schedule, strategy.vpp, strategy.orders)
    blocks = []
    for index, (block, cost) in enumerate(pairs):
        footprint, scale = priced.footprints[index], priced.microbatch_scale[block.modality]
        forward_ms, backward_ms = replicas.pass_ms(block, cost, scale)
        chain_block = ChainBlock(
            name=block.name,
            modality=block.modality,
            count=block.count,
            forward_ms=cost.forward_ms + pauses[index][0] + forward_ms,
            backward_ms=cost.backward_input_ms + cost.backward_weight_ms + pauses[index][1] + backward_ms,
            static_bytes=footprint.static_bytes,
            activation_bytes=cost.activation_bytes,
            modes=modes[index],
            layer=block.role == "layer",
            pinned=block.pinned,
            attach=block.attach,
            recompute_group=block.modality,
            transient_bytes=most_transient_bytes(block, cost, known.modes, known.workload, strategy.mbs),
            tail_ms=replicas.tail_ms(block, cost, scale),
            output_bytes=priced.output_bytes[index],
            sends_gradient=known.chain.sends_gradient(index),
            microbatch_scale=scale,
            footprint=footprint,
            host_static_bytes=footprint.host_bytes,
            step_bytes=at_step[index][0],
            step_once_bytes=at_step[index][1],
            step_shard_bytes=footprint.moment_bytes / 2 if has_once else None,  # one of two moments
        )
        blocks.append(_part(chain_block, cost) if splits else chain_block)
    chain = _add_pause(tuple(blocks), known.calibration.figures.micro_batch_ms)
    if (longest := longest_factor(known.workload, priced.num_microbatches)) != 1.0:
        chain = tuple(at_longest(block, longest) for block in chain)
    return hold_together(chain, known.model, known.workload, strategy)


def _part(block: ChainBlock, cost: BlockCost) -> ChainBlock:
    """`block`, whose backward may run in two parts. Where no profile says what that costs, it is taken to cost nothing,
    and all that the block keeps to be needed until the second part has run."""
    if not cost.backward_weight_ms:
        return replace(block, kept_for_weight_bytes=0.0)
    kept_bytes = cost.kept_for_weight_bytes
    return replace(
        block,
        backward_weight_ms=min(cost.backward_weight_ms, block.backward_ms),
        split_extra_ms=cost.split_extra_ms or 0.0,
        kept_for_weight_bytes=None if kept_bytes is None else min(kept_bytes, block.activation_bytes),
    )


def _step_ms(known: CostModel, strategy: Strategy) -> float:
    """What a step takes beside all operators: where shapes are sent before tensors, that wait at every boundary while
    the pipeline fills and drains; between, stages have other micro-batches to work on."""
    figures = known.calibration.figures
    num_waits = 2 * (strategy.pp * strategy.vpp - 1) if known.workload.variable_seq_lengths and strategy.pp > 1 else 0
    return figures.step_ms + num_waits * figures.shape_exchange_ms


def _time_factors(known: CostModel, strategy: Strategy) -> tuple[float, ...]:
    """Of each stage: how slow its devices are, times what samples of unequal lengths cost; empty where all are 1."""
    of_devices, factor = known.devices_of(strategy).uneven_factors, uneven_factor(known.workload, strategy)
    return of_devices if factor == 1.0 else tuple(factor * each for each in of_devices or (1.0,) * strategy.pp)


def _add_pause(chain: tuple[ChainBlock, ...], micro_batch_ms: float) -> tuple[ChainBlock, ...]:
    """What a micro-batch takes beside all operators, half at either end of the chain, a third of it in forward."""
    if not micro_batch_ms:
        return chain
    forward_ms, backward_ms = micro_batch_ms / 6, micro_batch_ms / 3
    ends = {0: chain[0], len(chain) - 1: chain[-1]}
    paused = {
        index: replace(
            block,
            forward_ms=block.forward_ms + forward_ms,
            backward_ms=block.backward_ms + (backward_ms if block.backward_ms else 0.0),
        )
        for index, block in ends.items()
    }
    return tuple(paused.get(index, block) for index, block in enumerate(chain))


def _footprints(
    known: CostModel, costs: Sequence[BlockCost], held_counts: Sequence[float], strategy: Strategy, is_part: bool
) -> tuple[Footprint, ...]:
    """What the memory of each block consists of. held_counts: parameters that a device holds of each."""
    footprints = []
    scattered = [
        count_scattered(held_count, cost.expert_count, strategy)
        for held_count, cost in zip(held_counts, costs, strict=True)
    ]
    trained = [
        count_scattered(held_count - cost.frozen_count, cost.trained_expert_count, strategy)
        for held_count, cost in zip(held_counts, costs, strict=True)
    ]
    gathered = [gathered_weight_bytes(block, known.workload, strategy) for block in known.chain.blocks]
    whole = list_whole(known.chain.blocks, scattered, known.workload, strategy, trained, gathered, is_part)
    for index, (block, tokens, cost) in enumerate(zip(known.chain.blocks, known.tokens, costs, strict=True)):
        held_count, share = held_counts[index], known.share_of(block, known.strategy_of(block, strategy))
        high = high_fraction(known.chain, block, known.workload, strategy)
        each_bytes = held_weight_bytes(block, known.workload, strategy, known.cluster.device, high)
        more = (cost.expert_count, cost.frozen_count, each_bytes)
        static = static_bytes(held_count, block.trainable, known.workload, strategy, *more)
        footprints.append(
            Footprint(
                weight_bytes=static.weight_bytes,
                gradient_bytes=static.gradient_bytes,
                optimizer_bytes=static.optimizer_bytes,
                working_bytes=cost.transient_bytes,
                has_backward=block.has_backward,
                held_once_bytes=(
                    *list_held_once(block, tokens, share, known.workload, known.cluster.device),
                    *whole[index],
                ),
                moment_bytes=static.moment_bytes,
                host_bytes=static.host_bytes,
            )
        )
    return tuple(footprints)


def _replicas(known: CostModel, table: BlockCost, strategy: Strategy, scales: CostScales) -> Replicas:
    return Replicas(
        cluster=known.cluster,
        workload=strategy.overlaps.of(known.workload),
        strategy=strategy,
        network=known.network,
        memory_fraction=known.calibration.figures.memory_fraction,
        lanes=known.lanes,
        table=table,
        ties=known.has_tied_table,
        shard_cluster=known.shard_cluster,
        shard_gigabyte_ms=known.calibration.figures.shard_gigabyte_ms,
        shards_open=known.shards_open and not strategy.overlaps.chosen,
        scales=scales,
    )


def _microbatch_scale(known: CostModel, modality: str, num_microbatches: int) -> tuple[float, ...]:
    scale = known.workload.micro_batch_scale.get(modality, ())
    return tuple(scale[index % len(scale)] for index in range(num_microbatches)) if scale else ()
