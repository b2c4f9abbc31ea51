"""The tools for files of frameworks: export_plan, import_launch and lint, as tools.py has the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mm_autoparallel.api.jobs import read_job
from mm_autoparallel.errors import JobError
from mm_autoparallel.files import write_text_atomically
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.mcp import answers, questions
from mm_autoparallel.mcp.answers import cut
from mm_autoparallel.mcp.calls import Call, remarks_of
from mm_autoparallel.mcp.tools import figures_of
from mm_autoparallel.planner.plan import format_document


def export_plan(question: questions.ExportQuestion, call: Call) -> answers.ExportAnswer:
    """A plan into a framework's files."""
    from mm_autoparallel.api import read_plan
    from mm_autoparallel.api.exported import OUT, export_plan
    from mm_autoparallel.planner.bare_plan import read_bare_plan

    of_plan = call.folder.read(question.plan)
    into = tuple(map(call.folder.read, question.into))
    if into and question.out is None and not question.overwrite:
        raise JobError(
            f"into names {', '.join(map(str, into))}, which would be changed; give overwrite: true, or a folder as out"
        )
    out = call.folder.write_folder(str(OUT) if question.out is None else question.out)
    job = None if question.job is None else read_job(call.folder.read(question.job))
    plan = read_bare_plan(of_plan) if job is None else read_plan(of_plan, job)
    with _writing(out):
        found = export_plan(
            plan,
            job,
            question.framework,
            into=into,
            out=None if into and question.out is None else out,
            version=question.target_version,
            overwrite=question.overwrite,
        )
    exported = found.exported
    return answers.ExportAnswer(
        warnings=cut(plan.warnings),
        remarks=remarks_of(call),
        files=tuple(map(str, found.files)),
        framework=found.framework,
        target_version=found.version,
        predicted=found.header,
        approximations=cut(exported.approximations),
        notes=cut((*exported.unchecked, *exported.notes)),
    )


def import_launch(question: questions.ImportQuestion, call: Call) -> answers.ImportAnswer:
    """What a launch runs, as a job and a plan."""
    from mm_autoparallel import api
    from mm_autoparallel.api.imported import import_launch

    path = call.folder.read(question.file)
    beside = tuple(map(call.folder.read, question.beside))
    out = call.folder.write_folder(question.out)
    found = import_launch(
        path, framework=question.framework, device=question.device, given=_given(question, call, beside)
    )
    with _writing(out):
        files = found.write(out)
    simulation = api.simulate(found.job, found.estimate.plan)
    return answers.ImportAnswer(
        warnings=cut((*found.job.warnings, *found.estimate.warnings)),
        remarks=(*remarks_of(call), *found.notes),
        files=tuple(map(str, files)),
        framework=found.framework,
        plan=figures_of(simulation),
    )


def lint(question: questions.LintQuestion, call: Call) -> answers.LintAnswer:
    """What launches break and waste."""
    from mm_autoparallel.api.linted import lint_files
    from mm_autoparallel.lint.sarif import sarif_document

    paths = [call.folder.read(name) for name in question.files]
    out = call.folder.write_optional(question.out, question.overwrite, paths)
    found = lint_files(
        paths,
        framework=question.framework,
        device=question.device,
        given=_given(question, call, ()),
        ignored=question.ignore,
    )
    file = None
    if out is not None:
        sarif = sarif_document(found.findings, found.rules, call.folder.root)
        text = format_document(sarif if question.sarif else found.document())
        file = call.folder.put(out, question.overwrite, lambda target: write_text_atomically(target, text))
    kept = found.findings[: answers.MAX_FINDINGS]
    left = len(found.findings) - len(kept)
    return answers.LintAnswer(
        file=file,
        remarks=(*remarks_of(call), *([f"{left} more findings; out names a file for all"] if left else [])),
        errors=found.count("error"),
        warning_count=found.count("warning"),
        notes=found.count("note"),
        findings=tuple(
            answers.Finding(
                rule=one.rule.key,
                severity=one.rule.severity,
                place=f"{one.path}:{one.line}" if one.line is not None else str(one.path),
                stage=one.stage,
                message=one.message,
                mend=one.mend,
            )
            for one in kept
        ),
    )


def _given(question: questions.OfLaunch, call: Call, beside: tuple[Path, ...]) -> Given:
    return Given(
        None if question.model is None else call.folder.read(question.model),
        question.image_tokens,
        question.images,
        question.world_size,
        vocab_size=question.vocab_size,
        beside=beside,
        seq_length=question.seq_length,
        global_batch_size=question.global_batch_size,
        micro_batch_size=question.micro_batch_size,
    )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises JobError where nothing can be written there."""
    try:
        yield
    except OSError as failure:
        raise JobError(f"{folder} cannot be written to: {failure.strerror or failure}") from None
