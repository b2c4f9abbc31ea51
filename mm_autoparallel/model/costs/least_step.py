"""The least that a strategy's step can take by the costs of its blocks alone, before its problem is built.

Costs of blocks depend on few of a strategy's sizes, so tens of thousands of strategies are bounded in a second.
"""

from __future__ import annotations

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.cost import BlockCost

#: Far above the rounding of sums in another order, so that the bound stays one.
ROUNDING_FRACTION = 1e-10


class LeastSteps:
    """Of one job."""

    def __init__(self, job: Job | CostModel) -> None:
        self._costs = CostModel.of(job)

    def least_ms(self, strategy: Strategy) -> float:
        """No placement of `build_problem(job, strategy)` is below.

        All passes of all blocks shared out evenly among the stages, each at its own speed, and those of the largest
        block on the fastest of them; what the strategy adds to a block's passes, its hops and its tails are left out.
        Raises ProfileError where a profile does not fit or lacks a point.
        """
        if strategy.arrangement:
            return self._least_arranged_ms(strategy)
        num_microbatches = strategy.num_microbatches(self._costs.job.workload.global_batch_size)
        total_ms, largest_ms = 0.0, 0.0
        found = [self._costs.look_up(each) for each in strategy.in_each_layout()]
        for i, block in enumerate(self._costs.chain.blocks):
            passes_ms = min(_sum_passes(costs[i]) for costs in (found if block.role == "layer" else found[:1]))
            passes_ms *= self._sum_scale(block.modality, num_microbatches)
            total_ms += block.count * passes_ms
            largest_ms = max(largest_ms, passes_ms)
        factors = self._costs.devices_of(strategy).uneven_factors or (1.0,) * strategy.pp
        evenly_ms = total_ms / sum(1.0 / factor for factor in factors)
        return max(evenly_ms, largest_ms * min(factors)) * (1.0 - ROUNDING_FRACTION)

    def _least_arranged_ms(self, strategy: Strategy) -> float:
        """The same of two modules. On ranks of its own each has its stages to share its passes out among; on shared
        ones, the encoder's come on top: with each micro-batch, or a whole step's before and after the pipeline."""
        arrangement = strategy.arrangement
        assert arrangement is not None
        least = self._least_part_ms(strategy.of_encoder(), False), self._least_part_ms(strategy.of_decoder(), True)
        if arrangement.in_bubbles:  # devices share all work, and passes of either may lie where the other's do not
            return max(self._least_beside_ms(strategy), *least)
        return max(least) if arrangement.apart else sum(least)

    def _least_beside_ms(self, strategy: Strategy) -> float:
        """Passes of the encoder, and the decoder's layers, shared out evenly among the stages."""
        arrangement, decoder = strategy.arrangement, strategy.of_decoder()
        assert arrangement is not None
        passes_ms = self._sum_part_ms(strategy.of_encoder(), False)[0] / arrangement.encoder.mbs
        passes_ms /= arrangement.num_beside(decoder.tp, decoder.cp)
        samples = self._costs.job.workload.global_batch_size // decoder.dp
        each_ms = passes_ms + self._sum_part_ms(decoder, True)[0] / decoder.mbs
        return samples * each_ms / decoder.pp * (1.0 - ROUNDING_FRACTION)

    def least_decoder_ms(self, decoder: Strategy) -> float:
        """No strategy with this decoder and whatever arrangement is below. Raises as least_ms."""
        return self._least_part_ms(decoder, True)

    def least_share_ms(self, part: Strategy, is_decoder: bool) -> float:
        """Of one sample, what devices spend together at least on this module with the costs of such sizes. Its step is
        not below that times all samples over its devices. Raises as least_ms."""
        total_ms, _ = self._sum_part_ms(part, is_decoder)
        return total_ms * part.tp * part.cp / part.mbs * (1.0 - ROUNDING_FRACTION)

    def _least_part_ms(self, part: Strategy, is_decoder: bool) -> float:
        total_ms, largest_ms = self._sum_part_ms(part, is_decoder)
        each_ms = max(total_ms / part.pp, largest_ms)
        number = self._costs.job.workload.global_batch_size // (part.dp * part.mbs)
        return each_ms * number * (1.0 - ROUNDING_FRACTION)

    def _sum_part_ms(self, part: Strategy, is_decoder: bool) -> tuple[float, float]:
        """What all blocks of a module take for one micro-batch, and the largest of them."""
        decodes = self._costs.chain.modalities[-1]
        pairs = zip(self._costs.chain.blocks, self._costs.look_up(part), strict=True)
        held = [(b.count, _sum_passes(cost)) for b, cost in pairs if (b.modality == decodes) == is_decoder]
        return sum(count * passes_ms for count, passes_ms in held), max(passes_ms for _, passes_ms in held)

    def _sum_scale(self, modality: str, num_microbatches: int) -> float:
        """The factors on a block's times, summed over all micro-batches."""
        scale = self._costs.job.workload.micro_batch_scale.get(modality)
        if not scale:
            return float(num_microbatches)
        rounds, rest = divmod(num_microbatches, len(scale))
        return rounds * sum(scale) + sum(scale[:rest])


def _sum_passes(cost: BlockCost) -> float:
    return cost.forward_ms + cost.backward_input_ms + cost.backward_weight_ms
