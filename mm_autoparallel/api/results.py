"""What the functions of the face return: frozen, with `table()` for a terminal, `to_dict()` for JSON, and a notebook's
HTML. `document()` is the same content under the keys of the result file, which `--json` prints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.pipeline.problem import Placement, Problem
    from mm_autoparallel.pipeline.simulate.step import Timeline
    from mm_autoparallel.pipeline.solve.engines.ray_cluster import RayCluster
    from mm_autoparallel.planner.evaluate import Estimate
    from mm_autoparallel.planner.plan import Plan
    from mm_autoparallel.planner.search.check import Check
    from mm_autoparallel.planner.search.result import SearchResult
    from mm_autoparallel.planner.twice import Answer

_WITH_UNITS = {"e2e_time": "step_ms", "throughput": "throughput_tokens_per_s"}
"""Keys of the result file that leave their unit out."""


def with_units(value: Any) -> Any:
    """`value` with the keys of the result file that leave their unit out under names that say it."""
    if isinstance(value, Mapping):
        return {_WITH_UNITS.get(key, key): with_units(item) for key, item in value.items()}
    return [with_units(item) for item in value] if isinstance(value, (list, tuple)) else value


def draw(*renderables: RenderableType) -> str:
    """`renderables` one below the other, as plain text."""
    from mm_autoparallel.reports.console import draw_text

    return draw_text(*renderables)


def draw_stages(title: str, problem: Problem, placement: Placement, timeline: Timeline, rows: str) -> str:
    """A heading, the table of stages and the timeline."""
    from mm_autoparallel.reports.html import render_heading, render_table
    from mm_autoparallel.reports.tables import stage_table
    from mm_autoparallel.reports.timeline import render_timeline

    table = stage_table(problem, placement, timeline, rows="modality" if rows == "modality" else "name")
    return render_heading(title) + render_table(table) + render_timeline(problem, timeline)


class Result(ABC):
    """What the results of the face share."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The content under the keys of the result file."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values, with units in the names."""
        document: dict[str, Any] = with_units(self.document())
        return document


@dataclass(frozen=True, eq=False)
class Simulation(Result):
    """One simulated step of `job`. estimate: all that is known of it (planner/evaluate.py)."""

    job: Job
    estimate: Estimate

    @property
    def plan(self) -> Plan:
        return self.estimate.plan

    @property
    def step_ms(self) -> float:
        return self.estimate.step_ms

    @property
    def fits(self) -> bool:
        """Whether every stage keeps its memory limits."""
        return self.estimate.fits

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.estimate.warnings

    @cached_property
    def unstated(self) -> tuple[Answer, ...]:
        """What the plan takes if what the job does not state is otherwise than was taken."""
        from mm_autoparallel.planner.twice import answer_twice

        return answer_twice(self.job, self.estimate)

    def renderable(self) -> RenderableType:
        """Strategy, where the step goes, what stages hold, and the step, for rich's consoles."""
        from mm_autoparallel.reports.estimates import render_estimate

        return render_estimate(self.estimate)

    def table(self) -> str:
        """The strategy, where the step goes, what every stage holds, and the step, as plain text."""
        return draw(self.renderable(), *(answer.words for answer in self.unstated))

    def document(self) -> dict[str, Any]:
        """What `simulate --json` prints."""
        from mm_autoparallel.reports.estimates import estimate_document

        return estimate_document(self.estimate) | {"unstated": [answer.document() for answer in self.unstated]}

    def svg(self) -> str:
        """The pipeline's timeline as an SVG picture."""
        from mm_autoparallel.reports.timeline import render_timeline

        return render_timeline(self.estimate.problem, self.estimate.timeline)

    def write_svg(self, path: str | Path) -> None:
        """Write `svg()` to `path` in one step. Raises OSError."""
        from mm_autoparallel.files import write_text_atomically

        write_text_atomically(Path(path), self.svg())

    def write_trace(self, path: str | Path) -> None:
        """Write the timeline for Perfetto to `path` in one step. Raises OSError."""
        from mm_autoparallel.reports.trace import write_trace

        write_trace(Path(path), self.estimate.problem, self.estimate.timeline)

    def _repr_html_(self) -> str:
        from mm_autoparallel.reports.estimates import describe_strategy
        from mm_autoparallel.units import format_ms

        one = self.estimate
        title = f"{describe_strategy(one.plan)}: step {format_ms(one.step_ms)}{'' if one.fits else ', does not fit'}"
        return draw_stages(title, one.problem, one.placement, one.timeline, "modality")


@dataclass(frozen=True, eq=False)
class PlanResult(Result):
    """The best plan of `job`, and what is known of all others. search: all of that (search/result.py). cluster: where
    candidates were solved; None: here."""

    job: Job
    search: SearchResult
    cluster: RayCluster | None = field(default=None, repr=False)

    @property
    def plan(self) -> Plan:
        return self.search.plan

    @property
    def step_ms(self) -> float:
        return self.search.estimates[0].step_ms

    @property
    def lower_bound_ms(self) -> float:
        """No plan of the space ranks before one with this step (planner/search/result.py)."""
        return self.search.lower_bound_ms

    @property
    def gap_fraction(self) -> float:
        return self.search.gap_fraction

    @property
    def proven(self) -> bool:
        """Whether the bound over the whole space is within 0.1 % of the step."""
        return self.search.proven

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.search.warnings

    @cached_property
    def best(self) -> tuple[Simulation, ...]:
        """The best plans, simulated: as many as were asked for and found, the answer first."""
        return tuple(Simulation(self.job, estimate) for estimate in self.search.estimates)

    def write(self, path: str | Path, rank: int = 0) -> None:
        """Write the result file of the answer, or of the one of `best` behind it that `rank` counts, to `path` in one
        step. Raises OSError."""
        from mm_autoparallel.planner.plan import write_result

        one = self.search.estimates[rank]
        write_result(Path(path), one.plan, one.figures(self.search.lower_bound_ms) if rank else self.search.figures)

    def check_eliminated(
        self,
        number: int,
        should_stop: Callable[[], bool] = lambda: False,
        on_done: Callable[[int, int], None] = lambda *_: None,
    ) -> Check:
        """Place `number` random candidates that bounds eliminated, and tell which contradict their bound."""
        from mm_autoparallel.planner.search.watched import check_watched

        return check_watched(self.job, self.search, number, should_stop, self.cluster, on_done)

    def describe_check(self, check: Check) -> str:
        """What `check_eliminated` showed, in words."""
        from mm_autoparallel.planner.search.watched import describe_check

        return describe_check(check, self.search)

    def bound_rows(self) -> list[dict[str, Any]]:
        """For each lawful candidate, what bounds it, by how much, and what was reached then."""
        from mm_autoparallel.planner.search.candidate import bound_rows

        return list(bound_rows(self.search.candidates))

    def renderables(self) -> list[RenderableType]:
        """The ranking where there is one, the best plan and how the search ended, for rich's consoles."""
        from mm_autoparallel.planner.search.watched import describe_end
        from mm_autoparallel.reports.estimates import ranking_table

        ranking: list[RenderableType] = [ranking_table(self.search.estimates)] if len(self.best) > 1 else []
        return [*ranking, self.best[0].renderable(), describe_end(self.search)]

    def table(self) -> str:
        """The best plans, where the step of the first goes, what its stages hold, and how the search ended, as text."""
        return draw(*self.renderables(), *(answer.words for answer in self.best[0].unstated))

    def document(self) -> dict[str, Any]:
        """What `plan --json` prints."""
        from mm_autoparallel.planner.plan import plan_document
        from mm_autoparallel.planner.search.candidate import candidate_rows
        from mm_autoparallel.reports.estimates import estimate_document

        found = self.search
        return plan_document(found.plan, found.figures) | {
            "stopped": found.stopped,
            "elapsed_s": round(found.elapsed_s, 3),
            "warnings": list(found.warnings),
            "robust": found.robust.document() if found.robust else None,
            "best": [estimate_document(estimate) for estimate in found.estimates],
            "candidates": candidate_rows(found.candidates),
            "unstated": [answer.document() for answer in self.best[0].unstated],
        }

    def _repr_html_(self) -> str:
        from mm_autoparallel.planner.search.watched import describe_end
        from mm_autoparallel.reports.html import render_paragraph

        return self.best[0]._repr_html_() + render_paragraph(describe_end(self.search))
