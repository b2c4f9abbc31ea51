"""build_problem: the one bridge from a job and a strategy to the numbers that are simulated and placed.

What does not depend on the strategy (chain, token counts, profiles) is prepared once per Job object, block costs once
per (tp, cp, mbs): a search asks for hundreds of strategies.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mm_autoparallel.blocks.chain import Block, Experts, OutputHead, Projector, TokenEmbedding, TransformerLayer
from mm_autoparallel.blocks.expand import expand
from mm_autoparallel.blocks.tokens import TokenCounts, count_tokens
from mm_autoparallel.costs.communication import (
    cover_of,
    data_group,
    expert_group,
    exposed_data_ms,
    hop_costs,
    optimizer_ms,
    tied_table_ms,
    waits_ms,
)
from mm_autoparallel.costs.held_once import OPEN_SEGMENTS_BYTES, count_communicators, list_held_once
from mm_autoparallel.costs.memory import count_held_parameters, static_bytes, step_bytes
from mm_autoparallel.costs.sources import block_sources, communication_sources, optimizer_source
from mm_autoparallel.errors import JobError, ProfileError
from mm_autoparallel.job.job import Job
from mm_autoparallel.job.strategy import Strategy, unlawful_reason
from mm_autoparallel.problem import RECOMPUTE, ChainBlock, Footprint, Mode, Problem, sum_held_once
from mm_autoparallel.profiles.analytic import Rates, estimate_block, launch_layer, rates_of
from mm_autoparallel.profiles.calibration import Calibration, Interval, calibration_of
from mm_autoparallel.profiles.collectives import Group
from mm_autoparallel.profiles.cost import BlockCost
from mm_autoparallel.profiles.network import read_network
from mm_autoparallel.profiles.operators import form_share
from mm_autoparallel.profiles.store import read_profile_files
from mm_autoparallel.profiles.table import Point, build_table
from mm_autoparallel.profiles.traced import is_shipped, read_traces
from mm_autoparallel.profiles.traced_table import build_traced_table


def build_problem(job: Job, strategy: Strategy, calibration: Calibration | None = None) -> Problem:
    """The pipeline of `job` under `strategy`, one ChainBlock per block of the chain, in its order.

    calibration: in place of the one that the job names or its device has.
    Raises JobError where the strategy is unlawful, ProfileError where a profile does not fit, lacks a point, or ran out
    of memory there.
    """
    reason = unlawful_reason(job.model, job.cluster, job.workload, strategy)
    if reason:
        raise JobError(f"job file {job.path}: no lawful strategy: {reason}")
    costs = _costs_of(job, calibration)
    reason = costs.overfull_reason(strategy)
    if reason:
        raise ProfileError(f"job file {job.path}: {reason}; more tensor parallel ranks or smaller micro-batches may do")
    return costs.build_problem(strategy)


def overfull_reason(job: Job, strategy: Strategy) -> str | None:
    """Why a block of `job` is known not to fit a device under `strategy`: it ran out of memory when it was profiled.

    None where nothing of the kind is known. Raises ProfileError where a profile does not fit the job.
    """
    return _costs_of(job).overfull_reason(strategy)


def block_costs(job: Job, strategy: Strategy) -> dict[str, BlockCost]:
    """The cost of one of each block, by the block's name, with the sources of its figures. Raises ProfileError."""
    costs = _costs_of(job)
    found = costs.look_up(strategy)
    return {block.name: cost for block, cost in zip(costs.chain.blocks, found, strict=True)}


def describe_provenance(job: Job, strategy: Strategy, calibration: Calibration | None = None) -> dict[str, Any]:
    """Where figures came from: files, the source of each block's times and bytes, and of all other times."""
    costs = _costs_of(job, calibration)
    pairs = list(zip(costs.chain.blocks, costs.look_up(strategy), strict=True))
    return {
        "profiles": [str(path) for path in (*costs.table.paths, *costs.traced.paths)],
        "blocks": {block.name: block_sources(block, cost) for block, cost in pairs},
        "communication": "analytic"
        if costs.network is None
        else {"profile": str(costs.network_path)}
        | communication_sources(costs.cluster, costs.calibration, costs.network, strategy, costs.has_tied_table),
        "optimizer": optimizer_source(pairs),
        "calibration": costs.calibration.description,
    }


def find_interval(job: Job, strategy: Strategy, calibration: Calibration | None = None) -> Interval | None:
    """How far a step may lie from its prediction where any block's time is analytic; None where all were measured."""
    costs = _costs_of(job, calibration)
    works = (cost for cost in costs.look_up(strategy) if cost.forward_ms > 0)
    return costs.calibration.interval if any(cost.time_source == "analytic" for cost in works) else None


class _JobCosts:
    """What is known of a job before any strategy and the block costs asked for so far. It never refers to the job."""

    def __init__(self, job: Job, calibration: Calibration) -> None:
        self.calibration = calibration
        self.cluster, self.workload = calibration.reached(job.cluster), job.workload
        # the plan by which transformers' models are divided leaves projectors as they are
        self.chain = expand(job.model, whole_projectors=job.workload.implementation == "transformers")
        tokens = {modality.name: count_tokens(modality, job.workload) for modality in job.model.modalities}
        self.tokens: tuple[TokenCounts, ...] = tuple(tokens[block.modality] for block in self.chain.blocks)
        kinds = list(dict.fromkeys(block.kind for block in self.chain.blocks))
        device_name = job.cluster.device.name
        paths = [path for path in job.profiles if not is_shipped(path)]
        self.table = build_table(read_profile_files(paths, job.model, device_name, job.workload), kinds)
        self.traced = build_traced_table(read_traces(job.profiles, job.model, job.workload), kinds)
        found = read_network(paths, device_name)
        self.network_path = found[0] if found else None
        self.network = found[1] if found else None
        self.hidden_fraction = self.network.hidden_fraction if self.network else 1.0
        self._found: dict[tuple[int, ...], tuple[BlockCost, ...]] = {}

    @property
    def has_tied_table(self) -> bool:
        """Whether the head shares the embedding's vocabulary table."""
        head = self.chain.blocks[-1].structure
        return isinstance(head, OutputHead) and head.tied

    def look_up(self, strategy: Strategy) -> tuple[BlockCost, ...]:
        """One cost per block of the chain."""
        key = (strategy.tp, strategy.cp, strategy.mbs, strategy.ep, strategy.etp)
        if key not in self._found:
            share = form_share(strategy, self.workload, self.calibration.figures.statistics_bytes)
            rates = rates_of(self.cluster, self.calibration, strategy, self.network)
            estimates = (
                estimate_block(block, tokens, share, rates, self.workload.gradient_bytes)
                for block, tokens in zip(self.chain.blocks, self.tokens, strict=True)
            )
            found = [
                self._launch(block, self._prefer_profile(block, tokens, strategy, estimate, rates))
                for block, tokens, estimate in zip(self.chain.blocks, self.tokens, estimates, strict=True)
            ]
            if self.has_tied_table:
                found[-1] = _without_table(found[-1], self._table_cost(found))
            self._found[key] = tuple(found)
        return self._found[key]

    def overfull_reason(self, strategy: Strategy) -> str | None:
        """Why a block does not fit, as profiling it has shown; None where no profile says so."""
        points = (_point(*pair, strategy) for pair in zip(self.chain.blocks, self.tokens, strict=True))
        reasons = (self.table.overfull_reason(point) for point in points)
        return next((reason for reason in reasons if reason), None)

    def _launch(self, block: Block, cost: BlockCost) -> BlockCost:
        """No layer is faster than its host; a measured one has shown how fast that is."""
        if block.role != "layer" or cost.time_source != "analytic":
            return cost
        figures, layer = self.calibration.figures, block.structure
        launch_ms = figures.layer_launch_ms
        if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, Experts):
            launch_ms = max(launch_ms, figures.expert_launch_ms)
        return launch_layer(cost, launch_ms, block.trainable, block.has_backward)

    def _prefer_profile(
        self, block: Block, tokens: TokenCounts, strategy: Strategy, estimate: BlockCost, rates: Rates
    ) -> BlockCost:
        """What was measured, else what was traced, else the estimate from sizes alone."""
        if tokens.layer_tokens == 0:
            return estimate  # the workload gives this modality nothing to do
        if estimate.expert_count and (strategy.ep > 1 or strategy.expert_tp != strategy.tp):
            return estimate  # profiles hold every expert, divided like all else
        point = _point(block, tokens, strategy)
        profiled = self.table.look_up(point) or self.traced.look_up(point, self.workload.sequence_parallel, rates)
        if profiled is None:
            return estimate
        trains, returns = block.trainable, block.has_backward
        return replace(
            estimate,
            forward_ms=profiled.forward_ms,
            backward_input_ms=profiled.backward_input_ms if returns else 0.0,
            backward_weight_ms=profiled.backward_weight_ms if trains else 0.0,
            parameter_count=_or(profiled.parameter_count, estimate.parameter_count),
            activation_bytes=profiled.activation_bytes if returns else 0.0,
            checkpoint_bytes=profiled.checkpoint_bytes if returns else 0.0,
            transient_bytes=profiled.transient_bytes,
            output_bytes=_or(profiled.output_bytes, estimate.output_bytes),
            time_source=profiled.time_source,
            memory_source=profiled.memory_source,
            recompute_ms=profiled.recompute_ms,
            optimizer_ms=profiled.optimizer_ms,
            arrangement=profiled.arrangement,
        )

    def build_problem(self, strategy: Strategy) -> Problem:
        costs = self.look_up(strategy)
        group = data_group(self.cluster, strategy, self.network)
        p2p_ms, p2p_ms_per_byte = hop_costs(self.cluster, strategy, self.workload, self.network)
        outputs, table = self._output_bytes(costs), self._table_cost(costs)
        waits = waits_ms(self.chain, outputs, strategy, self.workload, p2p_ms, p2p_ms_per_byte)
        if any(waits):
            p2p_ms = p2p_ms_per_byte = (0.0,) * len(p2p_ms)
        num_microbatches = strategy.num_microbatches(self.workload.global_batch_size)
        scales = {name: self._microbatch_scale(name, num_microbatches) for name in self.chain.modalities}
        footprints = self._footprints(costs, table, strategy)
        chain = tuple(
            ChainBlock(
                name=block.name,
                modality=block.modality,
                count=block.count,
                forward_ms=cost.forward_ms + waits[index],
                backward_ms=cost.backward_input_ms + cost.backward_weight_ms + waits[index],
                static_bytes=footprints[index].static_bytes,
                activation_bytes=cost.activation_bytes,
                modes=_modes(block, cost),
                layer=block.role == "layer",
                pinned=block.pinned,
                attach=block.attach,
                recompute_group=block.modality,
                transient_bytes=max(_transient_bytes(block, cost), footprints[index].step_once_bytes),
                tail_ms=self._tail_ms(block, cost, table, scales[block.modality], strategy, group),
                output_bytes=outputs[index],
                sends_gradient=self.chain.sends_gradient(index),
                microbatch_scale=scales[block.modality],
                footprint=footprints[index],
            )
            for index, (block, cost) in enumerate(zip(self.chain.blocks, costs, strict=True))
        )
        context_bytes = float(self.cluster.device.context_bytes)
        num_communicators = count_communicators(strategy, self.has_tied_table)
        communicator_bytes = float(num_communicators * self.cluster.device.communicator_bytes)
        # what any block makes its stage hold once is set aside on every stage
        inside_bytes = sum_held_once(footprints) + OPEN_SEGMENTS_BYTES
        return Problem(
            num_stages=strategy.pp,
            num_chunks=strategy.vpp,
            num_microbatches=num_microbatches,
            schedule=strategy.schedule,
            chain=chain,
            memory_limit_bytes=(self.cluster.memory_limit_bytes,) * strategy.pp,
            stage_static_bytes=(context_bytes + communicator_bytes + inside_bytes,) * strategy.pp,
            stage_tail_ms=(0.0,) * strategy.pp,
            p2p_ms=p2p_ms,
            p2p_ms_per_byte=p2p_ms_per_byte,
            context_bytes=context_bytes,
            communicator_bytes=communicator_bytes,
        )

    def _footprints(self, costs: Sequence[BlockCost], table: BlockCost, strategy: Strategy) -> tuple[Footprint, ...]:
        """What the memory of each block consists of. `table`: as in `_tail_ms`."""
        share = form_share(strategy, self.workload, self.calibration.figures.statistics_bytes)
        footprints = []
        for block, tokens, cost in zip(self.chain.blocks, self.tokens, costs, strict=True):
            held_count = count_held_parameters(block, cost.parameter_count, strategy, table.parameter_count)
            static = static_bytes(held_count, block.trainable, self.workload, strategy, cost.expert_count)
            at_step_bytes, once_bytes = step_bytes(block, held_count, cost.expert_count, self.workload, strategy)
            footprints.append(
                Footprint(
                    weight_bytes=static.weight_bytes,
                    gradient_bytes=static.gradient_bytes,
                    optimizer_bytes=static.optimizer_bytes,
                    working_bytes=cost.transient_bytes,
                    has_backward=block.has_backward,
                    held_once_bytes=list_held_once(block, tokens, share, self.workload, self.cluster.device),
                    moment_bytes=static.moment_bytes,
                    step_bytes=at_step_bytes,
                    step_once_bytes=once_bytes,
                )
            )
        return tuple(footprints)

    def _tail_ms(
        self,
        block: Block,
        cost: BlockCost,
        table: BlockCost,
        scale: tuple[float, ...],
        strategy: Strategy,
        group: Group,
    ) -> float:
        """What one block adds after its stage's last backward: exposed data-parallel traffic and its optimizer step.

        `table`: the cost of the embedding, of which a tied head may hold a copy.
        """
        if not block.trainable:
            return 0.0
        held_count = count_held_parameters(block, cost.parameter_count, strategy, table.parameter_count)
        memory_bytes_per_s = self.cluster.device.memory_bytes_per_s * self.calibration.figures.memory_fraction
        cover = cover_of(block, cost, scale, self.workload, self.hidden_fraction)
        experts = expert_group(self.cluster, strategy, self.network)
        tail_ms = exposed_data_ms(cover, held_count, group, self.workload, strategy, cost.expert_count, experts)
        copied_count = held_count - cost.parameter_count if cost.optimizer_ms is not None else 0.0
        tail_ms += optimizer_ms(
            held_count - copied_count, self.workload, strategy, memory_bytes_per_s, cost, cost.expert_count
        )
        tail_ms += optimizer_ms(copied_count, self.workload, strategy, memory_bytes_per_s, table)
        holds_table = isinstance(block.structure, (TokenEmbedding, OutputHead))
        if holds_table and self.has_tied_table and strategy.pp > 1:
            tail_ms += tied_table_ms(held_count, self.cluster, self.workload, strategy, self.network)
        return tail_ms

    def _table_cost(self, costs: Sequence[BlockCost]) -> BlockCost:
        """The cost of what is before the decoder's layers, its vocabulary table without what is added beside it."""
        pairs = zip(self.chain.blocks, costs, strict=True)
        block, cost = next(pair for pair in pairs if pair[0].modality == self.chain.modalities[-1])
        if isinstance(block.structure, TokenEmbedding) and block.structure.num_added:
            added_count = block.structure.num_added * block.structure.hidden_size
            return replace(cost, parameter_count=cost.parameter_count - added_count)
        return cost

    def _output_bytes(self, costs: tuple[BlockCost, ...]) -> list[float]:
        """What crosses a cut after each block: its output, and what encoders have made ready for the decoder so far."""
        ready_bytes, outputs = 0.0, []
        for block, cost in zip(self.chain.blocks, costs, strict=True):
            if block.modality == self.chain.modalities[-1]:
                outputs.append(cost.output_bytes)
            elif isinstance(block.structure, Projector) and block.structure.layer_sizes:
                ready_bytes += cost.output_bytes * block.count
                outputs.append(ready_bytes)
            else:
                outputs.append(ready_bytes + cost.output_bytes)
        return outputs

    def _microbatch_scale(self, modality: str, num_microbatches: int) -> tuple[float, ...]:
        scale = self.workload.micro_batch_scale.get(modality, ())
        return tuple(scale[index % len(scale)] for index in range(num_microbatches)) if scale else ()


_known: dict[int, tuple[Calibration | None, _JobCosts]] = {}


def _costs_of(job: Job, calibration: Calibration | None = None) -> _JobCosts:
    """By identity, because a job holds mappings and has no hash; forgotten together with the job.

    Of each job the costs under one calibration are kept, the last one: who fits figures asks for each but once.
    """
    if id(job) not in _known:
        weakref.finalize(job, _known.pop, id(job), None)
    elif _known[id(job)][0] is calibration:
        return _known[id(job)][1]
    costs = _JobCosts(job, calibration or calibration_of(job))
    _known[id(job)] = calibration, costs
    return costs


def _point(block: Block, tokens: TokenCounts, strategy: Strategy) -> Point:
    return Point(block.kind, strategy.tp, strategy.cp, strategy.mbs, tokens.layer_tokens, tokens.num_spans)


def _without_table(head: BlockCost, table: BlockCost) -> BlockCost:
    """The cost of a tied head without the table, which the embedding counts; a profile of the head may count it too."""
    own_count = head.parameter_count - table.parameter_count
    if own_count < 0 or not head.parameter_count:
        return head
    own_ms = head.optimizer_ms and head.optimizer_ms * own_count / head.parameter_count
    return replace(head, parameter_count=own_count, optimizer_ms=own_ms)


def _or(measured: float | None, estimated: float) -> float:
    return estimated if measured is None else measured


def _modes(block: Block, cost: BlockCost) -> tuple[Mode, ...]:
    """Full recompute alone: the layer keeps its input and runs its whole forward, collectives included, once more.

    Where that was measured the measurement counts: it may skip what its backward does not need.
    """
    if block.role != "layer" or not block.has_backward:
        return ()
    extra_ms = cost.forward_ms if cost.recompute_ms is None else cost.recompute_ms
    return (Mode(RECOMPUTE, extra_backward_ms=extra_ms, activation_bytes=cost.checkpoint_bytes),)


def _transient_bytes(block: Block, cost: BlockCost) -> float:
    """The working set, and what a layer that can be recomputed restores beside its input.

    A stage restores one layer at a time, so this is a largest, not a sum over recomputed layers as `restored_bytes` is.
    It is charged where nothing is recomputed too: that overstates by at most one layer, and never understates.
    """
    if block.role != "layer" or not block.has_backward:
        return cost.transient_bytes
    return cost.transient_bytes + max(0.0, cost.activation_bytes - cost.checkpoint_bytes)
