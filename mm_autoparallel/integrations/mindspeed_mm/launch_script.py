"""The part of a plan that the launch script holds: its parallel sizes and batches, as Megatron's flags.

Flags are changed where they stand, through the variables that hold them. Flags that many scripts lack are put beside
the pipeline size where a plan needs them; the rest must be there, because their place is the person's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.launch_script import (
    WORLD,
    check_numbers,
    check_shared_variables,
    known_world,
    read_number,
    set_global_batch,
)
from mm_autoparallel.integrations.megatron_core.flags import overlap_switches
from mm_autoparallel.integrations.mindspeed_mm import flags
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

STRANGERS = {
    "--auto-parallel-mm": "searches instead of training; give the script that trains, or take this flag out",
    flags.HETERO: "gives every part of the model parallel sizes of its own, and this plan has one set for all",
    "--use-torch-fsdp2": "shards the model without a pipeline, and a plan divides it into stages",
    "--num-layers-per-virtual-pipeline-stage": f"is refused by MindSpeed-MM beside {flags.CHUNKS}; take it out",
    "--num-virtual-stages-per-pipeline-rank": f"is refused by MindSpeed-MM beside {flags.CHUNKS}; take it out",
}
"""Flag → why a plan cannot be trained under beside it."""


@dataclass(frozen=True)
class ScriptSizes:
    """What a launch script trains with."""

    sizes: dict[str, int]
    mbs: int
    global_batch_size: int
    zero: int
    sequence_parallel: bool
    fuses_products: bool


def set_sizes(script: LaunchScript, plan: Plan, frozen_stage: bool) -> LaunchScript:
    """`script` with the sizes and batches of `plan`. frozen_stage: a stage of it has nothing to train.

    Raises JobError where a flag is missing that the plan sets, or its value cannot be changed.
    """
    strategy, wanted = plan.strategy.of_decoder(), _list_numbers(plan)
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
    known, batch = known_world(script, plan.strategy.world_size), wanted.pop(flags.GLOBAL_BATCH)
    given = {flag: value for flag, value in wanted.items() if script.has_flag(flag)}
    check_shared_variables(script, given | {flags.GLOBAL_BATCH: batch})
    for flag, value in given.items():
        script = script.set_flag(flag, value, known)
    script = set_global_batch(script, batch, plan.num_microbatches, known, flags.SIZES)
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
    if strategy.tp_overlap == "mc2" and not script.has_flag(flags.FUSED):
        added.append(flags.FUSED)
    if strategy.dispatcher and not script.has_flag(flags.DISPATCHER):
        added.append(f"{flags.DISPATCHER} {strategy.dispatcher}")
    elif strategy.dispatcher and script.resolve(flags.DISPATCHER) != strategy.dispatcher:
        script = script.set_text(flags.DISPATCHER, strategy.dispatcher)
    switches = overlap_switches(strategy.overlaps.chosen)
    added += [flag for flag, passed in switches.items() if passed and not script.has_flag(flag)]
    script = script.add_flags(added, behind=flags.PIPELINE)
    for flag in (flag for flag, passed in switches.items() if not passed):
        script = script.remove_flag(flag)
    if strategy.overlap_all_to_all == "none":
        script = script.remove_flag(flags.SHARED_OVERLAP)
    if strategy.tp_overlap == "none":
        script = script.remove_flag(flags.FUSED)
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
    known = known_world(script, strategy.world_size)
    wanted = {
        flags.MICRO_BATCH: strategy.mbs,
        **({flags.CONTEXT: strategy.cp} if script.has_flag(flags.CONTEXT) else {}),
    }
    check_shared_variables(script, wanted | {flags.GLOBAL_BATCH: plan.global_batch_size})
    for flag, value in wanted.items():
        script = script.set_flag(flag, value, known)
    script = set_global_batch(script, plan.global_batch_size, plan.num_microbatches, known, flags.SIZES)
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
        sizes={name: read_number(script, flag, known, default=1) for flag, name in flags.SIZES.items()},
        mbs=read_number(script, flags.MICRO_BATCH, known),
        global_batch_size=read_number(script, flags.GLOBAL_BATCH, known),
        zero=int(script.has_flag(flags.SHARDED_OPTIMIZER)),
        sequence_parallel=script.has_flag(flags.SEQUENCE_PARALLEL),
        fuses_products=script.has_flag(flags.FUSED),
    )


def check_switches(passes: Callable[[str], bool], strategy: Strategy, where: str) -> None:
    """Whether a plan can be trained under beside the flags that `passes` finds in `where` ("launch script x.sh").

    Raises JobError for one that no plan goes with, PlanError for one that forbids this strategy.
    """
    for flag, reason in STRANGERS.items():
        if passes(flag) and not (flag == flags.HETERO and strategy.arrangement):
            raise JobError(f"{where}: it passes {flag}, which {reason}")
    # mindspeed_mm/patchs/validate_args_patch.py
    if strategy.vpp > 1 and strategy.pp < 3 and passes("--no-overlap-p2p-communication"):
        raise PlanError(
            f"plan: PP {strategy.pp} with VPP {strategy.vpp} cannot run under {where}: it passes "
            "--no-overlap-p2p-communication, and MindSpeed-MM then asks for PP 3 or more; take the flag out or plan "
            "with another PP"
        )


def _list_numbers(plan: Plan) -> dict[str, int]:
    """Flag → what a script passes for `plan`. Beside --hetero-parallel sizes of modules stand in model.json, and the
    batch counts every device as a replica."""
    decoder = plan.strategy.of_decoder()
    numbers = {flag: getattr(decoder, name) for flag, name in flags.SIZES.items()}
    numbers |= {flags.MICRO_BATCH: decoder.mbs, flags.GLOBAL_BATCH: plan.global_batch_size}
    if plan.strategy.arrangement:
        numbers |= dict.fromkeys((flags.PIPELINE, flags.TENSOR, flags.CONTEXT), 1)
        numbers[flags.GLOBAL_BATCH] *= decoder.pp * decoder.tp * decoder.cp
    return numbers


def _check(script: LaunchScript, plan: Plan) -> None:
    """What was written is read back, because a person will train with it for weeks."""
    check_numbers(script, _list_numbers(plan), known_world(script, plan.strategy.world_size))
    for flag, passed in overlap_switches(plan.strategy.overlaps.chosen).items():
        if script.has_flag(flag) != passed:
            raise JobError(f"launch script {script.path}: {flag} could not be {'added' if passed else 'taken out'}")
