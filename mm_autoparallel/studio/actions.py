"""What a person can do to the session: each action of studio/document.py, and how it is said in words and commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from mm_autoparallel.api.job_text import format_job
from mm_autoparallel.api.jobs import describe_job
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.edits import move_layers, set_mode, set_order
from mm_autoparallel.planner.explain.modules import LAYOUT, Wish, format_key, split_key
from mm_autoparallel.planner.explain.modules import SIZES as OWN_SIZES
from mm_autoparallel.planner.explain.nearest import change_sizes, resize_plan
from mm_autoparallel.planner.explain.why_not import describe_wish
from mm_autoparallel.planner.plan import Plan, parse_plan
from mm_autoparallel.records import Noun
from mm_autoparallel.studio import document as words
from mm_autoparallel.studio.drawing import SIZES, describe_values
from mm_autoparallel.studio.launches import export_files, import_file
from mm_autoparallel.studio.moments import Source
from mm_autoparallel.studio.session import Played, Session, plainest_plan
from mm_autoparallel.validation import validation_error

Asked = TypeVar("Asked", bound=Noun)


def read_request(record: type[Asked], body: bytes) -> Asked:
    """The record that a page has sent. Raises JobError where the body is none."""
    try:
        return record.model_validate_json(body)
    except ValidationError as failure:
        raise validation_error(failure, "the request", record, {}, JobError) from None


def act(session: Session, asked: words.Do) -> None:
    """Do what was asked. Raises Stale, PlannerError, or OSError where the session cannot be kept."""
    session.check_revision(asked.revision)
    _ACTIONS[type(asked.action)](session, asked.action)


def _edit(session: Session, told: str, flags: list[str], change: Callable[[Plan], Plan]) -> None:
    present = session.present()
    command = session.command("edit", present, *flags, "--out", session.next_file())
    session.add(told, command, present.source, change(session.plan_of(present)))


def _move(session: Session, action: words.MoveLayers) -> None:
    flag = f"{action.modality}:{action.source}:{action.target}:{action.count}"
    told = f"{_count(action.count, action.modality)} from stage {action.source} to {action.target}"
    _edit(
        session,
        told,
        ["--move", flag],
        lambda plan: move_layers(plan, action.modality, action.source, action.target, action.count),
    )


def _mode(session: Session, action: words.SetMode) -> None:
    job = session.play(session.present().source).job
    flag = f"{action.modality}:{action.stage}:{action.mode}={action.count}"
    told = f"{_count(action.count, action.modality)} of stage {action.stage} in {action.mode}"
    _edit(
        session,
        told,
        ["--mode", flag],
        lambda plan: set_mode(job, plan, action.modality, action.stage, action.mode, action.count),
    )


def _order(session: Session, action: words.SetOrder) -> None:
    told = f"another order of stage {action.stage}"
    flag = f"{action.stage}:{' '.join(action.words.split())}"
    _edit(session, told, ["--order", flag], lambda plan: set_order(plan, action.stage, action.words))


def _sizes(session: Session, action: words.SetSizes) -> None:
    present = session.present()
    played = session.play(present.source)
    wish = _check_wish(action.sizes)
    plan = change_sizes(played.costs, session.plan_of(present), wish, "sizes")
    flag = ",".join(f"{format_key(name)}={value}" for name, value in wish.items())
    command = session.command("edit", present, "--sizes", flag, "--out", session.next_file())
    session.add(describe_wish(wish), command, present.source, plan)


def _knobs(session: Session, action: words.SetKnobs) -> None:
    present = session.present()
    values = present.source.values | {key: value for key, value in action.values.items() if value is not None}
    values = {key: value for key, value in values.items() if action.values.get(key, value) is not None}
    if "cluster.device" in action.values:  # single figures were of the device before
        values = {key: value for key, value in values.items() if not key.startswith("cluster.device.")}
    source = present.source.model_copy(update={"values": values})
    told, played = describe_values(action.values), session.play(source)
    try:
        plan, more = parse_plan(present.plan, played.job, "the plan"), ""
    except PlannerError as error:
        plan, more = _again(played, session.plan_of(present).strategy), f" (the plan before did not fit: {error})"
    if plan.strategy.world_size != played.job.cluster.num_devices:
        plan, more = _again(played, plan.strategy), " (the plan before left devices out)"
    moment = present.model_copy(update={"source": source})
    command = session.command("simulate", moment)
    session.add(told, command, source, plan, present.file if not more else "", more)


def _again(played: Played, like: Strategy) -> Plan:
    """A first plan of the lawful strategy that is most like `like`, in pipeline and tensor parallel sizes first."""
    for names in (("pp", "tp", "cp", "ep", "vpp", "mbs"), ("pp", "tp"), ("tp",), ()):
        plan = _like_or_none(played, like, {name: getattr(like, name) for name in names})
        if plan is not None:
            return plan
    return plainest_plan(played)


def _like_or_none(played: Played, like: Strategy, kept: Wish) -> Plan | None:
    try:
        return resize_plan(played.costs, like, kept, "sizes")
    except PlannerError:
        return None


def _job(session: Session, action: words.NewJob) -> None:
    workload: dict[str, int] = {"global_batch_size": action.global_batch_size, "seq_length": action.seq_length}
    flags = ["--gbs", str(action.global_batch_size), "--seq", str(action.seq_length)]
    if action.image_tokens_per_sample:
        workload["image_tokens_per_sample"] = action.image_tokens_per_sample
        workload["images_per_sample"] = action.images_per_sample
        flags += ["--image-tokens", str(action.image_tokens_per_sample), "--images", str(action.images_per_sample)]
    session.check_inside(action.model)
    cluster = {
        "device": action.device,
        "num_nodes": action.num_nodes,
        "devices_per_node": action.devices_per_node,
    }
    path = session.free_name()
    found = describe_job(action.model, cluster, workload, path=path)
    where = ["--device", action.device, "--nodes", str(action.num_nodes)]
    where += ["--devices-per-node", str(action.devices_per_node)]
    command = shlex.join(["mm-autoparallel", "init", "--model", action.model, *where, *flags, "--out", path.name])
    text = format_job(found, found.parse(path), path.name)
    session.begin(Source(file=path.name, text=text), command, f"a job of {action.model}")


def _undo(session: Session, _: words.Undo) -> None:
    taken = session.present()
    session.moments.move(-1)
    session.show(f"taken back: {taken.words}", taken)


def _redo(session: Session, _: words.Redo) -> None:
    before = session.present()
    session.show(f"done again: {session.moments.move(1).words}", before)


def _pin(session: Session, action: words.Pin) -> None:
    session.moments.pin(action.name)
    session.show(f"pinned as {action.name}", None)


def _unpin(session: Session, action: words.Unpin) -> None:
    session.moments.unpin(action.name)
    session.show(f"put {action.name} away", None)


def _take(session: Session, action: words.Take) -> None:
    moment = session.moments.pinned(action.name)
    session.add(f"took {action.name}", "", moment.source, session.plan_of(moment), moment.file)


def _count(number: int, modality: str) -> str:
    return f"{number} {modality} layer{'' if number == 1 else 's'}"


def _check_wish(sizes: dict[str, Any]) -> Wish:
    """Sizes as the page names them → fields of a Strategy, or of an encoder's module. Raises JobError where one is not
    known, or no size."""
    wish: dict[str, int | str] = {}
    for name, value in sizes.items():
        module, of = split_key(name)
        key, known = of.lower(), (LAYOUT, *OWN_SIZES) if module else SIZES
        if key not in known:
            what = f"an encoder {module}" if module else "a strategy"
            raise JobError(f"{name} is no size of {what}; known are {', '.join(known).upper()}")
        is_word = key in ("schedule", LAYOUT)
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not (isinstance(value, str) if is_word else is_size):
            expected = f"the name of a {key}" if is_word else "a whole number"
            raise JobError(f"{name} is {value!r}; {expected} is expected")
        wish[f"{module}.{key}" if module else key] = value
    return wish


_ACTIONS: dict[type[Any], Callable[[Session, Any], None]] = {
    words.MoveLayers: _move,
    words.SetMode: _mode,
    words.SetOrder: _order,
    words.SetSizes: _sizes,
    words.SetKnobs: _knobs,
    words.NewJob: _job,
    words.ImportLaunch: import_file,
    words.ExportPlan: export_files,
    words.Undo: _undo,
    words.Redo: _redo,
    words.Pin: _pin,
    words.Unpin: _unpin,
    words.Take: _take,
}
