"""The arguments of a MindSpeed-MM process, as a list: those of a run that profiles, and those of training under a plan.

MindSpeed decides while it is imported what it patches in Megatron, from the command line; so a plan has to be on it
before (mindspeed/megatron_adaptor.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.megatron_core.flags import overlap_switches
from mm_autoparallel.integrations.mindspeed_mm import flags
from mm_autoparallel.integrations.mindspeed_mm.launch_script import check_switches
from mm_autoparallel.integrations.mindspeed_mm.model_layers import LATENT_SIZES
from mm_autoparallel.planner.plan import Plan

PROFILE_ITERATIONS = 5
"""As MindSpeed's own automatic parallelism profiles; here it only keeps schedules of learning rates short."""


def find_argument(arguments: Sequence[str], flag: str) -> str | None:
    """The value of `flag`, of several the last; None where it is not there. Raises JobError where it has none."""
    found = None
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            found = argument.partition("=")[2]
        elif argument == flag:
            if index + 1 == len(arguments):
                raise JobError(f"{flag} is the last of the script's arguments; a value is expected behind it")
            found = arguments[index + 1]
    return found


def find_switch(arguments: Sequence[str], flag: str) -> bool:
    """Whether `flag` is there, with a value or without."""
    return any(argument.partition("=")[0] == flag for argument in arguments)


def find_count(arguments: Sequence[str], flag: str) -> int:
    """The value of `flag` as a whole number of at least 1. Raises JobError where it is missing or something else."""
    value = find_argument(arguments, flag)
    if value is None or not re.fullmatch(r"0*[1-9]\d*", value):
        found = "is missing" if value is None else f"is {value}"
        raise JobError(f"{flag} {found}; a whole number of at least 1 is expected among the script's arguments")
    return int(value)


def find_size(arguments: Sequence[str], flag: str, default: int = 1) -> int:
    """As find_count; `default` where the flag is not there."""
    return find_count(arguments, flag) if find_switch(arguments, flag) else default


def key_of(flag: str) -> str:
    """`--micro-batch-size` → `micro_batch_size`, as YAML and JSON files have it."""
    return flag.removeprefix("--").replace("-", "_")


def flag_of(key: str) -> str:
    """`micro_batch_size` → `--micro-batch-size`."""
    return f"--{key.replace('_', '-')}"


def as_mapping(arguments: Sequence[str]) -> dict[str, Any]:
    """Flag → its value, of several the last; of switches True."""
    found: dict[str, Any] = {}
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag, said, value = argument.partition("=")
            found[flag] = value if said else True
        elif flag and found[flag] is True:
            found[flag] = argument
    return found


_LATENT = ("--multi-latent-attention", "--multi-head-latent-attention")


def decoder_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """What `arguments` say of the text decoder that model.json leaves to them: the sizes of latent attention.

    Raises JobError where one is no whole number.
    """
    if not any(find_switch(arguments, flag) for flag in _LATENT):
        return {}
    settings: dict[str, Any] = {"multi_latent_attention": True}
    for key in LATENT_SIZES:
        if find_switch(arguments, flag_of(key)):
            settings[key] = find_count(arguments, flag_of(key))
    return settings


def planned_arguments(arguments: Sequence[str], plan: Plan, model_json: Path, frozen_stage: bool) -> list[str]:
    """`arguments` of training under `plan`, whose layers the file `model_json` has.

    frozen_stage: a stage has nothing to train. Raises JobError or PlanError where they hold what the plan cannot run
    beside.
    """
    strategy = plan.strategy
    check_switches(lambda flag: find_switch(arguments, flag), strategy, "the command line")
    values: dict[str, object] = {flag: getattr(strategy, name) for flag, name in flags.SIZES.items()}
    values |= {flags.MICRO_BATCH: strategy.mbs, flags.GLOBAL_BATCH: plan.global_batch_size}
    # Left out at their default, because not every checkout knows them.
    values = {flag: value for flag, value in values.items() if value != 1 or flag not in (flags.EXPERT, flags.CHUNKS)}
    switches = {
        flags.SHARDED_OPTIMIZER: strategy.zero > 0,
        flags.SEQUENCE_PARALLEL: strategy.tp > 1 and strategy.sequence_parallel,
        flags.VARIABLE_LENGTHS: strategy.pp > 1 or flags.VARIABLE_LENGTHS in arguments,
        flags.EMPTY_OPTIMIZER: frozen_stage or flags.EMPTY_OPTIMIZER in arguments,
    }
    switches |= overlap_switches(strategy.overlaps.chosen)
    if strategy.overlap_all_to_all:
        switches[flags.SHARED_OVERLAP] = strategy.overlap_all_to_all == "shared_experts"
    if strategy.tp_overlap:
        switches[flags.FUSED] = strategy.tp_overlap == "mc2"
    if strategy.dispatcher:
        values[flags.DISPATCHER] = strategy.dispatcher
    if strategy.cp > 1 and not find_switch(arguments, flags.CONTEXT_KIND):
        values[flags.CONTEXT_KIND] = flags.ALL_TO_ALL
    return _with(arguments, values | {flags.MODEL: model_json}, switches, dropped=(flags.EXPERT, flags.CHUNKS))


def profile_arguments(arguments: Sequence[str], world_size: int) -> list[str]:
    """`arguments` of one of `world_size` processes that profile: each holds the whole (cut) model and one sample."""
    values = {
        "--train-iters": PROFILE_ITERATIONS,
        "--eval-iters": 0,
        flags.PIPELINE: 1,
        flags.TENSOR: 1,
        flags.CONTEXT: 1,
        flags.MICRO_BATCH: 1,
        flags.GLOBAL_BATCH: world_size,
    }
    dropped = (flags.CHUNKS, flags.EXPERT, "--load", "--save", "--recompute-granularity", "--recompute-method")
    return _with(arguments, values, {flags.SEQUENCE_PARALLEL: False}, (*dropped, "--recompute-num-layers"))


def _with(
    arguments: Sequence[str],
    values: Mapping[str, object],
    switches: Mapping[str, bool],
    dropped: Sequence[str],
) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        flag = argument.partition("=")[0]
        if skip:
            skip = False
        elif flag in values or flag in dropped:
            skip = "=" not in argument
        elif flag not in switches:
            kept.append(argument)
    for flag, value in values.items():
        kept += [flag, str(value)]
    return kept + [flag for flag, on in switches.items() if on]
