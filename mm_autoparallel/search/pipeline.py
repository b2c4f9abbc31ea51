"""Pipeline: strategies that have one problem in common, and what is known of it while a search goes on.

What it takes at least is known from its blocks' costs alone before its problem is built, and its problem is forgotten
as soon as nothing more about it is of interest: of tens of thousands of strategies few are ever held as problems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.placement.place import OPTIMAL_GAP_FRACTION
from mm_autoparallel.problem import Placement, Problem
from mm_autoparallel.search.bounds.step import bound_step, work_bound_ms
from mm_autoparallel.search.candidate import Bounded, Candidate
from mm_autoparallel.search.space import describe_strategy, strategy_key
from mm_autoparallel.search.task import Answer

#: Whether it was placed, whether it has chunks, its bound in ms, its number.
Rank = tuple[int, bool, float, int]


@dataclass(eq=False)
class Pipeline:
    """One problem of the search.

    number: the place of its first strategy in the space; how it ranks where bounds are equal. bound_ms: no placement is
    below; bounded_by: what says so. problem: None before it is built, and once nothing more is of interest; key: its
    content_key. cached_s: time that earlier searches spent on it.
    num_refinements: which bounds it has had after that of its blocks' costs (1: `work_bound_ms`, 2: `bound_step`, 3:
    sharpened). visit: when it was first placed, -1 if never. num_slices: how often it was placed. overflow_suffices:
    limits higher by overflow_bytes would do. twin: the one that has the same problem and all its strategies.
    betters: pipelines that it cannot beat; better: the one of them whose bound it has. waiting: those that it keeps
    waiting, as one of their betters; is_waiting: one of its own does so with it. given_up: every process that placed it
    died. cutoff_ms: the cutoff when it was closed.
    """

    number: int
    strategies: list[Strategy]
    num_microbatches: int
    bound_ms: float
    bounded_by: Bounded = "block costs"
    problem: Problem | None = None
    key: str = ""
    num_refinements: int = 0
    visit: int = -1
    num_slices: int = 0
    step_ms: float = np.inf
    placement: Placement | None = None
    infeasible: bool = False
    reason: str = ""
    overflow_bytes: float = 0.0
    overflow_suffices: bool = False
    solve_s: float = 0.0
    cached_s: float = 0.0
    twin: Pipeline | None = None
    betters: list[Pipeline] = field(default_factory=list)
    better: Pipeline | None = None
    waiting: list[Pipeline] = field(default_factory=list)
    is_waiting: bool = False
    given_up: bool = False
    cutoff_ms: float | None = None

    @property
    def has_chunks(self) -> bool:
        return self.strategies[0].vpp > 1

    @property
    def is_refined(self) -> bool:
        return self.num_refinements == (3 if self.has_chunks else 2)

    @property
    def rank(self) -> Rank:
        """The next to visit has the least: once all had their turn, the one that holds the bound of the space down."""
        return (min(self.num_slices, 1), self.has_chunks, self.bound_ms, self.number)

    @property
    def name(self) -> str:
        return describe_strategy(self.strategies[0])

    def build(self, problem: Problem, key: str) -> None:
        """Take the problem, and the bound that its figures give."""
        self.problem, self.key, self.num_refinements = problem, key, 1
        self.raise_bound(work_bound_ms(problem), "work")

    def join(self, twin: Pipeline) -> None:
        """Be one with another pipeline of the same problem."""
        self.twin = twin
        twin.strategies = sorted(twin.strategies + self.strategies, key=strategy_key)

    def refine(self, should_stop: Callable[[], bool]) -> None:
        """Raise the bound by the next of the better ones, which may show that nothing fits."""
        assert self.problem is not None
        self.num_refinements += 1
        bound = bound_step(self.problem, self.num_refinements > 2, should_stop)
        if bound.reason:
            self.infeasible, self.reason = True, bound.reason
            self.bounded_by = "memory" if bound.overflow_bytes or bound.by_host else "layers"
            self.overflow_bytes, self.overflow_suffices = bound.overflow_bytes, bound.exact
        else:
            self.raise_bound(bound.step_ms, "mixture of paths" if self.num_refinements > 2 else "paths")

    def learn_from_betters(self) -> None:
        """Take the bounds of the pipelines that it cannot beat."""
        for better in self.betters:
            if better.infeasible and not self.infeasible:
                self.infeasible, self.bounded_by, self.better = True, "another strategy", better
                self.reason = f"{better.name} needs no more bytes anywhere and does not fit: {better.reason}"
            elif self.raise_bound(min(better.bound_ms, self.step_ms), "another strategy"):
                self.better = better

    def raise_bound(self, bound_ms: float, bounded_by: Bounded) -> bool:
        """Whether the bound was lower until now."""
        if bound_ms <= self.bound_ms:
            return False
        self.bound_ms, self.bounded_by = bound_ms, bounded_by
        return True

    def take(self, answer: Answer) -> None:
        """Learn from having been placed once more, or from a better placement on the way."""
        # the last word on an equally fast placement counts: no layer is in a mode there without need
        is_taken = answer.step_ms <= self.step_ms if answer.is_last else answer.step_ms < self.step_ms
        if answer.placement is not None and is_taken:
            self.step_ms, self.placement = answer.step_ms, answer.placement
        if not answer.is_last:
            return
        self.solve_s += answer.solve_s
        self.num_slices += 1
        self.reason, self.given_up = answer.reason, bool(answer.reason) and not answer.infeasible
        if answer.infeasible:
            self.infeasible, self.bounded_by = True, "placing"
            self.overflow_bytes, self.overflow_suffices = answer.overflow_bytes, answer.overflow_bytes > 0
            return
        self.raise_bound(answer.lower_bound_ms, "placing")
        self.bound_ms = min(self.bound_ms, self.step_ms)

    def is_closed(self, cutoff_ms: float, gap_fraction: float) -> bool:
        """Whether nothing more about it is of interest: no placement is below the cutoff, or the best one is known."""
        keep = 1.0 - max(gap_fraction, OPTIMAL_GAP_FRACTION)
        return self.infeasible or self.bound_ms >= keep * min(cutoff_ms, self.step_ms)

    def is_settled(self, cutoff_ms: float, gap_fraction: float) -> bool:
        """Whether no more will become known of it."""
        return self.given_up or self.is_closed(cutoff_ms, gap_fraction)

    def close(self, cutoff_ms: float) -> None:
        """Note what the cutoff was, and forget the problem unless a placement of it was found."""
        if self.cutoff_ms is None:
            self.cutoff_ms = cutoff_ms
        if self.placement is None:
            self.problem = None

    def candidate_of(self, strategy: Strategy, cutoff_ms: float, gap_fraction: float, stopped: str) -> Candidate:
        """The end of one of its strategies; cutoff_ms is then the step of the last of the best plans."""
        found_ms = self.step_ms if self.placement is not None else None
        closed = self.is_closed(cutoff_ms, gap_fraction)
        candidate = Candidate(
            strategy=strategy,
            status="unfinished",
            num_microbatches=self.num_microbatches,
            bound_ms=None if self.infeasible else self.bound_ms,
            step_ms=found_ms,
            overflow_bytes=self.overflow_bytes,
            solve_s=self.solve_s,
            bounded_by=self.bounded_by,
            cutoff_ms=(cutoff_ms if self.cutoff_ms is None else self.cutoff_ms) if closed else None,
            was_placed=self.visit >= 0,
        )
        first = self.strategies[0]
        twin = "" if strategy is first else f"; the same pipeline as {describe_strategy(first)}"
        if self.infeasible:
            return replace(candidate, status="infeasible", reason=self.reason + twin)
        if found_ms is not None and self.is_closed(np.inf, gap_fraction):
            return replace(candidate, status="solved", reason=f"its best placement takes {found_ms:.3f} ms{twin}")
        if closed:
            reason = (
                f"{self._who_says()} no placement is below {self.bound_ms:.3f} ms, and {cutoff_ms:.3f} ms is reached"
            )
            return replace(candidate, status="dominated", reason=reason + twin)
        return replace(candidate, reason=(self.reason or f"the search ended first: {stopped}") + twin)

    def _who_says(self) -> str:
        if self.bounded_by == "placing":
            return "placing it proved that"
        if self.bounded_by == "another strategy":
            assert self.better is not None
            return f"no time or byte of it is below that of {self.better.name}, of which"
        return f"its bound ({self.bounded_by}) says that"
