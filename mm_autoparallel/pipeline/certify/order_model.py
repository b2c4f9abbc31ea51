"""Orders of one placement below a bound, as a model of CP-SAT: start times, or the proof that there are none.

Micro-batches are equal, so each stage may take forwards, backwards and gradients of weights in order of micro-batches:
of any other order the starts can be sorted kind by kind, and what is the k-th backward of a stage stays whole or split.
Every backward is one of two optional intervals, its whole, or its input's gradient with an interval of its weights'.
Memory is what all intervals between these take together; where every backward is split, it says which gradients of
weights must end before a forward begins.
Times and bytes are rounded down, so an order below the bound stays one, and "infeasible" holds for what was rounded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from mm_autoparallel.pipeline.certify.order_bounds import most_at_once
from mm_autoparallel.pipeline.certify.order_options import (
    FORWARD,
    HOP_BACKWARD,
    HOP_FORWARD,
    INPUT,
    KEPT,
    LESS_ON_HOST,
    LESS_ROOM,
    PENDING,
    TAIL,
    WEIGHT,
    WHOLE,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Variable = cp_model.IntVar
Answer = Literal["infeasible", "found", "unknown"]

#: Units of the bound, and of what all micro-batches keep: no sum of the model passes 2^29, and the solver errs beyond
#: 2^31.
TIME_UNITS, ROOM_UNITS = 2**28, 2**22
#: Of a stage's room: by how much sums of bytes may exceed it by rounding.
ROUNDING_FRACTION = 1e-12
#: Units of time in ms that are tried first: where all times are multiples of one, nothing is rounded.
EXACT_UNITS_MS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.01, 1e-3, 1e-4, 1e-5)


@dataclass(frozen=True, eq=False)
class Found:
    """orders: one text a stage, where the answer is "found"."""

    answer: Answer
    orders: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Stage:
    """Variables by micro-batch: when its forward and its backward begin, when its gradient can be handed on, when its
    weights' gradient begins; and whether its backward is whole, where that is not the same for all."""

    forward: list[Variable]
    backward: list[Variable]
    handed: list[cp_model.LinearExprT]
    weight: list[Variable]
    whole: list[Variable]


def find_orders(
    figures: Floats,
    num_microbatches: int,
    bound_ms: float,
    effort: float,
    should_stop: Callable[[], bool],
    turn: int = 0,
) -> Found:
    """Orders whose step is below bound_ms, of stages with these figures [P, NUM_FIGURES].

    effort: the solver's deterministic time. turn: it searches otherwise in each.
    """
    times, end = _round_times(figures[:, : TAIL + 1], bound_ms)
    if np.any(times[:, FORWARD] + times[:, INPUT] + times[:, TAIL] > end):
        return Found("infeasible")
    model = cp_model.CpModel()
    stages = [
        _add_stage(model, row, of, end, num_microbatches) for row, of in zip(times.tolist(), figures, strict=True)
    ]
    for s, (before, after) in enumerate(pairwise(stages)):
        forward, hop_forward, hop_backward = (int(times[s, at]) for at in (FORWARD, HOP_FORWARD, HOP_BACKWARD))
        for m in range(num_microbatches):
            model.add(after.forward[m] >= before.forward[m] + forward + hop_forward)
            model.add(before.backward[m] >= after.handed[m] + hop_backward)
    solver = cp_model.CpSolver()
    answer = solve_model(solver, model, effort, should_stop, turn)
    if answer != "found":
        return Found(answer)
    return Found("found", tuple(_write(solver, *of) for of in zip(stages, times.tolist(), strict=True)))


def _round_times(times_ms: Floats, bound_ms: float) -> tuple[Ints, int]:
    """Times in whole units, rounded down, and the last unit below bound_ms."""
    for unit_ms in EXACT_UNITS_MS:
        exact = np.rint(times_ms / unit_ms)
        if bound_ms / unit_ms <= TIME_UNITS and np.all(np.abs(times_ms / unit_ms - exact) < 1e-9):
            return exact.astype(np.int64), math.ceil(bound_ms / unit_ms + 1e-6) - 1
    unit_ms = bound_ms / TIME_UNITS
    return np.floor(times_ms / unit_ms).astype(np.int64), TIME_UNITS


def _add_stage(model: cp_model.CpModel, times: list[int], figures: Floats, end: int, count: int) -> _Stage:
    forward, of_input, of_weight, whole, _, _, tail = times
    last, room_bytes, in_flight = end - tail, -float(figures[LESS_ROOM]), -float(figures[LESS_ON_HOST])
    kept, pending = float(figures[KEPT]), float(figures[PENDING])
    # Without weights of their own all are whole. Split ones do all that whole ones do where that costs nothing more.
    never_splits = figures[WEIGHT] <= 0.0 or pending > room_bytes or forward + of_input + of_weight > last
    always_splits = not never_splits and of_input + of_weight <= whole and pending <= kept

    def new(most: int) -> list[Variable]:
        return [model.new_int_var(0, most, "") for _ in range(count)]

    forwards, backwards = new(last - forward), new(last - of_input)
    is_whole: list[Variable] = [
        model.new_constant(never_splits) if never_splits or always_splits else model.new_bool_var("")
        for _ in range(count)
    ]
    intervals = [model.new_fixed_size_interval_var(start, forward, "") for start in forwards]
    handed: list[cp_model.LinearExprT] = []
    for start, literal in zip(backwards, is_whole, strict=True):
        if never_splits or always_splits:
            length = whole if never_splits else of_input
            intervals.append(model.new_fixed_size_interval_var(start, length, ""))
            handed.append(start + length)
            continue
        intervals.append(model.new_optional_fixed_size_interval_var(start, whole, literal, ""))
        intervals.append(model.new_optional_fixed_size_interval_var(start, of_input, ~literal, ""))
        handed.append(model.new_int_var(0, last, ""))
        model.add(handed[-1] == start + of_input + (whole - of_input) * literal)
    for m in range(count):
        model.add(backwards[m] >= forwards[m] + forward)
        model.add(handed[m] <= last)
        if m:
            model.add(forwards[m] >= forwards[m - 1] + forward)
            model.add(backwards[m] >= handed[m - 1])
    weights = [] if never_splits else new(last)  # that of a whole backward is nowhere, and keeps the others in order
    for m, (start, literal) in enumerate(zip(weights, is_whole, strict=False)):
        if always_splits:
            intervals.append(model.new_fixed_size_interval_var(start, of_weight, ""))
        else:
            intervals.append(model.new_optional_fixed_size_interval_var(start, of_weight, ~literal, ""))
        model.add(start >= handed[m]).only_enforce_if(~literal)
        model.add(start + of_weight <= last).only_enforce_if(~literal)
        if m:
            model.add(start >= weights[m - 1] + of_weight - of_weight * is_whole[m - 1])
    model.add_no_overlap(intervals)
    stage = _Stage(forwards, backwards, handed, weights, is_whole)
    most = int(min(float(most_at_once(np.array(room_bytes), np.array(figures[KEPT]), count)), in_flight))
    for m in range(count - most):
        model.add(forwards[m + most] >= handed[m])
    if always_splits:
        _keep_in_turn(model, stage, (kept, pending, room_bytes), forward, of_weight)
    elif weights:
        _keep_at_once(model, stage, (kept, pending, room_bytes), of_weight, end)
    return stage


def _keep_in_turn(
    model: cp_model.CpModel, stage: _Stage, sizes: tuple[float, float, float], forward: int, of_weight: int
) -> None:
    """Bytes of a stage all of whose backwards are split, and that keeps no more after one than before.

    Before a forward begins that so many have preceded, and so many gradients of inputs, so many gradients of weights
    must have ended as leave room for it; fewer gradients of inputs ask for as many of weights or more. sizes: bytes
    kept, pending, and of the room.
    """
    kept, pending, room = sizes
    count = len(stage.forward)

    def needed(forwards: int, inputs: int) -> int:
        free = room * (1.0 + ROUNDING_FRACTION) - kept * (forwards - inputs)
        return max(0, inputs - math.floor(free / pending)) if pending * count > free else 0

    for x in range(count):  # the forward of micro-batch x is the (x + 1)-th
        most = needed(x + 1, x)
        if most:
            model.add(stage.forward[x] >= stage.weight[most - 1] + of_weight)
        for y in range(x - 1, -1, -1):
            if kept * (x + 1 - y) > room * (1.0 + ROUNDING_FRACTION):
                break  # not without the gradient of input y
            if needed(x + 1, y) > most:
                most = needed(x + 1, y)
                is_before = model.new_bool_var("")
                model.add(stage.backward[y] >= stage.forward[x] + forward).only_enforce_if(is_before)
                model.add(stage.forward[x] >= stage.handed[y]).only_enforce_if(~is_before)
                model.add(stage.forward[x] >= stage.weight[most - 1] + of_weight).only_enforce_if(is_before)


def _keep_at_once(
    model: cp_model.CpModel, stage: _Stage, sizes: tuple[float, float, float], of_weight: int, end: int
) -> None:
    """Bytes of any stage: what micro-batches keep, each in two intervals, never comes to more than there is.

    Sizes are rounded down to whole units, and the room to the most that any numbers of micro-batches take that fit.
    """
    count = len(stage.forward)
    kept, pending = (
        math.floor(each * (ROOM_UNITS // count) / max(sizes[0], sizes[1], 1.0)) for each in (sizes[0], sizes[1])
    )
    fitting = [
        kept * flight + pending * rest
        for flight in range(count + 1)
        for rest in range(count + 1 - flight)
        if sizes[0] * flight + sizes[1] * rest <= sizes[2] * (1.0 + ROUNDING_FRACTION)
    ]
    most = max(fitting)
    if count * max(kept, pending) <= most:
        return
    intervals: list[cp_model.IntervalVar] = []
    demands: list[int] = []
    for m, forward in enumerate(stage.forward):
        if kept:
            intervals.append(model.new_interval_var(forward, model.new_int_var(0, end, ""), stage.handed[m], ""))
            demands.append(kept)
        if pending:
            length, until = model.new_int_var(0, end, ""), stage.weight[m] + of_weight
            intervals.append(model.new_optional_interval_var(stage.handed[m], length, until, ~stage.whole[m], ""))
            demands.append(pending)
    model.add_cumulative(intervals, demands, most)


def solve_model(
    solver: cp_model.CpSolver, model: cp_model.CpModel, effort: float, should_stop: Callable[[], bool], turn: int
) -> Answer:
    """By one worker, without linear programs: their cuts multiply times."""
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 0
    solver.parameters.max_deterministic_time = effort
    solver.parameters.catch_sigint_signal = False
    solver.parameters.random_seed = turn
    solver.parameters.use_dynamic_precedence_in_disjunctive = turn % 3 == 0
    solver.parameters.use_strong_propagation_in_disjunctive = turn % 3 == 1
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            if should_stop():
                solver.stop_search()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        status = solver.solve(model)
    finally:
        done.set()
        watcher.join()
    if status == cp_model.MODEL_INVALID:
        raise RuntimeError(f"the model of an order is invalid: {model.validate()}")
    if status == cp_model.INFEASIBLE:
        return "infeasible"
    return "found" if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else "unknown"


def _write(solver: cp_model.CpSolver, stage: _Stage, times: list[int]) -> str:
    """A stage's order; of actions that begin together those that take no time come first."""
    actions = []
    for m, forward in enumerate(stage.forward):
        is_whole = not stage.weight or solver.boolean_value(stage.whole[m])
        actions.append((solver.value(forward), times[FORWARD] > 0, m, "F"))
        length = times[WHOLE if is_whole else INPUT]
        actions.append((solver.value(stage.backward[m]), length > 0, m, "B" if is_whole else "I"))
        if not is_whole:
            actions.append((solver.value(stage.weight[m]), times[WEIGHT] > 0, m, "W"))
    actions.sort(key=lambda action: (*action[:3], "FBIW".index(action[3])))
    return " ".join(f"{m}{kind}0" for _, _, m, kind in actions)
