"""Branches: of a space, all arrangements of one kind beside one decoder, which are listed when their turn comes.

A decoder goes with hundreds of encoders, and most decoders are too slow or too large by themselves. So a branch is
bounded by its decoder alone, first by the costs of its blocks, then by paths and memory, and its strategies join the
search only where that leaves it below the best step known.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.least_step import LeastSteps
from mm_autoparallel.model.costs.stage import build_decoder
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.planner.search.arrangements import Branch
from mm_autoparallel.planner.search.candidate import Bounded, Candidate
from mm_autoparallel.planner.search.space import judge


@dataclass(eq=False)
class _Open:
    """A branch that is not listed yet. bound_ms: no strategy of it is below. is_bounded: by paths and memory too.
    reason: why nothing of it fits, by overflow_bytes; empty: something may."""

    branch: Branch
    bound_ms: float
    is_bounded: bool = False
    reason: str = ""
    overflow_bytes: float = 0.0


class Branches:
    """Those of one search, the least bound first."""

    def __init__(self, costs: CostModel, steps: LeastSteps, branches: tuple[Branch, ...]) -> None:
        self._costs = costs
        self._open = [_Open(branch, steps.least_decoder_ms(branch.decoder)) for branch in branches]
        self._heap = [(one.bound_ms, number) for number, one in enumerate(self._open)]
        heapq.heapify(self._heap)
        self._listed: set[int] = set()

    @property
    def least_ms(self) -> float:
        """No strategy that is not listed is below; infinite where all are."""
        return self._heap[0][0] if self._heap else math.inf

    def num_open(self, worth_ms: float) -> int:
        """Those that may hold what is below it."""
        return sum(bound_ms < worth_ms for bound_ms, _ in self._heap)

    @property
    def num_unlisted(self) -> int:
        return len(self._open) - len(self._listed)

    def advance(self, should_stop: Callable[[], bool]) -> Iterator[Strategy]:
        """Bound the branch of the least bound better, or list its strategies."""
        _, number = heapq.heappop(self._heap)
        one = self._open[number]
        if one.is_bounded:
            self._listed.add(number)
            yield from one.branch.strategies()
            return
        one.is_bounded = True
        first = self._first_of(one.branch)
        if first is None:
            self._listed.add(number)
            yield from one.branch.strategies()
            return
        if not self._costs.overfull_reason(first.of_decoder()):
            bound = bound_step(build_decoder(self._costs, first), should_stop=should_stop)
            one.reason, one.overflow_bytes = bound.reason, bound.overflow_bytes
            one.bound_ms = max(one.bound_ms, bound.step_ms)
        if not one.reason:
            heapq.heappush(self._heap, (one.bound_ms, number))

    def _first_of(self, branch: Branch) -> Strategy | None:
        """Its first lawful strategy; None where it has none."""
        return next((one for one in branch.strategies() if judge(self._costs.job, one).reason is None), None)

    def candidates(self, cutoff_ms: float, worth_ms: float, stopped: str) -> Iterator[Candidate]:
        """The end of each branch that was never listed, named by its first lawful strategy. worth_ms: what is not
        below it is as good as the cutoff."""
        batch = self._costs.job.workload.global_batch_size
        for number, one in enumerate(self._open):
            first = None if number in self._listed else self._first_of(one.branch)
            if first is None:
                continue
            what = f"all {one.branch.kind} layouts beside this decoder"
            count = first.num_microbatches(batch)
            if one.reason:
                over = one.overflow_bytes
                told = f"{what}: it does not fit by itself: {one.reason}"
                yield Candidate(first, "infeasible", told, count, overflow_bytes=over, bounded_by="memory")
                continue
            by: Bounded = "paths" if one.is_bounded else "block costs"
            is_closed = one.bound_ms >= worth_ms
            told = (
                f"{what}: by itself it takes {one.bound_ms:.3f} ms at least, and {cutoff_ms:.3f} ms is reached"
                if is_closed
                else f"{what}: the search ended first: {stopped}"
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
