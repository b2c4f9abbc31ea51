"""How fast the devices of each kind of nodes are beside the cluster's own, and what that and slow ranks do to stages.

A problem has one factor a stage, and another device is not slower by one factor: matrix products follow its peak,
norms its memory, collectives neither. A stage gets the ratio of the analytic times of the whole chain, whatever of it
it holds: exact where stages hold the same mix, and for others off by what `least_factor` and `most_factor` tell. (The
largest ratio would be a bound, and useless: that of H100 to A100 is 0.44 for the text layers of Qwen2-VL-72B, 0.57 for
its vision layers, 0.65 for its projector.) Traffic and the optimizer's step stay those of the cluster's device, and so
does what a device keeps beside its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.blocks.chain import Block
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.costs.topology import replica_factors, stage_factors
from mm_autoparallel.model.job.cluster import Cluster, Device
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.analytic import estimate_block, rates_of
from mm_autoparallel.model.operators.operators import form_share
from mm_autoparallel.model.profiles.calibration import Calibration, find_calibration


@dataclass(frozen=True)
class KindRatio:
    """Times on a kind of node over those on the cluster's device: of the whole chain, and at least and most of a block.

    All 1 on the cluster's device.
    """

    device: str
    time_factor: float = 1.0
    least_factor: float = 1.0
    most_factor: float = 1.0


@dataclass(frozen=True)
class StageDevices:
    """What makes the stages of a strategy slower or faster than the cluster's device. ratios: of each kind of nodes."""

    cluster: Cluster
    strategy: Strategy
    ratios: tuple[KindRatio, ...] = ()

    @property
    def replica_factors(self) -> tuple[tuple[float, ...], ...]:
        """As `topology.replica_factors` gives them."""
        return replica_factors(self.cluster, self.strategy, [ratio.time_factor for ratio in self.ratios])

    @property
    def uneven_factors(self) -> tuple[float, ...]:
        """Of each stage; empty where all are 1."""
        factors = stage_factors(self.cluster, self.strategy, [ratio.time_factor for ratio in self.ratios])
        return () if all(factor == 1.0 for factor in factors) else factors

    def document(self) -> dict[str, Any]:
        """The factors and where they come from, as JSON values; empty where all are 1."""
        factors = self.uneven_factors
        return {"stage_time_factor": list(factors), "notes": list(self._notes())} if factors else {}

    def _notes(self) -> Iterator[str]:
        base, spread_fraction = self.cluster.device.name, self.cluster.device_time_spread_fraction
        for ratio in dict.fromkeys(self.ratios):
            if ratio != KindRatio(ratio.device):
                yield (
                    f"a stage on {ratio.device} counts {ratio.time_factor:.3f} times as long as on {base}, by analytic "
                    f"times of the whole chain; of its blocks {ratio.least_factor:.3f} to {ratio.most_factor:.3f}"
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


def find_stage_devices(
    cluster: Cluster,
    calibration: Calibration,
    workload: Workload,
    blocks: Iterable[tuple[Block, TokenCounts]],
    strategy: Strategy,
) -> StageDevices:
    """How slow the devices of each stage are. blocks: the chain, each with its tokens per sample.

    cluster: its levels as they are reached. Other devices than its own stand on their own calibration.
    """
    if all(group.device in (None, cluster.device) for group in cluster.node_groups):
        return StageDevices(cluster, strategy)
    working = [pair for pair in blocks if pair[1].layer_tokens]
    counts = np.array([block.count for block, _ in working])
    statistics_bytes = calibration.figures.statistics_bytes
    node_devices = cluster.levels[0].num_devices
    shares = [form_share(strategy, workload, statistics_bytes, block.modality, node_devices) for block, _ in working]

    def times_ms(device: Device, calibration: Calibration) -> NDArray[np.float64]:
        rates = rates_of(cluster.model_copy(update={"device": device}), calibration, strategy, workload=workload)
        pairs = zip(working, shares, strict=True)
        costs = (estimate_block(*pair, share, rates, workload.gradient_bytes) for pair, share in pairs)
        return np.array([cost.forward_ms + cost.backward_input_ms + cost.backward_weight_ms for cost in costs])

    base_ms, ratios = times_ms(cluster.device, calibration), []
    for device in (kind.device for kind in cluster.kinds):
        if device == cluster.device:
            ratios.append(KindRatio(device.name))
            continue
        other_ms = times_ms(device, find_calibration(device.name))
        parts, whole = other_ms / base_ms, float(counts @ other_ms / (counts @ base_ms))
        ratios.append(KindRatio(device.name, whole, float(parts.min()), float(parts.max())))
    return StageDevices(cluster, strategy, tuple(ratios))
