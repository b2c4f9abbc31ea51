"""A launch script of pretrain_gpt.py: the training that it starts, the plan that it runs under, a plan written into it.

Nothing is executed. Every byte that the plan does not decide stays; a decided flag is changed where it stands, in the
variable that holds it.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value, read_document, read_text
from mm_autoparallel.integrations.accounting import Lost
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.export import describe_other_devices
from mm_autoparallel.integrations.launch_script import (
    check_numbers,
    check_shared_variables,
    find_broken_arithmetic,
    find_world_size,
    known_world,
    read_launch_script,
    set_global_batch,
)
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.decided import TEXT, Decided, decide
from mm_autoparallel.integrations.megatron_core.dialect import MEGATRON, Dialect
from mm_autoparallel.integrations.megatron_core.passed import Passed, read_passed
from mm_autoparallel.integrations.megatron_core.read import (
    check_read_back,
    check_strangers,
    read_choices,
    read_context,
    read_operators,
    read_plan,
    with_workload,
)
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.megatron_arguments import read_megatron_arguments
from mm_autoparallel.model.readers.megatron_precision import read_megatron_precision
from mm_autoparallel.model.readers.model_file import read_model
from mm_autoparallel.planner.plan import Plan

ENTRY = "pretrain_gpt.py"

_LOCAL = ("--spec", "local")
"""Layers of megatron-core's own in the place of TransformerEngine's; other specifications are other models."""

_VOCABULARY = "--vocab-size"
MODEL_ARGS = "MODEL_ARGS"
_YAML = (".yaml", ".yml")

_ANCHORS = (flags.PIPELINE, flags.TENSOR, flags.MICRO_BATCH, flags.GLOBAL_BATCH, flags.NUM_LAYERS)
"""Behind the first of these that is passed, flags are added."""

_MOST_EXPERTS_RANKS = 64
"""EP that a search tries where nobody says how many devices there are. Assumed."""


def is_launch(path: Path) -> bool:
    """Whether the script at `path` starts Megatron-LM's pretrain_gpt.py, or the YAML there has MODEL_ARGS."""
    if path.suffix in _YAML:
        return re.search(rf"^{MODEL_ARGS}:", read_text(path, "launch file", "YAML file"), re.MULTILINE) is not None
    if path.suffix not in (".sh", ".bash", ""):
        return False
    script = read_launch_script(path)
    started = script.started()
    return started is not None and PurePath(started[0].text).name == ENTRY and not is_mindspeed(script)


def is_mindspeed(script: LaunchScript) -> bool:
    """Whether `script` passes a flag that MindSpeed-LLM has and Megatron-LM has not, or was written for it."""
    from mm_autoparallel.integrations.mindspeed_llm.dialect import MARKS

    return "Starts MindSpeed-LLM's" in script.text or any(script.has_flag(flag) for flag in MARKS)


def read_training(path: Path) -> LaunchScript:
    """The launch script at `path`; of a YAML as Megatron-LM's functional tests have it, one that passes its MODEL_ARGS.

    Raises JobError where it cannot be read, or a YAML has no such mapping.
    """
    if path.suffix not in _YAML:
        return read_launch_script(path)
    arguments = read_document(path, "launch file").get(MODEL_ARGS)
    if not isinstance(arguments, dict):
        raise JobError(
            f"launch file {path}: {MODEL_ARGS} is {describe_value(arguments)}; a mapping of flags is expected, as "
            "Megatron-LM's functional tests have it"
        )
    lines = []  # shells take these words there, one after the other: `\\\\|` is a bar
    for flag, value in arguments.items():
        if value is False or value is None:
            continue
        words = [] if value is True else value if isinstance(value, list) else [value]
        if str(flag) in flags.LISTS:
            words = [part for word in words for part in str(word).strip("[]").split()]
        lines.append(" ".join([str(flag), *(_as_word(str(word).replace("\\", "")) for word in words)]))
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
    world_size = given.world_size or find_world_size(script)
    spelt = read_passed(script, world_size)
    passed = dialect.read(spelt)
    check_strangers(passed)
    if given.image_tokens is not None or given.images is not None:
        raise JobError(
            f"{passed.where}: it trains a decoder alone, whose samples have no images; leave their number out"
        )
    model = _read_model(passed, given)
    workload, notes = _read_workload(passed, model, world_size, dialect)
    notes += dialect.note(spelt)
    search: dict[str, object] = {"max_vpp": given.max_vpp or 1}
    experts = model.text.layers.experts
    if experts:
        most = min(experts.num_experts, world_size or _MOST_EXPERTS_RANKS)
        search["ep"] = [2**k for k in range(most.bit_length()) if experts.num_experts % 2**k == 0 and 2**k <= most]
    if passed.has("--rampup-batch-size"):
        notes += (f"--rampup-batch-size makes the first steps smaller; planned are those of {flags.GLOBAL_BATCH}",)
    source = given.model_config if given.model_config is not None else model
    return Described(source, workload, search, world_size=find_world_size(script), notes=notes)


def _read_model(passed: Passed, given: Given) -> Model:
    """That of the flags, or of the file that a person names in their place."""
    if given.model_config is not None:
        model = read_model(given.model_config)
        if not isinstance(model, Model):
            raise JobError(f"model file {given.model_config}: it is known from traces alone; give one with its sizes")
        said = passed.number(flags.NUM_LAYERS)
        if said not in (None, model.text.layers.num_layers):
            raise JobError(
                f"{passed.where}: {flags.NUM_LAYERS} is {said}, and {given.model_config} has "
                f"{model.text.layers.num_layers} layers; give the model that the script trains"
            )
        return model
    for flag in (flags.NUM_LAYERS, "--hidden-size", "--num-attention-heads"):
        if passed.number(flag) is None:
            raise JobError(f"{passed.where}: it does not pass {flag}; name the model's own file with --model")
    document = {key: value for key, value in passed.document().items() if (key, value) != _LOCAL}
    if given.vocab_size is not None:
        if passed.has(_VOCABULARY):
            raise JobError(f"{passed.where}: it passes {_VOCABULARY} itself; leave out the one beside it")
        document[_VOCABULARY] = given.vocab_size
    section = Section(document, passed.script.path, what="launch script")
    try:
        return read_megatron_arguments(section)
    except ValidationError as failure:
        raise JobError(f"{passed.where}: its flags make no model: {failure.errors()[0]['msg']}") from None
    except JobError as failure:
        if failure.key != "vocab_size":
            raise
        raise JobError(
            f"{passed.where}: how many tokens its vocabulary has is its tokenizer's to say; say it with "
            f"{_VOCABULARY} N, here or in the script, or name the model's own file"
        ) from None


def _read_workload(
    passed: Passed, model: Model, world_size: int | None, dialect: Dialect
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Sections of a job, and a sentence for what was assumed."""
    document = passed.document()
    try:
        low = read_megatron_precision(document)
    except ValueError as failure:
        raise JobError(f"{passed.where}: {failure}") from None
    if not (passed.has(flags.BF16) or passed.has("--fp16")):
        raise JobError(
            f"{passed.where}: neither {flags.BF16} nor --fp16 is passed, and training in fp32 is not planned"
        )
    choices = read_choices(passed)
    seq_length, batch = passed.number("--seq-length"), passed.number(flags.GLOBAL_BATCH)
    notes: tuple[str, ...] = ()
    if seq_length is None:
        raise JobError(f"{passed.where}: it does not pass --seq-length; a whole number is expected")
    if batch is None:
        if world_size is None:
            raise JobError(f"{passed.where}: it does not pass {flags.GLOBAL_BATCH}; a whole number is expected")
        batch = read_plan(passed, world_size, model.text.layers.num_layers).global_batch_size
        notes += (f"{flags.GLOBAL_BATCH} is not passed: it is MBS x DP, {batch}",)
    facts = dict(low.facts)
    experts = model.text.layers.experts
    facts |= {
        name: choices[name] for name in ("dispatcher", "graphs") if choices[name] and (experts or name == "graphs")
    }
    facts |= {"tp_overlap": choices["tp_overlap"]} if choices["tp_overlap"] else {}
    local = passed.text("--transformer-impl") == "local" or document.get(_LOCAL[0]) == _LOCAL[1]
    backend = passed.text("--attention-backend") or "auto"
    flash = passed.has("--use-flash-attn") if local else backend not in ("unfused", "local")
    operators = read_operators(passed)
    said: dict[str, Any] = {
        "global_batch_size": batch,
        "seq_length": seq_length,
        "stack": dialect.stack or ("megatron-local" if local else "megatron-te"),
        "attention": "flash" if flash else "unfused",
        "hidden_dropout": _drops(passed, "--hidden-dropout"),
        "attention_dropout": _drops(passed, "--attention-dropout"),
        "overlap_grad_reduce": passed.has(flags.OVERLAP_REDUCE),
        "overlap_param_gather": passed.has(flags.OVERLAP_GATHER),
        "overlap_p2p": not passed.has(flags.NO_P2P_OVERLAP),
        "gradient_fusion": not passed.has("--no-gradient-accumulation-fusion"),
    }
    said |= {"gradient_bytes": 2.0} if passed.has("--fp16") or passed.has("--grad-reduce-in-bf16") else {}
    said |= {"recompute_operators": [*operators]} if operators else {}
    said |= {"deterministic": True} if passed.has("--deterministic-mode") else {}
    said |= {"precision": low.precision} if low.precision != "bf16" else {}
    said |= {"overlap_all_to_all": choices["overlap_all_to_all"]} if experts else {}
    said |= {"facts": facts} if facts else {}
    if passed.has("--cross-entropy-loss-fusion") and passed.text("--cross-entropy-fusion-impl") == "te":
        said["cross_entropy"] = "fused"
    if (passed.number(flags.CONTEXT) or 1) > 1:
        said["context_parallel"] = read_context(passed)
        sizes = passed.list(flags.CONTEXT_SIZES)
        said |= {"dealing_ranks": int(sizes[0])} if sizes and sizes[0].isdigit() else {}
    return said, notes


def _drops(passed: Passed, flag: str) -> bool:
    """Megatron-LM drops a tenth where nothing is said."""
    text = passed.text(flag) or "0.1"
    try:
        return float(text) > 0
    except ValueError:
        raise JobError(f"{passed.where}: {flag} is {text!r}; a number is expected") from None


def read_launch_plan(path: Path, given: Given, dialect: Dialect = MEGATRON) -> Plan:
    """The plan that the script at `path` trains under by itself. Raises JobError or PlanError where that is unknown."""
    script = dialect.open(path, given) if dialect.open else read_training(path)
    world_size = given.world_size or find_world_size(script)
    if world_size is None:
        raise JobError(
            f"launch script {path}: how many devices it starts is known only on the machine, and with it the data "
            "parallel size; say it with --world-size"
        )
    passed = dialect.read(read_passed(script, world_size))
    model = _read_model(passed, given)
    workload, _ = _read_workload(passed, model, world_size, dialect)
    try:
        known = Workload.model_validate(workload)
    except ValidationError as failure:
        raise JobError(f"{passed.where}: its flags make no training: {failure.errors()[0]['msg']}") from None
    plan = read_plan(passed, world_size, model.text.layers.num_layers)
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
    passed = dialect.read(read_passed(before, plan.strategy.world_size))
    for flag, reason in dialect.not_patched.items():
        if before.has_flag(flag):
            raise PlanError(f"{passed.where}: {flag} {reason}")
    num_layers = passed.number(flags.NUM_LAYERS)
    if num_layers not in (None, sum(plan.layers.get(TEXT, ()))):
        raise PlanError(
            f"{passed.where}: {flags.NUM_LAYERS} is {num_layers}, and the plan places "
            f"{sum(plan.layers.get(TEXT, ()))} decoder layers; give the script of the model that it was made for"
        )
    decided = dialect.write(decide(plan, job, passed.number(flags.MTP, least=0) or 0))
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
