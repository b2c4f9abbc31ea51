"""One placement of a V by CP-SAT: start times of all actions below a goal, or the proof that there are none.

As `orders/leaf`: one machine for each stage, each kind of action of a virtual stage in order of micro-batches, data and
hops, and what all micro-batches of both chunks keep together. Times and bytes are rounded down, so an order below the
goal stays one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT,
    KEPT,
    NUM_KINDS,
    PENDING,
    TAIL_MS,
    WEIGHT,
)
from mm_autoparallel.pipeline.placement.orders.leaf import ROOM_UNITS, Leaf, count_units, run_solver, unit_of
from mm_autoparallel.pipeline.placement.orders.v_shape.bounds import HOST_LIMIT, STAGE_TAIL_MS, room_of
from mm_autoparallel.pipeline.placement.orders.v_shape.pieces import HOST_STATIC, ON_HOST
from mm_autoparallel.pipeline.placement.orders.v_shape.words import NUM_LETTERS

Floats = NDArray[np.float64]
Starts = list[list[list[cp_model.IntVar]]]


def solve_leaf(
    figures: Floats,
    stages: Floats,
    num_microbatches: int,
    goal_ms: float,
    effort_s: float,
    should_stop: Callable[[], bool],
    seed: int = 0,
) -> Leaf:
    """Words of virtual stages with figures [K, NUM_FIGURES] on stages [P, 3] (`stage_figures`) whose step is below
    goal_ms. effort_s: the solver's deterministic time."""
    num_stages, num_virtual = len(stages), len(figures)
    model, starts = _build(figures, stages, num_microbatches, goal_ms)
    if model is None:
        return Leaf("infeasible")
    solver, answer = run_solver(model, effort_s, should_stop, seed)
    if answer != "found":
        return Leaf(answer)
    words = np.empty((num_stages, NUM_LETTERS * num_microbatches), np.int8)
    for s in range(num_stages):
        actions = []
        for chunk, k in enumerate((s, num_virtual - 1 - s)):
            for kind, row in enumerate(starts[k]):
                lasts = bool(figures[k, kind] > 0.0)  # of actions that start together those of no time come first
                # and of these, in the order in which a micro-batch passes
                turn = (FORWARD, chunk) if kind == FORWARD else (kind, 1 - chunk)
                actions += [(solver.value(at), lasts, m, turn, chunk * NUM_KINDS + kind) for m, at in enumerate(row)]
        words[s] = [letter for *_, letter in sorted(actions)]
    return Leaf("found", words)


def _build(
    figures: Floats, stages: Floats, num_microbatches: int, goal_ms: float
) -> tuple[cp_model.CpModel | None, Starts]:
    """The model and its start times [K][kind][M]; none where a stage's tail is beyond the goal."""
    num_stages, num_virtual, count = len(stages), len(figures), num_microbatches
    tails = stages[:, STAGE_TAIL_MS] + figures[:num_stages, TAIL_MS] + figures[::-1][:num_stages, TAIL_MS]
    columns = [FORWARD, INPUT, WEIGHT, HOP_FORWARD_MS, HOP_BACKWARD_MS]
    unit, exact = unit_of(np.concatenate([figures[:, columns].ravel(), tails]), goal_ms)

    def whole(times: Floats) -> list[list[int]] | list[int]:
        scaled = np.rint(times / unit) if exact else np.floor(times / unit)
        of: list[list[int]] | list[int] = scaled.astype(np.int64).tolist()
        return of

    times, ends = np.array(whole(figures[:, columns])), np.array(whole(tails))
    goal = math.ceil(goal_ms / unit) - 1
    model = cp_model.CpModel()
    starts: Starts = []
    for k in range(num_virtual):
        stage = k if k < num_stages else num_virtual - 1 - k
        high = goal - int(ends[stage])
        if high < 0:
            return None, []
        starts.append(
            [[model.new_int_var(0, high - int(each), "") for _ in range(count)] for each in times[k, :NUM_KINDS]]
            if high >= times[k, :NUM_KINDS].max()
            else []
        )
        if not starts[-1]:
            return None, []
    for k, (forwards, inputs, weights) in enumerate(starts):
        f, i, w, hop_forward, hop_backward = times[k].tolist()
        for m in range(count):
            if m:
                model.add(forwards[m] >= forwards[m - 1] + f)
                model.add(inputs[m] >= inputs[m - 1] + i)
                model.add(weights[m] >= weights[m - 1] + w)
            model.add(weights[m] >= inputs[m] + i)
            model.add(inputs[m] >= forwards[m] + f)
            if k < num_virtual - 1:
                model.add(starts[k + 1][FORWARD][m] >= forwards[m] + f + hop_forward)
                model.add(inputs[m] >= starts[k + 1][INPUT][m] + int(times[k + 1, INPUT]) + hop_backward)
    for s in range(num_stages):
        both = s, num_virtual - 1 - s
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start, int(times[k, kind]), "")
            for k in both
            for kind in range(NUM_KINDS)
            for start in starts[k][kind]
            if times[k, kind]
        )
        _limit_bytes(model, figures[list(both)], stages[s], [starts[k] for k in both], times[list(both)], goal)
    return model, starts


def _limit_bytes(
    model: cp_model.CpModel, figures: Floats, stage: Floats, starts: Starts, times: NDArray[np.int64], goal: int
) -> None:
    """What a stage's two pieces keep, of its device's room and its host's."""
    room = room_of(figures[0], figures[1], stage)
    host_room = float(stage[HOST_LIMIT] - figures[:, HOST_STATIC].sum())
    for limit, kept_column, pending_column in ((room, KEPT, PENDING), (host_room, ON_HOST, None)):
        if np.isinf(limit):
            continue
        intervals, demands = [], []
        for of, (forwards, inputs, weights), (_, i, w, *_) in zip(figures, starts, times.tolist(), strict=True):
            kept = count_units(float(of[kept_column]), limit)
            pending = count_units(float(of[pending_column]), limit) if pending_column is not None else 0
            for m in range(len(forwards)):
                spans = [(forwards[m], inputs[m] + i, kept), (inputs[m] + i, weights[m] + w, pending)]
                if kept == pending:
                    spans = [(forwards[m], weights[m] + w, kept)]
                for begin, end, size in spans:
                    if size:
                        intervals.append(model.new_interval_var(begin, model.new_int_var(0, goal, ""), end, ""))
                        demands.append(size)
        if intervals:
            model.add_cumulative(intervals, demands, ROOM_UNITS)
