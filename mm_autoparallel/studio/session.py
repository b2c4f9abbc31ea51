"""Session: the moments of one studio, played: every action on them, and the page that they make.

One at a time: who calls holds `lock`. Searches run beside it (studio/work.py) and come back as an action of their own.
"""

from __future__ import annotations

import shlex
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from mm_autoparallel.api.report_page import ReportResult, build_report
from mm_autoparallel.api.results import Simulation
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.files import is_there, read_text
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.first_plan import first_plan
from mm_autoparallel.planner.plan import Plan, decision_document, parse_plan
from mm_autoparallel.planner.search.space import SpaceEntry, list_entries, strategy_key
from mm_autoparallel.reports.estimates import describe_change, describe_strategy
from mm_autoparallel.studio import document as words
from mm_autoparallel.studio.bounds import Known, find_bound, read_known, write_known
from mm_autoparallel.studio.drawing import FILES, list_knobs, list_modes, list_sizes, list_values
from mm_autoparallel.studio.moments import FOLDER, Moment, Moments, Source
from mm_autoparallel.units import format_ms

KEPT_JOBS, KEPT_ESTIMATES = 8, 64
"""Played again only when others came between. Assumed."""


T = TypeVar("T")


class Stale(Exception):
    """Another page has acted since the revision that an action names."""


@dataclass(frozen=True, eq=False)
class Played:
    """A job that is worked on: its costs, its space, and what searches have shown of it. given: without its values.
    The space is listed when it is asked for."""

    source: Source
    costs: CostModel
    given: Job
    document: dict[str, Any]

    @cached_property
    def entries(self) -> tuple[SpaceEntry, ...]:
        """Every strategy, but for those of a module for each encoder."""
        return list_entries(self.job, with_several=False)

    @cached_property
    def values(self) -> dict[str, set[Any]]:
        """What lawful ones have of each size."""
        return list_values(self.job)

    @property
    def job(self) -> Job:
        return self.costs.job


class Session:
    """The studio of a folder. Raises JobError where what was kept there cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.moments = Moments.read(folder)
        self.message = ""
        self.before: Moment | None = None
        self._jobs: OrderedDict[str, Played] = OrderedDict()
        self._known: dict[str, Known] = {}
        self._estimates: OrderedDict[str, Estimate] = OrderedDict()

    @property
    def revision(self) -> int:
        return self.moments.saved.revision

    # ------------------------------------------------------------------------------------------------------ beginning

    def open_job(self, path: Path, text: str, plan: Plan | None = None) -> None:
        """Begin with the job file at `path`, unless it is the one that is worked on. Raises PlannerError."""
        source, present = Source(file=str(path), text=text), self.moments.present
        if present and present.source.file == source.file and present.source.text == text and plan is None:
            return
        self.begin(source, "", f"opened {path}", plan)

    def begin(self, source: Source, command: str, told: str, plan: Plan | None = None) -> None:
        """Go on with another job, from a first plan of it unless one is given. Raises PlannerError."""
        played = self.play(source)
        self.add(told, command, source, plan or plainest_plan(played))

    # -------------------------------------------------------------------------------------------------------- playing

    def play(self, source: Source) -> Played:
        """The job of `source`. Raises JobError."""
        key = source.key
        if key not in self._jobs:
            content = source.document(self.folder)
            job = source.job(self.folder)
            given = source.model_copy(update={"values": {}}).job(self.folder) if source.values else job
            self._jobs[key] = Played(source, CostModel(job), given, content)
        return _last(self._jobs, key, KEPT_JOBS)

    def plan_of(self, moment: Moment) -> Plan:
        """The plan of a moment. Raises PlannerError."""
        return parse_plan(moment.plan, self.play(moment.source).job, "the plan")

    def estimate_of(self, moment: Moment) -> Estimate:
        """The plan of a moment, simulated. Raises PlannerError."""
        key = f"{moment.source.key} {moment.plan}"
        if key not in self._estimates:
            self._estimates[key] = evaluate(self.play(moment.source).costs, self.plan_of(moment))
        return _last(self._estimates, key, KEPT_ESTIMATES)

    def known(self, source: Source) -> Known:
        """What searches have shown of the job."""
        if source.key not in self._known:
            self._known[source.key] = read_known(self._path_of_known(source))
        return self._known[source.key]

    def learn(self, source: Source, known: Known) -> None:
        """What a search has shown. Raises OSError where it cannot be kept."""
        self._known[source.key] = known
        write_known(self._path_of_known(source), known)

    def _path_of_known(self, source: Source) -> Path:
        return self.folder / FOLDER / f"bounds-{source.key}.json"

    # ------------------------------------------------------------------------------------------------------- changing

    def check_revision(self, revision: int) -> None:
        """Raises Stale where another page was first."""
        if revision != self.revision:
            raise Stale

    def present(self) -> Moment:
        """The moment that is shown. Raises JobError where there is none."""
        moment = self.moments.present
        if moment is None:
            raise JobError("there is no job yet: make one first")
        return moment

    def add(self, told: str, command: str, source: Source, plan: Plan, file: str = "", more: str = "") -> None:
        """Go on from `plan` of the job `source`. told: what was done; command: of the command line that does it; file:
        how commands call the plan's file, a new name if empty; more: what the message has behind `told`.

        Raises PlannerError where the plan is none of the job, OSError where the session cannot be kept.
        """
        before = self.moments.present
        file = file or self.next_file()
        moment = Moment(words=told, command=command, source=source, plan=decision_document(plan), file=file)
        estimate = self.estimate_of(moment)  # of the plan as it is read back: what cannot be is not kept
        self.moments.add(moment)
        is_same = before is not None and before.source.text == source.text
        self.show(told + more, before if is_same else None)
        if before is not None and is_same:
            self.message += f": {describe_change(self.estimate_of(before), estimate)}"

    def show(self, message: str, before: Moment | None) -> None:
        """What the page says of the last action, and the moment that it left."""
        self.message, self.before = message, before

    def next_file(self) -> str:
        """How commands call the plan that comes next."""
        return f"plan-{self.moments.saved.cursor + 1}.json"

    def free_name(self) -> Path:
        """What a job is called that is made here: as no file of the folder, since it is only written when saved."""
        names = (f"job{number}.yaml" for number in ("", *range(2, 10_000)))
        return next(path for path in (self.folder / name for name in names) if not is_there(path))

    def check_inside(self, name: str) -> Path:
        """The path of a file that a page names. Raises JobError where it lies outside the folder."""
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise JobError(f"{name} lies outside the folder that the studio was started in")
        return self.folder / name

    def command(self, verb: str, moment: Moment, *flags: str) -> str:
        """`mm-autoparallel VERB JOB --set … --config PLAN FLAGS`, as a shell takes it."""
        begin = ["mm-autoparallel", verb, moment.source.file, *moment.source.flags()]
        config = [] if verb == "plan" else ["--config", moment.file]
        return shlex.join([*begin, *config, *flags])

    # -------------------------------------------------------------------------------------------------------- drawing

    def draw(self, work: words.Work | None) -> tuple[words.Studio, bytes]:
        """The page as it is, and the numbers behind it. work: what runs beside it. Raises PlannerError."""
        saved, present = self.moments.saved, self.moments.present
        if present is None:
            return words.Studio(
                schema_name=words.SCHEMA,
                revision=saved.revision,
                report=None,
                bound=None,
                sizes=(),
                modes={},
                knobs=(),
                pins=(),
                message=self.message,
                undo=None,
                redo=None,
                commands=(),
                answers=saved.answers,
                work=work,
                files=(),
                search_revision=None,
            ), b""
        played, estimate, page = self.play(present.source), self.estimate_of(present), self.report()
        known, behind = self.known(present.source), saved.moments[saved.cursor + 1 :]
        return words.Studio(
            schema_name=words.SCHEMA,
            revision=saved.revision,
            report=page.report,
            bound=find_bound(played.job, known, estimate),
            sizes=list_sizes(played.job, played.values, estimate.plan.strategy),
            modes=list_modes(played.job),
            knobs=list_knobs(played.job, played.given, present.source.values, played.document),
            pins=tuple(saved.pins),
            message=self.message,
            undo=present.words if saved.cursor > 0 else None,
            redo=behind[0].words if behind else None,
            commands=tuple(one.command for one in saved.moments[: saved.cursor + 1] if one.command),
            answers=saved.answers,
            work=work,
            files=FILES,
            search_revision=present.source.number if known.strategies else None,
            differences=tuple(self._difference(estimate, name, moment) for name, moment in saved.pins.items()),
            change=self._difference(estimate, "", self.before) if self.before else None,
            orders=estimate.plan.stage_orders,
        ), page.block

    def _difference(self, estimate: Estimate, name: str, moment: Moment) -> words.Difference:
        other = self.estimate_of(moment)
        return words.Difference(
            name=name,
            step_ms=estimate.step_ms - other.step_ms,
            step_fraction=estimate.step_ms / other.step_ms - 1.0,
            peak_bytes=max(estimate.peak_memory_bytes) - max(other.peak_memory_bytes),
        )

    def report(self) -> ReportResult:
        """The page of the present plan, and of those that are pinned, each on its own job."""
        present = self.present()
        plans = {"now": self._simulation(present)}
        plans |= {name: self._simulation(moment) for name, moment in self.moments.saved.pins.items()}
        return build_report(plans["now"].job, plans, None, None, {}, self.command("report", present))

    def bound_of(self, moment: Moment) -> float:
        """In steps of the plan, no plan of the job's space ranks before, ms; 0 where that is not known."""
        bound = find_bound(self.play(moment.source).job, self.known(moment.source), self.estimate_of(moment))
        return min(bound.lower_bound_ms or 0.0, self.estimate_of(moment).step_ms)

    def _simulation(self, moment: Moment) -> Simulation:
        return Simulation(self.play(moment.source).job, self.estimate_of(moment))

    def describe_found(self, estimate: Estimate) -> str:
        """A plan that a search found, in a line."""
        return f"{describe_strategy(estimate.plan)}: step {format_ms(estimate.step_ms)}"


def plainest_plan(played: Played) -> Plan:
    """A first plan that fits, of one of a dozen lawful strategies, if one is met. Raises JobError where none is lawful,
    PlanError where no plan of the plainest is."""
    lawful = sorted((one.strategy for one in played.entries if one.reason is None), key=strategy_key)
    if not lawful:
        reasons = {entry.reason for entry in played.entries if entry.reason}
        raise JobError(f"no strategy is lawful for the job: {'; '.join(sorted(reasons)[:3])}")
    tried = [first_or_none(played, strategy) for strategy in lawful[:: max(1, len(lawful) // 12)]]
    met = [evaluate(played.costs, plan) for plan in tried if plan is not None]
    fitting = [estimate for estimate in met if estimate.fits]
    if fitting:
        return min(fitting, key=lambda estimate: estimate.step_ms).plan
    return first_plan(played.costs, lawful[0])


def first_or_none(played: Played, strategy: Strategy) -> Plan | None:
    """A first plan of `strategy`; None where no placement of it is lawful."""
    try:
        return first_plan(played.costs, strategy)
    except PlannerError:
        return None


def read_job_text(path: Path) -> str:
    """The text of a job file. Raises JobError."""
    return read_text(path, "job file", "YAML or JSON file")


def _last(kept: OrderedDict[str, T], key: str, most: int) -> T:
    """What is kept under `key`, and nothing that was not asked for lately."""
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
    return kept[key]
