"""Orders of one placement of a V below a bound, as a model of CP-SAT: start times, or the proof that there are none.

As `order_model`, of stages with two virtual stages each: equal micro-batches pass each of them in order, every backward
is whole or split, and what both chunks keep fits together. Times and bytes are rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from mm_autoparallel.pipeline.certify.order_model import Found, solve_model
from mm_autoparallel.pipeline.certify.v_pieces import (
    FORWARD,
    HOP_BACKWARD,
    HOP_FORWARD,
    INPUT,
    KEPT,
    ON_HOST,
    PENDING,
    TAIL,
    WEIGHT,
    WHOLE,
    Stage,
    rooms,
)

Floats = NDArray[np.float64]
Variable = cp_model.IntVar

#: Units of the bound, and of a stage's room.
TIME_UNITS, ROOM_UNITS = 2**26, 2**16
#: Units in ms that are tried first: where all times are multiples of one, nothing is rounded.
EXACT_UNITS_MS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.01, 1e-3)


@dataclass(frozen=True, eq=False)
class _Node:
    """Of one virtual stage by micro-batch: begins, whether the backward is whole, and when its gradient goes on."""

    times: list[int]
    forward: list[Variable]
    backward: list[Variable]
    weight: list[Variable]
    whole: list[Variable]
    handed: list[Variable]


def find_v_orders(
    figures: Floats,
    stages: list[Stage],
    num_microbatches: int,
    bound_ms: float,
    effort: float,
    should_stop: Callable[[], bool],
    turn: int,
) -> Found:
    """Orders below bound_ms of virtual stages with figures [K, 17]. effort: the solver's deterministic time."""
    num_stages = len(stages)
    tails = [stage.tail_ms + figures[s, TAIL] + figures[len(figures) - 1 - s, TAIL] for s, stage in enumerate(stages)]
    columns = [FORWARD, INPUT, WEIGHT, WHOLE, HOP_FORWARD, HOP_BACKWARD]
    every = np.concatenate([figures[:, columns].ravel(), tails])
    unit_ms = next(
        (
            unit
            for unit in EXACT_UNITS_MS
            if bound_ms / unit <= TIME_UNITS and np.all(np.abs(every / unit - np.rint(every / unit)) < 1e-9)
        ),
        0.0,
    )
    if unit_ms:
        rounded, last = np.rint(every / unit_ms), math.ceil(bound_ms / unit_ms + 1e-6) - 1
    else:
        unit_ms = bound_ms / TIME_UNITS
        rounded, last = np.floor(every / unit_ms), TIME_UNITS
    times = rounded[: figures.shape[0] * 6].astype(np.int64).reshape(-1, 6).tolist()
    ends = [last - int(tail) for tail in rounded[figures.shape[0] * 6 :]]
    model = cp_model.CpModel()
    nodes: list[_Node] = []
    for k, of in enumerate(times):
        end = ends[k if k < num_stages else len(times) - 1 - k]
        if end < of[0] + of[1]:
            return Found("infeasible")
        nodes.append(_add_node(model, of, end, num_microbatches, bool(figures[k, WEIGHT] > 0.0)))
    for before, after in pairwise(nodes):
        for m in range(num_microbatches):
            model.add(after.forward[m] >= before.forward[m] + before.times[0] + before.times[4])
            model.add(before.backward[m] >= after.handed[m] + before.times[5])
    for s, stage in enumerate(stages):
        both = s, len(nodes) - 1 - s
        _share(model, [nodes[k] for k in both], figures[list(both)], stage, last)
    solver = cp_model.CpSolver()
    answer = solve_model(solver, model, effort, should_stop, turn)
    if answer != "found":
        return Found(answer)
    return Found("found", tuple(_write(solver, nodes[s], nodes[len(nodes) - 1 - s]) for s in range(num_stages)))


def _add_node(model: cp_model.CpModel, times: list[int], end: int, count: int, may_split: bool) -> _Node:
    f, i, w, b, _, _ = times

    def new() -> list[Variable]:
        return [model.new_int_var(0, max(0, end), "") for _ in range(count)]

    whole = [model.new_bool_var("") if may_split else model.new_constant(1) for _ in range(count)]
    node = _Node(times, new(), new(), new(), whole, new())
    for m in range(count):
        is_whole = node.whole[m]
        model.add(node.backward[m] >= node.forward[m] + f)
        model.add(node.handed[m] == node.backward[m] + i + (b - i) * is_whole)
        if may_split:
            model.add(node.weight[m] >= node.handed[m]).only_enforce_if(~is_whole)
            model.add(node.weight[m] + w <= end).only_enforce_if(~is_whole)
        if m:
            model.add(node.forward[m] >= node.forward[m - 1] + f)
            model.add(node.backward[m] >= node.handed[m - 1])
            model.add(node.weight[m] >= node.weight[m - 1] + w - w * node.whole[m - 1])
    return node


def _share(model: cp_model.CpModel, nodes: list[_Node], figures: Floats, stage: Stage, last: int) -> None:
    """One machine and one memory for the two virtual stages of a stage."""
    intervals = []
    for node in nodes:
        f, i, w, b, _, _ = node.times
        for m in range(len(node.forward)):
            is_whole = node.whole[m]
            intervals.append(model.new_fixed_size_interval_var(node.forward[m], f, ""))
            intervals.append(model.new_interval_var(node.backward[m], i + (b - i) * is_whole, node.handed[m], ""))
            intervals.append(model.new_optional_fixed_size_interval_var(node.weight[m], w, ~is_whole, ""))
    model.add_no_overlap(intervals)
    room, host_room = (float(of) for of in rooms(figures[0], figures[1], stage))
    for space, in_flight, pending in ((room, KEPT, PENDING), (host_room, ON_HOST, None)):
        if not np.isfinite(space):
            continue
        spans, sizes = [], []
        for node, of in zip(nodes, figures, strict=True):
            kept, later = _units(float(of[in_flight]), space), _units(float(of[pending]) if pending else 0.0, space)
            for m in range(len(node.forward)):
                if kept:
                    length = model.new_int_var(0, last, "")
                    spans.append(model.new_interval_var(node.forward[m], length, node.handed[m], ""))
                    sizes.append(kept)
                if later:
                    length, until = model.new_int_var(0, last, ""), node.weight[m] + node.times[2]
                    spans.append(model.new_optional_interval_var(node.handed[m], length, until, ~node.whole[m], ""))
                    sizes.append(later)
        if spans:
            model.add_cumulative(spans, sizes, ROOM_UNITS)


def _units(size_bytes: float, room_bytes: float) -> int:
    """What it fills of a room, rounded down; of what does not fit, more than that."""
    if size_bytes <= 0.0:
        return 0
    if size_bytes > room_bytes:
        return ROOM_UNITS + 1
    return math.floor(size_bytes / room_bytes * ROOM_UNITS * (1.0 - 1e-12))


def _write(solver: cp_model.CpSolver, first: _Node, second: _Node) -> str:
    """A stage's order; of actions that begin together those that take no time come first, as a micro-batch passes."""
    actions = []
    for chunk, node in enumerate((first, second)):
        f, i, w, b, _, _ = node.times
        for m in range(len(node.forward)):
            is_whole = solver.boolean_value(node.whole[m])
            actions.append((solver.value(node.forward[m]), f > 0, m, (0, chunk), "F", chunk))
            length, letter = (b, "B") if is_whole else (i, "I")
            actions.append((solver.value(node.backward[m]), length > 0, m, (1, 1 - chunk), letter, chunk))
            if not is_whole:
                actions.append((solver.value(node.weight[m]), w > 0, m, (2, 1 - chunk), "W", chunk))
    return " ".join(f"{m}{letter}{chunk}" for _, _, m, _, letter, chunk in sorted(actions))
