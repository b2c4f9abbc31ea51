"""Pairs: a step that no order of one cut takes where both directions of an encoder's passes lie on one stage.

As `gaps` has them, passes lie between the actions of a stage, those of each direction in their turn. Here both
directions and what is kept between them count at once. What the stage has done is a *state*: so many of its actions,
forwards and backwards of passes. From state to state goes the earliest time at which it can be there; an action begins
at its head at the earliest, and what follows it, its tail, must still end by T.

    at the beginning   h forwards lie before the first action, in each case: so the stage begins no earlier than they
                       end, and all heads are those of a pipeline whose stage begins then
    at full moments    where 1F1B has as many micro-batches in flight as ever, at most k passes are kept, in each case:
                       of k = 2 and more the stage takes what it does at least with room for k, since at some full
                       moment there are k, or k - 1 would do. At other moments nothing is limited

A step is possible on a stage where some h and k let it run everything. Cases are independent of one another and of
other stages, whose passes are left out, so a stage without one refutes T.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import ROUNDING_FRACTION
from mm_autoparallel.pipeline.placement.bounds.gaps import Strand, Times, find_paths
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.graph import TaskGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Pair(NamedTuple):
    """Passes of one stage of an encoder on the device of a decoder's stage, forth and back. part_of: which encoder, and
    which stage of it. is_limited: whether what passes keep counts at full moments."""

    part_of: tuple[int, int]
    forwards: Strand
    backwards: Strand
    is_limited: bool

    @property
    def most_kept(self) -> int:
        """How many passes may be kept at most."""
        return len(self.forwards.end)


class Actions(NamedTuple):
    """Those of a stage in their order, [n]: the earliest start of each, how long it takes, the longest path from its
    start to the end of the step, all in ms; whether as many micro-batches as ever are in flight when it begins."""

    heads_ms: Floats
    lengths_ms: Floats
    rests_ms: Floats
    is_full: Bools


class Passes(NamedTuple):
    """Those of one direction in their turn. ready_ms, after_ms: [K] what precedes and follows each elsewhere; bounds:
    [K] the last gap that a forward, the first that a backward may lie in."""

    length_ms: float
    ready_ms: Floats
    after_ms: Floats
    bounds: Ints


def count_work(graph: TaskGraph, pair: Pair) -> int:
    """About how many steps `can_take` makes at most."""
    states = (2 * graph.num_microbatches + 1) * (pair.most_kept + 1) ** 2 // 2
    return (graph.num_tasks + states) * (pair.most_kept + 1) ** 2 // 2


def can_take(graph: TaskGraph, times: Times, pair: Pair, most_kept: int, step_ms: float) -> bool:
    """Whether a stage of a cut can run everything within step_ms, keeping most_kept passes at full moments at most.

    times: of the cut, in ms, its stage's own with room for so many. graph: of equal micro-batches, one chunk a stage,
    forwards and whole backwards.
    """
    stage, most_ms = pair.forwards.stage, step_ms * (1.0 + ROUNDING_FRACTION)
    mine = np.flatnonzero(graph.stage == stage)
    is_forward = graph.kind[mine] == FORWARD
    lengths = np.where(is_forward, times.forward_ms[stage], times.backward_ms[stage])
    ahead = min(graph.num_stages - stage, graph.num_microbatches)
    is_full = is_forward & (np.cumsum(is_forward) >= ahead) & pair.is_limited
    of_task = np.where(graph.kind == FORWARD, times.forward_ms[graph.stage], times.backward_ms[graph.stage])
    arrays = graph.stage, graph.kind, graph.micro_batch, graph.dependency, graph.hop
    for begun in range(min(most_kept, pair.most_kept) + 1):
        begin_ms = np.zeros(graph.num_stages)
        begin_ms[stage] = begun * pair.forwards.length_ms
        starts, rests = find_paths(*arrays, times, begin_ms)
        if float(np.max(starts + rests)) > most_ms:
            return False  # nor with more before the first action
        actions = Actions(starts[mine], lengths, rests[mine], is_full)
        forwards, backwards = (
            _passes(strand, bounds, starts + of_task, rests)
            for strand, bounds in ((pair.forwards, pair.forwards.end), (pair.backwards, pair.backwards.first))
        )
        if _can_run(actions, forwards, backwards, begun, most_kept, float(times.tail_ms[stage]), most_ms):
            return True
    return False


def _passes(strand: Strand, bounds: Ints, ends_ms: Floats, rests_ms: Floats) -> Passes:
    ready = np.where(strand.waited < 0, 0.0, ends_ms[strand.waited]) + strand.before_ms
    after = np.where(strand.fed < 0, 0.0, rests_ms[strand.fed]) + strand.behind_ms
    return Passes(float(strand.length_ms), ready, after, bounds)


@kernel
def _can_run(
    actions: Actions,
    forwards: Passes,
    backwards: Passes,
    begun: int,
    most_kept: int,
    tail_ms: float,
    most_ms: float,
) -> bool:
    """Whether all actions and passes end in time, `begun` forwards of passes before the first action."""
    num_actions, count = actions.heads_ms.shape[0], forwards.ready_ms.shape[0]
    times = np.full((count + 1, count + 1), np.inf)
    times[0, 0] = 0.0
    for gap in range(num_actions + 1):
        for run in range(count + 1):
            for back in range(run + 1):
                at = times[run, back]
                if at == np.inf:
                    continue
                if run < count and gap <= forwards.bounds[run] and (gap > 0 or run < begun):
                    end = max(at, forwards.ready_ms[run]) + forwards.length_ms
                    if end + forwards.after_ms[run] <= most_ms:
                        times[run + 1, back] = min(times[run + 1, back], end)
                if back < run and gap >= backwards.bounds[back]:
                    end = max(at, backwards.ready_ms[back]) + backwards.length_ms
                    if end + backwards.after_ms[back] <= most_ms:
                        times[run, back + 1] = min(times[run, back + 1], end)
        if gap == num_actions:
            break
        found = False
        for run in range(count + 1):
            for back in range(run + 1):
                at = max(times[run, back], actions.heads_ms[gap])
                is_late = run < count and forwards.bounds[run] <= gap
                is_over = (actions.is_full[gap] and run - back > most_kept) or (gap == 0 and run != begun)
                if at + actions.rests_ms[gap] > most_ms or is_late or is_over:
                    times[run, back] = np.inf
                    continue
                times[run, back] = at + actions.lengths_ms[gap]
                found = True
        if not found:
            return False
    return bool(times[count, count] + tail_ms <= most_ms)
