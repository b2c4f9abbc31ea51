"""Trials: plans trained for a few steps on the devices at hand, by the script itself under the plan's own flags.

Each trial leaves a record in the work folder as soon as it ends, so that a killed search goes on where it was and a
second one trains nothing. A record belongs to a command, to the code of the script and to versions, and is read for no
other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import Field

from mm_autoparallel.errors import JobError, PlanError, ProfileError
from mm_autoparallel.files import read_document, write_text_atomically
from mm_autoparallel.hooks.fingerprint import hash_files
from mm_autoparallel.hooks.language import LanguageTraining
from mm_autoparallel.hooks.planner_process import simulate_in
from mm_autoparallel.hooks.planning import with_profiles
from mm_autoparallel.hooks.profiling import plan_command
from mm_autoparallel.hooks.runs import Site, run_task
from mm_autoparallel.hooks.task import Task, Trained, describe_job
from mm_autoparallel.integrations.auto_tuning.cut import TEXT, cut_job, cut_plan
from mm_autoparallel.integrations.megatron_core.decided import Decided, decide
from mm_autoparallel.measurements.logs.steady import Steady, find_steady
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import Plan, decision_document, read_plan
from mm_autoparallel.planner.search.space import describe_strategy
from mm_autoparallel.profilers.launch import RankFailure
from mm_autoparallel.records import Noun
from mm_autoparallel.reports.terminal import say, warn, writing
from mm_autoparallel.validation import parse_record

NUM_STEPS = 10
"""Of each trial: upstream's number."""

Flags = Mapping[str, tuple[str, ...] | None]


@dataclass(frozen=True)
class Candidate:
    """A plan of a search that is held against a trial. path: its file. step_ms, peak_bytes: as it was planned.

    trial_ms: what its cut takes as planned. trained_ms: as it was trained; None: it was not. trained_peak_bytes: 0: not
    told. is_whole: nothing was cut, so that what was trained is the plan itself.
    """

    path: Path
    plan: Plan
    step_ms: float
    peak_bytes: float
    trial_ms: float = 0.0
    trained_ms: float | None = None
    trained_peak_bytes: float = 0.0
    is_whole: bool = False

    @property
    def corrected_ms(self) -> float:
        """The planned step times what its trial took over what that was planned to take."""
        return self.step_ms if self.trained_ms is None else self.step_ms * self.trained_ms / self.trial_ms


class _Record(Noun):
    """What a trial left that ended well; one that did not is run again the next time."""

    schema_name: Literal["mm-autoparallel/trial/1"] = Field(alias="schema")
    command: str
    trained: Trained


@dataclass(frozen=True)
class Trials:
    """Runs trials of plans of `job`. folder: of their records, and of their plans as they were run.

    planner: the interpreter that simulates; None for this process.
    """

    job: Job
    training: LanguageTraining
    site: Site
    planner: Path | None
    folder: Path
    jobs: dict[str, Job] = field(default_factory=dict)
    """Of cut plans, with their profiles, by their content."""

    def hold(self, paths: Sequence[Path]) -> list[Candidate]:
        """The plans at `paths` with what their trials took, in the same order; each cut is trained once."""
        candidates = [read_candidate(path, self.job) for path in paths]
        return [self._try(candidate) for candidate in candidates]

    def _try(self, candidate: Candidate) -> Candidate:
        cut = cut_plan(candidate.plan, self.site.num_ranks)
        name = describe_strategy(candidate.plan.strategy)
        if cut is None:
            say(f"{name}: it divides a layer among more devices than are here; planned alone")
            return candidate
        is_whole = cut is candidate.plan
        try:
            job = self.job if is_whole else self._job_of(cut)
            decided = self.training.dialect.write(decide(cut, job, allows=self.training.dialect.allows))
        except (PlanError, JobError) as error:
            say(f"{name}: it is not trained, since {error}")
            return candidate
        flags = _flags_of(decided, is_whole)
        try:
            trained = self._train(flags, job, describe_strategy(cut.strategy))
        except RankFailure as failure:
            warn([f"{name}: its trial told no step; {failure}"])
            return candidate
        if not trained.steps_ms:
            warn([f"{name}: its trial ended and printed no step as Megatron-LM does"])
            return candidate
        trial_ms = candidate.step_ms
        if not is_whole or decided.plan != cut:
            trial_ms = self._simulate(job, decided.plan, flags)
        trained_ms = _steady_ms(trained.steps_ms)
        say(f"{name}: trial planned {trial_ms:.1f} ms, trained {trained_ms:.1f} ms a step")
        return replace(
            candidate,
            trial_ms=trial_ms,
            trained_ms=trained_ms,
            trained_peak_bytes=float(trained.peak_bytes),
            is_whole=is_whole,
        )

    def _job_of(self, cut: Plan) -> Job:
        """The job of a cut plan with its blocks measured. Raises as `with_profiles` does."""
        nodes = self.site.rendezvous.num_nodes if self.site.rendezvous else 1
        document = cut_job(describe_job(self.job), cut, nodes, self.site.processes_per_node)
        key = json.dumps(document, sort_keys=True)
        if key not in self.jobs:
            self.jobs[key] = with_profiles(parse_job(document, self.job.path), self.site)
        return self.jobs[key]

    def _train(self, flags: Flags, job: Job, name: str) -> Trained:
        """What training under `flags` told: from its record, which is made where there is none yet.

        Raises RankFailure where it did not end well.
        """
        path = self.folder / f"{self._key(flags)}.json"
        if path.exists():
            document = read_document(path, "trial", ProfileError)
            return parse_record(_Record, document, "trial record", path, ProfileError).trained
        say(f"training {name} for {NUM_STEPS} steps on {self.site.num_ranks} ranks")
        task = Task.model_validate(
            {
                "schema": "mm-autoparallel/task/1",
                "network": False,
                "arrangement": "group",
                "divisions": (),
                "command": plan_command(),
                "job": describe_job(job),
                "training": dict(flags),
            }
        )
        trained = run_task(self.site, task)
        record = _Record.model_validate(
            {"schema": "mm-autoparallel/trial/1", "command": task.command, "trained": trained}
        )
        with writing(path):
            write_text_atomically(path, record.model_dump_json(by_alias=True, indent=1) + "\n")
        return trained

    def _simulate(self, job: Job, plan: Plan, flags: Flags) -> float:
        """What `plan` takes, in ms, as it was cut and as its flags run it."""
        path = self.folder / f"{self._key(flags)}-plan.json"
        simulate_in(self.planner, job, decision_document(plan), path)
        return float(read_document(path, "plan", PlanError)["e2e_time"])

    def _key(self, flags: Flags) -> str:
        """A name for what a trial depends on: the command, the code that it runs, versions, devices and ranks."""
        from mm_autoparallel.profilers.device import software_versions

        content = {
            "words": list(self.training.words_to_train),
            "flags": {flag: words and list(words) for flag, words in sorted(flags.items())},
            "files": hash_files(),
            "software": dict(software_versions()),
            "device": self.job.cluster.device.name,
            "ranks": self.site.num_ranks,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _flags_of(decided: Decided, is_whole: bool) -> Flags:
    """What a trial is run under: the plan, and few steps; where it is cut, the layers that are left."""
    values = {**decided.usual, **decided.values, "--train-iters": (str(NUM_STEPS),), "--log-interval": ("1",)}
    return values if is_whole else {**values, "--num-layers": (str(sum(decided.plan.layers[TEXT])),)}


def read_candidate(path: Path, job: Job) -> Candidate:
    """The plan at `path`, as it was planned. Raises PlanError where the file is no plan of `job`."""
    document = read_document(path, "plan", PlanError)
    return Candidate(path, read_plan(path, job), document["e2e_time"], max(document["peak_memory_bytes"]))


def _steady_ms(steps_ms: Sequence[float]) -> float:
    """The steady step; where a run never was, the median of its second half."""
    steady = find_steady(steps_ms)
    if isinstance(steady, Steady):
        return steady.median_ms
    say(f"{steady}; the median of the second half is taken")
    return median(steps_ms[len(steps_ms) // 2 :])
