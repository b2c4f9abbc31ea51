"""build_problem: the one bridge from a job and a strategy to the numbers that are simulated and placed.

What does not depend on the strategy (chain, token counts, profiles) is prepared once per Job object, block costs once
per (tp, cp, mbs): a search asks for hundreds of strategies.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mm_autoparallel.blocks.chain import Block, OutputHead, Projector, TokenEmbedding
from mm_autoparallel.blocks.expand import expand
from mm_autoparallel.blocks.tokens import TokenCounts, count_tokens
from mm_autoparallel.costs.communication import (
    cover_of,
    data_group,
    exposed_data_ms,
    hop_costs,
    optimizer_ms,
    tied_table_ms,
)
from mm_autoparallel.costs.memory import count_held_parameters, static_bytes
from mm_autoparallel.costs.sources import block_sources, communication_sources, optimizer_source
from mm_autoparallel.errors import JobError, ProfileError
from mm_autoparallel.job.job import Job
from mm_autoparallel.job.strategy import Strategy, unlawful_reason
from mm_autoparallel.problem import ChainBlock, Problem, Recompute
from mm_autoparallel.profiles.analytic import estimate_block, rates_of
from mm_autoparallel.profiles.collectives import Group
from mm_autoparallel.profiles.cost import BlockCost
from mm_autoparallel.profiles.efficiency import efficiency_of
from mm_autoparallel.profiles.network import read_network
from mm_autoparallel.profiles.operators import Share
from mm_autoparallel.profiles.store import read_profile_files
from mm_autoparallel.profiles.table import Point, build_table


def build_problem(job: Job, strategy: Strategy) -> Problem:
    """The pipeline of `job` under `strategy`, one ChainBlock per block of the chain, in its order.

    Raises JobError where the strategy is unlawful, ProfileError where a profile does not fit, lacks a point, or ran out
    of memory there.
    """
    reason = unlawful_reason(job.model, job.cluster, job.workload, strategy)
    if reason:
        raise JobError(f"job file {job.path}: no lawful strategy: {reason}")
    costs = _costs_of(job)
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


def describe_provenance(job: Job, strategy: Strategy) -> dict[str, Any]:
    """Where figures came from: files, the source of each block's times and bytes, and of all other times."""
    costs = _costs_of(job)
    pairs = list(zip(costs.chain.blocks, costs.look_up(strategy), strict=True))
    return {
        "profiles": [str(path) for path in costs.table.paths],
        "blocks": {block.name: block_sources(block, cost) for block, cost in pairs},
        "communication": "analytic"
        if costs.network is None
        else {"profile": str(costs.network_path)}
        | communication_sources(job.cluster, costs.efficiency, costs.network, strategy, costs.has_tied_table),
        "optimizer": optimizer_source(pairs),
        "efficiency": f"{job.cluster.device.name}: {costs.efficiency.source}",
    }


class _JobCosts:
    """What is known of a job before any strategy and the block costs asked for so far. It never refers to the job."""

    def __init__(self, job: Job) -> None:
        self.cluster, self.workload = job.cluster, job.workload
        self.chain = expand(job.model)
        self.efficiency = efficiency_of(job.cluster.device.name)
        tokens = {modality.name: count_tokens(modality, job.workload) for modality in job.model.modalities}
        self.tokens: tuple[TokenCounts, ...] = tuple(tokens[block.modality] for block in self.chain.blocks)
        kinds = list(dict.fromkeys(block.kind for block in self.chain.blocks))
        device_name = job.cluster.device.name
        self.table = build_table(read_profile_files(job.profiles, job.model, device_name, job.workload), kinds)
        found = read_network(job.profiles, device_name)
        self.network_path = found[0] if found else None
        self.network = found[1] if found else None
        self.hidden_fraction = self.network.hidden_fraction if self.network else 1.0
        self._found: dict[tuple[int, int, int], tuple[BlockCost, ...]] = {}

    @property
    def has_tied_table(self) -> bool:
        """Whether the head shares the embedding's vocabulary table."""
        head = self.chain.blocks[-1].structure
        return isinstance(head, OutputHead) and head.tied

    def look_up(self, strategy: Strategy) -> tuple[BlockCost, ...]:
        """One cost per block of the chain."""
        key = (strategy.tp, strategy.cp, strategy.mbs)
        if key not in self._found:
            share = Share(
                mbs=strategy.mbs,
                tp=strategy.tp,
                cp=strategy.cp,
                sequence_parallel=strategy.sequence_parallel,
                fused_attention=self.workload.attention == "flash",
                statistics_bytes=self.efficiency.statistics_bytes,
            )
            rates = rates_of(self.cluster, self.efficiency, strategy.tp, strategy.cp, self.network)
            estimates = (
                estimate_block(block, tokens, share, rates, self.workload.gradient_bytes)
                for block, tokens in zip(self.chain.blocks, self.tokens, strict=True)
            )
            found = [
                self._prefer_profile(block, tokens, strategy, estimate)
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

    def _prefer_profile(self, block: Block, tokens: TokenCounts, strategy: Strategy, estimate: BlockCost) -> BlockCost:
        if tokens.layer_tokens == 0:
            return estimate  # the workload gives this modality nothing to do
        profiled = self.table.look_up(_point(block, tokens, strategy))
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
            time_source=profiled.source,
            memory_source=profiled.source,
            recompute_ms=profiled.recompute_ms,
            optimizer_ms=profiled.optimizer_ms,
            arrangement=profiled.arrangement,
        )

    def build_problem(self, strategy: Strategy) -> Problem:
        costs = self.look_up(strategy)
        network_fraction = self.efficiency.network_fraction
        group = data_group(self.cluster, strategy, network_fraction, self.network)
        p2p_ms, p2p_ms_per_byte = hop_costs(self.cluster, strategy, network_fraction, self.network)
        outputs, table = self._output_bytes(costs), self._table_cost(costs)
        num_microbatches = strategy.num_microbatches(self.workload.global_batch_size)
        scales = {name: self._microbatch_scale(name, num_microbatches) for name in self.chain.modalities}
        chain = tuple(
            ChainBlock(
                name=block.name,
                modality=block.modality,
                count=block.count,
                forward_ms=cost.forward_ms,
                backward_ms=cost.backward_input_ms + cost.backward_weight_ms,
                static_bytes=static_bytes(
                    count_held_parameters(block, cost.parameter_count, strategy, table.parameter_count),
                    block.trainable,
                    self.workload,
                    strategy,
                ),
                activation_bytes=cost.activation_bytes,
                recompute=_recompute(block, cost),
                layer=block.role == "layer",
                pinned=block.pinned,
                attach=block.attach,
                recompute_group=block.modality,
                transient_bytes=_transient_bytes(block, cost),
                tail_ms=self._tail_ms(block, cost, table, scales[block.modality], strategy, group),
                output_bytes=outputs[index],
                sends_gradient=self.chain.sends_gradient(index),
                microbatch_scale=scales[block.modality],
            )
            for index, (block, cost) in enumerate(zip(self.chain.blocks, costs, strict=True))
        )
        device = self.cluster.device
        return Problem(
            num_stages=strategy.pp,
            num_chunks=strategy.vpp,
            num_microbatches=num_microbatches,
            schedule=strategy.schedule,
            chain=chain,
            memory_limit_bytes=(self.cluster.memory_limit_bytes,) * strategy.pp,
            stage_static_bytes=(float(device.context_bytes),) * strategy.pp,
            stage_tail_ms=(0.0,) * strategy.pp,
            p2p_ms=p2p_ms,
            p2p_ms_per_byte=p2p_ms_per_byte,
        )

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
        memory_bytes_per_s = self.cluster.device.memory_bytes_per_s * self.efficiency.memory_fraction
        cover = cover_of(block, cost, scale, self.workload, self.hidden_fraction)
        tail_ms = exposed_data_ms(cover, held_count, group, self.workload, strategy)
        copied_count = held_count - cost.parameter_count if cost.optimizer_ms is not None else 0.0
        tail_ms += optimizer_ms(held_count - copied_count, self.workload, strategy, memory_bytes_per_s, cost)
        tail_ms += optimizer_ms(copied_count, self.workload, strategy, memory_bytes_per_s, table)
        holds_table = isinstance(block.structure, (TokenEmbedding, OutputHead))
        if holds_table and self.has_tied_table and strategy.pp > 1:
            fraction = self.efficiency.network_fraction
            tail_ms += tied_table_ms(held_count, self.cluster, self.workload, strategy, fraction, self.network)
        return tail_ms

    def _table_cost(self, costs: Sequence[BlockCost]) -> BlockCost:
        """The cost of the block that is the decoder's vocabulary table."""
        pairs = zip(self.chain.blocks, costs, strict=True)
        return next(cost for block, cost in pairs if isinstance(block.structure, TokenEmbedding))

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


_known: dict[int, _JobCosts] = {}


def _costs_of(job: Job) -> _JobCosts:
    """By identity, because a job holds mappings and has no hash; forgotten together with the job."""
    if id(job) not in _known:
        _known[id(job)] = _JobCosts(job)
        weakref.finalize(job, _known.pop, id(job), None)
    return _known[id(job)]


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


def _recompute(block: Block, cost: BlockCost) -> Recompute | None:
    """Full recompute: the layer keeps its input and runs its whole forward, collectives included, once more.

    Where that was measured the measurement counts: it may skip what its backward does not need.
    """
    if block.role != "layer" or not block.has_backward:
        return None
    extra_ms = cost.forward_ms if cost.recompute_ms is None else cost.recompute_ms
    return Recompute(extra_backward_ms=extra_ms, activation_bytes=cost.checkpoint_bytes)


def _transient_bytes(block: Block, cost: BlockCost) -> float:
    """The working set, and what a layer that can be recomputed restores beside its input.

    A stage restores one layer at a time, so this is a largest, not a sum over recomputed layers as `restored_bytes` is.
    It is charged where nothing is recomputed too: that overstates by at most one layer, and never understates.
    """
    if block.role != "layer" or not block.has_backward:
        return cost.transient_bytes
    return cost.transient_bytes + max(0.0, cost.activation_bytes - cost.checkpoint_bytes)
