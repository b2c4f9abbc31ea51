"""Lanes: a step that no order of one placement goes below, of any number of chunks and encoders.

Every task has a window for a step T: its earliest start by the longest path to it, its latest by the longest path from
it to the end. A lane runs its strands, each in its own order, so what it has done is a count of each, a *state*, which
says what it keeps as well. The earliest time at which it can be in each state is found state by state, within the
windows and its memory, and so is the latest at which the rest still ends by T. A lane that cannot run all refutes T.
Of each task the starts that some way through the states leaves are its new window, which narrows those of other lanes;
so it goes on until nothing changes. What lanes would do to one another beyond that is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import PRECISION_FRACTION
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.encoders.play import Player
from mm_autoparallel.pipeline.simulate.encoders.tasks import Tasks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: States of one lane beyond which it is left alone, and of all lanes together. Assumed.
MAX_STATES, MAX_ALL_STATES = 500_000, 2_000_000
#: How often windows are narrowed at most, and by what part of a step at least for another round.
MAX_ROUNDS, LEAST_CHANGE = 30, 1e-4
#: What sums of times in another order may differ by, as a part of the step; far above it.
ROUNDING_FRACTION = 1e-9


class Paths(NamedTuple):
    """Who waits for whom: order [n], each behind what it waits for; before [n], in its strand, and dependency [n],
    -1: none; lengths_ms, lags_ms, tails_ms [n], the latter of its lane."""

    order: Ints
    before: Ints
    dependency: Ints
    lengths_ms: Floats
    lags_ms: Floats
    tails_ms: Floats


class Lane(NamedTuple):
    """members: tasks strand by strand. begin, count, stride: [strands] where each begins in it, its length, and what
    one more of it adds to a state. grows_bytes: of members, what one adds while it runs. held_bytes: strand by
    strand [count + 1], what is kept of it when so many are done. room_bytes: for all that."""

    members: Ints
    begin: Ints
    count: Ints
    stride: Ints
    grows_bytes: Floats
    held_bytes: Floats
    room_bytes: float


def bound_lanes(player: Player, floor_ms: float, enough_ms: float, should_stop: Callable[[], bool]) -> float:
    """A step, at least floor_ms, that no order of the player's tasks goes below; infinite where that is more than
    enough_ms, or no order fits."""
    paths, lanes = _list_paths(player.tasks), _list_lanes(player)

    def refutes(step_ms: float) -> bool:
        return not should_stop() and narrow(paths, lanes, step_ms) is None

    if not lanes or not refutes(floor_ms):
        return floor_ms
    anything_ms = float(np.sum(paths.lengths_ms) + np.sum(paths.lags_ms) + np.max(paths.tails_ms))
    low, high = floor_ms, max(floor_ms, min(enough_ms, 1.01 * anything_ms))  # all work one after the other
    if refutes(high):
        return np.inf
    while high - low > PRECISION_FRACTION * high:
        middle = 0.5 * (low + high)
        if refutes(middle):
            low = middle
        else:
            high = middle
    return low


def narrow(paths: Paths, lanes: tuple[Lane, ...], step_ms: float) -> tuple[Floats, Floats] | None:
    """[n] the earliest and the latest starts that are left of a step of step_ms; None where there are none."""
    count = len(paths.order)
    earliest, latest = np.zeros(count), step_ms - paths.tails_ms - paths.lengths_ms
    slack_ms = ROUNDING_FRACTION * step_ms
    for _ in range(MAX_ROUNDS):
        if not _propagate(*paths[:-1], earliest, latest, slack_ms):
            return None
        changed_ms = 0.0
        for lane in lanes:
            change_ms = _narrow_lane(*lane, paths.lengths_ms, earliest, latest, slack_ms)
            if change_ms < 0.0:
                return None
            changed_ms = max(changed_ms, change_ms)
        if changed_ms <= LEAST_CHANGE * step_ms:
            break
    return earliest, latest


def _list_paths(tasks: Tasks) -> Paths:
    count = tasks.num_tasks
    before = np.full(count, -1, dtype=np.int64)
    for strand in tasks.strands:
        before[strand[1:]] = strand[:-1]
    dependency = np.where(tasks.dependency < count, tasks.dependency, -1).astype(np.int64)
    later: list[list[int]] = [[] for _ in range(count)]
    left = [0] * count
    for task, pair in enumerate(zip(before.tolist(), dependency.tolist(), strict=True)):
        for other in set(pair) - {-1}:
            later[other].append(task)
            left[task] += 1
    order = [task for task in range(count) if not left[task]]
    for task in order:
        for after in later[task]:
            left[after] -= 1
            if not left[after]:
                order.append(after)
    tails = tasks.tails_ms[tasks.lane]
    return Paths(np.array(order, dtype=np.int64), before, dependency, tasks.length_ms, tasks.lag_ms, tails)


def _list_lanes(player: Player) -> tuple[Lane, ...]:
    """Those that have something to choose, as far as their states are few enough."""
    tasks = player.tasks
    found, num_states = [], 0
    for lane in range(tasks.num_lanes):
        strands = [of for of, on in zip(tasks.strands, tasks.strand_lane, strict=True) if on == lane and len(of)]
        count = np.array([len(of) for of in strands], dtype=np.int64)
        number = float(np.prod(count + 1.0))
        if len(strands) < 2 or number > MAX_STATES or num_states + number > MAX_ALL_STATES:
            continue
        num_states += int(number)
        members = np.concatenate(strands).astype(np.int64)
        stride = np.append(np.cumprod((count + 1)[:0:-1])[::-1], 1).astype(np.int64)
        sizes = tasks.kept_bytes[tasks.kept[members]]
        forward = tasks.kind[members] == FORWARD
        frozen = np.array([tasks.is_frozen(int(owner)) for owner in tasks.owner[members]], dtype=bool)
        change = np.where(frozen, 0.0, np.where(forward, sizes, -sizes))
        held = np.concatenate(
            [np.concatenate([[0.0], np.cumsum(part)]) for part in np.split(change, count.cumsum()[:-1])]
        )
        room = float(player.allowed_bytes[lane] - tasks.fixed_bytes[lane])
        room += ROUNDING_FRACTION * (abs(room) + float(sizes.sum())) if np.isfinite(room) else 0.0
        begin = np.concatenate([[0], np.cumsum(count)[:-1]]).astype(np.int64)
        found.append(Lane(members, begin, count, stride, np.where(forward, sizes, 0.0), held, room))
    return tuple(found)


@kernel
def _propagate(
    order: Ints,
    before: Ints,
    dependency: Ints,
    lengths_ms: Floats,
    lags_ms: Floats,
    earliest: Floats,
    latest: Floats,
    slack_ms: float,
) -> bool:
    """Narrow all windows by what waits for what; whether none is empty."""
    for at in range(order.shape[0]):
        task = order[at]
        if before[task] >= 0:
            earliest[task] = max(earliest[task], earliest[before[task]] + lengths_ms[before[task]])
        if dependency[task] >= 0:
            other = dependency[task]
            earliest[task] = max(earliest[task], earliest[other] + lengths_ms[other] + lags_ms[task])
    for at in range(order.shape[0] - 1, -1, -1):
        task = order[at]
        if earliest[task] > latest[task] + slack_ms:
            return False
        if before[task] >= 0:
            latest[before[task]] = min(latest[before[task]], latest[task] - lengths_ms[before[task]])
        if dependency[task] >= 0:
            other = dependency[task]
            latest[other] = min(latest[other], latest[task] - lags_ms[task] - lengths_ms[other])
    return True


@kernel
def _narrow_lane(
    members: Ints,
    begin: Ints,
    count: Ints,
    stride: Ints,
    grows_bytes: Floats,
    held_bytes: Floats,
    room_bytes: float,
    lengths_ms: Floats,
    earliest: Floats,
    latest: Floats,
    slack_ms: float,
) -> float:
    """By how much the windows of one lane's tasks were narrowed at most, in ms; below 0: it cannot run them all."""
    num_strands = count.shape[0]
    total = 1
    for strand in range(num_strands):
        total *= count[strand] + 1
    soonest, by = np.full(total, np.inf), np.full(total, -np.inf)
    done = np.zeros(num_strands, np.int64)
    soonest[0] = 0.0
    for state in range(total):
        if soonest[state] < np.inf:
            held = 0.0
            for strand in range(num_strands):
                held += held_bytes[begin[strand] + strand + done[strand]]
            for strand in range(num_strands):
                if done[strand] < count[strand]:
                    at = begin[strand] + done[strand]
                    task = members[at]
                    start = max(soonest[state], earliest[task])
                    if start <= latest[task] + slack_ms and held + grows_bytes[at] <= room_bytes:
                        after = state + stride[strand]
                        soonest[after] = min(soonest[after], start + lengths_ms[task])
        for strand in range(num_strands - 1, -1, -1):  # on to the next state
            if done[strand] < count[strand]:
                done[strand] += 1
                break
            done[strand] = 0
    if soonest[total - 1] == np.inf:
        return -1.0
    first, last = np.full(members.shape[0], np.inf), np.full(members.shape[0], -np.inf)
    by[total - 1] = np.inf
    done[:] = count
    for state in range(total - 1, -1, -1):
        if soonest[state] < np.inf:
            held = 0.0
            for strand in range(num_strands):
                held += held_bytes[begin[strand] + strand + done[strand]]
            for strand in range(num_strands):
                if done[strand] < count[strand]:
                    at = begin[strand] + done[strand]
                    task = members[at]
                    start = max(soonest[state], earliest[task])
                    end = min(latest[task], by[state + stride[strand]] - lengths_ms[task])
                    if start <= end + slack_ms and held + grows_bytes[at] <= room_bytes:
                        by[state] = max(by[state], end)
                        first[at], last[at] = min(first[at], start), max(last[at], end)
        for strand in range(num_strands - 1, -1, -1):  # back to the state before
            if done[strand] > 0:
                done[strand] -= 1
                break
            done[strand] = count[strand]
    changed = 0.0
    for at in range(members.shape[0]):
        task = members[at]
        if first[at] == np.inf:
            return -1.0
        changed = max(changed, first[at] - earliest[task], latest[task] - last[at])
        earliest[task], latest[task] = max(earliest[task], first[at]), min(latest[task], last[at])
    return changed
