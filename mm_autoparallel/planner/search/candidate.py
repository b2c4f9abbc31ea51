"""Candidate: what became of one strategy of the space, with its reason and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, Strategy
from mm_autoparallel.planner.plan import parallel_config
from mm_autoparallel.units import format_ms, format_percent

Status = Literal["solved", "dominated", "infeasible", "unlawful", "unfinished"]
#: What says that no placement is below a bound, or that none fits: the costs of the blocks alone, before a problem is
#: built; its work, its paths, a mixture of them, its memory (of hosts too), its number of layers (`bounds`); prices of
#: parts of layers (`pricing`); a strategy that it cannot beat (`families`); a profile that ran out of memory; the
#: solver, or one that was cached.
Bounded = Literal[
    "block costs", "work", "paths", "mixture of paths", "prices", "memory", "layers", "another strategy", "profile",
    "placing",
]  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One strategy and its end.

    status: solved (its best placement is known), dominated (no placement of it is faster than the best plans found),
    infeasible (none fits), unlawful (it breaks a rule), unfinished (the search was stopped first); reason: why.
    bound_ms: no placement ranks below. step_ms: of the best placement found, None where none was looked for or found;
    rank_ms: its step with the price of its chance to run out of memory (search/caution.py), by which plans are ranked;
    peak_bytes: of its fullest stage, as `evaluate` says.
    overflow_bytes: where infeasible by memory, by how much the worst stage is over in every placement.
    bounded_by: what says so of bound_ms, or that none fits; None where unlawful. cutoff_ms: the best step known when it
    was eliminated, None where it was not. was_placed: a solver was asked for its placement.
    """

    strategy: Strategy
    status: Status
    reason: str = ""
    num_microbatches: int = 0
    bound_ms: float | None = None
    step_ms: float | None = None
    overflow_bytes: float = 0.0
    solve_s: float = 0.0
    bounded_by: Bounded | None = None
    cutoff_ms: float | None = None
    was_placed: bool = False
    rank_ms: float | None = None
    peak_bytes: float | None = None

    @property
    def is_eliminated(self) -> bool:
        """Whether bounds alone ruled it out."""
        return self.status in ("dominated", "infeasible") and not self.was_placed

    @property
    def gap_fraction(self) -> float | None:
        """How far its own bound is below what it ranks by; None without a step."""
        if self.rank_ms is None or self.bound_ms is None:
            return None
        return max(0.0, 1.0 - self.bound_ms / self.rank_ms) if self.rank_ms > 0 else 0.0


@dataclass(frozen=True)
class Progress:
    """How far a search is. best_ms: infinite while nothing is found. num_done of num_candidates have their end. left_s:
    until its time limit; infinite where it has none."""

    best_ms: float
    lower_bound_ms: float
    num_done: int
    num_candidates: int
    elapsed_s: float
    left_s: float = math.inf

    @property
    def gap_fraction(self) -> float:
        return 1.0 - self.lower_bound_ms / self.best_ms if 0 < self.best_ms < float("inf") else 1.0


def progress_line(progress: Progress, since_s: float = 0.0) -> str:
    """`12 of 330 strategies, best so far 84.53 s, bound 84.19 s, gap 0.4 %, 41 s left`, since_s after it was told."""
    words = [f"{progress.num_done} of {progress.num_candidates} strategies"]
    if progress.best_ms == math.inf:
        words.append("nothing found so far")
    else:
        words.append(f"best so far {format_ms(progress.best_ms)}")
    if math.isfinite(progress.lower_bound_ms):
        words.append(f"bound {format_ms(progress.lower_bound_ms)}")
    if progress.best_ms < math.inf:
        words.append(f"gap {format_percent(progress.gap_fraction)}")
    if progress.left_s < math.inf:
        words.append(f"{max(0.0, progress.left_s - since_s):.0f} s left")
    return ", ".join(words)


def candidate_rows(candidates: Iterable[Candidate]) -> list[dict[str, Any]]:
    """The candidates as JSON values, for `--json` and reports; what is unknown is null."""
    return [
        _names(c)
        | {
            "num_microbatches": c.num_microbatches or None,
            "status": c.status,
            "lower_bound_ms": c.bound_ms,
            "bounded_by": c.bounded_by,
            "e2e_time": c.step_ms,
            "rank_ms": c.rank_ms,
            "peak_memory_bytes": None if c.peak_bytes is None else math.ceil(c.peak_bytes),
            "gap_fraction": c.gap_fraction,
            "overflow_bytes": c.overflow_bytes or None,
            "solve_s": round(c.solve_s, 3),
            "reason": c.reason,
        }
        for c in candidates
    ]


def bound_rows(candidates: Iterable[Candidate]) -> list[dict[str, Any]]:
    """The log of bounds, a row for each lawful candidate: what bounds it, by how much, and what was reached then.

    `by`: Candidate.bounded_by. `cutoff_ms`: null where it was not eliminated, or nothing was found by then.
    `bound_ms`: null where nothing fits.
    """
    return [
        _names(c)
        | {
            "status": c.status,
            "by": c.bounded_by,
            "placed": c.was_placed,
            "bound_ms": c.bound_ms,
            "cutoff_ms": c.cutoff_ms if c.cutoff_ms is not None and math.isfinite(c.cutoff_ms) else None,
            "reason": c.reason,
        }
        for c in candidates
        if c.status != "unlawful"
    ]


def _names(candidate: Candidate) -> dict[str, Any]:
    strategy = candidate.strategy
    return {
        "parallel_config": parallel_config(strategy),
        "schedule": strategy.schedule,
        **({} if strategy.rank_order == DEFAULT_RANK_ORDER else {"rank_order": strategy.rank_order}),
    }
