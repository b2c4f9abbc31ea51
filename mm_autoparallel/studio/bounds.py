"""What searches have shown of jobs, and how far from the best a plan is because of that.

Searches rank plans by their step with the price of the chance to run out of memory (planner/search/caution.py), so
their bounds are of ranks; a plan that a person made is ranked likewise before it is held against them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from mm_autoparallel.api.report_page import strategies_page
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.files import is_there, read_document, write_text_atomically
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.planner.plan import PROVEN_GAP_FRACTION, parallel_config
from mm_autoparallel.planner.search.candidate import Candidate
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.result import SearchResult
from mm_autoparallel.records import Noun
from mm_autoparallel.reports.page.report import Strategies
from mm_autoparallel.studio.document import Bound
from mm_autoparallel.units import format_ms, format_percent
from mm_autoparallel.validation import parse_record

OUTSIDE_FRACTION = 1e-6
"""A plan that ranks below a bound by more than this is no plan of the space that was searched."""


class Known(Noun):
    """Of one job: rank_bound_ms: no plan of its space ranks below, None before the space was searched; strategies: of
    that search. of_strategy_ms: bounds of strategies that were searched alone, by `name_strategy`."""

    rank_bound_ms: float | None = None
    strategies: Strategies | None = None
    of_strategy_ms: dict[str, float] = Field(default_factory=dict)

    def with_space(self, found: SearchResult) -> Known:
        """After a search of the space."""
        return self.model_copy(
            update={
                "rank_bound_ms": found.objective.rank_bound_ms,
                "strategies": strategies_page(found.candidates, found.estimates[0].problem.memory_limit_bytes),
                "of_strategy_ms": self.of_strategy_ms | _bounds(found.candidates),
            }
        )

    def with_strategies(self, candidates: Sequence[Candidate]) -> Known:
        """After a search of these strategies alone."""
        return self.model_copy(update={"of_strategy_ms": self.of_strategy_ms | _bounds(candidates)})


def read_known(path: Path) -> Known:
    """What was kept at `path`; nothing where there is no file, or none that can be read."""
    if not is_there(path):
        return Known()
    try:
        return parse_record(Known, read_document(path, "bounds of the studio"), "bounds of the studio", path)
    except PlannerError:
        return Known()  # it is found out again by a search


def write_known(path: Path, known: Known) -> None:
    """Raises OSError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_text_atomically(path, known.model_dump_json())


def find_bound(job: Job, known: Known, estimate: Estimate) -> Bound:
    """How far from the best `estimate`, a plan of `job`, can be."""
    caution = Caution(job)
    factor = caution.price_factor(estimate.oom_probability)
    rank_ms = estimate.step_ms * factor
    of_strategy_ms = known.of_strategy_ms.get(name_strategy(estimate.plan.strategy))
    gap, strategy_gap = _gap(rank_ms, known.rank_bound_ms), _gap(rank_ms, of_strategy_ms)
    return Bound(
        words=_describe(
            *(estimate, known.rank_bound_ms, of_strategy_ms, gap, strategy_gap), rank_ms if caution.price else None
        ),
        lower_bound_ms=None if known.rank_bound_ms is None else known.rank_bound_ms / factor,
        gap_fraction=gap,
        proven=gap is not None and estimate.fits and -OUTSIDE_FRACTION <= gap <= PROVEN_GAP_FRACTION,
        strategy_bound_ms=None if of_strategy_ms is None else of_strategy_ms / factor,
        strategy_gap_fraction=strategy_gap,
    )


def name_strategy(strategy: Strategy) -> str:
    """Differs where a strategy does."""
    sizes = " ".join(f"{key}={value}" for key, value in parallel_config(strategy).items())
    return " ".join((sizes, strategy.schedule, strategy.rank_order, *strategy.orders))


def _bounds(candidates: Sequence[Candidate]) -> dict[str, float]:
    return {
        name_strategy(one.strategy): one.bound_ms for one in candidates if one.bound_ms and math.isfinite(one.bound_ms)
    }


def _gap(rank_ms: float, bound_ms: float | None) -> float | None:
    return None if bound_ms is None else 1.0 - bound_ms / rank_ms


def _describe(
    estimate: Estimate,
    bound_ms: float | None,
    of_strategy_ms: float | None,
    gap: float | None,
    strategy_gap: float | None,
    rank_ms: float | None,
) -> str:
    """rank_ms: of the plan, None where plans rank by their steps alone."""
    if not estimate.fits:
        return "the plan does not fit, and bounds are of plans that do"
    words = []
    below = "is below" if rank_ms is None else "ranks below"
    here = "" if rank_ms is None else f", this one ranks at {format_ms(rank_ms)}"
    if gap is None or bound_ms is None:
        words.append("how far from the best it is, is not known: the space of this job has not been searched")
    elif gap < -OUTSIDE_FRACTION:
        words.append(f"no plan of the job's search {below} {format_ms(bound_ms)}{here}; it is outside of that search")
    elif gap <= PROVEN_GAP_FRACTION:
        words.append(f"no plan of the space {below} {format_ms(bound_ms)}{here}")
    else:
        bound = format_ms(bound_ms)
        words.append(f"at most {format_percent(gap)} from the best of the space: none {below} {bound}{here}")
    if of_strategy_ms is not None and strategy_gap is not None and strategy_gap >= -OUTSIDE_FRACTION:
        if strategy_gap <= PROVEN_GAP_FRACTION:
            words.append("no other placement of this strategy is better")
        else:
            bound = format_ms(of_strategy_ms)
            words.append(f"other placements of this strategy can be {format_percent(strategy_gap)} better: {bound}")
    if rank_ms is not None and not (gap is None and strategy_gap is None):
        words.append("plans rank by their steps with the price of their chances to run out of memory")
    return "; ".join(words)
