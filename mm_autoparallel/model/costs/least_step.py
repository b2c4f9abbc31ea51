"""The least that a strategy's step can take by the costs of its blocks alone, before its problem is built.

Costs of blocks depend on few of a strategy's sizes, so tens of thousands of strategies are bounded in a second.
"""

from __future__ import annotations

from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.costs.stage import block_costs, find_devices
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy

#: Far above the rounding of sums in another order, so that the bound stays one.
ROUNDING_FRACTION = 1e-10


class LeastSteps:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._blocks = [(block.name, block.modality, block.count) for block in expand(job.model).blocks]

    def least_ms(self, strategy: Strategy) -> float:
        """No placement of `build_problem(job, strategy)` is below.

        All passes of all blocks shared out evenly among the stages, each at its own speed, and those of the largest
        block on the fastest of them; what the strategy adds to a block's passes, its hops and its tails are left out.
        Raises ProfileError where a profile does not fit or lacks a point.
        """
        costs = block_costs(self._job, strategy)
        num_microbatches = strategy.num_microbatches(self._job.workload.global_batch_size)
        total_ms, largest_ms = 0.0, 0.0
        for name, modality, num_blocks in self._blocks:
            cost = costs[name]
            passes_ms = cost.forward_ms + cost.backward_input_ms + cost.backward_weight_ms
            passes_ms *= self._sum_scale(modality, num_microbatches)
            total_ms += num_blocks * passes_ms
            largest_ms = max(largest_ms, passes_ms)
        factors = find_devices(self._job, strategy).uneven_factors or (1.0,) * strategy.pp
        evenly_ms = total_ms / sum(1.0 / factor for factor in factors)
        return max(evenly_ms, largest_ms * min(factors)) * (1.0 - ROUNDING_FRACTION)

    def _sum_scale(self, modality: str, num_microbatches: int) -> float:
        """The factors on a block's times, summed over all micro-batches."""
        scale = self._job.workload.micro_batch_scale.get(modality)
        if not scale:
            return float(num_microbatches)
        rounds, rest = divmod(num_microbatches, len(scale))
        return rounds * sum(scale) + sum(scale[:rest])
