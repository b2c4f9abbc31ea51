"""Pipeline: strategies that have one problem in common, and what is known of it while a search goes on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.placement.place import OPTIMAL_GAP_FRACTION
from mm_autoparallel.problem import Placement, Problem
from mm_autoparallel.search.bounds import bound_step, work_bound_ms
from mm_autoparallel.search.candidate import Candidate
from mm_autoparallel.search.space import describe_strategy
from mm_autoparallel.search.task import Answer

#: How often it was placed, whether it has chunks, its bound in ms, its order.
Rank = tuple[int, bool, float, int]


@dataclass(eq=False)
class Pipeline:
    """One problem of the search.

    order: how it ranks where bounds are equal, and its name. bound_ms: no placement is below. num_refinements: which
    bounds it has had after the first (1: `bound_step`, 2: sharpened). visit: when it was first placed, -1 if never.
    num_slices: how often it was placed. overflow_suffices: limits higher by overflow_bytes would do.
    """

    order: int
    problem: Problem
    strategies: list[Strategy] = field(default_factory=list)
    bound_ms: float = 0.0
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

    def __post_init__(self) -> None:
        self.bound_ms = work_bound_ms(self.problem)

    @property
    def has_chunks(self) -> bool:
        return self.problem.num_chunks > 1

    @property
    def is_refined(self) -> bool:
        return self.num_refinements == (2 if self.has_chunks else 1)

    @property
    def rank(self) -> Rank:
        """The next to visit has the least."""
        return (self.num_slices, self.has_chunks, self.bound_ms, self.order)

    def refine(self) -> None:
        """Raise the bound by the next of the better ones, which may show that nothing fits."""
        self.num_refinements += 1
        bound = bound_step(self.problem, sharpen=self.num_refinements > 1)
        if bound.reason:
            self.infeasible, self.reason = True, bound.reason
            self.overflow_bytes, self.overflow_suffices = bound.overflow_bytes, bound.exact
        else:
            self.bound_ms = max(self.bound_ms, bound.step_ms)

    def take(self, answer: Answer) -> None:
        """Learn from having been placed once more."""
        self.solve_s += answer.solve_s
        self.num_slices += 1
        self.reason = answer.reason
        if answer.infeasible:
            self.infeasible = True
            self.overflow_bytes, self.overflow_suffices = answer.overflow_bytes, answer.overflow_bytes > 0
            return
        if answer.placement is not None and answer.step_ms < self.step_ms:
            self.step_ms, self.placement = answer.step_ms, answer.placement
        self.bound_ms = min(max(self.bound_ms, answer.lower_bound_ms), self.step_ms)

    def is_closed(self, cutoff_ms: float, gap_fraction: float) -> bool:
        """Whether nothing more about it is of interest: no placement is below the cutoff, or the best one is known."""
        keep = 1.0 - max(gap_fraction, OPTIMAL_GAP_FRACTION)
        return self.infeasible or self.bound_ms >= keep * min(cutoff_ms, self.step_ms)

    def candidate_of(self, strategy: Strategy, cutoff_ms: float, gap_fraction: float, stopped: str) -> Candidate:
        """The end of one of its strategies; cutoff_ms is then the step of the last of the best plans."""
        found_ms = self.step_ms if self.placement is not None else None
        candidate = Candidate(
            strategy=strategy,
            status="unfinished",
            num_microbatches=self.problem.num_microbatches,
            bound_ms=None if self.infeasible else self.bound_ms,
            step_ms=found_ms,
            overflow_bytes=self.overflow_bytes,
            solve_s=self.solve_s,
        )
        first = self.strategies[0]
        twin = "" if strategy is first else f"; the same pipeline as {describe_strategy(first)}"
        if self.infeasible:
            return replace(candidate, status="infeasible", reason=self.reason + twin)
        if found_ms is not None and self.is_closed(np.inf, gap_fraction):
            return replace(candidate, status="solved", reason=f"its best placement takes {found_ms:.3f} ms{twin}")
        if self.is_closed(cutoff_ms, gap_fraction):
            how = "placing it proved" if self.visit >= 0 else "its bound says"
            reason = f"{how} that no placement is below {self.bound_ms:.3f} ms, and {cutoff_ms:.3f} ms is reached"
            return replace(candidate, status="dominated", reason=reason + twin)
        return replace(candidate, reason=(self.reason or f"the search ended first: {stopped}") + twin)
