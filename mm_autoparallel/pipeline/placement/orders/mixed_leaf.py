"""One placement by CP-SAT where backwards may be split or whole, micro-batch by micro-batch.

`leaf` asks for relaxed figures, in which a backward is both. Where that finds an order that does not fit, or is slower
than it seems, this model decides: each backward is either an input gradient, and a weight gradient later, or whole, and
hands its gradient on when all of it has run. Taking micro-batches in order still loses nothing: what a stage's k-th
backward is may stay with its place in the order, whatever micro-batch it is of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT_MS,
    KEPT,
    MOST_IN_FLIGHT,
    PENDING,
    ROOM,
    TAIL_MS,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.leaf import ROOM_UNITS, Answer, count_units, run_solver, unit_of

Floats = NDArray[np.float64]
Variable = cp_model.IntVar


@dataclass(frozen=True, eq=False)
class MixedLeaf:
    """orders: of each stage as text, where any below the goal were found. spent_s: as of a `Leaf`."""

    answer: Answer
    orders: tuple[str, ...] = ()
    spent_s: float = 0.0


@dataclass(frozen=True, eq=False)
class _Stage:
    """Variables of one stage, by micro-batch: starts, whether the backward is whole, when its first part ends."""

    forward: list[Variable]
    backward: list[Variable]
    weight: list[Variable]
    whole: list[Variable]
    handed: list[Variable]


def solve_mixed_leaf(
    split: Floats,
    whole: Floats,
    may_split: NDArray[np.bool_],
    num_microbatches: int,
    goal_ms: float,
    effort_s: float,
    should_stop: Callable[[], bool],
    seed: int = 0,
) -> MixedLeaf:
    """Orders below goal_ms of stages with figures split and whole [P, NUM_FIGURES]; may_split: [P]."""
    columns = [FORWARD_MS, INPUT_MS, WEIGHT_MS, HOP_FORWARD_MS, HOP_BACKWARD_MS, TAIL_MS]
    times = np.concatenate([split[:, columns], whole[:, [INPUT_MS]]], axis=1)
    unit, exact = unit_of(times.ravel(), goal_ms)
    rounded = (np.rint(times / unit) if exact else np.floor(times / unit)).astype(np.int64).tolist()
    goal = math.ceil(goal_ms / unit) - 1
    if goal < 0:
        return MixedLeaf("infeasible")
    model = cp_model.CpModel()
    stages: list[_Stage] = []
    for s, (f, i, w, _, _, tail, b) in enumerate(rounded):
        stage = _add_stage(model, f, i, w, b, goal - tail, num_microbatches, bool(may_split[s]))
        if s:
            of_before = rounded[s - 1]
            for m in range(num_microbatches):
                model.add(stage.forward[m] >= stages[-1].forward[m] + of_before[0] + of_before[3])
                model.add(stages[-1].backward[m] >= stage.handed[m] + of_before[4])
        _limit_bytes(model, stage, split[s], w, goal)
        stages.append(stage)
    solver, answer = run_solver(model, effort_s, should_stop, seed)
    spent_s = solver.response_proto.deterministic_time
    if answer != "found":
        return MixedLeaf(answer, spent_s=spent_s)
    orders = tuple(_write(solver, stage, of[0], of[2]) for stage, of in zip(stages, rounded, strict=True))
    return MixedLeaf("found", orders, spent_s)


def _add_stage(
    model: cp_model.CpModel, f: int, i: int, w: int, b: int, end: int, count: int, may_split: bool
) -> _Stage:
    def new(most: int = end) -> list[Variable]:
        return [model.new_int_var(0, most, "") for _ in range(count)]

    stage = _Stage(new(), new(), new(), [model.new_bool_var("") for _ in range(count)], new())
    intervals = []
    for m in range(count):
        forward, backward, weight = stage.forward[m], stage.backward[m], stage.weight[m]
        is_whole, handed = stage.whole[m], stage.handed[m]
        if not may_split:
            model.add(is_whole == 1)
        length = i + (b - i) * is_whole
        model.add(handed == backward + length)
        model.add(backward >= forward + f)
        model.add(weight >= backward + i).only_enforce_if(is_whole.negated())
        model.add(weight + w <= end).only_enforce_if(is_whole.negated())
        if m:
            model.add(forward >= stage.forward[m - 1] + f)
            model.add(backward >= stage.handed[m - 1])
            model.add(weight >= stage.weight[m - 1] + w - w * stage.whole[m - 1])
        model.add(forward + f <= end)
        intervals.append(model.new_fixed_size_interval_var(forward, f, ""))
        intervals.append(model.new_interval_var(backward, length, handed, ""))
        intervals.append(model.new_optional_fixed_size_interval_var(weight, w, is_whole.negated(), ""))
    model.add_no_overlap(intervals)
    return stage


def _limit_bytes(model: cp_model.CpModel, stage: _Stage, figures: Floats, w: int, goal: int) -> None:
    count, most = len(stage.forward), int(figures[MOST_IN_FLIGHT])
    for m in range(count - most):
        model.add(stage.forward[m + most] >= stage.handed[m])
    kept, pending = (count_units(figures[column], figures[ROOM]) for column in (KEPT, PENDING))
    intervals, demands = [], []
    for m in range(count):
        if kept:
            held = model.new_int_var(0, goal, "")
            intervals.append(model.new_interval_var(stage.forward[m], held, stage.handed[m], ""))
            demands.append(kept)
        if pending:
            later = model.new_int_var(0, goal, "")
            is_split = stage.whole[m].negated()
            end = stage.weight[m] + w
            intervals.append(model.new_optional_interval_var(stage.handed[m], later, end, is_split, ""))
            demands.append(pending)
    if intervals:
        model.add_cumulative(intervals, demands, ROOM_UNITS)


def _write(solver: cp_model.CpSolver, stage: _Stage, f: int, w: int) -> str:
    """A stage's order; of actions that start together those that take no time come first."""
    actions = []
    for m, is_whole in enumerate(map(solver.boolean_value, stage.whole)):
        forward, backward, handed = (solver.value(of[m]) for of in (stage.forward, stage.backward, stage.handed))
        actions.append((forward, f > 0, m, "F"))
        actions.append((backward, handed > backward, m, "B" if is_whole else "I"))
        if not is_whole:
            actions.append((solver.value(stage.weight[m]), w > 0, m, "W"))
    actions.sort(key=lambda action: (*action[:3], "FBIW".index(action[3])))
    return " ".join(f"{m}{kind}0" for _, _, m, kind in actions)
