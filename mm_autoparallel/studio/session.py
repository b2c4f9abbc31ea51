"""Session: the moments of one studio, played: every action on them, and the page that they make.

One at a time: who calls holds `lock`. Searches run beside it (studio/work.py) and come back as an action of their own.
"""

from __future__ import annotations

import shlex
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mm_autoparallel.api.job_text import format_job
from mm_autoparallel.api.jobs import describe_job
from mm_autoparallel.api.report_page import ReportResult, build_report
from mm_autoparallel.api.results import Simulation
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.files import is_there, read_text
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layer_modes import mode_reason
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.edits import RECOMPUTE, move_layers, set_mode
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.explain.nearest import nearest_strategy
from mm_autoparallel.planner.explain.why_not import Wish, describe_wish
from mm_autoparallel.planner.first_plan import first_plan
from mm_autoparallel.planner.plan import Plan, parse_plan, plan_document
from mm_autoparallel.planner.search.space import SpaceEntry, list_entries, strategy_key
from mm_autoparallel.reports.estimates import describe_change, describe_strategy
from mm_autoparallel.studio import document as words
from mm_autoparallel.studio.bounds import Known, find_bound, read_known, write_known
from mm_autoparallel.studio.drawing import FILES, PLAN_KEYS, SIZES, describe_values, list_knobs, list_modes, list_sizes
from mm_autoparallel.studio.moments import FOLDER, Moment, Moments, Source
from mm_autoparallel.units import format_ms

KEPT_JOBS, KEPT_ESTIMATES = 8, 64
"""Played again only when others came between. Assumed."""


T = TypeVar("T")


class Stale(Exception):
    """Another page has acted since the revision that an action names."""


@dataclass(frozen=True, eq=False)
class Played:
    """A job that is worked on: its costs, its space, and what searches have shown of it. given: without its values."""

    source: Source
    costs: CostModel
    given: Job
    document: dict[str, Any]
    entries: tuple[SpaceEntry, ...]

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
        self._begin(source, "", f"opened {path}", plan)

    def _begin(self, source: Source, command: str, told: str, plan: Plan | None = None) -> None:
        played = self.play(source)
        self._add(told, command, source, plan or first_plan(played.costs, self._plainest(played)))

    def _plainest(self, played: Played) -> Strategy:
        """A lawful strategy to begin with whose first plan fits, if one of those in the middle of the space does."""
        lawful = sorted((one.strategy for one in played.entries if one.reason is None), key=strategy_key)
        if not lawful:
            reasons = {entry.reason for entry in played.entries if entry.reason}
            raise JobError(f"no strategy is lawful for the job: {'; '.join(sorted(reasons)[:3])}")
        tried = lawful[:: max(1, len(lawful) // 12)]
        best: tuple[float, Strategy] | None = None
        for strategy in tried:
            try:
                estimate = evaluate(played.costs, first_plan(played.costs, strategy))
            except PlannerError:
                continue  # no placement of it is lawful; another may be
            if estimate.fits and (best is None or estimate.step_ms < best[0]):
                best = (estimate.step_ms, strategy)
        return best[1] if best else tried[0]

    # -------------------------------------------------------------------------------------------------------- playing

    def play(self, source: Source) -> Played:
        """The job of `source`. Raises JobError."""
        key = source.key
        if key not in self._jobs:
            content = source.document(self.folder)
            job = source.job(self.folder)
            given = source.model_copy(update={"values": {}}).job(self.folder) if source.values else job
            self._jobs[key] = Played(source, CostModel(job), given, content, tuple(list_entries(job)))
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

    # -------------------------------------------------------------------------------------------------------- actions

    def act(self, asked: words.Do) -> None:
        """Do what was asked. Raises Stale, PlannerError, or OSError where the session cannot be kept."""
        self.check_revision(asked.revision)
        action = asked.action
        _ACTIONS[type(action)](self, action)

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

    def adopt(self, source: Source, plan: Plan, told: str, command: str) -> None:
        """What a search found becomes the plan that is worked on."""
        self._add(told, command, source, plan)

    def tell(self, message: str) -> None:
        """What the page shows of what was done last."""
        self.message = message

    def _add(self, told: str, command: str, source: Source, plan: Plan, file: str = "", more: str = "") -> None:
        """more: what the message has behind what was done."""
        before = self.moments.present
        job = self.play(source).job
        estimate = evaluate(self.play(source).costs, plan)
        figures = estimate.figures(lower_bound_ms=0.0)
        kept = {key: value for key, value in plan_document(plan, figures).items() if key in PLAN_KEYS}
        file = file or self._next_file()
        moment = Moment(words=told, command=command, source=source, plan=kept, file=file)
        parse_plan(kept, job, "the plan")  # what cannot be read back is not kept
        self.moments.add(moment)
        self.message = told + more
        if before is not None and before.source.text == source.text:
            self.message += f": {describe_change(self.estimate_of(before), estimate)}"

    def _next_file(self) -> str:
        return f"plan-{self.moments.saved.cursor + 1}.json"

    def _edit(self, told: str, flags: list[str], change: Callable[[Plan], Plan]) -> None:
        present = self.present()
        command = self.command("edit", present, *flags, "--out", self._next_file())
        self._add(told, command, present.source, change(self.plan_of(present)))

    def command(self, verb: str, moment: Moment, *flags: str) -> str:
        """`mm-autoparallel VERB JOB --set … --config PLAN FLAGS`, as a shell takes it."""
        begin = ["mm-autoparallel", verb, moment.source.file, *moment.source.flags()]
        config = [] if verb == "plan" else ["--config", moment.file]
        return shlex.join([*begin, *config, *flags])

    def _move(self, action: words.MoveLayers) -> None:
        flag = f"{action.modality}:{action.source}:{action.target}:{action.count}"
        told = f"{_count(action.count, action.modality)} from stage {action.source} to {action.target}"
        self._edit(
            told,
            ["--move", flag],
            lambda plan: move_layers(plan, action.modality, action.source, action.target, action.count),
        )

    def _mode(self, action: words.SetMode) -> None:
        job = self.play(self.present().source).job
        reason = None
        if action.mode != RECOMPUTE:
            if action.mode not in list_modes(job).get(action.modality, (action.mode,)):
                reason = mode_reason(action.mode, job.workload, job.cluster.device)  # type: ignore[arg-type]  # of its Literal
            if reason:
                raise JobError(f"{action.mode}: {reason}")
        flag = f"{action.modality}:{action.stage}:{action.mode}={action.count}"
        told = f"{_count(action.count, action.modality)} of stage {action.stage} in {action.mode}"
        self._edit(
            told,
            ["--mode", flag],
            lambda plan: set_mode(plan, action.modality, action.stage, action.mode, action.count),
        )

    def _sizes(self, action: words.SetSizes) -> None:
        present = self.present()
        played = self.play(present.source)
        wish = check_wish(action.sizes)
        strategy = nearest_strategy(played.job, self.plan_of(present).strategy, wish, "sizes")
        flag = ",".join(f"{name.upper()}={value}" for name, value in wish.items())
        command = self.command("edit", present, "--sizes", flag, "--out", self._next_file())
        self._add(describe_wish(wish), command, present.source, first_plan(played.costs, strategy))

    def _knobs(self, action: words.SetKnobs) -> None:
        present = self.present()
        values = present.source.values | {key: value for key, value in action.values.items() if value is not None}
        values = {key: value for key, value in values.items() if action.values.get(key, value) is not None}
        if "cluster.device" in action.values:  # single figures were of the device before
            values = {key: value for key, value in values.items() if not key.startswith("cluster.device.")}
        source = present.source.model_copy(update={"values": values})
        told, played = describe_values(action.values), self.play(source)
        try:
            plan, more = parse_plan(present.plan, played.job, "the plan"), ""
        except PlannerError as error:
            plan, more = self._again(played, self.plan_of(present).strategy), f" (the plan before did not fit: {error})"
        if plan.strategy.world_size != played.job.cluster.num_devices:
            plan, more = self._again(played, plan.strategy), " (the plan before left devices out)"
        moment = present.model_copy(update={"source": source})
        command = self.command("simulate", moment)
        self._add(told, command, source, plan, present.file if not more else "", more)

    def _again(self, played: Played, like: Strategy) -> Plan:
        """A first plan of the lawful strategy that is most like `like`, in pipeline and tensor parallel sizes first."""
        for names in (("pp", "tp", "cp", "ep", "vpp", "mbs"), ("pp", "tp"), ("tp",), ()):
            kept: Wish = {name: getattr(like, name) for name in names}
            try:
                return first_plan(played.costs, nearest_strategy(played.job, like, kept, "sizes"))
            except PlannerError:
                continue  # fewer sizes may stay
        return first_plan(played.costs, self._plainest(played))

    def _job(self, action: words.NewJob) -> None:
        workload: dict[str, int] = {"global_batch_size": action.global_batch_size, "seq_length": action.seq_length}
        flags = ["--gbs", str(action.global_batch_size), "--seq", str(action.seq_length)]
        if action.image_tokens_per_sample:
            workload["image_tokens_per_sample"] = action.image_tokens_per_sample
            workload["images_per_sample"] = action.images_per_sample
            flags += ["--image-tokens", str(action.image_tokens_per_sample), "--images", str(action.images_per_sample)]
        self.check_inside(action.model)
        cluster = {
            "device": action.device,
            "num_nodes": action.num_nodes,
            "devices_per_node": action.devices_per_node,
        }
        path = self._free_name()
        found = describe_job(action.model, cluster, workload, path=path)
        where = ["--device", action.device, "--nodes", str(action.num_nodes)]
        where += ["--devices-per-node", str(action.devices_per_node)]
        command = shlex.join(["mm-autoparallel", "init", "--model", action.model, *where, *flags, "--out", path.name])
        text = format_job(found, found.parse(path), path.name)
        self._begin(Source(file=path.name, text=text), command, f"a job of {action.model}")

    def _free_name(self) -> Path:
        """What a job is called that a wizard makes: as no file of the folder, since it is only written when saved."""
        names = (f"job{number}.yaml" for number in ("", *range(2, 10_000)))
        return next(path for path in (self.folder / name for name in names) if not is_there(path))

    def check_inside(self, name: str) -> None:
        """Raises JobError where a file that a page names lies outside the folder."""
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise JobError(f"{name} lies outside the folder that the studio was started in")

    def _undo(self, _: words.Undo) -> None:
        taken = self.moments.present
        self.moments.move(-1)
        self.message = f"taken back: {taken.words}" if taken else ""

    def _redo(self, _: words.Redo) -> None:
        self.message = f"done again: {self.moments.move(1).words}"

    def _pin(self, action: words.Pin) -> None:
        self.moments.pin(action.name)
        self.message = f"pinned as {action.name}"

    def _unpin(self, action: words.Unpin) -> None:
        self.moments.unpin(action.name)
        self.message = f"put {action.name} away"

    def _take(self, action: words.Take) -> None:
        moment = self.moments.pinned(action.name)
        self._add(f"took {action.name}", "", moment.source, self.plan_of(moment), moment.file)

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
            sizes=list_sizes(played.entries, estimate.plan.strategy),
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
        ), page.block

    def report(self) -> ReportResult:
        """The page of the present plan, and of those that are pinned, each on its own job."""
        present = self.present()
        plans = {"now": self._simulation(present)}
        plans |= {name: self._simulation(moment) for name, moment in self.moments.saved.pins.items()}
        return build_report(plans["now"].job, plans, None, None, {}, self.command("report", present))

    def bound_of(self, moment: Moment) -> float:
        """No plan of the job's space is below, ms; 0 where that is not known."""
        bound = find_bound(self.play(moment.source).job, self.known(moment.source), self.estimate_of(moment))
        return min(bound.lower_bound_ms or 0.0, self.estimate_of(moment).step_ms)

    def _simulation(self, moment: Moment) -> Simulation:
        return Simulation(self.play(moment.source).job, self.estimate_of(moment))

    def describe_found(self, estimate: Estimate) -> str:
        """A plan that a search found, in a line."""
        return f"{describe_strategy(estimate.plan)}: step {format_ms(estimate.step_ms)}"


def check_wish(sizes: dict[str, Any]) -> Wish:
    """Sizes as the page names them → fields of a Strategy. Raises JobError where one is not known, or no size."""
    wish: dict[str, int | str] = {}
    for name, value in sizes.items():
        if name.lower() not in SIZES:
            raise JobError(f"{name} is no size of a strategy; known are {', '.join(SIZES).upper()}")
        is_word = name.lower() == "schedule"
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not (isinstance(value, str) if is_word else is_size):
            expected = "the name of a schedule" if is_word else "a whole number"
            raise JobError(f"{name} is {value!r}; {expected} is expected")
        wish[name.lower()] = value
    return wish


def _count(number: int, modality: str) -> str:
    return f"{number} {modality} layer{'' if number == 1 else 's'}"


def read_job_text(path: Path) -> str:
    """The text of a job file. Raises JobError."""
    return read_text(path, "job file", "YAML or JSON file")


def _last(kept: OrderedDict[str, T], key: str, most: int) -> T:
    """What is kept under `key`, and nothing that was not asked for lately."""
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
    return kept[key]


_ACTIONS: dict[type[Any], Callable[[Session, Any], None]] = {
    words.MoveLayers: Session._move,
    words.SetMode: Session._mode,
    words.SetSizes: Session._sizes,
    words.SetKnobs: Session._knobs,
    words.NewJob: Session._job,
    words.Undo: Session._undo,
    words.Redo: Session._redo,
    words.Pin: Session._pin,
    words.Unpin: Session._unpin,
    words.Take: Session._take,
}
