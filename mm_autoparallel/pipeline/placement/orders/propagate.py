"""Whether a step can be as short as a goal: time windows of all actions, narrowed until they are empty or stand still.

Equal micro-batches may be taken in order by every stage and kind (sort the starts of each, and rename), so a stage's
actions form three chains. Windows follow from the chains, from data that passes between stages, from memory (a forward
waits for the weight gradient of the micro-batch whose bytes it takes), and from each stage running one action at a time
(`one_machine`): overload, detectable precedences and edge finding. All that is removed is impossible below the goal, so
an empty window proves that every order takes at least the goal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD,
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT,
    MOST_HELD,
    MOST_IN_FLIGHT,
    MOST_PENDING,
    NUM_KINDS,
    TAIL_MS,
    WEIGHT,
)
from mm_autoparallel.pipeline.placement.orders.one_machine import raise_starts
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]

#: Of the goal: far above the rounding of sums, far below what a bound is told to.
SLACK_FRACTION = 1e-10
#: Rounds of narrowing after which a goal counts as not refuted; and visits of `count_visits` in all: a second or two.
MAX_ROUNDS, MAX_VISITS = 200, 12_000_000
NOTHING = -1e300


@kernel
def _pull_starts(num_microbatches: int, figures: Floats, earliest: Floats, slack: float) -> bool:
    """Raise earliest starts along chains, data and memory; whether one moved."""
    num_stages, moved = figures.shape[0], False
    for s in range(num_stages):
        duration = figures[s, FORWARD_MS]
        behind, held = int(figures[s, MOST_IN_FLIGHT]), int(figures[s, MOST_HELD])
        for m in range(num_microbatches):
            at = earliest[s, FORWARD, m]
            if m > 0:
                at = max(at, earliest[s, FORWARD, m - 1] + duration)
            if s > 0:
                at = max(at, earliest[s - 1, FORWARD, m] + figures[s - 1, FORWARD_MS] + figures[s - 1, HOP_FORWARD_MS])
            if m >= behind:
                at = max(at, earliest[s, INPUT, m - behind] + figures[s, INPUT])
            if m >= held:
                at = max(at, earliest[s, WEIGHT, m - held] + figures[s, WEIGHT])
            if at > earliest[s, FORWARD, m] + slack:
                earliest[s, FORWARD, m], moved = at, True
    for s in range(num_stages - 1, -1, -1):
        pending = int(figures[s, MOST_PENDING])
        for m in range(num_microbatches):
            at = max(earliest[s, INPUT, m], earliest[s, FORWARD, m] + figures[s, FORWARD])
            if m > 0:
                at = max(at, earliest[s, INPUT, m - 1] + figures[s, INPUT])
            if s < num_stages - 1:
                at = max(at, earliest[s + 1, INPUT, m] + figures[s + 1, INPUT] + figures[s, HOP_BACKWARD_MS])
            if m >= pending:
                at = max(at, earliest[s, WEIGHT, m - pending] + figures[s, WEIGHT])
            if at > earliest[s, INPUT, m] + slack:
                earliest[s, INPUT, m], moved = at, True
            at = max(earliest[s, WEIGHT, m], earliest[s, INPUT, m] + figures[s, INPUT])
            if m > 0:
                at = max(at, earliest[s, WEIGHT, m - 1] + figures[s, WEIGHT])
            if at > earliest[s, WEIGHT, m] + slack:
                earliest[s, WEIGHT, m], moved = at, True
    return moved


@kernel
def _push_ends(num_microbatches: int, figures: Floats, latest: Floats, slack: float) -> bool:
    """Lower latest ends likewise; whether one moved."""
    num_stages, last, moved = figures.shape[0], num_microbatches - 1, False
    for s in range(num_stages):
        held, pending = int(figures[s, MOST_HELD]), int(figures[s, MOST_PENDING])
        for m in range(last, -1, -1):
            at = latest[s, WEIGHT, m]
            if m < last:
                at = min(at, latest[s, WEIGHT, m + 1] - figures[s, WEIGHT])
            if m + held <= last:
                at = min(at, latest[s, FORWARD, m + held] - figures[s, FORWARD])
            if m + pending <= last:
                at = min(at, latest[s, INPUT, m + pending] - figures[s, INPUT])
            if at < latest[s, WEIGHT, m] - slack:
                latest[s, WEIGHT, m], moved = at, True
            at = min(latest[s, INPUT, m], latest[s, WEIGHT, m] - figures[s, WEIGHT])
            if m < last:
                at = min(at, latest[s, INPUT, m + 1] - figures[s, INPUT])
            if s > 0:
                at = min(at, latest[s - 1, INPUT, m] - figures[s - 1, INPUT] - figures[s - 1, HOP_BACKWARD_MS])
            behind = m + int(figures[s, MOST_IN_FLIGHT])
            if behind <= last:
                at = min(at, latest[s, FORWARD, behind] - figures[s, FORWARD])
            if at < latest[s, INPUT, m] - slack:
                latest[s, INPUT, m], moved = at, True
    for s in range(num_stages - 1, -1, -1):
        for m in range(last, -1, -1):
            at = min(latest[s, FORWARD, m], latest[s, INPUT, m] - figures[s, INPUT])
            if m < last:
                at = min(at, latest[s, FORWARD, m + 1] - figures[s, FORWARD])
            if s < num_stages - 1:
                at = min(at, latest[s + 1, FORWARD, m] - figures[s + 1, FORWARD] - figures[s, HOP_FORWARD_MS])
            if at < latest[s, FORWARD, m] - slack:
                latest[s, FORWARD, m], moved = at, True
    return moved


@kernel
def _is_empty(figures: Floats, earliest: Floats, latest: Floats, slack: float) -> bool:
    """Whether an action's window is shorter than the action."""
    for s in range(earliest.shape[0]):
        for kind in range(NUM_KINDS):
            for m in range(earliest.shape[2]):
                if earliest[s, kind, m] + figures[s, kind] > latest[s, kind, m] + slack:
                    return True
    return False


@kernel
def count_visits(num_stages: int, num_actions: int) -> int:
    """Of nodes of all stages' trees (`one_machine`) where each has so many actions, but for a factor."""
    depth = 1
    while 2**depth < num_actions:
        depth += 1
    return num_stages * num_actions * depth


@kernel
def open_windows(num_microbatches: int, figures: Floats, goal_ms: float) -> tuple[Floats, Floats, Floats]:
    """Earliest starts and latest ends [P, kind, M] of all actions in a step of goal_ms, and [2, P, 3M] for `narrow`."""
    num_stages = figures.shape[0]
    latest = np.empty((num_stages, NUM_KINDS, num_microbatches))
    for s in range(num_stages):
        latest[s, :, :] = goal_ms - figures[s, TAIL_MS]
    compared = np.full((2, num_stages, NUM_KINDS * num_microbatches), NOTHING)
    return np.zeros((num_stages, NUM_KINDS, num_microbatches)), latest, compared


@kernel
def narrow(
    num_microbatches: int, figures: Floats, goal_ms: float, earliest: Floats, latest: Floats, compared: Floats
) -> bool:
    """Narrow windows until they stand still, or one is empty; whether one is, so that no order lies within them.

    compared: the windows of each stage whose comparison moved none of them; that stage is not looked at again.
    """
    num_stages, n = figures.shape[0], NUM_KINDS * num_microbatches
    slack = SLACK_FRACTION * goal_ms
    durations = np.empty(n)
    for _ in range(min(MAX_ROUNDS, max(2, MAX_VISITS // count_visits(num_stages, n)))):
        while _pull_starts(num_microbatches, figures, earliest, slack):
            pass
        while _push_ends(num_microbatches, figures, latest, slack):
            pass
        if _is_empty(figures, earliest, latest, slack):
            return True
        moved = False
        for s in range(num_stages):
            starts, ends = earliest[s].reshape(n), latest[s].reshape(n)
            if np.all(starts == compared[0, s]) and np.all(ends == compared[1, s]):
                continue
            for kind in range(NUM_KINDS):
                durations[kind * num_microbatches : (kind + 1) * num_microbatches] = figures[s, kind]
            forward, overloaded = raise_starts(starts, ends, durations, slack)
            if overloaded:
                return True
            mirrored_starts, mirrored_ends = goal_ms - ends, goal_ms - starts
            backward, overloaded = raise_starts(mirrored_starts, mirrored_ends, durations, slack)
            if overloaded:
                return True
            if backward:
                ends[:] = goal_ms - mirrored_starts
            if not (forward or backward):
                compared[0, s], compared[1, s] = starts, ends
            moved = moved or forward or backward
        if not moved:
            return False
    return False


@kernel
def refutes(num_microbatches: int, figures: Floats, goal_ms: float) -> bool:
    """Whether every order of a pipeline with these figures [P, NUM_FIGURES] takes at least goal_ms."""
    earliest, latest, compared = open_windows(num_microbatches, figures, goal_ms)
    return narrow(num_microbatches, figures, goal_ms, earliest, latest, compared)
