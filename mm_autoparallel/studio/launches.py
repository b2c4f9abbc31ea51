"""Files of frameworks in the studio: a launch as a job and a plan, the plan as a framework's files, and `lint`."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import import_launch
from mm_autoparallel.api.linted import lint_files
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.catalog import find_launch, frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.studio import document as words
from mm_autoparallel.studio.moments import Source
from mm_autoparallel.studio.session import Session

_PATTERNS = ("*.sh", "*/*.sh", "*.yaml", "*.yml", "*.toml", "*.json")


def list_launches(folder: Path, most: int) -> tuple[str, ...]:
    """Files of the folder that start a training, `most` at most."""
    paths = (path for pattern in _PATTERNS for path in sorted(folder.glob(pattern)) if not path.is_symlink())
    looked_at = (path for path, _ in zip(paths, range(most), strict=False))
    return tuple(str(path.relative_to(folder)) for path in looked_at if _starts_training(path))


def _starts_training(path: Path) -> bool:
    """Whether a framework knows the file by more than its ending, and it is no job file."""
    try:
        if find_launch(path).asked_last:
            return False
        return path.suffix == ".sh" or not {"cluster", "workload"} <= {*read_document(path, "launch file")}
    except PlannerError:
        return False


def list_exporters() -> tuple[str, ...]:
    """Frameworks that plans are written for, by name."""
    return tuple(sorted(name for name, one in frameworks().items() if one.exporter is not None))


def import_file(session: Session, action: words.ImportLaunch) -> None:
    """Go on with the job of a launch file, from the plan that it runs under. Raises PlannerError as import_launch."""
    path = session.check_inside(action.file)
    found = import_launch(path, device=action.device, given=_given(action))
    text = yaml.safe_dump(dict(found.job_document), sort_keys=False, width=116)
    command = ["mm-autoparallel", "import", action.file, "--from", found.framework, "--device", action.device]
    for flag, value in (("--world-size", action.world_size), ("--vocab-size", action.vocab_size)):
        command += [] if value is None else [flag, str(value)]
    told = "; ".join((f"read {action.file} as a launch of {found.framework}", *found.notes))
    session.begin(Source(file=session.free_name().name, text=text), shlex.join(command), told, found.estimate.plan)


def export_files(session: Session, action: words.ExportPlan) -> None:
    """Write the plan as it stands below the folder. Raises PlannerError as export_plan, OSError where it cannot be."""
    out = session.check_inside(action.out)
    if any(part.startswith(".") for part in Path(action.out).parts):
        raise JobError(f"{action.out}: names that begin with a dot are not written here")
    into = [session.check_inside(action.into)] if action.into else []
    present = session.present()
    job, plan = session.play(present.source).job, session.plan_of(present)
    found = export_plan(plan, job, action.framework, into=into, out=out, overwrite=action.overwrite)
    names = ", ".join(str(path.relative_to(session.folder)) for path in found.files)
    told = (*found.header, *found.exported.approximations, *found.exported.notes)
    session.show("; ".join((f"wrote {names} for {found.framework} {found.version}", *told)), None)


def lint_file(session: Session, asked: words.LintLaunch) -> words.Findings:
    """What a launch file of the folder breaks or wastes. Raises JobError as lint_files."""
    path = session.check_inside(asked.file)
    found = lint_files([path], device=asked.device, given=_given(asked))
    return words.Findings(
        file=asked.file,
        findings=tuple(
            words.Finding(
                rule=one.rule.key,
                severity=one.rule.severity,
                line=one.line,
                stage=one.stage,
                message=one.message,
                mend=one.mend,
            )
            for one in found.findings
        ),
    )


def _given(asked: words.Launch) -> Given:
    return Given(world_size=asked.world_size, vocab_size=asked.vocab_size)
