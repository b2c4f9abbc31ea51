"""Edits of a plan, stage by stage: layers moved, layers that recompute or run in another mode, or whole lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layer_modes import LayerMode, mode_reason
from mm_autoparallel.planner.plan import Plan, format_document, plan_document
from mm_autoparallel.planner.plan_lists import Refused, edit_lists, nest
from mm_autoparallel.records import Few, Name, Noun, Number
from mm_autoparallel.reports.estimates import OF_A_SEARCH
from mm_autoparallel.validation import nearest

if TYPE_CHECKING:
    from mm_autoparallel.api.results import Simulation

Counts = dict[str, list[int]]


class Move(Noun):
    """Layers that go from one stage to another."""

    part: Name = Field("text", description="part of the model whose layers move, such as text or vision")
    layers: Few = Field(description="how many layers move")
    from_stage: Number = Field(description="pipeline stage that gives them, from 0")
    to_stage: Number = Field(description="pipeline stage that takes them, from 0")
    from_chunk: Number = Field(0, description="chunk of the stage that gives, from 0, where stages have several")
    to_chunk: Number = Field(0, description="chunk of the stage that takes, from 0, where stages have several")


class StageMode(Noun):
    """How many layers of a stage run in a mode."""

    part: Name = Field("text", description="part of the model, such as text or vision")
    stage: Number = Field(description="pipeline stage, from 0")
    chunk: Number = Field(0, description="chunk of the stage, from 0, where stages have several")
    mode: LayerMode = Field("recompute", description="what they do to keep less until their backward")
    layers: Number = Field(description="how many layers of the stage run in it")


def edit_plan(
    job: Job,
    plan: Plan,
    *,
    layers: Mapping[str, Sequence[Any]] | None = None,
    recompute: Mapping[str, Sequence[Any]] | None = None,
    moves: Sequence[Move] = (),
    modes: Sequence[StageMode] = (),
) -> Plan:
    """`plan` with whole lists replaced as `Plan.edited` does, then layers moved, then layers of stages put into modes.

    A stage that gives layers away keeps those in modes as far as it still holds them: fewer recompute first.
    Raises PlanError naming stage and part where what comes out does not fit the plan's strategy or the job.
    """
    strategy = plan.strategy
    try:
        held = _lists(edit_lists(plan.layers, layers or {}, "layers", strategy))
        again = _lists(edit_lists(plan.recompute, recompute or {}, "recompute", strategy))
        others = {part: _lists(of_mode) for part, of_mode in plan.modes.items()}
        for move in moves:
            _move(move, held, plan)
            _shorten(move, held, again, others, plan)
        for one in modes:
            _set_mode(one, again, others, job, plan)
    except Refused as refusal:
        raise PlanError(f"the edited plan: {refusal}") from None
    used = {
        part: {mode: tuple(counts) for mode, counts in of_mode.items() if any(counts)}
        for part, of_mode in others.items()
    }
    with_modes = replace(plan, modes={part: of_mode for part, of_mode in used.items() if of_mode})
    return with_modes.edited(
        layers={part: nest(tuple(counts), strategy) for part, counts in held.items()},
        recompute={part: nest(tuple(counts), strategy) for part, counts in again.items()},
    )


def format_plan(simulation: Simulation) -> str:
    """The text of the result file of a plan that no search found: without the figures that only a search knows."""
    document = plan_document(simulation.plan, simulation.estimate.figures(lower_bound_ms=0.0))
    return format_document({key: value for key, value in document.items() if key not in OF_A_SEARCH})


def _lists(counts: Mapping[str, tuple[int, ...]]) -> Counts:
    return {name: list(row) for name, row in counts.items()}


def _index(stage: int, chunk: int, plan: Plan) -> int:
    """The virtual stage. Raises Refused where there is none."""
    strategy = plan.strategy
    if stage >= strategy.pp:
        raise Refused(f"there is no stage {stage}: PP is {strategy.pp}, so stages are 0 to {strategy.pp - 1}")
    if chunk >= strategy.vpp:
        raise Refused(f"there is no chunk {chunk}: VPP is {strategy.vpp}, so chunks are 0 to {strategy.vpp - 1}")
    return chunk * strategy.pp + stage


def _check_part(part: str, plan: Plan) -> None:
    if part not in plan.layers:
        raise Refused(f"{part!r} is no part of the model{nearest(part, list(plan.layers))}: {', '.join(plan.layers)}")


def _move(move: Move, held: Counts, plan: Plan) -> None:
    _check_part(move.part, plan)
    giver = _index(move.from_stage, move.from_chunk, plan)
    taker = _index(move.to_stage, move.to_chunk, plan)
    counts = held[move.part]
    if counts[giver] < move.layers:
        name = plan.strategy.name_stage(giver)
        raise Refused(f"{move.layers} {move.part} layers cannot leave {name}, which holds {counts[giver]}")
    counts[giver] -= move.layers
    counts[taker] += move.layers


def _shorten(move: Move, held: Counts, again: Counts, others: Mapping[str, Counts], plan: Plan) -> None:
    """Take layers out of modes that the giving stage holds no more."""
    giver = _index(move.from_stage, move.from_chunk, plan)
    of_mode = others.get(move.part, {})
    rows = [again[move.part], *of_mode.values()]
    excess = sum(row[giver] for row in rows) - held[move.part][giver]
    for row in rows:
        taken = min(max(excess, 0), row[giver])
        row[giver] -= taken
        excess -= taken


def _set_mode(one: StageMode, again: Counts, others: dict[str, Counts], job: Job, plan: Plan) -> None:
    _check_part(one.part, plan)
    at = _index(one.stage, one.chunk, plan)
    if one.mode == "recompute":
        again[one.part][at] = one.layers
        return
    reason = mode_reason(one.mode, job.workload, job.cluster.device)
    if reason and one.layers:
        raise Refused(f"layers cannot run in {one.mode}: {reason}")
    others.setdefault(one.part, {}).setdefault(one.mode, [0] * len(again[one.part]))[at] = one.layers
