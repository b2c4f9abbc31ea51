"""BatchBalancer: deals the samples of a global batch over replicas and micro-batches by the costs of a plan's stages.

Micro-batches are packed under a cap of tokens and ordered for the plan's own schedule; pipeline/balance does it on
numbers alone. An encoder with sizes of its own is a part of the pipeline too: on ranks of its own its first stages, at
their own pace; on the decoder's, in phases, in bubbles, as prefetch or inline, an even part of every stage.
Re-packing leaves the gradient as it is where the loss is the mean over all tokens of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.garbage import collection_waits
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.balance.deal import Bounds, deal
from mm_autoparallel.pipeline.balance.law import Law, bound_step
from mm_autoparallel.pipeline.schedules.catalog import GIVEN, OF_JOBS
from mm_autoparallel.planner.balanced_checks import check_cost, read_dealing, read_samples, whole_number
from mm_autoparallel.planner.bare_plan import parse_bare_plan
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.samples.sample import Sample, SampleCost
from mm_autoparallel.samples.table import UNSAID, add_up

if TYPE_CHECKING:
    from mm_autoparallel.planner.balanced_stream import Exchange

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Payload = TypeVar("Payload")

Ranks = Sequence[Sequence[Sequence[int]]]
"""A dealing: of each replica, of each micro-batch in the order it runs, the numbers of its samples."""


@dataclass(frozen=True)
class Assignment:
    """A dealing and its step. ranks: see Ranks. lower_bound_ms: no dealing of these samples over as many replicas and
    micro-batches has a shorter step."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    predicted_ms: float
    lower_bound_ms: float

    @property
    def regret(self) -> float:
        """By which fraction the step lies above the bound; the best dealing's may do so too."""
        return self.predicted_ms / self.lower_bound_ms - 1.0 if self.lower_bound_ms > 0.0 else 0.0


class BatchBalancer:
    """Deals global batches for one plan. Every process that asks gets the same answer: nothing is timed or random."""

    def __init__(
        self,
        plan: Plan | str | Path | Mapping[str, Any],
        *,
        dp: int | None = None,
        micro_batches: int | None = None,
        token_cap: int,
        cost: SampleCost | None = None,
    ) -> None:
        """plan: a Plan, its result file, or what that file holds. dp, micro_batches: replicas, and micro-batches of
        each; None: as the plan has them. token_cap: of a micro-batch. cost: what samples take.

        Raises PlanError where the plan is malformed, or has a part that `cost` does not cover.
        """
        if cost is None:
            raise PlanError(
                "a plan says what its own micro-batches cost, and not what a sample does; give "
                "cost=SampleCost(image_ms=(a2, a1, a0), token_ms=(b2, b1)), of the whole encoder and the whole decoder"
            )
        check_cost(cost)
        replicas = None if dp is None else whole_number("dp", dp, least=1)
        each = None if micro_batches is None else whole_number("micro_batches", micro_batches, least=1)
        self.token_cap = whole_number("token_cap", token_cap, least=1)
        self.plan, self.cost = _read(plan, each), cost
        self.dp = replicas or self.plan.strategy.dp
        self.micro_batches = each or self.plan.num_microbatches
        self.law, self.encoder_factor = _law_of(self.plan, cost), _encoder_factor(self.plan.strategy)
        try:
            self.law.tasks(self.micro_batches)
        except (JobError, PlanError) as error:
            raise PlanError(f"the plan's schedule does not run {self.micro_batches} micro-batches: {error}") from None

    @collection_waits()
    def assign(self, samples: Sequence[Sample]) -> Assignment:
        """Deal `samples`: each into exactly one micro-batch, none of which is empty or holds more than token_cap.

        Raises PlanError where a sample is malformed or above the cap, they are fewer than the micro-batches, or no
        packing within the cap was found.
        """
        ms, tokens = self._measure(samples)
        bounds = Bounds(self.dp, self.micro_batches, self.token_cap)
        self._check_cap(tokens)
        if len(tokens) < bounds.num_bins:
            raise PlanError(
                f"{len(tokens)} samples are fewer than the {bounds.num_bins} micro-batches of DP {self.dp} x "
                f"{self.micro_batches}, and none may be empty; give more samples or fewer micro-batches"
            )
        if tokens.sum() > bounds.num_bins * self.token_cap:
            raise PlanError(
                f"the samples have {tokens.sum()} tokens, and {bounds.num_bins} micro-batches of token_cap "
                f"{self.token_cap} hold {bounds.num_bins * self.token_cap}; raise token_cap or micro_batches"
            )
        bin_of = deal(self.law, ms, tokens, bounds)
        if bin_of is None:
            raise PlanError(
                f"no packing of {len(tokens)} samples, {tokens.sum()} tokens, into {bounds.num_bins} micro-batches of "
                f"at most {self.token_cap} tokens was found; raise token_cap or micro_batches"
            )
        bins: list[list[int]] = [[] for _ in range(bounds.num_bins)]
        for i, b in enumerate(bin_of.tolist()):
            bins[b].append(i)
        by_replica = (bins[first : first + self.micro_batches] for first in range(0, len(bins), self.micro_batches))
        ranks = tuple(tuple(map(tuple, replica)) for replica in by_replica)
        predicted_ms = self._play(ranks, ms)
        bound_ms = min(bound_step(self.law, ms, self.dp), predicted_ms)  # above it by rounding alone
        return Assignment(ranks, predicted_ms, bound_ms)

    def evaluate(self, ranks: Ranks, samples: Sequence[Sample]) -> float:
        """The step in ms of any dealing, of a part of it too: the longest of its replicas'; caps are not looked at.

        Raises PlanError where a number is no sample's or stands there twice, or a replica has no micro-batch.
        """
        ms = self._measure(samples)[0]
        return self._play(read_dealing(ranks, len(samples)), ms)

    def wrap(
        self, iterator: Iterable[Sequence[tuple[Sample, Payload]]], exchange: Exchange[Payload]
    ) -> Iterator[list[Payload]]:
        """On line: this replica's micro-batches, one after the other, of global batches of which each replica reads a
        part.

        iterator: each item is this replica's part of a global batch, samples with what they hold. exchange: how the
        replicas meet (`hooks.RankExchange` over torch.distributed). All replicas take as many items. Raises PlanError
        where there are not dp of them, and as `assign` does, on all of them alike.
        """
        from mm_autoparallel.planner.balanced_stream import balanced_stream

        self.check_replica(exchange.rank, exchange.size)
        return balanced_stream(self, iterator, exchange)

    def check_replica(self, rank: int, size: int) -> None:
        """Raise PlanError where `rank` of `size` is none of this balancer's replicas."""
        if size != self.dp or whole_number("rank", rank) >= size:
            raise PlanError(f"this is rank {rank} of {size} replicas, and the balancer deals to {self.dp}: give its dp")

    def check_samples(self, samples: Sequence[Sample]) -> None:
        """Raise PlanError, naming it, where a sample is malformed or above the token cap."""
        self._check_cap(self._measure(samples)[1])

    def _measure(self, samples: Sequence[Sample]) -> tuple[Floats, Ints]:
        """Load [n, 2] and tokens [n], as Sample and SampleCost have them. Raises PlanError naming a malformed one."""
        table = read_samples(samples)
        unsaid = np.flatnonzero((table.num_recordings > 0) & (table.tokens == UNSAID))
        if len(unsaid):
            raise PlanError(
                f"sample {unsaid[0]} has audio, and what that becomes of its sequence is not known here; give its "
                "tokens, of the whole sequence"
            )
        tokens = table.num_tokens(self.cost.merge_tokens)
        encoder_ms = add_up(self.encoder_factor * self.cost.images_ms(table.patches.astype(np.float64)), table.images)
        if encoder_ms.any() and not any(self.law.layers[0]):
            raise PlanError(f"sample {int(np.argmax(encoder_ms))} has images, and the plan has no vision layers")
        return np.column_stack([encoder_ms, self.cost.sequences_ms(tokens.astype(np.float64))]), tokens

    def _check_cap(self, tokens: Ints) -> None:
        largest = int(np.argmax(tokens)) if len(tokens) else 0
        if len(tokens) and tokens[largest] > self.token_cap:
            raise PlanError(
                f"sample {largest} has {tokens[largest]} tokens, and token_cap is {self.token_cap}; leave it out, cut "
                "it, or raise the cap"
            )

    def _play(self, ranks: Ranks, ms: Floats) -> float:
        micro_batches = [micro_batch for replica in ranks for micro_batch in replica]
        sizes = [len(micro_batch) for micro_batch in micro_batches]
        dealt = np.fromiter(chain.from_iterable(micro_batches), np.int64, sum(sizes))
        of = np.repeat(np.arange(len(sizes)), sizes)
        held = np.column_stack([np.bincount(of, ms[dealt, part], len(sizes)) for part in range(2)])
        lengths = np.array([len(replica) for replica in ranks])
        begins = np.cumsum(lengths) - lengths
        try:
            return max(
                float(self.law.replica_steps_ms(held[begins[lengths == n, None] + np.arange(n)]).max())
                for n in np.unique(lengths).tolist()
            )
        except (JobError, PlanError) as error:
            raise PlanError(f"the plan's schedule does not run this dealing: {error}") from None


def _read(plan: Plan | str | Path | Mapping[str, Any], micro_batches: int | None) -> Plan:
    """The plan, of a result file too that says no batch where micro_batches does. Raises PlanError."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, (str, Path)):
        document, where = read_document(Path(plan), "plan", PlanError), f"plan {plan}"
    elif isinstance(plan, Mapping):
        document, where = dict(plan), "the plan"
    else:
        raise PlanError(f"plan is {describe_value(plan)}; a Plan, its result file or that file's content is expected")
    document.setdefault("layer_recompute", {})
    sizes = document.get("parallel_config")
    if micro_batches is None and "global_batch_size" not in document:
        raise PlanError("global_batch_size is missing; give it there, or micro_batches", where=where)
    if micro_batches is not None and "global_batch_size" not in document and isinstance(sizes, Mapping):
        share = [sizes.get(name) for name in ("DP", "MBS")]
        document["global_batch_size"] = micro_batches * math.prod(n if isinstance(n, int) else 1 for n in share)
    return parse_bare_plan(document, where)


def _law_of(plan: Plan, cost: SampleCost) -> Law:
    strategy = plan.strategy
    if strategy.arrangement is not None and strategy.arrangement.others:
        raise PlanError(
            f"layout is {strategy.arrangement.name}, a module for each encoder, and plans of one encoder are balanced; "
            "plan one with search.layouts: chain"
        )
    if strategy.schedule not in (*OF_JOBS, GIVEN):
        raise PlanError(f"schedule is {strategy.schedule}; plans are balanced that run {', '.join(OF_JOBS)}")
    held = [modality for modality, counts in plan.layers.items() if any(counts)]
    if strategy.arrangement is not None and not strategy.arrangement.is_cached:
        held += [part for part in strategy.arrangement.encoder.parts if part not in held]
    others = [modality for modality in held if modality not in ("vision", "text")]
    if others:
        raise PlanError(
            f"the plan has layers of {', '.join(others)}, and a SampleCost covers vision and text alone; what those "
            "cost would be left out"
        )
    none, even = ((number,) * (strategy.pp * strategy.vpp) for number in (0, 1))
    is_away = strategy.arrangement is not None and strategy.arrangement.away
    return Law(
        schedule=strategy.schedule,
        num_stages=strategy.pp,
        num_chunks=strategy.vpp,
        layers=(even if is_away else plan.layers.get("vision", none), plan.layers.get("text", none)),
        frozen=(cost.encoder_frozen, False),
        orders=() if is_away else plan.stage_orders,
    )


def _encoder_factor(strategy: Strategy) -> float:
    """How many times as long an encoder takes with each micro-batch of a decoder's replica as on the ranks of one of
    that one's stages: on ranks of its own it may have fewer, and several replicas to serve; cached it does not run."""
    one, decoder = strategy.arrangement, strategy.of_decoder()
    if one is None or not (one.apart or one.is_cached):
        return 1.0
    if one.is_cached:
        return 0.0
    return decoder.tp * decoder.cp * decoder.dp / (one.encoder.tp * one.encoder.cp * one.encoder.dp)
