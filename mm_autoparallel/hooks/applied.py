"""`applied_plan`: the plan that a training script was given, as what each virtual stage holds."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mm_autoparallel.errors import PlanError, PlannerError
from mm_autoparallel.files import read_document
from mm_autoparallel.hooks.pretraining import Pretraining, build_job
from mm_autoparallel.model.blocks.chain import Block
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.pipeline.modalities import placement_from_modalities
from mm_autoparallel.pipeline.problem import recomputed
from mm_autoparallel.planner.plan import Plan, parse_strategy, read_plan
from mm_autoparallel.planner.plan_lists import Refused
from mm_autoparallel.reports.terminal import say
from mm_autoparallel.streams import tell_on_terminal


@dataclass(frozen=True)
class Held:
    """What a virtual stage holds of one block of the chain.

    kind: what it is profiled as. first: where its layers begin among those of the modality (role `layer`; else 0).
    count: how many. recomputed: of those how many are recomputed, the first ones.
    """

    block: str
    kind: str
    modality: str
    role: Literal["pre", "layer", "post"]
    first: int
    count: int
    recomputed: int


@dataclass(frozen=True)
class AppliedPlan:
    """A plan that fits the script's model and its processes.

    stages[k]: what virtual stage k = chunk · PP + stage holds, in the order data flows. planned_ms: the step that the
    plan's file promises; None where it says none. encoder[k]: where the plan has a layout, what stage k of the encoder
    holds, which then has sizes of its own (plan.strategy.arrangement); `stages` are the decoder's alone. As prefetch
    its passes stand between the decoder's actions in plan.orders.
    """

    plan: Plan
    stages: tuple[tuple[Held, ...], ...]
    planned_ms: float | None = None
    encoder: tuple[tuple[Held, ...], ...] = ()


def applied_plan(arguments: argparse.Namespace, pretraining: Pretraining) -> AppliedPlan | None:
    """The plan of --auto-parallel-config; None without that flag.

    Where it does not fit the model or the number of processes, the process ends: one paragraph, exit code 2.
    """
    path: Path | None = arguments.auto_parallel_config
    if path is None:
        return None
    tell_on_terminal()
    try:
        return read_applied_plan(path, pretraining)
    except PlannerError as error:
        if os.environ.get("RANK", "0") == "0":
            say(str(error))
        sys.exit(error.exit_code)


def read_applied_plan(path: Path, pretraining: Pretraining) -> AppliedPlan:
    """The plan at `path`, for the processes that torchrun has started (or this one alone).

    Raises PlanError where it does not fit the model or their number, JobError where `pretraining` is wrong.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    _check_world(path, world)
    # Only the plan's form is read with this job, and the chain is the same on every device: any that is known will do.
    job = build_job(pretraining, max(1, world // per_node), min(world, per_node), DEVICES["a100-80g"])
    frozen = {"cached_features": tuple(encoder.name for encoder in job.model.encoders if encoder.freeze)}
    job = replace(job, workload=job.workload.model_copy(update=frozen))  # whether they are cached, the plan says
    plan = read_plan(path, job)
    try:
        return apply(job, plan, _planned_ms(path))
    except PlanError as error:
        raise PlanError(f"plan {path}: {error}") from None


def apply(job: Job, plan: Plan, planned_ms: float | None = None) -> AppliedPlan:
    """`plan` as what each virtual stage holds.

    Raises PlanError where the plan does not fit the chain, or runs layers in a mode, or an encoder in an order, that
    scripts are not told of.
    """
    for modality, modes in plan.modes.items():
        for mode, counts in modes.items():
            raise PlanError(
                f"layer_modes.{mode} runs {sum(counts)} {modality} layers so, and training scripts are told which "
                "layers recompute, no more; plan with search.modes [recompute]"
            )
    arrangement = plan.strategy.arrangement
    if arrangement and arrangement.others:
        raise PlanError(
            f"layout is {arrangement.name}, a module for each encoder, and training scripts are told of one encoder "
            "module; plan with search.layouts [chain]"
        )
    if arrangement and arrangement.encoder_run in ("bubbles", "cached"):
        raise PlanError(
            f"layout.encoder_run is {arrangement.encoder_run}, and training scripts are told of an encoder inline, in "
            "phases or as prefetch, no more; take the best plan of another kind (`edit JOB --config PLAN --sizes "
            "layout=phases`)"
        )
    stages = _list_stages(job, plan)
    if arrangement is None:
        return AppliedPlan(plan, stages, planned_ms)
    own = arrangement.encoder
    if arrangement.apart:
        return AppliedPlan(plan, stages[own.pp :], planned_ms, stages[: own.pp])
    on_device = _hold_all(expand(job.model).blocks) if arrangement.away else stages[0]
    encoder = tuple(held for held in on_device if held.modality in own.parts)
    decoder = tuple(tuple(held for held in stage if held.modality not in own.parts) for stage in stages)
    return AppliedPlan(plan, decoder, planned_ms, (encoder,))


def _list_stages(job: Job, plan: Plan) -> tuple[tuple[Held, ...], ...]:
    """What each virtual stage of the pipeline holds under `plan`, of one in phases the decoder's."""
    problem = build_problem(job, plan.strategy)
    placement = placement_from_modalities(problem, plan.layers, plan.recompute)
    blocks = [block for block in expand(job.model).blocks if block.modality not in plan.strategy.away]
    begun = dict.fromkeys((block.name for block in blocks), 0)
    before = _count_before(blocks)
    stages = []
    for counts, recomputing in zip(placement.layers, recomputed(problem, placement), strict=True):
        held = []
        for block, count, again in zip(blocks, counts, recomputing, strict=True):
            if count:
                first = before[block.name] + begun[block.name] if block.role == "layer" else 0
                held.append(Held(block.name, block.kind, block.modality, block.role, first, count, again))
                begun[block.name] += count
        stages.append(tuple(held))
    return tuple(stages)


def _hold_all(blocks: Sequence[Block]) -> list[Held]:
    """All of `blocks`, on one device and without recompute."""
    before = _count_before(blocks)
    return [Held(each.name, each.kind, each.modality, each.role, before[each.name], each.count, 0) for each in blocks]


def _count_before(blocks: Sequence[Block]) -> dict[str, int]:
    """Of each block of layers by name, how many of its modality come before it; of others 0."""
    before: dict[str, int] = {}
    layers_of: dict[str, int] = {}
    for block in blocks:
        before[block.name] = layers_of.get(block.modality, 0) if block.role == "layer" else 0
        layers_of[block.modality] = layers_of.get(block.modality, 0) + (block.count if block.role == "layer" else 0)
    return before


def _planned_ms(path: Path) -> float | None:
    step_ms = read_document(path, "plan", PlanError).get("e2e_time")
    return float(step_ms) if isinstance(step_ms, (int, float)) else None


def _check_world(path: Path, world: int) -> None:
    """Raises PlanError where the plan is for another number of processes; what else is wrong is read_plan's to tell."""
    document = read_document(path, "plan", PlanError)
    try:
        strategy = parse_strategy(document)
    except Refused:
        return
    planned, own = strategy.world_size, strategy.of_decoder()
    if planned != world:
        started = f"torchrun has started {world}" if "WORLD_SIZE" in os.environ else "this is one"
        arrangement = strategy.arrangement
        beside = f" beside {arrangement.name}" if arrangement else ""
        raise PlanError(
            f"plan {path}: PP {own.pp} x TP {own.tp} x CP {own.cp} x DP {own.dp}{beside} is for {planned} processes, "
            f"and {started}; start the script with `torchrun --nproc-per-node {planned}` (on several nodes `--nnodes N "
            "--nproc-per-node PROCESSES/N` and so on), or search a plan for as many processes as there are"
        )
