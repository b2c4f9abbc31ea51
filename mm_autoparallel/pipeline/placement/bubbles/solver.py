"""One placement by CP-SAT: starts of all tasks, the shortest step, and what none goes below.

One machine a lane, strands in their order, who waits for whom, and memory as what all lanes hold together. Times are
whole units, rounded down: whatever order there is stays one, so what the solver shows of steps holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from mm_autoparallel.pipeline.placement.bubbles.construct import find_windows
from mm_autoparallel.pipeline.placement.orders.leaf import ROOM_UNITS, count_units, run_solver, unit_of
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.encoders.play import Player, Words, words_by_starts
from mm_autoparallel.pipeline.simulate.encoders.tasks import JOIN


@dataclass(frozen=True, eq=False)
class Solved:
    """lower_bound_ms: of all orders of this placement; the step that was given, where none is below it. words: below
    that step, where any were found that also fit to the byte."""

    lower_bound_ms: float
    words: Words | None = None


def solve_words(
    player: Player, upper_ms: float, lower_ms: float, effort_s: float, should_stop: Callable[[], bool]
) -> Solved:
    """Orders with a step below upper_ms, no less than lower_ms. effort_s: the solver's deterministic time."""
    tasks = player.tasks
    times = np.concatenate([tasks.length_ms, tasks.lag_ms, tasks.tails_ms])
    unit, exact = unit_of(times, upper_ms)
    scaled = np.rint(times / unit) if exact else np.floor(times / unit)
    lengths, lags, tails = np.split(scaled, [tasks.num_tasks, 2 * tasks.num_tasks])
    goal = math.ceil(upper_ms / unit * (1.0 - 1e-12)) - 1
    least = math.floor(lower_ms / unit * (1.0 - 1e-12))
    windows = find_windows(tasks, lengths, lags, tails, float(goal))
    if goal < least or any(low > high for low, high in zip(windows.earliest_ms, windows.latest_ms, strict=True)):
        return Solved(upper_ms)
    model = cp_model.CpModel()
    starts = [
        model.new_int_var(int(low), int(high), "")
        for low, high in zip(windows.earliest_ms, windows.latest_ms, strict=True)
    ]
    step = model.new_int_var(least, goal, "")
    length = lengths.astype(np.int64).tolist()
    for task, dependency in enumerate(tasks.dependency.tolist()):
        if dependency < tasks.num_tasks:
            model.add(starts[task] >= starts[dependency] + length[dependency] + int(lags[task]))
    for strand in tasks.strands:
        for first, second in zip(strand[:-1].tolist(), strand[1:].tolist(), strict=True):
            model.add(starts[second] >= starts[first] + length[first])
    for lane in range(tasks.num_lanes):
        mine = [int(task) for task in np.flatnonzero(tasks.lane == lane) if tasks.owner[task] != JOIN]
        for strand, of_lane in zip(tasks.strands, tasks.strand_lane, strict=True):
            if of_lane == lane:
                model.add(step >= starts[strand[-1]] + length[strand[-1]] + int(tails[lane]))
        model.add_no_overlap(
            model.new_fixed_size_interval_var(starts[task], length[task], "") for task in mine if length[task]
        )
        _limit_memory(model, player, lane, mine, starts, length)
    model.minimize(step)
    solver, answer = run_solver(model, effort_s, should_stop, 0)
    if answer == "infeasible":
        return Solved(upper_ms)
    if answer == "unknown":
        return Solved(lower_ms)
    bound_ms = max(lower_ms, math.floor(solver.best_objective_bound + 1e-6) * unit * (1.0 if exact else 1.0 - 1e-12))
    words = words_by_starts(tasks, [float(solver.value(start)) for start in starts])
    fits = player.step_ms(words) < upper_ms and player.fits(words)
    return Solved(min(bound_ms, upper_ms), words if fits else None)


def _limit_memory(
    model: cp_model.CpModel,
    player: Player,
    lane: int,
    mine: list[int],
    starts: list[cp_model.IntVar],
    length: list[int],
) -> None:
    """What is kept from the start of each forward until its backward has ended fits beside what is always there."""
    tasks = player.tasks
    room = float(player.allowed_bytes[lane] - tasks.fixed_bytes[lane])
    ends = {(int(tasks.kept[task]), int(tasks.index[task])): task for task in mine if tasks.kind[task] != FORWARD}
    begins = [task for task in mine if tasks.kind[task] == FORWARD]
    sizes = [float(tasks.kept_bytes[tasks.kept[task]]) for task in begins]
    if not math.isfinite(room) or sum(sizes) <= room:
        return
    intervals, demands = [], []
    for task, size_bytes in zip(begins, sizes, strict=True):
        demand = count_units(size_bytes, room)
        if not demand:
            continue
        last = ends.get((int(tasks.kept[task]), int(tasks.index[task])), task)
        lasting = model.new_int_var(0, 2**30, "")
        intervals.append(model.new_interval_var(starts[task], lasting, starts[last] + length[last], ""))
        demands.append(demand)
    model.add_cumulative(intervals, demands, ROOM_UNITS)
