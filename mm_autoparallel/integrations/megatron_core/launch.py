"""A launch script of pretrain_gpt.py: the training that it starts, the plan that it runs under, a plan written into it.

Nothing is executed. Every byte that the plan does not decide stays; a decided flag is changed where it stands, in the
variable that holds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from pydantic import ValidationError

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value, read_document, read_text
from mm_autoparallel.integrations.accounting import Lost
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.export import describe_other_devices
from mm_autoparallel.integrations.launch_script import (
    SUFFIXES,
    check_numbers,
    check_shared_variables,
    find_broken_arithmetic,
    find_world_size,
    known_world,
    read_launch_script,
    set_global_batch,
)
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.decided import DEEPSPEED, TEXT, Decided, decide
from mm_autoparallel.integrations.megatron_core.dialect import MEGATRON, Dialect
from mm_autoparallel.integrations.megatron_core.passed import Passed, read_passed
from mm_autoparallel.integrations.megatron_core.read import (
    DEEPSPEED as DEEPSPEED_ENGINE,
)
from mm_autoparallel.integrations.megatron_core.read import (
    check_read_back,
    read_operators,
    read_plan,
    with_workload,
)
from mm_autoparallel.integrations.megatron_core.training import (
    check_precision,
    describe_training,
    read_trained_model,
    read_workload,
)
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.planner.plan import Plan

ENTRY = "pretrain_gpt.py"

MODEL_ARGS = "MODEL_ARGS"
_YAML = (".yaml", ".yml")

_ANCHORS = (flags.PIPELINE, flags.TENSOR, flags.MICRO_BATCH, flags.GLOBAL_BATCH, flags.NUM_LAYERS)
"""Behind the first of these that is passed, flags are added."""


def is_launch(path: Path) -> bool:
    """Whether the script at `path` starts Megatron-LM's pretrain_gpt.py, or the YAML there has MODEL_ARGS."""
    if path.suffix in _YAML:
        return re.search(rf"^{MODEL_ARGS}:", read_text(path, "launch file", "YAML file"), re.MULTILINE) is not None
    if path.suffix not in SUFFIXES:
        return False
    script = read_launch_script(path)
    started = script.started()
    return started is not None and PurePath(started[0].text).name == ENTRY and not is_mindspeed(script)


def is_mindspeed(script: LaunchScript) -> bool:
    """Whether `script` passes a flag that MindSpeed-LLM has and Megatron-LM has not, or was written for it."""
    from mm_autoparallel.integrations.mindspeed_llm.dialect import MARKS

    if script.has_flag(DEEPSPEED_ENGINE):  # Megatron-DeepSpeed's, whose experts have flags of the same names
        return False
    return "Starts MindSpeed-LLM's" in script.text or any(script.has_flag(flag) for flag in MARKS)


def read_training(path: Path) -> LaunchScript:
    """The launch script at `path`; of a YAML as Megatron-LM's functional tests have it, one that passes its MODEL_ARGS.

    Raises JobError where it cannot be read, or a YAML has no such mapping.
    """
    if path.suffix not in _YAML:
        return read_launch_script(path)
    arguments = read_document(path, "launch file", last_holds=True).get(MODEL_ARGS)
    if not isinstance(arguments, dict):
        raise JobError(
            f"launch file {path}: {MODEL_ARGS} is {describe_value(arguments)}; a mapping of flags is expected, as "
            "Megatron-LM's functional tests have it"
        )
    passed = []  # shells take these words there, one after the other: `\\\\|` is a bar
    for flag, value in arguments.items():
        if value is False or value is None:
            continue
        words = [] if value is True else value if isinstance(value, list) else [value]
        if str(flag) in flags.LISTS:
            words = [part for word in words for part in str(word).strip("[]").split()]
        passed.append((str(flag), [str(word).replace("\\", "") for word in words]))
    return as_script(path, passed)


def as_script(path: Path, passed: Iterable[tuple[str, Sequence[str]]]) -> LaunchScript:
    """A script, called `path` in messages, that passes these flags, each with its words."""
    lines = [" ".join([flag, *map(_as_word, words)]) for flag, words in passed]
    return LaunchScript(path, f"torchrun {ENTRY} \\\n  " + " \\\n  ".join(lines) + "\n")


def _as_word(text: str) -> str:
    """As a shell takes it for one word; free text that has quotes itself is no value that is read."""
    return text if re.fullmatch(r"[\w./:=+-]+", text) else f"'{text}'" if re.fullmatch(r"[^'\n]*", text) else "''"


# ---------------------------------------------------------------------------------------------------------- describing


def describe_launch(path: Path, given: Given, dialect: Dialect = MEGATRON) -> Described:
    """Model, workload and search space of the training that the script at `path` starts. dialect: how flags are spelt.

    Raises JobError or PlanError naming the flag that is missing, malformed or not planned.
    """
    script = dialect.open(path, given) if dialect.open else read_training(path)
    devices = find_world_size(script)
    spelt = read_passed(script, given.world_size or devices)
    described = describe_training(spelt, replace(given, world_size=given.world_size or devices), dialect)
    return replace(described, world_size=devices, notes=(*described.notes, *script.doubts()))


def read_launch_plan(path: Path, given: Given, dialect: Dialect = MEGATRON) -> Plan:
    """The plan that the script at `path` trains under by itself. Raises JobError or PlanError where that is unknown."""
    script = dialect.open(path, given) if dialect.open else read_training(path)
    world_size = given.world_size or find_world_size(script)
    if world_size is None:
        raise JobError(
            f"launch script {path}: how many devices it starts is known only on the machine, and with it the data "
            "parallel size; say it with --world-size"
        )
    return read_passed_plan(dialect.read(read_passed(script, world_size)), world_size, given, dialect)


def read_passed_plan(passed: Passed, world_size: int, given: Given, dialect: Dialect) -> Plan:
    """The plan of the flags `passed`, without what its workload says by itself. Raises JobError or PlanError."""
    check_precision(passed)
    model = read_trained_model(passed, given)
    workload, _ = read_workload(passed, model, world_size, dialect)
    try:
        known = Workload.model_validate(workload)
    except ValidationError as failure:
        raise JobError(f"{passed.where}: its flags make no training: {failure.errors()[0]['msg']}") from None
    plan = read_plan(passed, world_size, model.text.layers.num_layers)
    if model.text.layers.experts is None:  # Megatron-LM makes groups of ranks for experts, and no layer uses them
        plan = replace(plan, strategy=replace(plan.strategy, etp=0))
    return with_workload(plan, known)


# ------------------------------------------------------------------------------------------------------------ patching


def check_patchable(path: Path) -> None:
    """Raises JobError where the file at `path` is none that a plan is written into."""
    if path.suffix in _YAML:
        raise JobError(f"{path}: a plan is written into launch scripts (.sh), and this is a YAML; import reads it")


def patch_launch(
    path: Path, plan: Plan, job: Job | None, dialect: Dialect = MEGATRON
) -> tuple[LaunchScript, Decided, tuple[str, ...]]:
    """The script at `path` with `plan` in it, what was decided, and a sentence for what a person must set or check.

    Raises PlanError where Megatron-LM cannot run the plan or the script trains another model, JobError where a flag's
    value cannot be changed.
    """
    check_patchable(path)
    before = read_launch_script(path)
    spelt = read_passed(before, plan.strategy.world_size)
    passed, adapts = dialect.read(spelt), dialect.adapters(spelt) is not None
    for flag, reason in dialect.not_patched.items():
        if before.has_flag(flag):
            raise PlanError(f"{passed.where}: {flag} {reason}")
    if passed.has(flags.DEEPSPEED_EXPERTS):
        raise PlanError(f"{passed.where}: {DEEPSPEED}")
    num_layers = passed.number(flags.NUM_LAYERS)
    if num_layers not in (None, sum(plan.layers.get(TEXT, ()))):
        raise PlanError(
            f"{passed.where}: {flags.NUM_LAYERS} is {num_layers}, and the plan places "
            f"{sum(plan.layers.get(TEXT, ()))} decoder layers; give the script of the model that it was made for"
        )
    decided = dialect.write(
        decide(plan, job, passed.number(flags.MTP, least=0) or 0, adapts=adapts, allows=dialect.allows)
    )
    kept = () if job or any(plan.modes.values()) else _keep_operators(passed, plan)
    values = {flag: words for flag, words in decided.values.items() if flag not in kept}
    values |= {flag: words for flag, words in decided.usual.items() if not before.has_flag(flag)}
    script = _write(before, decided.plan, values)
    try:
        again = dialect.read(read_passed(script, plan.strategy.world_size))
        check_read_back(again, decided.plan, job, operators_kept=bool(kept))
    except Lost as lost:
        raise JobError(
            f"{passed.where}: the plan is in it and does not come back ({lost}); pass every flag once, with a number "
            "or a variable that is assigned once"
        ) from None
    return script, decided, _list_notes(script, plan)


def _keep_operators(passed: Passed, plan: Plan) -> tuple[str, ...]:
    """The flags that name what every layer runs once more, which is the workload's choice and no job says.

    Raises PlanError where the plan recomputes whole layers too.
    """
    operators = read_operators(passed)
    if operators and any(plan.recompute[TEXT]):
        raise PlanError(
            f"{passed.where}: every layer runs {', '.join(operators)} once more, and the plan recomputes whole layers, "
            f"for which Megatron-LM has one {flags.GRANULARITY}; take these flags out, or give --job"
        )
    return (flags.GRANULARITY, flags.METHOD, flags.MODULES, flags.OLD_SELECTIVE) if operators else ()


def _write(script: LaunchScript, plan: Plan, values: flags.Values) -> LaunchScript:
    anchor = next((flag for flag in _ANCHORS if script.has_flag(flag)), None)
    if anchor is None:
        raise JobError(
            f"launch script {script.path}: it passes none of {', '.join(_ANCHORS)}, beside which a plan is written (a "
            "script that takes its flags from another file cannot be changed: give that file)"
        )
    known = known_world(script, plan.strategy.world_size)
    numbers = {
        flag: int(words[0])
        for flag, words in values.items()
        if words and flag not in flags.LISTS and words[0].isdigit()
    }
    there = {flag: number for flag, number in numbers.items() if script.has_flag(flag)}
    check_shared_variables(script, there)
    for flag, number in there.items():
        if flag != flags.GLOBAL_BATCH:
            script = script.set_flag(flag, number, known)
    if flags.GLOBAL_BATCH in there:
        script = set_global_batch(script, plan.global_batch_size, plan.num_microbatches, known, flags.SIZES)
    check_numbers(script, there, known)
    added = []
    for flag, words in values.items():
        if flag in there or (words is None and not script.has_flag(flag)):
            continue
        if words is not None and script.has_flag(flag):
            if read_passed(script, None).words[flag] == words:
                continue
            if len(words) == 1 and flag not in flags.LISTS and re.fullmatch(r"\w+", words[0]):
                script = script.set_text(flag, words[0])
                continue
        if _is_default(flag, words):
            continue
        if script.has_flag(flag) and not _keeps(script, flag, words):
            most = 0 if flag in flags.SWITCHES else 100 if flag in flags.LISTS else 1
            script = script.remove_flag(flag, most)
        if words is not None:
            added.append(" ".join((flag, *words)))
    anchor = next(flag for flag in _ANCHORS if script.has_flag(flag))
    return script.add_flags(added, behind=anchor)


def _is_default(flag: str, words: tuple[str, ...] | None) -> bool:
    """Sizes of 1 are not added where nothing is said."""
    return flag in flags.SIZES and words == ("1",)


def _keeps(script: LaunchScript, flag: str, words: tuple[str, ...] | None) -> bool:
    """The form of checkpoints is a person's own, unless it is that of Megatron-FSDP, which goes with nothing else."""
    return flag == flags.CHECKPOINT and words is None and script.resolve(flag) != flags.FSDP_CHECKPOINT


def _list_notes(script: LaunchScript, plan: Plan) -> tuple[str, ...]:
    """What a person must set or check beside the plan."""
    strategy = plan.strategy
    notes = list(describe_other_devices(find_world_size(script), strategy.world_size))
    broken = find_broken_arithmetic(script)
    notes += [f"{broken}; check the shell's arithmetic before training"] if broken else []
    said = [word.text for word in script.assignments(flags.CONNECTIONS)]
    if strategy.zero > 1 and said == ["1"]:
        notes.append(f"the script sets {flags.CONNECTIONS} to 1, which Megatron-FSDP refuses; take it out")
    elif strategy.zero < 2 and strategy.tp * strategy.cp > 1 and said != ["1"]:
        notes.append(
            f"the script does not set {flags.CONNECTIONS} to 1, which TP and CP need before compute capability 10.0 "
            f"(Blackwell); export {flags.CONNECTIONS}=1 there"
        )
    return tuple(notes)
