"""The least that a strategy's step can take by the costs of its blocks alone, before its problem is built.

Costs of blocks depend on few of a strategy's sizes, so tens of thousands of strategies are bounded in a second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.arrangement import Arrangement
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.pipeline.schedules.catalog import OF_MICROBATCHES

#: Far above the rounding of sums in another order, so that the bound stays one.
ROUNDING_FRACTION = 1e-10


class LeastSteps:
    """Of one job."""

    def __init__(self, job: Job | CostModel) -> None:
        self._costs = CostModel.of(job)
        self._chains: dict[tuple[int, ...], tuple[object, float, float]] = {}  # by costs, which it keeps

    def least_ms(self, strategy: Strategy) -> float:
        """No placement of `build_problem(job, strategy)` is below.

        All passes of all blocks shared out among the stages, each at its own speed, and those of the largest block on
        the fastest of them; what the strategy adds to a block's passes, its hops and its tails are left out. Raises
        ProfileError where a profile does not fit or lacks a point.
        """
        if strategy.arrangement:
            return self._least_arranged_ms(strategy)
        num_microbatches = strategy.num_microbatches(self._costs.job.workload.global_batch_size)
        found = tuple(self._costs.look_up(each) for each in strategy.in_each_layout())
        known = (*map(id, found), num_microbatches)
        if known not in self._chains:
            self._chains[known] = found, *self._sum_chain(found, num_microbatches)
        _, total_ms, largest_ms = self._chains[known]
        factors = self._costs.devices_of(strategy).uneven_factors or (1.0,) * strategy.pp
        shared_ms = total_ms / sum(1.0 / factor for factor in factors)
        if _fills_and_drains(strategy) and not self._costs.job.workload.micro_batch_scale:
            shared_ms = max(shared_ms, least_path_ms(total_ms * min(factors), strategy.pp, num_microbatches))
        return max(shared_ms, largest_ms * min(factors)) * (1.0 - ROUNDING_FRACTION)

    def _sum_chain(self, found: Sequence[Sequence[BlockCost]], num_microbatches: int) -> tuple[float, float]:
        """What all passes of all blocks take, and those of the largest of them, a layer in the fastest of its layouts.
        found: costs of the blocks in each."""
        total_ms, largest_ms = 0.0, 0.0
        for i, block in enumerate(self._costs.chain.blocks):
            passes_ms = min(_sum_passes(costs[i]) for costs in (found if block.role == "layer" else found[:1]))
            passes_ms *= self._sum_scale(block.modality, num_microbatches)
            total_ms += block.count * passes_ms
            largest_ms = max(largest_ms, passes_ms)
        return total_ms, largest_ms

    def _least_arranged_ms(self, strategy: Strategy) -> float:
        """The same of modules. On ranks of its own each has its stages to share its passes out among; on shared ones,
        an encoder's come on top: with each micro-batch, or a whole step's before and after the pipeline."""
        arrangement = strategy.arrangement
        assert arrangement is not None
        each = [(one, strategy.with_only(one)) for one in arrangement.each if not one.is_cached]
        inside = [part for one, only in each if one.in_chain for part in self._parts_of(only)]
        decoder_ms = self._least_part_ms(strategy.of_decoder(), (*inside, *self._decoder))
        least = {one: self._least_part_ms(only.of_encoder(), self._parts_of(only)) for one, only in each}
        on_top_ms = sum(least[one] for one in least if not (one.apart or one.in_bubbles or one.in_chain))
        apart_ms = max((least[one] for one in least if one.apart), default=0.0)
        pipeline_ms = decoder_ms
        in_bubbles = [(one, only) for one, only in each if one.in_bubbles]
        if in_bubbles:  # devices share all work, and passes of either may lie where the other's do not
            shared_ms = self._least_beside_ms(strategy, in_bubbles, (*inside, *self._decoder))
            pipeline_ms = max(shared_ms, decoder_ms, *(least[one] for one, _ in in_bubbles))
        return max(apart_ms, pipeline_ms + on_top_ms)

    def _least_beside_ms(
        self, strategy: Strategy, in_bubbles: Sequence[tuple[Arrangement, Strategy]], inside: Collection[str]
    ) -> float:
        """Passes of encoders in bubbles, and the layers on stages, shared out evenly among these."""
        decoder, passes_ms = strategy.of_decoder(), 0.0
        for one, only in in_bubbles:
            each_ms = self._sum_part_ms(only.of_encoder(), self._parts_of(only))[0] / one.encoder.mbs
            passes_ms += each_ms / one.num_beside(decoder.tp, decoder.cp)
        samples = self._costs.job.workload.global_batch_size // decoder.dp
        each_ms = passes_ms + self._sum_part_ms(decoder, inside)[0] / decoder.mbs
        return samples * each_ms / decoder.pp * (1.0 - ROUNDING_FRACTION)

    @property
    def _decoder(self) -> tuple[str, ...]:
        return (self._costs.chain.modalities[-1],)

    def _parts_of(self, only: Strategy) -> tuple[str, ...]:
        """The modalities of a strategy's one module."""
        assert only.arrangement is not None
        return only.arrangement.encoder.parts

    def least_decoder_ms(self, decoder: Strategy) -> float:
        """No strategy with this decoder and whatever arrangement is below. Raises as least_ms."""
        return self._least_part_ms(decoder, self._decoder)

    def least_share_ms(self, part: Strategy, modalities: Collection[str]) -> float:
        """Of one sample, what devices spend together at least on these modalities with the costs of such sizes. Their
        step is not below that times all samples over their devices. Raises as least_ms."""
        total_ms, _ = self._sum_part_ms(part, modalities)
        return total_ms * part.tp * part.cp / part.mbs * (1.0 - ROUNDING_FRACTION)

    def _least_part_ms(self, part: Strategy, modalities: Collection[str]) -> float:
        total_ms, largest_ms = self._sum_part_ms(part, modalities)
        each_ms = max(total_ms / part.pp, largest_ms)
        number = self._costs.job.workload.global_batch_size // (part.dp * part.mbs)
        return each_ms * number * (1.0 - ROUNDING_FRACTION)

    def _sum_part_ms(self, part: Strategy, modalities: Collection[str]) -> tuple[float, float]:
        """What all blocks of these modalities take for one micro-batch, and the largest of them."""
        pairs = zip(self._costs.chain.blocks, self._costs.look_up(part), strict=True)
        held = [(b.count, _sum_passes(cost)) for b, cost in pairs if b.modality in modalities]
        return sum(count * passes_ms for count, passes_ms in held), max(passes_ms for _, passes_ms in held)

    def _sum_scale(self, modality: str, num_microbatches: int) -> float:
        """The factors on a block's times, summed over all micro-batches."""
        scale = self._costs.job.workload.micro_batch_scale.get(modality)
        if not scale:
            return float(num_microbatches)
        rounds, rest = divmod(num_microbatches, len(scale))
        return rounds * sum(scale) + sum(scale[:rest])


def _fills_and_drains(strategy: Strategy) -> bool:
    """Whether no stage begins before a forward, nor ends before a backward, has passed all stages before it."""
    return strategy.vpp == 1 and strategy.schedule in OF_MICROBATCHES


def least_path_ms(total_ms: float, num_stages: int, num_microbatches: int) -> float:
    """The least step of stages that fill and drain, over all ways to share total_ms of equal micro-batches out.

    A stage with t of each of M micro-batches takes M · t, and the passes of one on all stages before it: with S before,
    the least step C leaves it t = (C - S) / M, so a fraction (1 - 1/M)^P of C is left after P stages, and the sum of
    all t is C · (1 - (1 - 1/M)^P).
    """
    return total_ms / num_microbatches / (1.0 - (1.0 - 1.0 / num_microbatches) ** num_stages)


def _sum_passes(cost: BlockCost) -> float:
    return cost.forward_ms + cost.backward_input_ms + cost.backward_weight_ms
