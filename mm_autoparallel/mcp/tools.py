"""The tools: each asks the Python face for one question's answer, and computes nothing by itself."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mm_autoparallel.api.jobs import describe_job, read_job
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import is_folder, is_there, read_text, write_text_atomically
from mm_autoparallel.mcp import answers, questions
from mm_autoparallel.mcp.answers import cut
from mm_autoparallel.mcp.calls import Call, remarks_of
from mm_autoparallel.units import format_ms

if TYPE_CHECKING:
    from mm_autoparallel.api.results import Simulation
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.planner.plan import Plan

_SECTIONS = ("cluster", "workload", "search")
_WHOLE = ("freeze", "adapters", "profiles", "calibration")


def plan(question: questions.PlanQuestion, call: Call) -> answers.PlanAnswer:
    """Search, write the plan file."""
    from mm_autoparallel import api
    from mm_autoparallel.planner.search.watched import describe_end

    path = call.folder.read(question.job)
    out = call.folder.write(question.out, ".json", question.overwrite, [path])
    job = read_job(path, question.changes)
    api.load_solver()
    found = api.plan(
        job,
        time_limit_s=question.time_limit_s,
        top_k=question.top_k,
        should_stop=call.should_stop,
        on_progress=call.tell,
    )
    file = call.folder.put(out, question.overwrite, found.write)
    best, *others = found.best
    return answers.PlanAnswer(
        file=file,
        warnings=cut(found.warnings),
        remarks=(*remarks_of(call), *(one.words for one in best.unstated)),
        best=figures_of(best),
        lower_bound_ms=found.lower_bound_ms,
        gap_fraction=found.gap_fraction,
        proven=found.proven,
        stopped=found.search.stopped,
        elapsed_s=round(found.search.elapsed_s, 3),
        verdict=cut(describe_end(found.search).splitlines()),
        runners_up=tuple(f"number {rank}: {_one_line(one)}" for rank, one in enumerate(others, start=2)),
    )


def simulate(question: questions.SimulateQuestion, call: Call) -> answers.SimulateAnswer:
    """Play a plan file."""
    from mm_autoparallel import api

    path, of_plan = call.folder.read(question.job), call.folder.read(question.plan)
    out = call.folder.write_optional(question.out, question.overwrite, [path, of_plan])
    job = read_job(path, question.changes)
    simulation = api.simulate(job, api.read_plan(of_plan, job), name=question.plan)
    return answers.SimulateAnswer(
        file=call.folder.put_result(out, question.overwrite, simulation), **_simulated(simulation, call)
    )


def edit(question: questions.EditQuestion, call: Call) -> answers.EditAnswer:
    """Edit a plan file, play what comes out, write it."""
    from mm_autoparallel import api
    from mm_autoparallel.planner.plan import format_document
    from mm_autoparallel.reports.estimates import describe_change

    path, of_plan = call.folder.read(question.job), call.folder.read(question.plan)
    out = call.folder.write(question.out, ".json", question.overwrite, [path])
    if not (question.sizes or question.layers or question.recompute or question.moves or question.modes):
        raise JobError("edit: nothing to change; give sizes, layers, recompute, moves or modes")
    job = read_job(path, question.changes)
    before = api.simulate(job, api.read_plan(of_plan, job), name=question.plan)
    after = api.simulate(job, _edit(question, job, before.plan))
    text = format_document(after.estimate.plan_document())
    return answers.EditAnswer(
        file=call.folder.put(out, question.overwrite, lambda target: write_text_atomically(target, text)),
        before_step_ms=before.step_ms,
        before_fits=before.fits,
        change=describe_change(before.estimate, after.estimate),
        **_simulated(after, call),
    )


def _edit(question: questions.EditQuestion, job: Job, plan: Plan) -> Plan:
    """The plan with all changes. Raises PlanError where one does not fit it or the job."""
    from mm_autoparallel.planner.edits import move_layers, set_mode
    from mm_autoparallel.planner.explain.nearest import change_sizes
    from mm_autoparallel.planner.explain.why_not import parse_wish

    if question.sizes:
        plan = change_sizes(job, plan, parse_wish(question.sizes, "sizes"), "sizes")
    if question.layers or question.recompute:
        plan = plan.edited(question.layers, question.recompute)
    for move in question.moves:
        plan = move_layers(plan, move.part, move.from_stage, move.to_stage, move.layers)
    for one in question.modes:
        plan = set_mode(job, plan, one.part, one.stage, one.mode, one.layers)
    return plan


def report(question: questions.ReportQuestion, call: Call) -> answers.ReportAnswer:
    """Write the page of plans."""
    from mm_autoparallel import api

    path = call.folder.read(question.job)
    paths = {name: call.folder.read(name) for name in question.plans}
    out = call.folder.write(question.out, ".html", question.overwrite, [path, *paths.values()])
    if not question.search and not paths:
        raise JobError("report: search is false, which leaves nothing to show; name a plan, or let it search")
    job = read_job(path, question.changes)
    plans = {name: api.read_plan(one, job) for name, one in paths.items()}
    api.load_solver()
    page = api.report(
        job,
        plans or None,
        search=question.search,
        time_limit_s=question.time_limit_s,
        should_stop=call.should_stop,
        on_progress=call.tell,
        texts={name: read_text(one, "plan", "JSON file") for name, one in paths.items()},
        command=_report_command(question),
    )
    return answers.ReportAnswer(
        file=call.folder.put(out, question.overwrite, page.write),
        warnings=cut(page.report.warnings),
        remarks=remarks_of(call),
        plans=tuple(
            f"{one.name}: {one.strategy}: step {format_ms(one.step_ms)}, {'fits' if one.fits else 'does not fit'}"
            for one in page.report.plans
        ),
    )


def init(question: questions.InitQuestion, call: Call) -> answers.InitAnswer:
    """Write the job file of a model on a cluster."""
    from mm_autoparallel.api.job_text import format_job

    out = call.folder.write(question.out, ".yaml", question.overwrite)
    model, named = question.model, call.folder.read(question.model)
    if is_there(named) or is_folder(named):
        model = os.path.relpath(named, out.parent)
    given = question.model_dump(exclude_none=True)
    workload = ("global_batch_size", "seq_length", "image_tokens_per_sample", "images_per_sample")
    sections: dict[str, Any] = {
        "cluster": {key: given[key] for key in ("device", "num_nodes", "devices_per_node") if key in given},
        "workload": {key: given[key] for key in workload if key in given},
        "search": {},
    }
    for name, value in question.more.items():
        if name in _WHOLE:
            sections[name] = value
        elif name not in _SECTIONS:
            raise JobError(f"more.{name} is no section of a job file; those are {', '.join((*_SECTIONS, *_WHOLE))}")
        elif not isinstance(value, dict):
            raise JobError(f"more.{name} is no mapping; give the keys of that section")
        else:
            sections[name] |= value
    words = describe_job(model, path=out, **sections)
    job = words.parse(out)
    text = format_job(words, job, str(out))
    return answers.InitAnswer(
        file=call.folder.put(out, question.overwrite, lambda target: write_text_atomically(target, text)),
        warnings=cut(job.warnings),
        remarks=remarks_of(call),
        model=job.model.name,
        parts={part.name: part.layers.num_layers for part in job.model.modalities},
        num_devices=job.cluster.num_devices,
    )


def place(question: questions.PlaceQuestion, call: Call) -> answers.PlaceAnswer:
    """Place a pipeline of one's own figures."""
    from mm_autoparallel import api
    from mm_autoparallel.api.placed import read_problem

    path = call.folder.read(question.problem)
    out = call.folder.write_optional(question.out, question.overwrite, [path])
    problem = read_problem(path)
    api.load_solver(for_search=False)
    found = api.place(
        problem, time_limit_s=question.time_limit_s, should_stop=call.should_stop, on_progress=call.tell_step
    )
    file = None
    if out is not None and found.placement is not None:
        file = call.folder.put(out, question.overwrite, found.write_certificate)
    document = found.document()
    return answers.PlaceAnswer(
        file=file,
        remarks=remarks_of(call),
        sentence=str(found.renderables()[-1]) if found.placement is not None else found.describe_failure(),
        **{key: document[key] for key in answers.PlaceAnswer.model_fields if key in document},
    )


def verify(question: questions.VerifyQuestion, call: Call) -> answers.VerifyAnswer:
    """Check a certificate."""
    from mm_autoparallel import api

    certificate = api.read_certificate(call.folder.read(question.certificate))
    try:
        found = api.verify(certificate, time_limit_s=question.time_limit_s)
    except PlanError as error:
        raise PlanError(f"certificate {question.certificate}: {error}") from None
    return answers.VerifyAnswer(
        remarks=remarks_of(call),
        sentences=cut(found.table().splitlines()),
        step_ms=found.step_ms,
        lower_bound_ms=found.lower_bound_ms,
        gap_fraction=found.document()["gap_fraction"],
    )


def doctor(_question: questions.NoQuestion, call: Call) -> answers.DoctorAnswer:
    """Try what planning needs."""
    from mm_autoparallel.api.doctor import diagnose

    found = diagnose()
    checks = tuple(answers.Check(**asdict(check)) for check in found.checks)
    return answers.DoctorAnswer(works=found.works, checks=checks, remarks=remarks_of(call))


def figures_of(simulation: Simulation) -> answers.Figures:
    """A simulated plan as answers have it."""
    from mm_autoparallel.reports.estimates import describe_chance, describe_expected, describe_strategy

    document, estimate = simulation.document(), simulation.estimate
    return answers.Figures(
        strategy=describe_strategy(simulation.plan),
        step_ms=simulation.step_ms,
        low_step_ms=document["step_ms_low"],
        high_step_ms=document["step_ms_high"],
        throughput_tokens_per_s=document["throughput"],
        bubble_fraction=document["bubble_fraction"],
        fits=simulation.fits,
        oom_probability=document["oom_probability"],
        chance=describe_chance(estimate),
        expected=describe_expected(estimate) if estimate.interval else "",
        stages=tuple(
            answers.Stage(**{key: stage.get(key, {}) for key in answers.Stage.model_fields})
            for stage in document["stages"]
        ),
    )


def _simulated(simulation: Simulation, call: Call) -> dict[str, Any]:
    from mm_autoparallel.reports.critical_path import describe_path

    return {
        "warnings": cut(simulation.warnings),
        "remarks": (*remarks_of(call), *(one.words for one in simulation.unstated)),
        "plan": figures_of(simulation),
        "longest_path": describe_path(simulation.estimate.timeline),
    }


def _one_line(simulation: Simulation) -> str:
    from mm_autoparallel.reports.estimates import describe_strategy

    fits = "fits" if simulation.fits else "does not fit"
    return f"{describe_strategy(simulation.plan)}: step {format_ms(simulation.step_ms)}, {fits}"


def _report_command(question: questions.ReportQuestion) -> str:
    """The command line that makes the page again."""
    import shlex

    words = ["mm-autoparallel", "report", question.job]
    for name in question.plans:
        words += ["--config", name]
    for key, value in question.changes.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    words += ["--no-search"] if not question.search else ["--time-limit", f"{question.time_limit_s:g}"]
    return shlex.join([*words, "--out", question.out])
