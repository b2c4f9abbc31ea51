"""One placement by CP-SAT: start times of all actions below a goal, or the proof that there are none.

The model: for each stage one machine (no overlap of its actions), each kind of action in order of micro-batches, data
and hops between stages, and memory as in `propagate`; where bytes kept for the input gradient and for the weight
gradient differ, also as what all micro-batches hold together. Where actions are not too many, which of two actions of
a stage runs first is a literal of its own wherever windows leave that open: what one conflict teaches is then said in
orders, not in times, and fewer of them prove as much. Durations are rounded down, and what is held too, to integers
whose sums stay below 2^30: a schedule below the goal always remains one, so INFEASIBLE proves the goal.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT,
    KEPT,
    MOST_HELD,
    MOST_IN_FLIGHT,
    MOST_PENDING,
    NUM_KINDS,
    PENDING,
    ROOM,
    TAIL_MS,
    WEIGHT,
)

Floats = NDArray[np.float64]
Words = NDArray[np.int8]
Variable = cp_model.IntVar

#: Units of time in a goal, and of a stage's room, where no exact unit is found.
TIME_UNITS, ROOM_UNITS = 2**26, 2**14
#: So close to whole numbers of units are those that people meant to be.
EXACT_FRACTION = 1e-12
#: Of a time in a window: what the rounding of its sums may have added or taken.
WINDOW_FRACTION = 1e-9
#: Units that times given by people are often multiples of.
EXACT_UNITS_MS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001)
#: Orders of so many actions in all are literals; of more, the model takes longer than it saves.
MOST_ACTIONS = 1_000
#: Of each two kinds in turn, how many micro-batches lie between them at most.
_MOST_BETWEEN = (MOST_IN_FLIGHT, MOST_HELD, MOST_PENDING)

Answer = Literal["infeasible", "found", "unknown"]


@dataclass(frozen=True, eq=False)
class Leaf:
    """words: [P, 3M] below the goal, where any were found. spent_s: of the solver's deterministic time."""

    answer: Answer
    words: Words | None = None
    spent_s: float = 0.0


def solve_leaf(
    figures: Floats,
    num_microbatches: int,
    goal_ms: float,
    effort_s: float,
    should_stop: Callable[[], bool],
    seed: int = 0,
    windows: tuple[Floats, Floats] | None = None,
) -> Leaf:
    """Words of stages with figures [P, NUM_FIGURES] whose step is below goal_ms.

    effort_s: the solver's deterministic time. windows: earliest starts and latest ends [P, kind, M] of actions, outside
    of which none of them is in a step below the goal.
    """
    model, starts, durations = _build(figures, num_microbatches, goal_ms, windows)
    if model is None:
        return Leaf("infeasible")
    solver, answer = run_solver(model, effort_s, should_stop, seed, has_literals(len(figures), num_microbatches))
    spent_s = solver.response_proto.deterministic_time
    if answer != "found":
        return Leaf(answer, spent_s=spent_s)
    words = np.empty((len(figures), NUM_KINDS * num_microbatches), np.int8)
    for s, of_stage in enumerate(starts):
        lasts = [duration > 0 for duration in durations[s]]  # of those that start together the others come first
        actions = [
            (solver.value(start), lasts[kind], m, kind)
            for kind, row in enumerate(of_stage)
            for m, start in enumerate(row)
        ]
        words[s] = [kind for *_, kind in sorted(actions)]
    return Leaf("found", words, spent_s)


def has_literals(num_stages: int, num_microbatches: int) -> bool:
    """Whether the model of such a pipeline has a literal for the order of two actions."""
    return NUM_KINDS * num_stages * num_microbatches <= MOST_ACTIONS


def count_units(size_bytes: float, room_bytes: float) -> int:
    """What a size fills of a room of ROOM_UNITS, rounded down; of one that never fits, one more than that."""
    if size_bytes <= 0.0:
        return 0
    if size_bytes > room_bytes:
        return ROOM_UNITS + 1
    return math.floor(size_bytes / room_bytes * ROOM_UNITS * (1.0 - 1e-12))


def run_solver(
    model: cp_model.CpModel, effort_s: float, should_stop: Callable[[], bool], seed: int, is_lean: bool = False
) -> tuple[cp_model.CpSolver, Answer]:
    """Solve a model of one placement by one worker, within a deterministic time. is_lean: without linear program,
    probing and stronger propagation, which take longer than they save where literals tell orders, and in windows."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort_s
    solver.parameters.catch_sigint_signal = False
    solver.parameters.symmetry_level = 0
    solver.parameters.use_strong_propagation_in_disjunctive = not is_lean
    if is_lean:
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.linearization_level = 0
    solver.parameters.use_dynamic_precedence_in_disjunctive = True
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
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
        raise RuntimeError(f"the model of a leaf is invalid: {model.validate()}")
    if status == cp_model.INFEASIBLE:
        return solver, "infeasible"
    return solver, "found" if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else "unknown"


def unit_of(times: Floats, goal_ms: float) -> tuple[float, bool]:
    """The unit in ms for a model below goal_ms, and whether all times [.] are multiples of it."""
    for unit in EXACT_UNITS_MS:
        in_units = times / unit
        if goal_ms / unit < TIME_UNITS and np.all(
            np.abs(in_units - np.rint(in_units)) <= EXACT_FRACTION * np.maximum(in_units, 1.0)
        ):
            return unit, True
    return goal_ms / TIME_UNITS, False


def _build(
    figures: Floats, num_microbatches: int, goal_ms: float, windows: tuple[Floats, Floats] | None
) -> tuple[cp_model.CpModel | None, list[list[list[Variable]]], list[list[int]]]:
    """The model, none where a window is empty; its start times [P][kind][M], and durations [P][kind] in its units."""
    unit, exact = unit_of(figures[:, : TAIL_MS + 1].ravel(), goal_ms)
    scaled = figures[:, : TAIL_MS + 1] / unit
    times = (np.rint(scaled) if exact else np.floor(scaled)).astype(np.int64)
    goal = math.ceil(goal_ms / unit) - 1
    num_stages, count = len(figures), num_microbatches
    duration = times[:, :NUM_KINDS].tolist()
    hop_forward, hop_backward = times[:, HOP_FORWARD_MS].tolist(), times[:, HOP_BACKWARD_MS].tolist()
    head, turn, back = _passes(duration, hop_forward, hop_backward, times[:, TAIL_MS].tolist())
    firsts, lasts = np.zeros((2, num_stages, NUM_KINDS, count), dtype=np.int64)
    lasts[:] = goal
    if windows is not None:  # of starts in units, rounded down as durations are
        firsts = np.floor(windows[0] / unit * (1.0 - WINDOW_FRACTION)).astype(np.int64)
        last_starts = (windows[1] - figures[:, :NUM_KINDS, None]) / unit
        lasts = np.floor(last_starts * (1.0 + WINDOW_FRACTION)).astype(np.int64)
    model = cp_model.CpModel()
    starts: list[list[list[Variable]]] = []
    for s in range(num_stages):
        f, i, w = duration[s]
        first_input = head[s] + f + turn[s]
        of_stage = []
        for kind, first, after in (
            (FORWARD, head[s], turn[s] + i + back[s]),
            (INPUT, first_input, back[s]),
            (WEIGHT, first_input + i, int(times[s, TAIL_MS])),
        ):
            each = duration[s][kind]
            row = []
            for m in range(count):
                low = max(first + m * each, int(firsts[s, kind, m]))
                high = min(goal - after - (count - m) * each, int(lasts[s, kind, m]))
                if low > high:
                    return None, [], duration
                row.append(model.new_int_var(low, high, ""))
            of_stage.append(row)
        starts.append(of_stage)
    for s, (forwards, inputs, weights) in enumerate(starts):
        f, i, w = duration[s]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start, each, "")
            for row, each in ((forwards, f), (inputs, i), (weights, w))
            for start in row
            if each
        )
        for m in range(count):
            if m:
                model.add(forwards[m] >= forwards[m - 1] + f)
                model.add(inputs[m] >= inputs[m - 1] + i)
                model.add(weights[m] >= weights[m - 1] + w)
            model.add(weights[m] >= inputs[m] + i)
            model.add(inputs[m] >= forwards[m] + f)
            if s:
                model.add(forwards[m] >= starts[s - 1][FORWARD][m] + duration[s - 1][FORWARD] + hop_forward[s - 1])
                model.add(starts[s - 1][INPUT][m] >= inputs[m] + i + hop_backward[s - 1])
        _limit_memory(model, figures[s], (forwards, inputs, weights), duration[s], goal)
        kinds = list(zip(starts[s], duration[s], strict=True))
        for (first, then), column in zip(combinations(kinds, 2), _MOST_BETWEEN, strict=True):
            if first[1] and then[1] and has_literals(num_stages, count):
                _order_pairs(model, *first, *then, int(figures[s, column]))
    return model, starts, duration


def _order_pairs(
    model: cp_model.CpModel, a: Sequence[Variable], each_a: int, b: Sequence[Variable], each_b: int, most: int
) -> None:
    """Say by literals which of two actions of one stage runs first. a, b: starts of two kinds, of which a micro-batch
    runs a first. most: so many micro-batches at once have begun a and not ended b."""
    firsts_a, lasts_a = _ends_of(a)
    firsts_b, lasts_b = _ends_of(b)
    is_first: dict[tuple[int, int], Variable] = {}
    for m in range(len(a)):
        for n in range(max(0, m - most + 1), m):  # b of m and of those behind waits for a of m, and a for b far before
            if firsts_a[m] + each_a > lasts_b[n] or firsts_b[n] + each_b > lasts_a[m]:
                continue
            literal = is_first[m, n] = model.new_bool_var("")
            model.add(b[n] >= a[m] + each_a).only_enforce_if(literal)
            model.add(a[m] >= b[n] + each_b).only_enforce_if(literal.negated())
            if (m - 1, n) in is_first:
                model.add_implication(literal, is_first[m - 1, n])
            if (m, n - 1) in is_first:
                model.add_implication(is_first[m, n - 1], literal)


def _ends_of(starts: Sequence[Variable]) -> tuple[list[int], list[int]]:
    """The earliest and the latest start of each."""
    domains = [list(start.proto.domain) for start in starts]
    return [domain[0] for domain in domains], [domain[-1] for domain in domains]


def _passes(
    duration: list[list[int]], hop_forward: list[int], hop_backward: list[int], tails: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """Per stage: the least time before its first forward, between a forward and its input gradient, and after an input
    gradient."""
    num_stages = len(duration)
    head, turn, back = [0] * num_stages, [0] * num_stages, [0] * num_stages
    for s in range(num_stages):
        back[s] = duration[s][WEIGHT] + tails[s]
        if s:
            head[s] = head[s - 1] + duration[s - 1][FORWARD] + hop_forward[s - 1]
            back[s] = max(back[s], hop_backward[s - 1] + duration[s - 1][INPUT] + back[s - 1])
    for s in range(num_stages - 2, -1, -1):
        passed = duration[s + 1][FORWARD] + turn[s + 1] + duration[s + 1][INPUT]
        turn[s] = hop_forward[s] + passed + hop_backward[s]
    return head, turn, back


def _limit_memory(
    model: cp_model.CpModel,
    figures: Floats,
    starts: tuple[list[Variable], list[Variable], list[Variable]],
    duration: list[int],
    goal: int,
) -> None:
    forwards, inputs, weights = starts
    _, i, w = duration
    count = len(forwards)
    in_flight, held, pending = (int(figures[column]) for column in (MOST_IN_FLIGHT, MOST_HELD, MOST_PENDING))
    for m in range(count):
        if m + in_flight < count:
            model.add(forwards[m + in_flight] >= inputs[m] + i)
        if m + held < count:
            model.add(forwards[m + held] >= weights[m] + w)
        if m + pending < count:
            model.add(inputs[m + pending] >= weights[m] + w)
    if figures[KEPT] == figures[PENDING] or figures[ROOM] <= 0.0:
        return
    intervals, demands = [], []
    for m in range(count):
        for begin, end, each in (
            (forwards[m], inputs[m] + i, figures[KEPT]),
            (inputs[m] + i, weights[m] + w, figures[PENDING]),
        ):
            size = count_units(each, figures[ROOM])
            if size > 0:
                length = model.new_int_var(0, goal, "")
                intervals.append(model.new_interval_var(begin, length, end, ""))
                demands.append(size)
    model.add_cumulative(intervals, demands, ROOM_UNITS)
