"""Branches: of a space, all arrangements of one kind beside one decoder, which are listed when their turn comes.

A decoder goes with hundreds of encoders, and most decoders are too slow or too large by themselves; of a large cluster
most numbers of devices are, whatever decoder they run. So a bough, all branches on so many devices, is bounded by the
costs of blocks alone, as shares of its devices' time, and where that leaves it below the best step known, it is parted
into boughs of one shape, and these are listed likewise. A branch is bounded by its decoder: by blocks, then by paths
and memory; and then its strategies join the search.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.least_step import LeastSteps
from mm_autoparallel.model.costs.stage import build_decoder
from mm_autoparallel.model.job.arrangement_law import arrangement_reasons, beside_reasons
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement.bounds.bound import overfull
from mm_autoparallel.pipeline.placement.bounds.overflow import least_overflow_bytes
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.planner.search.arrangements import Bough, Branch, Shape
from mm_autoparallel.planner.search.candidate import Bounded, Candidate
from mm_autoparallel.planner.search.space import decoders_of, divisors, judge
from mm_autoparallel.planner.search.thinning import Thinning

#: To name one that was never listed by its first lawful strategy. Measured on two cores, rounded up.
NAMING_S = 1.5e-4


@dataclass(eq=False)
class _Open:
    """A bough or a branch that is not listed yet. bound_ms: no strategy of it is below. is_bounded: by paths and memory
    too. reason: why nothing of it fits, by overflow_bytes; empty: something may."""

    part: Bough | Branch
    bound_ms: float
    is_bounded: bool = False
    is_listed: bool = False
    reason: str = ""
    overflow_bytes: float = 0.0

    def strategies(self) -> Iterator[Strategy]:
        branches = self.part.branches() if isinstance(self.part, Bough) else (self.part,)
        return (strategy for branch in branches for strategy in branch.strategies())

    @property
    def name(self) -> str:
        """`all colocated layouts beside this decoder`."""
        if not isinstance(self.part, Bough):
            return f"all {self.part.kind} layouts beside this decoder"
        (tp, cp, mbs), *others = self.part.shapes
        shape = "" if others else f" of TP {tp} CP {cp} MBS {mbs}"
        return f"all {self.part.kind} layouts beside {self.part.num_devices} devices of a decoder{shape}"


class _Shares:
    """The least that devices spend together on one sample of a modality, by what the costs of its blocks hang on."""

    def __init__(self, costs: CostModel, steps: LeastSteps) -> None:
        self._job, self._steps = costs.job, steps
        self._decodes, self._names = costs.chain.modalities[-1], costs.chain.modalities[:-1]
        self._by_shape: dict[Shape, dict[str, float]] = {}
        self._of_encoders: dict[object, dict[str, float]] = {}

    def of_shape_ms(self, shape: Shape) -> dict[str, float]:
        """Of a decoder of such a shape, and of the encoders beside it; 0 where nothing is known of one of them."""
        if shape not in self._by_shape:
            decoders = list(decoders_of(self._job, shape))
            found = [self.of_encoders_ms(decoder) for decoder in decoders]
            least = {name: min(each[name] for each in found) for name in self._names}
            decoder_ms = min(self._share_ms(decoder, self._decodes) for decoder in decoders)
            self._by_shape[shape] = least | {self._decodes: decoder_ms}
        return self._by_shape[shape]

    def of_encoders_ms(self, decoder: Strategy) -> dict[str, float]:
        """Of each encoder beside a decoder, whatever its sizes."""
        chosen = decoder.beside(pp=1, tp=1, dp=1, mbs=1), decoder.cp_kind
        if chosen not in self._of_encoders:
            widths, samples = divisors(self._job.cluster.max_tensor_parallel), self._job.workload.global_batch_size
            sizes = product(widths, divisors(samples), self._job.search.encoder_cp)
            every = [decoder.beside(1, tp, 1, mbs, cp) for tp, mbs, cp in sizes]
            least = {name: min(self._share_ms(encoder, name) for encoder in every) for name in self._names}
            self._of_encoders[chosen] = least
        return self._of_encoders[chosen]

    def _share_ms(self, part: Strategy, modality: str) -> float:
        try:
            return self._steps.least_share_ms(part, (modality,))
        except ProfileError:  # such sizes may be unlawful, and nobody measured them
            return 0.0


class Branches:
    """Those of one search, the least bound first."""

    def __init__(self, costs: CostModel, steps: LeastSteps, boughs: Sequence[Bough]) -> None:
        self._costs, self._steps, self._shares = costs, steps, _Shares(costs, steps)
        self._thinning = Thinning(costs)
        self._open: list[_Open] = []
        self._heap: list[tuple[float, int]] = []
        self._num_listed = 0
        for bough in boughs:
            self._push_bough(bough)

    def _push_bough(self, bough: Bough) -> None:
        shares = map(self._shares.of_shape_ms, bough.shapes)
        self._push(_Open(bough, min(self._bound_ms(bough, each) for each in shares)))

    def _push(self, one: _Open) -> None:
        heapq.heappush(self._heap, (one.bound_ms, len(self._open)))
        self._open.append(one)

    def _bound_ms(self, part: Bough | Branch, shares_ms: dict[str, float]) -> float:
        """No step is below, by what each sample takes of its devices' time, modality by modality."""
        batch, cached = self._costs.job.workload.global_batch_size, self._costs.job.workload.cached_features
        apart_ms = sum(share_ms for name, share_ms in shares_ms.items() if name in part.apart)
        shared_ms = sum(share_ms for name, share_ms in shares_ms.items() if name not in (*part.apart, *cached))
        return batch * max(shared_ms / part.num_devices, apart_ms / max(part.num_apart, 1))

    @property
    def least_ms(self) -> float:
        """No strategy that is not listed is below; infinite where all are."""
        return self._heap[0][0] if self._heap else math.inf

    def num_open(self, worth_ms: float) -> int:
        """Those that may hold what is below it."""
        return sum(bound_ms < worth_ms for bound_ms, _ in self._heap)

    @property
    def num_unlisted(self) -> int:
        return len(self._open) - self._num_listed

    @property
    def naming_s(self) -> float:
        """How long `candidates` takes in the end."""
        return NAMING_S * self.num_unlisted

    def advance(self, enough_ms: float, should_stop: Callable[[], bool]) -> Iterator[tuple[Strategy, float]]:
        """Part the bough of the least bound by shapes, or list its branches where it has one, or bound such a branch
        better, or list its strategies, each with what none of them is below. enough_ms: bounds above that are not
        looked for."""
        _, number = heapq.heappop(self._heap)
        one = self._open[number]
        if isinstance(one.part, Bough):
            self._list(one)
            if len(one.part.shapes) > 1:
                for bough in one.part.by_shape():
                    self._push_bough(bough)
            else:
                for branch in one.part.branches():
                    self._push(_Open(branch, max(one.bound_ms, self._bound_branch(branch))))
            return
        first = None if one.is_bounded else self._first_of(one)
        if first is None:
            self._list(one)
            branch = one.part
            several = (self._thinning.combine(branch.decoder, options) for options in branch.several())
            for strategy in filter(branch.is_meant, chain(branch.together(), chain.from_iterable(several))):
                yield strategy, one.bound_ms
            return
        one.is_bounded = True
        if not self._costs.overfull_reason(first.of_decoder()):
            problem = build_decoder(self._costs, first)
            over_bytes = least_overflow_bytes(problem)
            if over_bytes > 0.0:
                bound = overfull(problem, over_bytes, None, False)
            else:
                bound = bound_step(problem, should_stop=should_stop, enough_ms=enough_ms)
            one.reason, one.overflow_bytes = bound.reason, bound.overflow_bytes
            one.bound_ms = max(one.bound_ms, bound.step_ms)
        if not one.reason:
            heapq.heappush(self._heap, (one.bound_ms, number))

    def _list(self, one: _Open) -> None:
        one.is_listed = True
        self._num_listed += 1

    def _bound_branch(self, branch: Branch) -> float:
        decoder = branch.decoder
        shares_ms = self._shares.of_encoders_ms(decoder)
        decodes = self._costs.chain.modalities[-1]
        shares_ms = shares_ms | {decodes: self._steps.least_share_ms(decoder, (decodes,))}
        return max(self._steps.least_decoder_ms(decoder), self._bound_ms(branch, shares_ms))

    def _first_of(self, one: _Open) -> Strategy | None:
        """Its first lawful strategy; None where it has none."""
        if isinstance(one.part, Branch) and one.part.apart and next(beside_reasons(one.part.decoder, False), None):
            return None
        return next(filter(self._is_lawful, one.strategies()), None)

    def _is_lawful(self, strategy: Strategy) -> bool:
        """Whether a branch's strategy is, whose decoder is by itself."""
        job, arrangement = self._costs.job, strategy.arrangement
        assert arrangement is not None
        if any(one.in_chain for one in arrangement.each):  # the decoder has these encoders too
            return judge(job, strategy).reason is None
        return next(arrangement_reasons(job.model, job.cluster, job.workload, strategy), None) is None

    def candidates(self, cutoff_ms: float, worth_ms: float, stopped: str) -> Iterator[Candidate]:
        """The end of each bough and branch that was never listed, named by its first lawful strategy. worth_ms: what
        is not below it is as good as the cutoff."""
        batch = self._costs.job.workload.global_batch_size
        for one in self._open:
            first = None if one.is_listed else self._first_of(one)
            if first is None:
                continue
            count = first.num_microbatches(batch)
            if one.reason:
                over = one.overflow_bytes
                told = f"{one.name}: it does not fit by itself: {one.reason}"
                yield Candidate(first, "infeasible", told, count, overflow_bytes=over, bounded_by="memory")
                continue
            by: Bounded = "paths" if one.is_bounded else "block costs"
            is_closed = one.bound_ms >= worth_ms
            told = (
                f"{one.name}: they take {one.bound_ms:.3f} ms at least, and {cutoff_ms:.3f} ms is reached"
                if is_closed
                else f"{one.name}: the search ended first: {stopped}"
            )
            yield Candidate(
                first,
                "dominated" if is_closed else "unfinished",
                told,
                count,
                bound_ms=one.bound_ms,
                bounded_by=by,
                cutoff_ms=cutoff_ms if is_closed else None,
            )
