"""Slimming: of orders that take equally long, one whose stages hold less at their fullest.

Local search and CP-SAT keep what fits; how full a stage is they do not ask. A stage that runs ahead of what its
neighbours need holds micro-batches for nothing. So the fullest moments of each stage are taken down, by one
micro-batch at a time, as long as the step stays: forwards that would exceed the new peak wait, or weight gradients
come before them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.action import FORWARD, INPUT, KINDS, WEIGHT
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.step import Timeline, simulate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Actions = NDArray[np.int8]

#: By how much less than the peak so far is less, in parts of it.
LESS_FRACTION = 1e-9
#: Orders that are tried at most, times actions: half a second or so.
MOST_ACTIONS = 20_000_000


@kernel
def play_actions(actions: Actions, lengths: Ints, durations: Floats, hops: Floats, tails: Floats) -> float:
    """The step in ms of orders of one chunk a stage, as kinds of actions; infinite where they wait for one another.

    actions: [P, L], of which lengths [P] are used. durations: [P, 4] by kind; hops: [2, P - 1] forth and back;
    tails: [P].
    """
    num_stages = actions.shape[0]
    ends = np.empty((2, num_stages, actions.shape[1]))
    ran, at, free = np.zeros((2, num_stages), np.int64), np.zeros(num_stages, np.int64), np.zeros(num_stages)
    left, downwards = lengths.sum(), True
    while left > 0:
        before = left
        for x in range(num_stages):
            s = x if downwards else num_stages - 1 - x
            time = free[s]
            while at[s] < lengths[s]:
                kind = actions[s, at[s]]
                if kind == FORWARD and s > 0:
                    if ran[0, s - 1] <= ran[0, s]:
                        break
                    time = max(time, ends[0, s - 1, ran[0, s]] + hops[0, s - 1])
                elif kind != FORWARD and kind != WEIGHT and s < num_stages - 1:
                    if ran[1, s + 1] <= ran[1, s]:
                        break
                    time = max(time, ends[1, s + 1, ran[1, s]] + hops[1, s])
                time += durations[s, kind]
                if kind != WEIGHT:
                    way = 0 if kind == FORWARD else 1
                    ends[way, s, ran[way, s]] = time
                    ran[way, s] += 1
                at[s] += 1
                left -= 1
            free[s] = time
        downwards = not downwards
        if left == before:
            return np.inf
    return np.max(free + tails)


@kernel
def find_peak(actions: Actions, kept: float, pending: float) -> float:
    """The most bytes that a stage with these actions [L] holds of micro-batches: kept of each from its forward until
    its backward, pending from there until its weight gradient where these are apart."""
    held, peak = 0.0, 0.0
    in_flight, waiting = 0, 0
    for kind in actions:
        if kind == FORWARD:
            in_flight += 1
        elif kind == WEIGHT:
            waiting -= 1
        else:
            in_flight -= 1
            waiting += 1 if kind == INPUT else 0
        held = in_flight * kept + waiting * pending
        peak = max(peak, held)
    return peak


@kernel
def hold_at_most(actions: Actions, kept: float, pending: float, most: float, early: bool, changed: Actions) -> bool:
    """Write the order [L] of a stage changed so that it holds at most so many bytes; whether that can be.

    A forward that would exceed them waits. early: weight gradients whose inputs' have run come before it, if there are
    such. All else keeps its place.
    """
    in_flight, waiting, delayed, owed, n = 0, 0, 0, 0, 0
    for x in range(len(actions) + 1):
        kind = actions[x] if x < len(actions) else FORWARD
        if x < len(actions):
            if kind == FORWARD:
                delayed += 1
            elif kind == WEIGHT and owed > 0:
                owed -= 1
                continue
            else:
                if kind == WEIGHT:
                    waiting -= 1
                else:
                    if in_flight == 0:
                        return False
                    in_flight -= 1
                    waiting += 1 if kind == INPUT else 0
                if in_flight * kept + waiting * pending > most:
                    return False
                changed[n] = kind
                n += 1
        while delayed > 0:
            while early and waiting > 0 and (in_flight + 1) * kept + waiting * pending > most:
                changed[n] = WEIGHT
                n += 1
                waiting -= 1
                owed += 1
            if (in_flight + 1) * kept + waiting * pending > most:
                break
            changed[n] = FORWARD
            n += 1
            in_flight += 1
            delayed -= 1
    return delayed == 0


def hold_less(problem: Problem, placement: Placement, timeline: Timeline) -> tuple[Placement, Timeline]:
    """`placement`, with one chunk a stage and orders of its own, with its orders as slim as that leaves its step.

    timeline: that of the placement. Stages are taken down in turn, the fullest part of its limit first.
    """
    loads = timeline.loads
    orders = [[KINDS.index(action.rstrip("0123456789")[-1]) for action in text.split()] for text in placement.orders]
    lengths = np.array([len(order) for order in orders])
    actions = np.zeros((len(orders), int(lengths.max())), np.int8)
    for s, order in enumerate(orders):
        actions[s, : len(order)] = order
    durations = np.zeros((len(orders), len(KINDS)))
    of_kinds = loads.forward_ms, loads.backward_ms, loads.input_ms, loads.weight_ms
    for kind, of_kind in enumerate(of_kinds):
        if len(of_kind):
            durations[:, kind] = of_kind[:, 0]
    times = durations, np.array([loads.hop_forward_ms, loads.hop_backward_ms]), loads.tail_ms
    most_ms = play_actions(actions, lengths, *times)
    fixed = loads.static_bytes + loads.restored_bytes + loads.transient_bytes
    limits = np.array(problem.memory_limit_bytes)
    sizes = list(zip(loads.activation_bytes.tolist(), loads.pending_bytes.tolist(), strict=True))
    peaks = np.array([find_peak(actions[s, : lengths[s]], *sizes[s]) for s in range(len(orders))])
    tries_left = max(2 * len(orders), MOST_ACTIONS // max(1, int(lengths.sum())))
    open_stages = {s for s in range(len(orders)) if peaks[s] > 0.0}
    while open_stages and tries_left > 0:
        s = max(open_stages, key=lambda s: ((fixed[s] + peaks[s]) / limits[s] if limits[s] > 0.0 else np.inf, s))
        was, is_slimmer = actions[s].copy(), False
        for early in (False, True):
            tries_left -= 1
            most_bytes = peaks[s] * (1.0 - LESS_FRACTION)
            if (
                hold_at_most(was[: lengths[s]], *sizes[s], most_bytes, early, actions[s])
                and play_actions(actions, lengths, *times) <= most_ms
            ):
                is_slimmer = True
                break
        if is_slimmer:
            peaks[s] = find_peak(actions[s, : lengths[s]], *sizes[s])
        else:
            actions[s] = was
        if not is_slimmer or peaks[s] <= 0.0:
            open_stages.remove(s)
    texts = tuple(write_actions(actions[s, : lengths[s]].tolist()) for s in range(len(orders)))
    slim = replace(placement, orders=texts)
    slim_timeline = simulate(problem, slim)
    is_better = slim_timeline.step_ms <= timeline.step_ms and np.all(
        slim_timeline.peak_memory_bytes <= timeline.peak_memory_bytes
    )
    return (slim, slim_timeline) if is_better else (placement, timeline)


def write_actions(kinds: list[int]) -> str:
    """A stage's order as text, each kind of action in order of micro-batches; the k-th weight gradient is that of the
    k-th backward that was split."""
    num_forward, num_backward, split = 0, 0, list[int]()
    texts = []
    for kind in kinds:
        if kind == WEIGHT:
            m = split.pop(0)
        elif kind == FORWARD:
            m, num_forward = num_forward, num_forward + 1
        else:
            m, num_backward = num_backward, num_backward + 1
            if kind == INPUT:
                split.append(m)
        texts.append(f"{m}{KINDS[kind]}0")
    return " ".join(texts)
