"""export: a plan into the files of a framework, read back before they are written; all of them or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import is_there
from mm_autoparallel.integrations.accounting import Lost
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.export import read_exactly, write_files
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.units import GIB
from mm_autoparallel.validation import nearest

SCHEMA = "mm-autoparallel/export/1"
OUT = Path("exported")
"""Where new files are written, unless somebody says otherwise."""


@dataclass(frozen=True)
class ExportResult:
    """What was written. header: what the files' own header says of the plan that they run."""

    framework: str
    version: str
    files: tuple[Path, ...]
    exported: Exported
    header: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As `export --json` prints it."""
        return {
            "schema": SCHEMA,
            "framework": self.framework,
            "target_version": self.version,
            "files": [str(path) for path in self.files],
            "approximations": [*self.exported.approximations],
            "checked": [*self.exported.checked],
            "not_checked": [*self.exported.unchecked],
            "notes": [*self.exported.notes],
            "predicted": [*self.header],
        }


def find_exporter(name: str, version: str | None = None) -> tuple[Exporter, str]:
    """How plans are written for the framework `name`, and for which version of it.

    Raises JobError where no such framework is registered, it takes no plans, or the version is not known.
    """
    known = {key: one for key, one in frameworks().items() if one.exporter is not None}
    if name not in known:
        raise JobError(f"--to {name}: no framework that plans are written for{nearest(name, list(known))}; known are "
                       f"{', '.join(sorted(known))}")  # fmt: skip
    provider = known[name].exporter
    assert provider is not None
    exporter = provider()
    if version not in (None, *exporter.versions):
        raise JobError(f"--target-version {version}: known of {name} are {', '.join(exporter.versions)}")
    return exporter, version or exporter.versions[0]


def export_plan(
    plan: Plan,
    job: Job | None,
    framework: str,
    *,
    into: Sequence[Path] = (),
    out: Path | None = None,
    version: str | None = None,
    overwrite: bool = False,
    said: Sequence[str] = (),
) -> ExportResult:
    """`plan` in files of `framework`.

    job: what it was made for; None: what the plan's file alone says is checked. into: a person's own files, of which
    what the plan decides is changed, in place where `out` is None. out: the folder that is written to. overwrite: files
    that are there may be replaced. said: the plan's own figures, for a header where no job is there to simulate it.
    Raises PlanError naming what the framework cannot run, JobError where a file cannot be read, is there already or was
    changed meanwhile, OSError where it cannot be written.
    """
    exporter, version = find_exporter(framework, version)

    def describe(run: Plan) -> tuple[str, ...]:
        return _describe(plan, run, job, said)

    if plan.strategy.layouts and not exporter.by_layer:
        raise PlanError(
            f"plan: its layers are shared in several ways ({', '.join(of.name for of in plan.strategy.layouts)}), and "
            f"files of {framework} say one for all; plan without search.layer_strategies"
        )
    if plan.strategy.arrangement and any(one.is_cached for one in plan.strategy.arrangement.each):
        raise PlanError(
            f"plan: its layout is {plan.strategy.arrangement.name}, and no file of {framework} says that features are "
            "read; plan without workload.cached_features, or export a plan of the decoder by itself"
        )
    if plan.strategy.arrangement and version != exporter.by_module:
        other = f"give --target-version {exporter.by_module}, or " if exporter.by_module else ""
        raise PlanError(
            f"plan: its layout is {plan.strategy.arrangement.name}, and files of {framework} {version} have one "
            f"parallel size for encoder and decoder; {other}plan with search.layouts [chain]"
        )
    target = Target(version, job, describe, out)
    if not into:
        if exporter.write is None:
            raise JobError(
                f"a plan for {framework} goes into files of yours: name them with --into {exporter.read_back}"
            )
        with _losing_nothing(framework, version):
            exported = exporter.write(plan, target)
        at = {name: (OUT if out is None else out) / name for name in exported.texts}
        texts = {at[name]: text for name, text in exported.texts.items()}
        write_files(texts, overwrite, executable=[at[name] for name in exported.executable])
        return ExportResult(framework, version, (*at.values(),), exported, describe(exported.plan))
    if exporter.patch is None:
        raise JobError(f"--into: plans for {framework} are written as new files; leave it out")
    before = {path: read_exactly(path) for path in into}
    with _losing_nothing(framework, version):
        exported = exporter.patch(plan, target, into)
    at = {path: path if out is None else out / path.name for path in exported.texts}
    if len({*at.values()}) < len(at):
        raise JobError(f"--into {' '.join(map(str, into))}: two of these files would be one in {out}")
    for path, text in before.items():
        if not is_there(path) or read_exactly(path) != text:
            raise JobError(f"{path} was changed while the plan was written into it; nothing was written, start again")
    texts = {at[path]: text for path, text in exported.texts.items()}
    for path in exported.texts:
        if path not in before and not overwrite and is_there(at[path]) and read_exactly(at[path]) != texts[at[path]]:
            raise JobError(f"{at[path]} is there already and holds something else; move it, or give another folder")
    write_files(texts, overwrite or out is None, {there: path for path, there in at.items() if path in before})
    return ExportResult(framework, version, (*at.values(),), exported, describe(exported.plan))


@contextmanager
def _losing_nothing(framework: str, version: str) -> Iterator[None]:
    """Raises PlanError where the files that would be written say a choice of the plan otherwise."""
    try:
        yield
    except Lost as lost:
        raise PlanError(
            f"plan: files of {framework} {version} do not say all that it decides, so nothing was written: {lost}; "
            "change that choice (`edit --sizes`), or plan without it"
        ) from None


def _describe(plan: Plan, run: Plan, job: Job | None, said: Sequence[str]) -> tuple[str, ...]:
    """What is predicted of the files by themselves, and of the plan where they run another."""
    if job is None:
        if run == plan:
            return (*said,)
        rounded = "Not predicted without --job: the files run another plan than this one, as said above."
        return (rounded, *said)
    lines = [f"Predicted of these files by themselves: {_figures(run, job)}"]
    return (*lines, *([] if run == plan else [f"Predicted of the plan itself: {_figures(plan, job)}"]))


def _figures(plan: Plan, job: Job) -> str:
    from mm_autoparallel.planner.evaluate import evaluate

    try:
        found = evaluate(job.with_modes(plan.modes_used), plan)
    except PlanError as failure:
        return f"nothing ({failure})"
    fits = "fits" if found.fits else "does not fit"
    return (
        f"{found.step_ms:.2f} ms a step, highest peak {max(found.peak_memory_bytes) / GIB:.2f} GiB of "
        f"{found.memory_limit_bytes / GIB:.2f} GiB, {fits}"
    )
