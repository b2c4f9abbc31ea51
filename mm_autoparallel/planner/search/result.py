"""SearchResult: what is known of a job's plans once `search` ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mm_autoparallel.model.job.job import SearchSpace
from mm_autoparallel.planner.chance_to_fit import oom_probability
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.planner.plan import Figures, Plan
from mm_autoparallel.planner.search.batch_ranking import BatchRanking
from mm_autoparallel.planner.search.candidate import Candidate
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.robust import RobustChoice
from mm_autoparallel.planner.search.step_end_ranking import StepEndRanking

Stopped = Literal["finished", "time limit", "interrupted", "processes died"]


@dataclass(frozen=True)
class Objective:
    """What plans were ranked by, and what is proven of that: rank_ms = step * (1 + failure_price * P / (1 - P)), P the
    chance to run out of memory (planner/search/caution.py).

    step_ms, rank_ms: of the answer; rank_bound_ms: no plan of the space ranks below. fit_probability: plans that fit
    with less were left out; None: none were. fastest_ms, fastest_oom_probability: of the fastest plan that was met and
    keeps all
    limits, however likely it fails; None where chances do not count.
    """

    failure_price: float
    fit_probability: float | None
    step_ms: float
    rank_ms: float
    rank_bound_ms: float
    fastest_ms: float | None = None
    fastest_oom_probability: float | None = None

    @property
    def is_weighed(self) -> bool:
        """Whether plans rank by their chances too, so that a faster one than rank_bound_ms may be in the space."""
        return self.failure_price > 0.0 and self.fastest_ms is not None

    @property
    def caution_fraction(self) -> float:
        """By how much the answer's step is longer than that of the fastest plan met; 0 where that is the answer."""
        return 0.0 if self.fastest_ms is None else max(0.0, self.step_ms / self.fastest_ms - 1.0)

    def document(self) -> dict[str, Any]:
        """The result file's `objective`."""
        return {
            "failure_price": self.failure_price,
            "fit_probability": self.fit_probability,
            "rank_ms": self.rank_ms,
            "rank_lower_bound_ms": self.rank_bound_ms,
            "fastest_ms": self.fastest_ms,
            "fastest_oom_probability": self.fastest_oom_probability,
            "caution_fraction": self.caution_fraction,
        }


def objective_of(limits: SearchSpace, best: Pipeline, pipelines: Sequence[Pipeline], rank_bound_ms: float) -> Objective:
    """What is known of what plans were ranked by. best: whose plan is the answer."""
    fastest = min(pipelines, key=lambda p: p.fastest_ms)
    is_off = math.isinf(fastest.fastest_ms)
    return Objective(
        failure_price=limits.price,
        fit_probability=limits.fit_probability,
        step_ms=best.step_ms,
        rank_ms=best.rank_ms,
        rank_bound_ms=min(rank_bound_ms, best.rank_ms),
        fastest_ms=None if is_off else fastest.fastest_ms,
        fastest_oom_probability=None if is_off else oom_probability(fastest.fastest_fill_fraction, 1.0),
    )


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best plan and what is known of all others.

    estimates: of the best plans, at most one for each pipeline, the one that ranks first is the answer.
    lower_bound_ms: the bound of `objective` in steps of the answer: no plan ranks where one of this step and the
    answer's chance to fit would. candidates: every strategy of the space, in its order.
    stopped: why the search ended. warnings: what to know before trusting it.
    robust: the plans that could win, weighed; None where there is but one, or search.choice is point.
    batch_ranking: what ranking by drawn batches came to; None without search.objective. step_end: what ranking by how
    far apart steps are came to; None where they end with a barrier.
    """

    estimates: tuple[Estimate, ...]
    objective: Objective
    lower_bound_ms: float
    candidates: tuple[Candidate, ...]
    stopped: Stopped
    elapsed_s: float
    warnings: tuple[str, ...] = ()
    robust: RobustChoice | None = None
    batch_ranking: BatchRanking | None = None
    step_end: StepEndRanking | None = None

    @property
    def plan(self) -> Plan:
        return self.estimates[0].plan

    @property
    def figures(self) -> Figures:
        """What the result file tells beside the plan."""
        of_end = {"post_validation": self.step_end.document()} if self.step_end else {}
        objective = self.objective.document() | of_end
        figures = replace(self.estimates[0].figures(self.lower_bound_ms), objective=objective)
        if self.batch_ranking is None:
            return figures
        ranking = {"ranking": self.batch_ranking.document()}
        return replace(figures, step_over_batches={**figures.step_over_batches, **ranking})

    @property
    def gap_fraction(self) -> float:
        return self.figures.gap_fraction

    @property
    def proven(self) -> bool:
        """Whether the bound over the whole space is within 0.1 % of the step."""
        return self.figures.proven
