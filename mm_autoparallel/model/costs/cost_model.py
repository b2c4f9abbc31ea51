"""CostModel: what is known of a job before any strategy, and what one of each of its blocks costs under one.

Block costs are worked out once per (tp, cp, mbs, ep …): a search asks for hundreds of strategies.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from mm_autoparallel.model.blocks.chain import Block, Experts, OutputHead, TokenEmbedding, Traced, TransformerLayer
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.tokens import TokenCounts, count_tokens
from mm_autoparallel.model.costs.kinds import StageDevices, find_stage_devices
from mm_autoparallel.model.costs.low_parameters import high_fraction
from mm_autoparallel.model.costs.modes import list_modes
from mm_autoparallel.model.costs.scales import UNSCALED, CostScales
from mm_autoparallel.model.job.division_law import replicates
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.traced_model import TracedModel
from mm_autoparallel.model.job.workload import MINDSPEED, RecomputeOperator
from mm_autoparallel.model.operators.analytic import Rates, estimate_block, rates_of
from mm_autoparallel.model.operators.host import (
    EARLY_EXPERTS_FACTOR,
    chunk_launches_ms,
    host_layer_ms,
    launch_backward_factor,
    launch_layer,
    layer_launch_ms,
    pause_layer,
    run_ahead,
)
from mm_autoparallel.model.operators.operators import Share, form_share
from mm_autoparallel.model.operators.traced_table import build_traced_table, untraced
from mm_autoparallel.model.profiles.calibration import Calibration, calibration_of
from mm_autoparallel.model.profiles.collectives import ALONE
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.model.profiles.lanes import find_lanes
from mm_autoparallel.model.profiles.network import read_network
from mm_autoparallel.model.profiles.operators.times import OperatorTimes, is_base, open_base
from mm_autoparallel.model.profiles.store import read_profile_files
from mm_autoparallel.model.profiles.table import Point, Profiled, build_table
from mm_autoparallel.model.profiles.traced import is_shipped, read_traces
from mm_autoparallel.pipeline.problem import RECOMPUTE, Mode

OF_BLOCKS = (
    *("tp", "cp", "mbs", "ep", "etp", "cp_kind"),
    *("sequence_parallel", "precision", "dispatcher", "graphs", "overlap_all_to_all", "tp_overlap"),
)
"""Fields of a strategy that the cost of one block depends on."""
OF_EXPERTS = ("ep", "etp", "dispatcher", "overlap_all_to_all")
"""Those of them that change nothing in a block without experts."""
Key: TypeAlias = tuple[Hashable, ...]


class CostModel:
    """What `job` costs: what is known of it before any strategy, and the block costs asked for so far.

    Who asks more than once holds one and passes it on. calibration: in place of the one that the job names, or that its
    device has. Raises ProfileError where a profile, a trace or a calibration does not fit the job.
    """

    def __init__(self, job: Job, calibration: Calibration | None = None) -> None:
        self.job, self._given = job, calibration
        self._parts: dict[tuple[int, tuple[str, ...]], CostModel] = {}
        calibration = calibration or calibration_of(job)
        self.calibration, self.model = calibration, job.model
        self.cluster, self.workload = calibration.reached(job.cluster), job.workload.run_by(calibration.software)
        self.shard_cluster = calibration.reached_by_tensors(job.cluster)
        # overlaps that a job states are its own
        overlaps = {"overlap_grad_reduce", "overlap_param_gather"} & job.workload.model_fields_set
        self.shards_open = self.workload.known_facts.shards == "tensor" and not overlaps
        # the plan by which transformers' models are divided leaves projectors as they are
        self.chain = expand(job.model, whole_projectors=job.workload.implementation == "transformers")
        tokens = {modality.name: count_tokens(modality, job.workload) for modality in job.model.modalities}
        self.tokens: tuple[TokenCounts, ...] = tuple(tokens[block.modality] for block in self.chain.blocks)
        # what profilers measure: the model without adapters, with the weights beside them training
        bare = job.model.model_copy(update={"adapters": None})
        bare_blocks = expand(bare, whole_projectors=job.workload.implementation == "transformers").blocks
        self._measured_blocks = dict(zip(self.chain.blocks, bare_blocks, strict=True))
        kinds = list(dict.fromkeys(block.kind for block in self.chain.blocks))
        device_name = job.cluster.device.name
        paths = [path for path in job.profiles if not is_shipped(path) and not is_base(path)]
        self.table = build_table(read_profile_files(paths, bare, device_name, job.workload), kinds)
        traces = [path for path in job.profiles if not is_base(path)]
        self.operators = open_base(job.profiles)
        self.traced = build_traced_table(read_traces(traces, bare, job.workload), kinds, self._operator_times)
        found = read_network(paths, device_name)
        self.network_path = found[0] if found else None
        self.network = found[1] if found else None
        inner, figures = self.cluster.levels[0].name, calibration.figures
        self.lanes = find_lanes(job.cluster.device, figures, calibration.sources, self.network, inner)
        self.modes = job.search.modes
        # others than those of known sizes come from traces, and have no tensor parallelism
        towers = () if isinstance(job.model, TracedModel) else job.model.encoders
        self._towers = {tower.name: tower.layers for tower in towers}
        self._found: dict[Key, tuple[BlockCost, ...]] = {}
        self._bare: dict[Key, tuple[BlockCost, ...]] = {}
        self._plain: dict[Key, tuple[BlockCost, BlockCost]] = {}
        self._modes: dict[Key, list[tuple[Mode, ...]]] = {}

    @classmethod
    def of(cls, job: Job | CostModel) -> CostModel:
        """The costs that are given, or those of a job that is."""
        return job if isinstance(job, CostModel) else cls(job)

    def used_by(self, strategy: Strategy, modes: Collection[str] = ()) -> CostModel:
        """The costs on the part of the cluster that `strategy` uses, of layers that may run in `modes` too; these very
        ones where that is all of the job."""
        job = self.job.with_modes(modes).used_by(strategy)
        if job is self.job:
            return self
        key = strategy.world_size, job.search.modes
        if key not in self._parts:
            self._parts[key] = CostModel(job, self._given)
        return self._parts[key]

    def _operator_times(self, software: Mapping[str, str]) -> OperatorTimes | None:
        """Those of the job's base that hold for its device and for the software of its traces."""
        base = self.operators
        return OperatorTimes.of(base, self.job.cluster.device.name, software) if base else None

    @property
    def has_tied_table(self) -> bool:
        """Whether the head shares the embedding's vocabulary table."""
        head = self.chain.blocks[-1].structure
        return head.table_count > 0 if isinstance(head, Traced) else isinstance(head, OutputHead) and head.tied

    def look_up(self, strategy: Strategy, scales: CostScales = UNSCALED) -> tuple[BlockCost, ...]:
        """One cost per block of the chain."""
        return self._look_up(strategy, scales)[0]

    def host_share(self, strategy: Strategy) -> float:
        """Of what the blocks take together, the part of those that wait for their host."""
        found, bare = self._look_up(strategy, UNSCALED)
        totals = [block.count * cost.total_ms for block, cost in zip(self.chain.blocks, found, strict=True)]
        waits = [
            total if cost.total_ms > own.total_ms else 0.0 for total, cost, own in zip(totals, found, bare, strict=True)
        ]
        return sum(waits) / (sum(totals) or 1.0)

    def chunk_launches_ms(self, strategy: Strategy, scales: CostScales) -> list[tuple[float, float]]:
        """What forward and backward of one of each block take longer where hosts run passes of several chunks."""
        blocks, (found, bare) = self.chain.blocks, self._look_up(strategy, scales)
        shares = [self.share_of(block, self.strategy_of(block, strategy)) for block in blocks]
        factors = [scales.factor(block.kind) for block in blocks]
        num_virtual_stages = strategy.pp * strategy.vpp
        return chunk_launches_ms(blocks, bare, found, self.calibration.figures, shares, factors, num_virtual_stages)

    def _look_up(self, strategy: Strategy, scales: CostScales) -> tuple[tuple[BlockCost, ...], tuple[BlockCost, ...]]:
        """One cost per block of the chain, and the same without what its host takes to launch it."""
        scales = scales.of_blocks
        if strategy.arrangement:  # each encoder's blocks under its own sizes
            of = {name: self._look_up(strategy.of_modality(name), scales) for name in self.chain.modalities}
            names = [block.modality for block in self.chain.blocks]
            each = tuple(of[name][0][i] for i, name in enumerate(names))
            return each, tuple(of[name][1][i] for i, name in enumerate(names))
        runs_ahead, key = self._runs_ahead(strategy), self._key(strategy, scales)
        if key not in self._found:
            bare, found = [], []
            without_experts = (*(getattr(strategy, name) for name in OF_BLOCKS if name not in OF_EXPERTS), scales)
            every_rates: list[Rates] = []
            for i, (block, tokens) in enumerate(zip(self.chain.blocks, self.tokens, strict=True)):
                known = None if has_experts(block) else self._plain.get((i, *without_experts))
                if known is None:
                    every_rates = every_rates or self._rates(strategy, scales)
                    own = self.strategy_of(block, strategy)
                    estimate = self._estimate(block, tokens, own, every_rates[i])
                    cost = self._prefer_profile(block, tokens, own, estimate, every_rates[i])
                    known = self._launch(block, cost, scales.factor(block.kind), self.share_of(block, own))
                    if not has_experts(block):
                        self._plain[(i, *without_experts)] = known
                bare.append(known[0])
                found.append(known[1])
            if runs_ahead:
                found = run_ahead(self.chain.blocks, bare, found)
            if self.has_tied_table and not isinstance(self.chain.blocks[-1].structure, Traced):
                found[-1] = found[-1].without_table(self.table_cost(found))
            self._found[key], self._bare[key] = tuple(found), tuple(bare)
        return self._found[key], self._bare[key]

    def _key(self, strategy: Strategy, scales: CostScales) -> Key:
        """What the costs of blocks differ by."""
        return (*(getattr(strategy, name) for name in OF_BLOCKS), self._runs_ahead(strategy), scales)

    def _runs_ahead(self, strategy: Strategy) -> bool:
        # on several stages the layers of most stand beside no head; hosts of towers were told by whole steps
        alone = strategy.pp == 1 and len(self.chain.modalities) == 1
        return self.calibration.figures.host_runs_ahead and alone

    def _estimate(
        self,
        block: Block,
        tokens: TokenCounts,
        strategy: Strategy,
        rates: Rates,
        operators: tuple[RecomputeOperator, ...] = (),
    ) -> BlockCost:
        """The analytic cost, of layers in two precisions their mean. operators: that run once more besides."""
        share, gradient_bytes = self.share_of(block, strategy), self.workload.gradient_bytes
        if operators:
            share = replace(share, recompute_operators=(*share.recompute_operators, *operators))
        cost = estimate_block(block, tokens, share, rates, gradient_bytes)
        high = high_fraction(self.chain, block, self.workload, strategy)
        if not high:
            return cost
        return cost.mixed(estimate_block(block, tokens, replace(share, precision="bf16"), rates, gradient_bytes), high)

    def strategy_of(self, block: Block, strategy: Strategy) -> Strategy:
        """`strategy` as a block sees it: its module's, without tensor parallelism where each such rank has it whole."""
        if strategy.arrangement:
            return strategy.of_modality(block.modality)
        if block.modality in self._towers and replicates(
            block.modality, self._towers[block.modality], self.workload, strategy.tp
        ):
            return replace(strategy, tp=1)
        return strategy

    def share_of(self, block: Block, strategy: Strategy) -> Share:
        """What one rank has of a block, and how its framework runs it."""
        return self._form_share(strategy, block.modality)

    def _form_share(self, strategy: Strategy, modality: str = "text") -> Share:
        statistics_bytes, node_devices = self.calibration.figures.statistics_bytes, self.cluster.levels[0].num_devices
        return form_share(strategy, self.workload, statistics_bytes, modality, node_devices)

    def _rates(self, strategy: Strategy, scales: CostScales) -> list[Rates]:
        """What one of each block is priced by."""
        rates = scales.scale_rates(rates_of(self.cluster, self.calibration, strategy, self.network, self.workload))
        alone = replace(rates, tp_group=ALONE)
        early_factor = EARLY_EXPERTS_FACTOR if strategy.facts_of(self.workload).early_experts else 1.0
        return [
            replace(
                rates if self.strategy_of(block, strategy) is strategy else alone,
                compute_factor=scales.factor(block.kind) * (early_factor if has_experts(block) else 1.0),
            )
            for block in self.chain.blocks
        ]

    def overfull_reason(self, strategy: Strategy) -> str | None:
        """Why a block does not fit, as profiling it has shown; None where no profile says so."""
        if not self.table.overfull:
            return None
        if strategy.layouts:
            return next(filter(None, map(self.overfull_reason, strategy.in_each_layout())), None)
        alone = strategy.ep == 1 and strategy.expert_tp == strategy.tp  # what was measured held every expert
        of = {name: strategy.of_modality(name) for name in self.chain.modalities}
        points = (
            _point(block, tokens, self.strategy_of(block, of[block.modality]))
            for block, tokens in zip(self.chain.blocks, self.tokens, strict=True)
            if alone or not has_experts(block)
        )
        reasons = (self.table.overfull_reason(point) for point in points)
        return next((reason for reason in reasons if reason), None)

    def _launch(self, block: Block, cost: BlockCost, factor: float, share: Share) -> tuple[BlockCost, BlockCost]:
        """With what the device waits for between operators; then no layer faster than its host: a measured one has
        shown how fast that is. factor: on what a host takes."""
        if cost.time_source != "analytic":
            return cost, cost
        figures, trains, returns = self.calibration.figures, block.trainable, block.has_backward
        host = host_layer_ms(block, figures, share)
        if host is not None:  # a third of both in forward, and in the gradients of inputs and of weights each
            paused = pause_layer(cost, factor * host[1] / 3, trains, returns)
            return paused, launch_layer(paused, factor * host[0] / 3, trains, returns)
        if block.role != "layer":
            return cost, cost
        paused = pause_layer(cost, factor * figures.layer_gap_ms, trains, returns)
        launch_ms = factor * layer_launch_ms(block, figures, share.tp, share.facts)
        return paused, launch_layer(paused, launch_ms, trains, returns, launch_backward_factor(block, figures))

    def _prefer_profile(
        self, block: Block, tokens: TokenCounts, strategy: Strategy, estimate: BlockCost, rates: Rates
    ) -> BlockCost:
        """What was measured, else what was traced, else the estimate from sizes alone."""
        if tokens.layer_tokens == 0 or (block.role == "layer" and self.share_of(block, strategy).low):
            return estimate  # the workload gives this modality nothing to do, or profilers measure it in BF16 alone
        known = block, tokens, strategy, estimate, rates
        profiled = self._carry_measured(*known) or self._carry_traced(*known)
        if profiled is None:
            if isinstance(block.structure, Traced):
                raise untraced(block.kind)
            return estimate
        return profiled.instead_of(estimate, block.trainable, block.has_backward)

    def _carry_traced(
        self, block: Block, tokens: TokenCounts, strategy: Strategy, estimate: BlockCost, rates: Rates
    ) -> Profiled | None:
        """What was traced, every expert divided like all else and no adapters; for CP carried over from CP 1."""
        is_plain = not estimate.expert_count or (strategy.ep == 1 and strategy.expert_tp == strategy.tp)
        if not is_plain or self._measured_blocks[block] != block:
            return None
        carried = strategy.cp > 1 and not isinstance(block.structure, Traced)
        traced = replace(strategy, cp=1, cp_kind="") if carried else strategy
        found = self.traced.look_up(_point(block, tokens, traced), strategy.divides_sequences(self.workload), rates)
        if found is None or not carried:
            return found
        there = estimate_block(block, tokens, self.share_of(block, traced), rates, self.workload.gradient_bytes)
        return replace(found.carried(there, estimate), memory_source="traced")

    def _carry_measured(
        self, block: Block, tokens: TokenCounts, strategy: Strategy, estimate: BlockCost, rates: Rates
    ) -> Profiled | None:
        """What was measured under this very division, or else carried over to it from a plainer one.

        Blocks are measured with sequence parallel (if the workload has it), with every expert divided like all else,
        and, where the profile has no such CP, with whole samples.
        """
        measured = replace(strategy, sequence_parallel=True)
        if estimate.expert_count:
            measured = replace(measured, ep=1, etp=0)
        if strategy.cp > 1 and not self.table.has_division(_point(block, tokens, strategy)):
            measured = replace(measured, cp=1, cp_kind="")
        point = _point(block, tokens, measured)
        if estimate.expert_count and measured != strategy and self.table.overfull_reason(point):
            return None  # all experts together were too many
        found = self.table.look_up(point)
        if found is None:
            return None
        found = found.slowed(rates.compute_factor)
        there, measured_block = self.share_of(block, measured), self._measured_blocks[block]
        if there == self.share_of(block, strategy) and measured_block == block:
            return found
        gradient_bytes = self.workload.gradient_bytes
        return found.carried(estimate_block(measured_block, tokens, there, rates, gradient_bytes), estimate)

    def estimate_rerun(
        self, strategy: Strategy, rerun: tuple[str, ...], exchanges: tuple[str, ...] = ()
    ) -> list[tuple[BlockCost, BlockCost]]:
        """Of one of each block the analytic cost as it is, and with these operators and exchanges run once more (the
        patterns of Share).
        """
        share = self._form_share(strategy)
        lighter = replace(share, rerun_patterns=rerun, exchange_patterns=exchanges)
        blocks = zip(self.chain.blocks, self.tokens, self._rates(strategy, UNSCALED), strict=True)
        gradient_bytes = self.workload.gradient_bytes
        return [
            (
                estimate_block(block, tokens, share, rates, gradient_bytes),
                estimate_block(block, tokens, lighter, rates, gradient_bytes),
            )
            for block, tokens, rates in blocks
        ]

    def devices_of(self, strategy: Strategy) -> StageDevices:
        """How slow the devices of each stage are."""
        blocks = zip(self.chain.blocks, self.tokens, strict=True)
        return find_stage_devices(self.cluster, self.calibration, self.workload, blocks, strategy)

    def list_modes(self, strategy: Strategy, scales: CostScales) -> list[tuple[Mode, ...]]:
        """Per block the modes that the job's search allows it."""
        key = (*self._key(strategy, scales.of_blocks), self._keeps_layers(strategy), strategy.arrangement)
        if key not in self._modes:
            self._modes[key] = self._list_modes(strategy, scales)
        return self._modes[key]

    def _list_modes(self, strategy: Strategy, scales: CostScales) -> list[tuple[Mode, ...]]:
        costs, rates = self.look_up(strategy, scales), self._rates(strategy, scales.of_blocks)

        def estimate(index: int, operators: tuple[RecomputeOperator, ...]) -> BlockCost:
            block, tokens = self.chain.blocks[index], self.tokens[index]
            own = self.strategy_of(block, strategy)
            share = self.share_of(block, own)
            lighter = replace(share, recompute_operators=(*share.recompute_operators, *operators))
            cost = self._estimate(block, tokens, own, rates[index], operators)
            factor = scales.of_blocks.factor(block.kind)
            return self._launch(block, cost, factor, lighter)[1] if costs[index].time_source == "analytic" else cost

        names = [name for name in self.modes if name != RECOMPUTE or not self._keeps_layers(strategy)]
        # older figures were fitted without copies
        copied_ms_per_byte = 1e3 / rates[0].memory_bytes_per_s if rates[0].edges_move else 0.0
        return list_modes(names, self.chain.blocks, costs, self.workload, estimate, copied_ms_per_byte)

    def _keeps_layers(self, strategy: Strategy) -> bool:
        """Whether no layer may be recomputed whole: Megatron-LM forbids it (core/transformer/transformer_config.py),
        MindSpeed does not."""
        overlaps = strategy.overlap_of(self.workload) == "micro_batches" and strategy.ep > 1
        return overlaps and self.workload.stack not in MINDSPEED

    def table_cost(self, costs: Sequence[BlockCost]) -> BlockCost:
        """The cost of what is before the decoder's layers, its vocabulary table without what is added beside it."""
        pairs = zip(self.chain.blocks, costs, strict=True)
        block, cost = next(pair for pair in pairs if pair[0].modality == self.chain.modalities[-1])
        if isinstance(block.structure, Traced) and block.structure.table_count:
            return replace(cost, parameter_count=float(block.structure.table_count))
        if isinstance(block.structure, TokenEmbedding) and block.structure.num_added:
            added_count = block.structure.num_added * block.structure.hidden_size
            return replace(cost, parameter_count=cost.parameter_count - added_count)
        return cost


def _point(block: Block, tokens: TokenCounts, strategy: Strategy) -> Point:
    return Point(block.kind, strategy.tp, strategy.cp, strategy.mbs, tokens.layer_tokens, tokens.num_spans)


def has_experts(block: Block) -> bool:
    """Whether it is a layer with experts."""
    return isinstance(block.structure, TransformerLayer) and isinstance(block.structure.mlp, Experts)
