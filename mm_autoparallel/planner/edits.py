"""Single changes of a plan, as a person makes them: layers that move to another stage, layers that run in a mode."""

from __future__ import annotations

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layer_modes import OTHER_MODES, mode_reason
from mm_autoparallel.planner.plan import Plan
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


def _counts(plan: Plan, modality: str) -> tuple[int, ...]:
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
