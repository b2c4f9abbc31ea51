"""The part of a plan that the launch script holds: its parallel sizes and batches, as Megatron's flags.

Flags are changed where they stand, through the variables that hold them. Flags that many scripts lack are put beside
the pipeline size where a plan needs them; the rest must be there, because their place is the person's choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_text
from mm_autoparallel.integrations.mindspeed_mm import flags
from mm_autoparallel.integrations.mindspeed_mm.shell_text import LaunchScript
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

STRANGERS = {
    "--auto-parallel-mm": "searches instead of training; give the script that trains, or take this flag out",
    "--hetero-parallel": "gives every part of the model parallel sizes of its own, and a plan has one set for all",
    "--use-torch-fsdp2": "shards the model without a pipeline, and a plan divides it into stages",
    "--num-layers-per-virtual-pipeline-stage": f"is refused by MindSpeed-MM beside {flags.CHUNKS}; take it out",
    "--num-virtual-stages-per-pipeline-rank": f"is refused by MindSpeed-MM beside {flags.CHUNKS}; take it out",
}
"""Flag → why a plan cannot be trained under beside it."""


WORLD = "WORLD_SIZE"
"""The variable that scripts keep the number of all devices in."""

_COUNTED_LINES = re.compile(r"(?:\$\(|`) *wc +-l +[^|<)`]+[)`]")
"""What prints a file's name behind its number of lines."""

MAX_SCRIPT_BYTES = 1_000_000
"""Assumed: a hundred times the longest known."""


@dataclass(frozen=True)
class ScriptSizes:
    """What a launch script trains with."""

    sizes: dict[str, int]
    mbs: int
    global_batch_size: int
    zero: int
    sequence_parallel: bool


def read_launch_script(path: Path) -> LaunchScript:
    """The launch script at `path`. Raises JobError where it cannot be read, is no text or too large for a script."""
    text = read_text(path, "launch script", "shell script", with_marks=True, max_bytes=MAX_SCRIPT_BYTES)
    return LaunchScript(path, text)


def set_sizes(script: LaunchScript, plan: Plan, frozen_stage: bool) -> LaunchScript:
    """`script` with the sizes and batches of `plan`. frozen_stage: a stage of it has nothing to train.

    Raises JobError where a flag is missing that the plan sets, or its value cannot be changed.
    """
    strategy = plan.strategy
    wanted = {flag: getattr(strategy, name) for flag, name in flags.SIZES.items()}
    wanted[flags.MICRO_BATCH] = strategy.mbs
    missing = [
        flag
        for flag in (flags.PIPELINE, flags.MICRO_BATCH, flags.GLOBAL_BATCH, flags.MODEL)
        if not script.has_flag(flag)
    ]
    if missing:
        raise JobError(
            f"launch script {script.path}: it does not pass {', '.join(missing)}; a plan is written where these flags "
            "stand, so pass them with any value (a script that takes its flags from another file cannot be changed: "
            "give that file)"
        )
    known = _known(script, strategy.world_size)
    given = {flag: value for flag, value in wanted.items() if script.has_flag(flag)}
    _check_shared_variables(script, given | {flags.GLOBAL_BATCH: plan.global_batch_size})
    for flag, value in given.items():
        script = script.set_flag(flag, value, known)
    script = _set_global_batch(script, plan, known)
    added = [f"{flag} {wanted[flag]}" for flag in flags.SIZES if flag not in given and wanted[flag] > 1]
    if strategy.cp > 1 and not script.has_flag(flags.CONTEXT_KIND):
        added.append(f"{flags.CONTEXT_KIND} {flags.ALL_TO_ALL}")
    if strategy.zero and not script.has_flag(flags.SHARDED_OPTIMIZER):
        added.append(flags.SHARDED_OPTIMIZER)
    if strategy.tp > 1 and strategy.sequence_parallel and not script.has_flag(flags.SEQUENCE_PARALLEL):
        added.append(flags.SEQUENCE_PARALLEL)
    if strategy.pp > 1 and not script.has_flag(flags.VARIABLE_LENGTHS):
        added.append(flags.VARIABLE_LENGTHS)
    if frozen_stage and not script.has_flag(flags.EMPTY_OPTIMIZER):
        added.append(flags.EMPTY_OPTIMIZER)
    if strategy.overlap_all_to_all == "shared_experts" and not script.has_flag(flags.SHARED_OVERLAP):
        added.append(flags.SHARED_OVERLAP)
    if strategy.dispatcher and not script.has_flag(flags.DISPATCHER):
        added.append(f"{flags.DISPATCHER} {strategy.dispatcher}")
    elif strategy.dispatcher and script.resolve(flags.DISPATCHER) != strategy.dispatcher:
        script = script.set_text(flags.DISPATCHER, strategy.dispatcher)
    script = script.add_flags(added, behind=flags.PIPELINE)
    if strategy.overlap_all_to_all == "none":
        script = script.remove_flag(flags.SHARED_OVERLAP)
    if not strategy.zero:
        script = script.remove_flag(flags.SHARDED_OPTIMIZER)
    if not strategy.sequence_parallel:
        script = script.remove_flag(flags.SEQUENCE_PARALLEL)
    _check(script, plan)
    return script


def set_batches(script: LaunchScript, plan: Plan) -> LaunchScript:
    """`script` with the batches and CP of `plan`, of FSDP2, which has no other sizes. Raises as set_sizes does."""
    strategy = plan.strategy
    missing = [flag for flag in (flags.MICRO_BATCH, flags.GLOBAL_BATCH) if not script.has_flag(flag)]
    if missing:
        raise JobError(
            f"launch script {script.path}: it does not pass {', '.join(missing)}; a plan is written where these flags "
            "stand, so pass them with any value"
        )
    known = _known(script, strategy.world_size)
    wanted = {
        flags.MICRO_BATCH: strategy.mbs,
        **({flags.CONTEXT: strategy.cp} if script.has_flag(flags.CONTEXT) else {}),
    }
    _check_shared_variables(script, wanted | {flags.GLOBAL_BATCH: plan.global_batch_size})
    for flag, value in wanted.items():
        script = script.set_flag(flag, value, known)
    script = _set_global_batch(script, plan, known)
    added = [f"{flags.CONTEXT} {strategy.cp}"] if strategy.cp > 1 and flags.CONTEXT not in wanted else []
    if strategy.cp > 1 and not script.has_flag(flags.CONTEXT_KIND):
        added.append(f"{flags.CONTEXT_KIND} {flags.ALL_TO_ALL}")
    script = script.add_flags(added, behind=flags.MICRO_BATCH)
    _check(script, plan)
    return script


def read_sizes(script: LaunchScript, world_size: int) -> ScriptSizes:
    """What `script` trains with on `world_size` devices.

    Raises JobError where a size or batch is missing or known only when it runs.
    """
    known = {WORLD: world_size}  # as it is meant, also where the arithmetic behind it is broken
    return ScriptSizes(
        sizes={name: _read(script, flag, known, default=1) for flag, name in flags.SIZES.items()},
        mbs=_read(script, flags.MICRO_BATCH, known),
        global_batch_size=_read(script, flags.GLOBAL_BATCH, known),
        zero=int(script.has_flag(flags.SHARDED_OPTIMIZER)),
        sequence_parallel=script.has_flag(flags.SEQUENCE_PARALLEL),
    )


def list_arguments(script: LaunchScript, world_size: int | None) -> list[str]:
    """The arguments of a process: every flag, numbers worked out, texts as far as variables hold them.

    world_size: devices that are meant; None where nobody knows. What has no number stays as the script has it.
    """
    known = {} if world_size is None else {WORLD: world_size}
    arguments: list[str] = []
    for flag, words in script.flags():
        arguments.append(flag)
        for word in words:
            number = script.evaluate(word, known) if "$" in word else None
            arguments.append(script.follow(word) if number is None else str(number))
    return arguments


def find_devices(script: LaunchScript) -> tuple[int | None, int | None]:
    """Nodes that the script starts, and processes a node; None where only the machine knows.

    torchrun is told both; msrun all processes (--worker_num) and those of a node (--local_worker_num).
    """
    processes = _last_number(script, "--nproc_per_node", "--nproc-per-node", "--local_worker_num")
    workers = _last_number(script, "--worker_num")
    if workers is None or not processes:
        return _last_number(script, "--nnodes"), processes
    return (None if workers % processes else workers // processes), processes


def find_world_size(script: LaunchScript) -> int | None:
    """Devices that the script starts: nodes times processes a node; None where only the machine knows."""
    nodes, processes = find_devices(script)
    return nodes * processes if nodes is not None and processes is not None else None


def find_broken_arithmetic(script: LaunchScript) -> str | None:
    """Why the script's arithmetic cannot come to WORLD_SIZE, whatever nodes a person sets; None where it can."""
    for word in script.assignments(WORLD):
        if not word.text.startswith("$(("):
            continue
        for name in re.findall(r"[A-Za-z_]\w*", word.text):
            where = f"line {script.line(word.start)} works {WORLD} out from {name}"
            assigned = script.assignments(name)
            if not assigned and not _is_set_outside(script, name):
                return f"{where}, which is assigned nowhere"
            for source in assigned:
                if _COUNTED_LINES.fullmatch(source.text):
                    return (
                        f"{where}, and line {script.line(source.start)} gives {name} a number with the name of the "
                        "file behind it; `wc -l < FILE` gives the number alone"
                    )
    return None


def check_switches(passes: Callable[[str], bool], strategy: Strategy, where: str) -> None:
    """Whether a plan can be trained under beside the flags that `passes` finds in `where` ("launch script x.sh").

    Raises JobError for one that no plan goes with, PlanError for one that forbids this strategy.
    """
    for flag, reason in STRANGERS.items():
        if passes(flag):
            raise JobError(f"{where}: it passes {flag}, which {reason}")
    # mindspeed_mm/patchs/validate_args_patch.py
    if strategy.vpp > 1 and strategy.pp < 3 and passes("--no-overlap-p2p-communication"):
        raise PlanError(
            f"plan: PP {strategy.pp} with VPP {strategy.vpp} cannot run under {where}: it passes "
            "--no-overlap-p2p-communication, and MindSpeed-MM then asks for PP 3 or more; take the flag out or plan "
            "with another PP"
        )


def _last_number(script: LaunchScript, *flags: str) -> int | None:
    words = [word for flag in flags for word in script.values(flag)]
    return script.evaluate(words[-1].text) if words else None


def _is_set_outside(script: LaunchScript, name: str) -> bool:
    """Whether the launcher's own nodes or processes are `name` too, so that the caller's environment has it."""
    return any(
        name in re.findall(r"[A-Za-z_]\w*", word.text)
        for flag in ("--nnodes", "--nproc_per_node", "--nproc-per-node", "--worker_num", "--local_worker_num")
        for word in script.values(flag)
        if "$" in word.text
    )


def _known(script: LaunchScript, world_size: int) -> dict[str, int]:
    """WORLD_SIZE as it will be when a person has set nodes and processes; nothing where it cannot be that.

    What depends on it then has no value, so that a number is written in its place.
    """
    if find_broken_arithmetic(script):
        return {}
    assigned = script.assignments(WORLD)
    if assigned and all(re.fullmatch(r"\d+", word.text) for word in assigned):
        return {}  # a number that stands there, and nobody's nodes change it
    return {WORLD: world_size}


def _read(script: LaunchScript, flag: str, known: Mapping[str, int], default: int | None = None) -> int:
    words = script.values(flag)
    if not words:
        if default is None:
            raise JobError(f"launch script {script.path}: it does not pass {flag}; a whole number is expected")
        return default
    value = script.evaluate(words[-1].text, known)
    if value is None or value < 1:
        raise JobError(
            f"launch script {script.path}: line {script.line(words[-1].start)} gives {flag} the value "
            f"{words[-1].text}, whose number cannot be told from the script; a whole number of at least 1 is expected"
        )
    return value


def _check_shared_variables(script: LaunchScript, wanted: Mapping[str, int]) -> None:
    """One variable behind two flags cannot hold two numbers."""
    holders: dict[str, tuple[str, int]] = {}
    for flag, value in wanted.items():
        for word in script.values(flag):
            name = word.text.strip("${}").split(":")[0] if word.text.startswith("$") and "(" not in word.text else ""
            other, held = holders.setdefault(name, (flag, value))
            if name and held != value:
                raise JobError(
                    f"launch script {script.path}: {other} and {flag} both take their value from {name}, and the plan "
                    f"needs {held} for the one and {value} for the other; give {flag} a variable of its own"
                )


def _set_global_batch(script: LaunchScript, plan: Plan, known: Mapping[str, int]) -> LaunchScript:
    """Where the batch is worked out from the number of micro-batches, that number is set; else the batch itself."""
    batch = plan.global_batch_size
    for word in script.values(flags.GLOBAL_BATCH):
        found = script.evaluate(word.text, known)
        if found == batch:
            continue
        for name in sorted(script.names_in(word.text)) if found is not None else ():
            (assigned, *more) = script.assignments(name)
            if more or name in known or not assigned.text.isdigit():
                continue
            counted = dict(known) | {name: plan.num_microbatches}
            if _holds_micro_batches(script, name) and script.evaluate(word.text, counted) == batch:
                return script.set_variable(name, plan.num_microbatches, known, flags.GLOBAL_BATCH)
    return script.set_flag(flags.GLOBAL_BATCH, batch, known)


def _holds_micro_batches(script: LaunchScript, name: str) -> bool:
    """Whether `name` serves no flag but the global batch, so that it may count micro-batches."""
    others = [*flags.SIZES, flags.MICRO_BATCH, "--nnodes", "--nproc_per_node", "--nproc-per-node", "--local_worker_num"]
    return not any(
        name in script.names_in(word.text)
        for flag in others
        for word in script.values(flag)
        if word.text.startswith("$")
    )


def _check(script: LaunchScript, plan: Plan) -> None:
    """What was written is read back, because a person will train with it for weeks."""
    known = _known(script, plan.strategy.world_size)
    wanted = {flag: getattr(plan.strategy, name) for flag, name in flags.SIZES.items()}
    wanted |= {flags.MICRO_BATCH: plan.strategy.mbs, flags.GLOBAL_BATCH: plan.global_batch_size}
    for flag, value in wanted.items():
        for word in script.values(flag):
            if script.evaluate(word.text, known) != value:
                raise JobError(
                    f"launch script {script.path}: {flag} would have to be {value}, and its value {word.text} depends "
                    f"on other variables so that it cannot be; put a number or a variable of its own behind {flag}"
                )
