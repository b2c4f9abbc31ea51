"""Gaps: a step that no order goes below where passes of one encoder lie between the actions of one stage.

A rule gives the order of a stage's actions, and an encoder's passes through a device keep their own: a *strand* of K
passes that take e each. Which gap of the stage's order each lies in is what an order chooses. Of one cut of the chain,
whose passes take F and B, let

    head g    the longest path to the end of what stands before gap g, tail g that from the begin of what stands after
              it: the decoder's own tasks, whose first forwards wait for the passes that feed them, dealt to no device
    work g h  what the stage runs between the gaps g and h
    ready k, after k   what precedes the k-th pass elsewhere, and what follows it there

A pass lies before the forward, on its device, of each micro-batch that it feeds, for that waits for it; and behind the
backward of each whose gradient it takes. Let an order take T, with the k-th pass in gap g_k, begun at t_k. Then
g_1 <= g_2 <= ..., and

    t_k >= max(head g_k, ready k, t_(k-1) + e + work g_(k-1) g_k)     and     t_k + e + max(tail g_k, after k) <= T

So h_k(g) = max(head g, ready k, min over g' <= g of h_(k-1)(g') + e + work g' g), with infinity where the right-hand
side fails, is t_k at most in gap g_k: where h_K is infinite everywhere no order takes T. What several strands would do
to each other is left out, and so is all that is longer for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import PRECISION_FRACTION, ROUNDING_FRACTION
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.graph import TaskGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
IntArray = NDArray[np.int32]

#: Of a step that leaves no gaps, until one is found that does; after so many, what is known by then is the bound.
MOST_TRIES, FIRST_FACTOR, FACTOR = 60, 1.001, 1.05


class Strand(NamedTuple):
    """Passes of one stage and direction of an encoder on the device of a decoder's stage, in ms.

    waited, fed: [K] the task of the graph that each waits for, and the one that waits for it, -1 if none; before_ms,
    behind_ms: between them and the pass. first, end: [K] the first and the last gap that each may lie in.
    """

    stage: int
    length_ms: float
    before_ms: float
    behind_ms: float
    waited: Ints
    fed: Ints
    first: Ints
    end: Ints


class Times(NamedTuple):
    """Of one cut, in ms: forward_ms, backward_ms, tail_ms: [P]. hops_ms: as TaskGraph indexes them. feed_ms: [M] before
    a first forward may begin; return_ms: [M] after a last backward on the first stage."""

    forward_ms: Floats
    backward_ms: Floats
    tail_ms: Floats
    hops_ms: Floats
    feed_ms: Floats
    return_ms: Floats


class Gaps(NamedTuple):
    """Those of one strand in one cut, in ms as above: heads_ms, tails_ms, work_ms: [n + 1], the latter from the first
    gap on. ready_ms, after_ms, first, end: [K]."""

    heads_ms: Floats
    tails_ms: Floats
    work_ms: Floats
    length_ms: float
    ready_ms: Floats
    after_ms: Floats
    first: Ints
    end: Ints


def find_actions(graph: TaskGraph, stage: int, is_forward: bool) -> Ints:
    """[M] how many actions of `stage` precede the forward, or the backward, of each micro-batch."""
    mine = np.flatnonzero(graph.stage == stage)
    (of_kind,) = np.nonzero((graph.kind[mine] == FORWARD) == is_forward)
    found = np.empty(graph.num_microbatches, dtype=np.int64)
    found[graph.micro_batch[mine[of_kind]]] = of_kind
    return found


def find_tasks(graph: TaskGraph, stage: int, is_forward: bool) -> Ints:
    """[M] the task that is the forward, or the backward, of each micro-batch on `stage`."""
    mine = np.flatnonzero(graph.stage == stage)
    found: Ints = mine[find_actions(graph, stage, is_forward)]
    return found


def bound_gaps(graph: TaskGraph, times: Times, strands: tuple[Strand, ...], floor_ms: float) -> float:
    """A step, at least floor_ms, that no order of a cut with these times goes below. graph: of equal micro-batches, one
    chunk a stage, forwards and whole backwards."""
    arrays = graph.stage, graph.kind, graph.micro_batch, graph.dependency, graph.hop
    starts_ms, rests_ms = find_paths(*arrays, times, np.zeros(graph.num_stages))
    of_task = np.where(graph.kind == FORWARD, times.forward_ms[graph.stage], times.backward_ms[graph.stage])
    ends_ms = starts_ms + of_task
    least_ms = max(floor_ms, float(np.max(starts_ms + rests_ms)) * (1.0 - ROUNDING_FRACTION))
    for strand in strands:
        mine = np.flatnonzero(graph.stage == strand.stage)
        heads = np.concatenate([[0.0], ends_ms[mine]])
        tails = np.append(rests_ms[mine], times.tail_ms[strand.stage])
        work = np.concatenate([[0.0], np.cumsum(of_task[mine])])
        ready = np.where(strand.waited < 0, 0.0, ends_ms[strand.waited]) + strand.before_ms
        after = np.where(strand.fed < 0, 0.0, rests_ms[strand.fed]) + strand.behind_ms
        gaps = Gaps(heads, tails, work, float(strand.length_ms), ready, after, strand.first, strand.end)
        least_ms = _raise(gaps, least_ms)
    return least_ms


def _raise(gaps: Gaps, least_ms: float) -> float:
    """`least_ms`, or the largest step found that leaves some pass no gap."""
    low = high = least_ms
    for _ in range(MOST_TRIES):
        if _has_room(gaps, high * (1.0 + ROUNDING_FRACTION)):
            break
        low, high = high, high * (FACTOR if low < high else FIRST_FACTOR)
    if low == high:
        return least_ms
    while high - low > PRECISION_FRACTION * high:
        middle = 0.5 * (low + high)
        if _has_room(gaps, middle * (1.0 + ROUNDING_FRACTION)):
            high = middle
        else:
            low = middle
    return low * (1.0 - ROUNDING_FRACTION)


@kernel
def find_paths(
    stage: IntArray,
    kind: IntArray,
    micro_batch: IntArray,
    dependency: IntArray,
    hop: IntArray,
    times: Times,
    begin_ms: Floats,
) -> tuple[Floats, Floats]:
    """[n] the earliest start of each task in ms, and the longest path from its start to the end of the step. The arrays
    as TaskGraph has them; begin_ms: [P] before which a stage begins nothing."""
    n = stage.shape[0]
    starts, rests = np.zeros(n), np.zeros(n)
    free = begin_ms.copy()
    for task in range(n):
        s = stage[task]
        is_forward = kind[task] == FORWARD
        at = free[s]
        if s == 0 and is_forward:
            at = max(at, times.feed_ms[micro_batch[task]])
        if dependency[task] < n:
            before = dependency[task]
            length = times.forward_ms[stage[before]] if kind[before] == FORWARD else times.backward_ms[stage[before]]
            at = max(at, starts[before] + length + times.hops_ms[hop[task]])
        starts[task] = at
        free[s] = at + (times.forward_ms[s] if is_forward else times.backward_ms[s])
    free[:] = times.tail_ms
    for task in range(n - 1, -1, -1):
        s = stage[task]
        is_forward = kind[task] == FORWARD
        rest = max(free[s], rests[task])
        if s == 0 and not is_forward:
            rest = max(rest, times.return_ms[micro_batch[task]])
        rests[task] = rest + (times.forward_ms[s] if is_forward else times.backward_ms[s])
        free[s] = rests[task]
        if dependency[task] < n:
            before = dependency[task]
            rests[before] = max(rests[before], rests[task] + times.hops_ms[hop[task]])
    return starts, rests


@kernel
def _has_room(gaps: Gaps, step_ms: float) -> bool:
    """Whether every pass has a gap within step_ms."""
    num_gaps, length_ms = gaps.heads_ms.shape[0], gaps.length_ms
    starts = np.full(num_gaps, np.inf)
    for k in range(gaps.ready_ms.shape[0]):
        carried, found = np.inf, False
        for gap in range(num_gaps):
            carried = min(carried, starts[gap] - gaps.work_ms[gap])  # of the pass before, here or in an earlier gap
            start = np.inf
            if gaps.first[k] <= gap <= gaps.end[k]:
                start = max(gaps.heads_ms[gap], gaps.ready_ms[k])
                if k > 0:
                    start = max(start, carried + length_ms + gaps.work_ms[gap])
                if start + length_ms + max(gaps.tails_ms[gap], gaps.after_ms[k]) > step_ms:
                    start = np.inf
            starts[gap] = start
            found = found or start < np.inf
        if not found:
            return False
    return True
