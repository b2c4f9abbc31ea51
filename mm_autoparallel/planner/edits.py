"""Single changes of a plan, as a person makes them: layers that move to another stage, layers that run in a mode, what
a stage runs one after another."""

from __future__ import annotations

from dataclasses import replace

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layer_modes import OTHER_MODES, mode_reason
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.schedules.orders import find_deadlock, read_orders
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.plan_lists import away_reason
from mm_autoparallel.validation import nearest

RECOMPUTE = "recompute"


def move_layers(plan: Plan, modality: str, source: int, target: int, count: int) -> Plan:
    """`plan` with `count` layers of `modality` on virtual stage `target` in place of `source` (chunk * PP + stage).

    Layers that run in no mode move first; those that move with a mode keep it. Raises PlanError where the source holds
    fewer, or the result is no plan.
    """
    held = list(_counts(plan, modality))
    _check_stages(plan, source, target)
    if count > held[source]:
        raise PlanError(
            f"{count} {modality} layers cannot leave {plan.strategy.name_stage(source)}, which holds {held[source]}"
        )
    held[source] -= count
    held[target] += count
    in_modes = _in_modes(plan, modality)
    left = sum(counts[source] for counts in in_modes.values()) - held[source]
    for counts in in_modes.values():
        moved = min(max(left, 0), counts[source])
        counts[source] -= moved
        counts[target] += moved
        left -= moved
    return _edited(plan, modality, held, in_modes)


def set_mode(job: Job, plan: Plan, modality: str, stage: int, mode: str, count: int) -> Plan:
    """`plan` of `job` with `count` layers of `modality` on virtual stage `stage` in `mode`, of those that it holds.

    Raises PlanError where no layer of the job can run in the mode, or the result is no plan.
    """
    reason = mode_reason(mode, job.workload, job.cluster.device) if mode in OTHER_MODES and count else None
    if reason:
        raise PlanError(f"no layer can run in {mode}: {reason}")
    held = list(_counts(plan, modality))
    _check_stages(plan, stage)
    in_modes = _in_modes(plan, modality)
    in_modes.setdefault(mode, [0] * len(held))[stage] = count
    return _edited(plan, modality, held, in_modes)


def set_order(plan: Plan, stage: int, words: str) -> Plan:
    """`plan` whose stage runs these actions one after another, such as `0F0 1F0 0B0 1B0`.

    Raises PlanError where the plan's schedule has its order by name, an action is missing, repeated or before its time,
    or stages would wait for one another for ever, with which action waits for which. Where passes of encoders stand in
    the order, which hang on the job, the plan's simulation says so instead.
    """
    strategy, orders = plan.strategy, plan.stage_orders
    if not orders:
        raise PlanError(
            "the plan has no order of single actions to change: plans with search.schedule free have one, those with a "
            "file of an order, and those with an encoder in bubbles or as prefetch"
        )
    if not 0 <= stage < strategy.pp:
        raise PlanError(f"the plan has no stage {stage}; they are 0 to {strategy.pp - 1}")
    changed = (*orders[:stage], " ".join(words.split()), *orders[stage + 1 :])
    if strategy.arrangement and strategy.arrangement.has_orders:
        return replace(plan, orders=changed)
    parsed = read_orders(changed, strategy.pp, strategy.vpp, plan.num_microbatches, "stage {}".format)
    waiting = find_deadlock(parsed, strategy.vpp, find_schedule(strategy.schedule, strategy.vpp).v_shaped)
    if waiting:
        raise PlanError(f"this order never ends: {waiting}")
    if plan.orders:
        return replace(plan, orders=changed)
    return replace(plan, strategy=replace(strategy, orders=changed))


def _counts(plan: Plan, modality: str) -> tuple[int, ...]:
    if reason := away_reason(modality, plan.strategy):
        raise PlanError(reason)
    if modality not in plan.layers:
        near = nearest(modality, list(plan.layers))
        raise PlanError(f"the model has no part {modality!r}{near}; its parts are {', '.join(plan.layers)}")
    return plan.layers[modality]


def _check_stages(plan: Plan, *stages: int) -> None:
    last = plan.strategy.pp * plan.strategy.vpp - 1
    for stage in stages:
        if not 0 <= stage <= last:
            raise PlanError(f"the plan has no virtual stage {stage}; they are 0 to {last}")


def _in_modes(plan: Plan, modality: str) -> dict[str, list[int]]:
    others = {mode: list(counts) for mode, counts in plan.modes.get(modality, {}).items()}
    return {RECOMPUTE: list(plan.recompute[modality]), **others}


def _edited(plan: Plan, modality: str, held: list[int], in_modes: dict[str, list[int]]) -> Plan:
    def nested(counts: list[int]) -> list[list[int]] | list[int]:
        pp, vpp = plan.strategy.pp, plan.strategy.vpp
        return counts if vpp == 1 else [counts[chunk * pp : (chunk + 1) * pp] for chunk in range(vpp)]

    return plan.edited(
        layers={modality: nested(held)},
        recompute={modality: nested(in_modes.pop(RECOMPUTE))},
        modes={modality: {mode: nested(counts) for mode, counts in in_modes.items()}},
    )
