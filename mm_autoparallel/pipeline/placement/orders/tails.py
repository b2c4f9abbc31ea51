"""Tails: what the last stages of a pipeline take at least in any order, found by trying all of them.

Bounds of rows know what each stage holds on average; where few micro-batches are in flight, they come in whole numbers,
and neighbours cannot all keep the order that suits them. Of the last stages, which have few, CP-SAT finds the least
time D(n) from the start of their first forward to the start of the forward that is n later, whatever n micro-batches
then do. What ran before can only add to it, so for M micro-batches, with M - 1 = q n + r,

    step ≥ way in + q D(n) + D(r) + the last one's way through the tail and back + way out.

A row is left out of steps that are below this for every tail that it begins. Micro-batches are alike, so they can be
numbered by their turn on each stage; times and hops are rounded down, and backwards are the relaxed rows' own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.bounds import bound_rows, least_step, ways
from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT_MS,
    MOST_HELD,
    MOST_IN_FLIGHT,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.options import Options

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Micro-batches that are looked at together, more where fewer do not tell; and the longest tail in stages. Assumed.
WINDOWS, MOST_STAGES = range(4, 17, 4), 5
#: More are looked at where they would tell if each of them took so many times what the last ones did. Assumed.
HOPE = 1.15
#: Stages that hold more micro-batches at once begin no tail: windows are then too short to tell.
MOST_AT_ONCE = 4
#: Tails that are looked at for one step at most; the solver's deterministic seconds for each window. Assumed.
MOST_TAILS, EFFORT_S = 12, 1.0
#: The longest action has so many units of time, rounded down from a little less, so that rounding adds nothing.
UNITS, ROUNDING_FRACTION = 10_000, 1e-9
#: By so much more each next step is looked at.
STEP_FRACTION = 2e-3

Stage = tuple[int, ...]
"""Forward, input and weight gradient, hop forth and back, in units; micro-batches in flight and held at most."""


def raise_by_tails(options: Options, low_ms: float, most_ms: float, should_stop: Callable[[], bool]) -> float:
    """A bound of at least low_ms, which is one, as far as most_ms."""
    rows = np.arange(len(options.stage))
    while low_ms < most_ms and not should_stop():
        goal_ms = min(most_ms, low_ms * (1.0 + STEP_FRACTION))
        near, _ = bound_rows(options, rows, goal_ms)
        possible = near[~_is_too_long(options, near, goal_ms, should_stop)]
        if len(possible) == len(near) > 0:
            break
        if len(bound_rows(options, possible, goal_ms)[0]):
            return least_step(options, possible, low_ms, goal_ms)
        low_ms = goal_ms
    return low_ms


def _is_too_long(options: Options, rows: Ints, goal_ms: float, should_stop: Callable[[], bool]) -> NDArray[np.bool_]:
    """[R] of these rows, whether every tail that it begins takes more than goal_ms, way in and out included."""
    num_stages, num_looked = options.segments.problem.num_stages, 0
    head, back = ways(options, rows)
    too_long = np.zeros(len(rows), dtype=np.bool_)
    tails: dict[int, list[tuple[int, ...]] | None] = {}  # by row, those that are not too long; None: not looked at
    for stage in range(num_stages - 1, max(num_stages - 1 - MOST_STAGES, -1), -1):
        for at in np.flatnonzero(options.stage[rows] == stage).tolist():
            row = int(rows[at])
            if stage == num_stages - 1:
                tails[row] = [(row,)]
                continue
            later = rows[(options.stage[rows] == stage + 1) & (options.begin[rows] == options.end[row])]
            known = [tails.get(other) for other in later.tolist()]
            tails[row] = None
            if options.relaxed[row, MOST_HELD] > MOST_AT_ONCE or None in known:
                continue
            longer = [(row, *tail) for each in known if each is not None for tail in each]
            num_looked += len(longer)
            if num_looked > MOST_TAILS:
                continue
            begin = int(options.begin[row])
            out_ms = max(float(options.relaxed[row, WEIGHT_MS]), float(back[stage, begin]))
            beside_ms = float(head[stage, begin]) + out_ms
            tails[row] = [tail for tail in longer if _may_take(options, tail, goal_ms - beside_ms, should_stop)]
            too_long[at] = not tails[row]
    return too_long


def _may_take(options: Options, tail: tuple[int, ...], most_ms: float, should_stop: Callable[[], bool]) -> bool:
    """Whether from the first forward of its first stage to the last input gradient there may be so little; True on
    should_stop."""
    figures, number = options.relaxed[list(tail)], options.segments.problem.num_microbatches - 1
    actions = figures[:, [FORWARD_MS, INPUT_MS, WEIGHT_MS, HOP_FORWARD_MS, HOP_BACKWARD_MS]]
    unit_ms = float(actions.max()) / UNITS
    if unit_ms == 0.0:
        return True
    limits = np.minimum(figures[:, [MOST_IN_FLIGHT, MOST_HELD]], max(WINDOWS))
    in_units = np.column_stack([np.floor(actions / unit_ms * (1.0 - ROUNDING_FRACTION)), limits]).astype(np.int64)
    stages = tuple(tuple(row) for row in in_units.tolist())
    there_and_back_ms = float(actions[:, :2].sum() + actions[:-1, 3:].sum())
    before = 0
    for window in WINDOWS:
        if should_stop():
            break
        of_window = least_units(stages, window)
        units = number // window * of_window + least_units(stages, number % window)
        if units * unit_ms * (1.0 - ROUNDING_FRACTION) + there_and_back_ms > most_ms:
            return False
        hoped = of_window + HOPE * (of_window - before)
        if before and number / (window + WINDOWS.step) * hoped * unit_ms + there_and_back_ms <= most_ms:
            break
        before = of_window
    return True


@lru_cache(maxsize=4096)
def least_units(stages: tuple[Stage, ...], number: int) -> int:
    """D(number) of a tail, in units, or a lower bound of it where that is not found in time."""
    from ortools.sat.python import cp_model

    from mm_autoparallel.pipeline.placement.orders.leaf import run_solver

    if not number:
        return 0
    model = cp_model.CpModel()
    horizon = number * sum(sum(stage[:5]) for stage in stages)
    starts: list[list[list[cp_model.IntVar]]] = []
    for stage in stages:
        starts.append([[model.new_int_var(0, horizon, "") for _ in range(number)] for _ in range(3)])
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(start, length, "")
                for of_kind, length in zip(starts[-1], stage[:3], strict=True)
                for start in of_kind
            ]
        )
    next_forward = model.new_int_var(0, horizon, "")
    for s, (forward_ms, input_ms, weight_ms, *hops, most_in_flight, most_held) in enumerate(stages):
        forwards, inputs, weights = starts[s]
        behind = [*forwards, next_forward] if s == 0 else forwards
        for kind, length in ((behind, forward_ms), (inputs, input_ms), (weights, weight_ms)):
            for one, following in pairwise(kind):
                model.add(following >= one + length)
        for m in range(number):
            model.add(weights[m] >= inputs[m] + input_ms)
            if s + 1 < len(stages):
                model.add(starts[s + 1][0][m] >= forwards[m] + forward_ms + hops[0])
                model.add(inputs[m] >= starts[s + 1][1][m] + stages[s + 1][1] + hops[1])
            else:
                model.add(inputs[m] >= forwards[m] + forward_ms)
            if m + most_in_flight < len(behind):
                model.add(behind[m + most_in_flight] >= inputs[m] + input_ms)
            if m + most_held < len(behind):
                model.add(behind[m + most_held] >= weights[m] + weight_ms)
    model.add(starts[0][0][0] == 0)
    model.minimize(next_forward)
    solver, _ = run_solver(model, EFFORT_S, lambda: False, seed=0, is_lean=True)
    return max(0, int(np.floor(solver.best_objective_bound + 1e-6)))
