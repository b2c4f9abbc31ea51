"""SearchResult: what is known of a job's plans once `search` ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mm_autoparallel.plan import Figures, Plan
from mm_autoparallel.search.candidate import Candidate
from mm_autoparallel.simulate.evaluate import Estimate

Stopped = Literal["finished", "time limit", "interrupted", "processes died"]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best plan and what is known of all others.

    estimates: of the best plans, at most one for each pipeline, fastest first; the first is the answer.
    lower_bound_ms: no plan of the space is below. candidates: every strategy of the space, in its order.
    stopped: why the search ended. warnings: what to know before trusting it.
    """

    estimates: tuple[Estimate, ...]
    lower_bound_ms: float
    candidates: tuple[Candidate, ...]
    stopped: Stopped
    elapsed_s: float
    warnings: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.estimates[0].plan

    @property
    def figures(self) -> Figures:
        """What the result file tells beside the plan."""
        return self.estimates[0].figures(self.lower_bound_ms)

    @property
    def gap_fraction(self) -> float:
        return self.figures.gap_fraction

    @property
    def proven(self) -> bool:
        """Whether the bound over the whole space is within 0.1 % of the step."""
        return self.figures.proven
