"""`plan --script FILE`: a launch script as a job, its own plan beside the found one, and the plan written back."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.job_words import find_cluster
from mm_autoparallel.errors import JobError, PlannerError

if TYPE_CHECKING:
    from mm_autoparallel.api.results import PlanResult
    from mm_autoparallel.integrations.described import Given
    from mm_autoparallel.integrations.framework import LaunchKind
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.planner.evaluate import Estimate

OUT = Path("planned")
"""Where a planned script is written, unless --out says otherwise: never beside the user's, whose names it keeps."""

JOB_FILE = "job.json"
"""The job that was planned, for `simulate` and `explain`."""

_OF_SCRIPTS = ("model_config", "overwrite")
_OF_MODELS = ("gbs", "seq")
_NOT_OF_SCRIPTS = ("set",)
_OF_BOTH = ("device", "nnodes", "nproc_per_node", "cluster", "image_tokens", "images", "max_vpp")


@dataclass(frozen=True)
class Outcome:
    """What a search made of a launch script. own: the plan that it has by itself; None, and why, where it has none.

    files: written ones. told: what they cannot say as the plan says it, a sentence each.
    """

    found: Estimate
    own: Estimate | None
    why_not: str
    files: tuple[Path, ...]
    told: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """What --json has of it."""
        from mm_autoparallel.reports.estimates import estimate_document

        return {
            "own_plan": estimate_document(self.own) if self.own else None,
            "own_plan_unknown": self.why_not or None,
            "files": [str(path) for path in self.files],
            "approximations": list(self.told),
        }

    def print(self) -> None:
        """The two plans, one below the other, then what the files cannot say."""
        from mm_autoparallel.cli.output import print_line
        from mm_autoparallel.reports.estimates import describe_strategy
        from mm_autoparallel.reports.terminal import warn
        from mm_autoparallel.units import GIB

        if self.own is None:
            print_line(f"the script's own plan: {self.why_not}")
        for name, estimate in (("the script's own plan", self.own), ("the plan found", self.found)):
            if estimate is not None:
                fits = "fits" if estimate.fits else "does not fit"
                print_line(
                    f"{name}: {estimate.step_ms:.2f} ms a step, highest peak "
                    f"{max(estimate.peak_memory_bytes) / GIB:.2f} GiB, {fits} ({describe_strategy(estimate.plan)})"
                )
        if self.own is not None:
            print_line(_compare(self.own, self.found))
        warn(self.told)


def _compare(own: Estimate, found: Estimate) -> str:
    ratio = own.step_ms / found.step_ms
    if not own.fits:
        return "the script's own plan needs more memory than a device has"
    if ratio >= 1:
        return f"the plan found is {ratio:.2f} times as fast"
    return (
        f"the script's own plan is {1 / ratio:.2f} times as fast as the plan found: it has what was not searched, or "
        "the time limit came before"
    )


@dataclass(frozen=True)
class ScriptJob:
    """The job that a launch script is, and what to tell of it. document: the job as a job file has it."""

    path: Path
    kind: LaunchKind
    given: Given
    job: Job
    document: Mapping[str, Any]
    notes: tuple[str, ...]

    def write(self, result: PlanResult, out: Path, overwrite: bool) -> Outcome:
        """Write the plan into copies of the user's files in `out`, and the job; compare it with the script's own.

        Raises PlannerError where the files cannot hold it, or cannot be written.
        """
        from mm_autoparallel.planner.plan import format_document
        from mm_autoparallel.reports.terminal import write_file, writing

        with writing(out):
            export = self.kind.write_plan(result.plan, self.path, out, self.given, overwrite)
        job_file = out / JOB_FILE
        write_file(job_file, format_document(self.document))
        own, why_not = self._evaluate_own()
        return Outcome(result.search.estimates[0], own, why_not, (*export.files, job_file), export.approximations)

    def _evaluate_own(self) -> tuple[Estimate | None, str]:
        from mm_autoparallel.api import simulate

        try:
            plan = self.kind.read_plan(self.path, self.given)
            return simulate(self.job.with_modes(plan.modes_used), plan).estimate, ""
        except PlannerError as error:
            return None, str(error)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a launch script."""
    group = parser.add_argument_group("in place of JOB: a launch script")
    group.add_argument(
        "--script", type=Path, metavar="FILE", help="plan what this launch script of MindSpeed-MM or Megatron-LM trains"
    )
    group.add_argument("--model-config", type=Path, metavar="CONFIG.json", help="where the model's sizes are")
    group.add_argument("--overwrite", action="store_true", help="replace what is in --out")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises JobError where not one of JOB, a script and a model is given, or an option of one stands at another."""
    given = [source is not None for source in (arguments.job, arguments.script, arguments.model)]
    if sum(given) != 1:
        raise JobError(
            "give one of the three: JOB, a job file, or --script FILE, a launch script, or --model NAME, a model"
        )
    is_job, is_script, is_model = given
    for names, allowed, flag in (
        (_OF_SCRIPTS, is_script, "--script"),
        (_OF_MODELS, is_model, "--model"),
        (_OF_BOTH, not is_job, "--script or --model"),
        (_NOT_OF_SCRIPTS, not is_script, "JOB or --model"),
    ):
        for name in names:
            if getattr(arguments, name) and not allowed:
                own = "a job file says that itself" if is_job else "leave it out"
                raise JobError(f"--{name.replace('_', '-')} goes with {flag}; {own}")


def read_script_job(arguments: argparse.Namespace) -> ScriptJob:
    """The job of `arguments.script`. Raises JobError where the script, its files or the cluster are not understood."""
    from mm_autoparallel.integrations.catalog import find_launch
    from mm_autoparallel.integrations.described import Given
    from mm_autoparallel.model.job.model import Model
    from mm_autoparallel.model.readers.job_file import parse_job

    path: Path = arguments.script
    kind = find_launch(path)
    cluster = _cluster(kind, path, arguments)
    given = Given(
        arguments.model_config, arguments.image_tokens, arguments.images, _count_devices(cluster), arguments.max_vpp
    )
    described = kind.describe(path, given)
    _check_targets(kind, path, arguments, given)
    model: Any = described.model
    document = {
        "model": model.model_dump(mode="json") if isinstance(model, Model) else str(model.resolve()),
        "cluster": cluster,
        "workload": dict(described.workload),
        "search": dict(described.search),
        **({"adapters": dict(described.adapters)} if described.adapters else {}),
    }
    notes = described.notes
    if described.not_searched:
        notes += (f"not searched: {'; '.join(described.not_searched)}",)
    if described.world_size not in (None, given.world_size):
        notes += (f"the script starts {described.world_size} devices, and the plan is for {given.world_size}",)
    return ScriptJob(path, kind, given, parse_job(document, path), document, notes)


def _check_targets(kind: LaunchKind, path: Path, arguments: argparse.Namespace, given: Given) -> None:
    """Files that are there would end a search in vain."""
    from mm_autoparallel.files import is_there

    for target in (*kind.planned_files(path, arguments.out, given), arguments.out / JOB_FILE):
        if is_there(target) and not arguments.overwrite:
            raise JobError(f"{target} is there already; give another folder with --out, or --overwrite to replace it")


def _cluster(kind: LaunchKind, path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The cluster as a job file has it: that of a file, or from flags and what the script starts."""
    section = find_cluster(arguments)
    if section is not None:
        return section
    nodes, devices = arguments.nnodes, arguments.nproc_per_node
    if nodes is None or devices is None:
        of_script = kind.find_devices(path)
        nodes, devices = nodes or of_script[0], devices or of_script[1]
    missing = [flag for flag, value in (("--nnodes", nodes), ("--nproc-per-node", devices)) if value is None]
    if missing:
        raise JobError(
            f"launch script {path}: what it starts is known only on the machine; give {' and '.join(missing)}"
        )
    return {"num_nodes": nodes, "devices_per_node": devices, "device": arguments.device}


def _count_devices(cluster: Mapping[str, Any]) -> int | None:
    """Devices of a cluster section; None where it is malformed, which reading the job tells."""
    nodes, devices = cluster.get("num_nodes"), cluster.get("devices_per_node")
    return nodes * devices if isinstance(nodes, int) and isinstance(devices, int) else None
