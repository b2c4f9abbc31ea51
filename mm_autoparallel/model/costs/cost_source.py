"""CostSource: one thing that the times of a strategy stand on, how far off it may be, and where it would be measured.

Errors are relative, one standard deviation. What was measured repeats to its own standard error, and a step that is put
together of measured parts is off by some more; what is analytic is as far off as the calibration's interval says, of
which 90 of 100 measured steps lie inside (measurements/calibrate.interval_of).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mm_autoparallel.model.blocks.chain import Block
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.costs.communication import data_group, expert_group
from mm_autoparallel.model.costs.memory import sharded_over
from mm_autoparallel.model.costs.scales import (
    CONTEXT_PARALLEL,
    EXPERT_EXCHANGE,
    EXPERT_GATHER,
    EXPERT_REDUCTION,
    GRADIENT_REDUCTION,
    OPTIMIZER,
    PARAMETER_GATHER,
    PIPELINE,
    TENSOR_PARALLEL,
    TIED_TABLE,
)
from mm_autoparallel.model.costs.topology import hop_lines, tied_group
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.analytic import rates_of
from mm_autoparallel.model.operators.context_traffic import context_traffic
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import form_share
from mm_autoparallel.model.profiles.calibration import Calibration
from mm_autoparallel.model.profiles.collectives import Group
from mm_autoparallel.model.profiles.cost import BlockCost, Source
from mm_autoparallel.model.profiles.interval import Interval
from mm_autoparallel.model.profiles.network import NetworkProfile, Operation
from mm_autoparallel.model.profiles.table import Point

MEASURED_ERROR_FRACTION = 0.02
"""Beyond what timings repeat to: the median error of steps predicted from measured blocks
(docs/validation/real-runs.md)."""

INTERPOLATED_ERROR_FRACTION = 2 * MEASURED_ERROR_FRACTION
"""Between two measured points. Assumed."""

_NINETY_COUNT = 1.645
"""Standard deviations on either side of the mean within which 90 of 100 normal errors lie."""

_MEAN_COUNT = math.sqrt(math.pi / 2)
"""Standard deviations in one mean distance of a normal error, which is what a network's fits tell."""


@dataclass(frozen=True)
class BlockPoint:
    """A kind of block at one division. ep, etp: of a block with routed experts, else 1 and 0."""

    point: Point
    ep: int = 1
    etp: int = 0


@dataclass(frozen=True)
class MessagePoint:
    """Operations of a group: its ranks, the outermost level it crosses, ranks inside one group of the level below.

    size_bytes: of the largest message. Groups of one form are one source, whatever their messages.
    """

    operations: tuple[Operation, ...]
    num_ranks: int
    level: str
    inside: int
    size_bytes: int = field(compare=False)


@dataclass(frozen=True)
class UpdatePoint:
    """The optimizer step over parameters that `tp` ranks divide and whose state `num_shards` ranks share."""

    tp: int
    mbs: int
    num_shards: int


@dataclass(frozen=True)
class CostSource:
    """A source under one strategy. name: as in CostScales. at: equal for what one measurement would tell.

    time_source: where its times come from. error_fraction: standard deviation of its times, relative to them.
    cause: what it shares its error with: nobody knows what an uncalibrated device or network reaches, and all figures
    of it are too high or too low together. Empty where an error is the source's own.
    """

    name: str
    time_source: Source
    error_fraction: float
    cause: str
    at: BlockPoint | MessagePoint | UpdatePoint


def analytic_error_fraction(interval: Interval) -> float:
    """One standard deviation of the logarithm of a time whose 90 % interval is `interval`."""
    return math.log(interval.high_factor / interval.low_factor) / (2 * _NINETY_COUNT)


def list_cost_sources(
    pairs: Sequence[tuple[Block, TokenCounts, BlockCost]],
    cluster: Cluster,
    workload: Workload,
    calibration: Calibration,
    network: NetworkProfile | None,
    strategy: Strategy,
    has_tied_table: bool,
) -> tuple[CostSource, ...]:
    """Every source that may have a say in a step of `strategy`: blocks that take time, groups of several ranks.

    pairs: each block with its tokens of one sample and its cost. cluster: its levels as they are reached.
    """
    listed = _Listed(pairs, cluster, workload, calibration, network, strategy)
    return (
        *listed.blocks(),
        *listed.inside_blocks(),
        *listed.between_stages(),
        *listed.replicas(),
        *(listed.tied_table() if has_tied_table and strategy.pp > 1 else ()),
        *listed.optimizer(),
    )


@dataclass(frozen=True)
class _Listed:
    pairs: Sequence[tuple[Block, TokenCounts, BlockCost]]
    cluster: Cluster
    workload: Workload
    calibration: Calibration
    network: NetworkProfile | None
    strategy: Strategy

    def blocks(self) -> Iterator[CostSource]:
        """One for each kind of block that takes any time."""
        strategy, known = self.strategy, set()
        for block, tokens, cost in self.pairs:
            if block.kind in known or cost.forward_ms <= 0:
                continue
            known.add(block.kind)
            point = Point(block.kind, strategy.tp, strategy.cp, strategy.mbs, tokens.layer_tokens, tokens.num_spans)
            at = BlockPoint(point, strategy.ep, strategy.etp) if cost.expert_count else BlockPoint(point)
            yield self._source(block.kind, cost.time_source, cost.error_fraction, "compute", at)

    def inside_blocks(self) -> Iterator[CostSource]:
        """The groups that communicate while blocks run whose times are not measured with them."""
        strategy = self.strategy
        statistics_bytes, node_devices = self.calibration.figures.statistics_bytes, self.cluster.levels[0].num_devices
        share = form_share(strategy, self.workload, statistics_bytes, node_devices=node_devices)
        priced = [
            list_operators(block.structure, tokens, share)
            for block, tokens, cost in self.pairs
            if cost.time_source == "analytic" and cost.forward_ms > 0
        ]
        summed_bytes = exchanged_bytes = context_bytes = 0.0
        for operators in priced:
            products = (max(one.gathered_bytes, one.summed_bytes) for one in operators.products)
            summed_bytes = max(summed_bytes, operators.exchanged_bytes, *products, 0.0)
            exchanged_bytes = max(exchanged_bytes, operators.all_to_all_bytes)
            if operators.attention:
                attention = operators.attention
                moved_bytes = attention.ring_bytes or attention.gathered_bytes or attention.dealt_bytes
                context_bytes = max(context_bytes, moved_bytes)
        rates = rates_of(self.cluster, self.calibration, strategy, self.network, self.workload)
        tp_operations: tuple[Operation, ...] = (
            ("all_gather", "reduce_scatter") if share.sequence_parallel else ("all_reduce",)
        )
        yield from self._group(TENSOR_PARALLEL, rates.tp_group, tp_operations, summed_bytes)
        yield from self._group(CONTEXT_PARALLEL, *context_traffic(rates, strategy, self.workload), context_bytes)
        yield from self._group(EXPERT_EXCHANGE, rates.ep_group, ("all_to_all",), exchanged_bytes)

    def between_stages(self) -> Iterator[CostSource]:
        """The hops between stages, told by the one that takes longest."""
        lines = hop_lines(self.cluster, self.strategy, self.network)
        if not lines:
            return
        size_bytes = max(cost.output_bytes for _, _, cost in self.pairs)
        slowest = max(lines, key=lambda line: line.time_ms(size_bytes))
        at = MessagePoint(("send_recv",), 2, slowest.level, 1, int(size_bytes))
        yield self._message_source(PIPELINE, slowest.source, at)

    def replicas(self) -> Iterator[CostSource]:
        """Gradients that replicas sum and parameters that they gather, of dense weights and of routed experts."""
        strategy, workload = self.strategy, self.workload
        trained = [cost for block, _, cost in self.pairs if block.trainable]
        dense_count = max((cost.trained_count - cost.trained_expert_count for cost in trained), default=0.0)
        expert_count = max((cost.trained_expert_count for cost in trained), default=0.0)
        dense = data_group(self.cluster, strategy, self.network)
        experts = expert_group(self.cluster, strategy, self.network)
        reduction: tuple[Operation, ...] = ("reduce_scatter",) if strategy.zero else ("all_reduce",)
        yield from self._group(GRADIENT_REDUCTION, dense, reduction, dense_count * workload.gradient_bytes)
        yield from self._group(EXPERT_REDUCTION, experts, reduction, expert_count * workload.gradient_bytes)
        if strategy.zero:
            yield from self._group(PARAMETER_GATHER, dense, ("all_gather",), dense_count * workload.weight_bytes)
            yield from self._group(EXPERT_GATHER, experts, ("all_gather",), expert_count * workload.weight_bytes)

    def tied_table(self) -> Iterator[CostSource]:
        """The gradient of a vocabulary table that the first and the last stage hold."""
        group = tied_group(self.cluster, self.strategy, self.network)
        table_count = max(cost.parameter_count for block, _, cost in self.pairs if block.role == "pre")
        yield from self._group(TIED_TABLE, group, ("all_reduce",), table_count * self.workload.gradient_bytes)

    def optimizer(self) -> Iterator[CostSource]:
        """The update of all weights that train; measured where any block's is."""
        trained = [cost for block, _, cost in self.pairs if block.trainable]
        if not trained:
            return
        measured = [cost.time_source for cost in trained if cost.optimizer_ms is not None]
        at = UpdatePoint(self.strategy.tp, self.strategy.mbs, sharded_over(self.strategy))
        yield self._source(OPTIMIZER, measured[0] if measured else "analytic", 0.0, "compute", at)

    def _group(
        self, name: str, group: Group, operations: tuple[Operation, ...], size_bytes: float
    ) -> Iterator[CostSource]:
        if group.num_ranks > 1 and size_bytes > 0:
            weakest = max((group.source(operation) for operation in operations), key=_WEAKNESS.index)
            at = MessagePoint(operations, group.num_ranks, group.level, group.inside, int(size_bytes))
            yield self._message_source(name, weakest, at)

    def _message_source(self, name: str, time_source: Source, at: MessagePoint) -> CostSource:
        return self._source(name, time_source, self._residual_fraction(at), f"network {at.level}", at)

    def _residual_fraction(self, at: MessagePoint) -> float:
        """How far measured times lie from their lines, one standard deviation; 0 where nothing was measured."""
        fits = self.network.fits if self.network else ()
        near = (fit for fit in fits if fit.operation in at.operations and fit.level == at.level)
        return _MEAN_COUNT * max((fit.residual_fraction for fit in near), default=0.0)

    def _source(
        self,
        name: str,
        time_source: Source,
        repeats_fraction: float,
        cause: str,
        at: BlockPoint | MessagePoint | UpdatePoint,
    ) -> CostSource:
        if time_source in ("measured", "interpolated"):
            known = MEASURED_ERROR_FRACTION if time_source == "measured" else INTERPOLATED_ERROR_FRACTION
            return CostSource(name, time_source, math.hypot(known, repeats_fraction), "", at)
        error_fraction = analytic_error_fraction(self.calibration.interval)
        return CostSource(name, time_source, error_fraction, "" if self.calibration.calibrated else cause, at)


_WEAKNESS: tuple[Source, ...] = ("measured", "interpolated", "traced", "analytic")
