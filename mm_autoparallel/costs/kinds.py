"""How fast the devices of each kind of nodes are beside the cluster's own, and what that and slow ranks do to stages.

A problem has one factor a stage, and another device is not slower by one factor: matrix products follow its peak,
norms its memory. A stage gets the largest ratio of analytic times among the blocks that multiply matrices, whatever of
them it holds; stems and tables are left out, whose time is small and is that of memory. So a step on several kinds of
devices is an upper bound as far as analytic ratios hold. Traffic and the optimizer's step stay those of the cluster's
device, and so does what a device keeps beside its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mm_autoparallel.blocks.chain import Block
from mm_autoparallel.blocks.tokens import TokenCounts
from mm_autoparallel.costs.topology import replica_factors, stage_factors
from mm_autoparallel.job.cluster import Cluster
from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.profiles.analytic import estimate_block, rates_of
from mm_autoparallel.profiles.calibration import Calibration, find_calibration
from mm_autoparallel.profiles.operators import Share


@dataclass(frozen=True)
class KindRatio:
    """Time of a block on a kind of node over that on the cluster's device, at least and at most, by analytic times."""

    device: str
    least_factor: float
    most_factor: float


def compare_kinds(
    cluster: Cluster,
    calibration: Calibration,
    blocks: Sequence[tuple[Block, TokenCounts]],
    share: Share,
    strategy: Strategy,
    gradient_bytes: float,
) -> tuple[KindRatio, ...]:
    """Of every kind of nodes; none where the cluster has one device alone.

    cluster: its levels as they are reached. Other devices stand on their own calibration.
    """
    if all(group.device in (None, cluster.device) for group in cluster.node_groups):
        return ()
    counted = [(block, tokens) for block, tokens in blocks if block.role != "pre" and tokens.layer_tokens]

    def times_ms(cluster: Cluster, calibration: Calibration) -> list[float]:
        rates = rates_of(cluster, calibration, strategy)
        costs = (estimate_block(block, tokens, share, rates, gradient_bytes) for block, tokens in counted)
        return [cost.forward_ms + cost.backward_input_ms + cost.backward_weight_ms for cost in costs]

    base_ms, ratios = times_ms(cluster, calibration), []
    for kind in cluster.kinds:
        factors = [1.0]
        if kind.device != cluster.device:
            there = cluster.model_copy(update={"device": kind.device})
            other_ms = times_ms(there, find_calibration(kind.device.name))
            factors = [other / base for other, base in zip(other_ms, base_ms, strict=True)]
        ratios.append(KindRatio(kind.device.name, min(factors), max(factors)))
    return tuple(ratios)


@dataclass(frozen=True)
class StageDevices:
    """What makes the stages of a strategy slower or faster than the cluster's device. ratios: of `compare_kinds`."""

    cluster: Cluster
    strategy: Strategy
    ratios: tuple[KindRatio, ...] = ()

    @property
    def replica_factors(self) -> tuple[tuple[float, ...], ...]:
        """As `topology.replica_factors` gives them."""
        return replica_factors(self.cluster, self.strategy, [ratio.most_factor for ratio in self.ratios])

    @property
    def uneven_factors(self) -> tuple[float, ...]:
        """Of each stage; empty where all are 1."""
        factors = stage_factors(self.cluster, self.strategy, [ratio.most_factor for ratio in self.ratios])
        return () if all(factor == 1.0 for factor in factors) else factors

    def document(self) -> dict[str, Any]:
        """The factors and where they come from, as JSON values; empty where all are 1."""
        factors = self.uneven_factors
        return {"stage_time_factor": list(factors), "notes": list(self._notes())} if factors else {}

    def _notes(self) -> Iterator[str]:
        base, spread_fraction = self.cluster.device.name, self.cluster.device_time_spread_fraction
        for ratio in self.ratios:
            if ratio.device != base:
                yield (
                    f"a block on {ratio.device} counts {ratio.most_factor:.3f} times as long as on {base}, the most of "
                    f"any by analytic times; the least is {ratio.least_factor:.3f}"
                )
        if self.cluster.slow_devices:
            yield "a stage counts as slow as the slowest of its ranks in any replica"
        if spread_fraction:
            yield (
                f"device times spread by {spread_fraction * 100:g} %, and a stage counts as the expected slowest of "
                f"its {self.strategy.tp * self.strategy.cp * self.strategy.dp} ranks"
            )
        if len(self.replica_factors) > 1:
            yield "no replica holds the slowest ranks of all stages, so the step is an upper bound"
