"""The compiled kernels: flatten a schedule, play it, trace its critical path. Nothing here knows a model or a unit
but ms."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, INPUT, PAIRED, WEIGHT
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
IntArray = NDArray[np.int32]


@kernel
def virtual_at(chunk: int, stage: int, num_stages: int, v_shaped: bool) -> int:
    """`virtual_stage` of schedules/virtual_stages.py, for kernels."""
    return chunk * num_stages + (num_stages - 1 - stage if v_shaped and chunk % 2 == 1 else stage)


@kernel
def stage_at(virtual: int, num_stages: int, v_shaped: bool) -> int:
    """`stage_of` of schedules/virtual_stages.py, for kernels."""
    place = virtual % num_stages
    return num_stages - 1 - place if v_shaped and virtual // num_stages % 2 == 1 else place


@kernel
def topological_order(order: NDArray[np.int64], num_chunks: int, num_microbatches: int, v_shaped: bool) -> Any:
    """Flatten stage orders [P, n, 3] into one order in which every task follows what it waits for.

    Rows of a kind below 0 fill up stages that run less. Returns int32 [7, all tasks]: stage, kind, chunk, micro-batch,
    position in its stage, dependency, hop (see TaskGraph), and how many columns are filled: fewer where the schedule
    deadlocks. Of a pair the forward waits for its input and the backward after it for its gradient; both end with it.
    """
    num_stages, per_stage = order.shape[0], order.shape[1]
    num_virtual = num_stages * num_chunks
    length = np.zeros(num_stages, dtype=np.int64)
    for s in range(num_stages):
        while length[s] < per_stage and order[s, length[s], 0] >= 0:
            length[s] += 1
    total = length.sum()
    columns = np.empty((7, total), dtype=np.int32)
    task_of = np.full((2, num_virtual, num_microbatches), -1, dtype=np.int32)  # of outputs, of gradients
    head = np.zeros(num_stages, dtype=np.int64)
    no_hop = 2 * (num_virtual - 1)
    num_done = 0
    progressed = True
    while progressed:
        progressed = False
        for s in range(num_stages):
            while head[s] < length[s]:
                at = head[s]
                is_pair = order[s, at, 0] == PAIRED
                if is_pair:  # both begin at once, so neither does before the other may
                    chunk, mb = order[s, at + 1, 1], order[s, at + 1, 2]
                    k = virtual_at(chunk, s, num_stages, v_shaped)
                    if task_of[0, k, mb] < 0 or (k < num_virtual - 1 and task_of[1, k + 1, mb] < 0):
                        break
                first = num_done
                for row in range(at, at + 2 if is_pair else at + 1):
                    kind, chunk, mb = order[s, row, 0] % PAIRED, order[s, row, 1], order[s, row, 2]
                    k = virtual_at(chunk, s, num_stages, v_shaped)
                    dependency = np.int32(total)
                    hop = no_hop
                    if kind == FORWARD:
                        if k > 0:
                            dependency = task_of[0, k - 1, mb]
                            if num_stages > 1 and not (v_shaped and k % num_stages == 0):
                                hop = k - 1
                    elif kind == WEIGHT:
                        if task_of[1, k, mb] < 0:
                            dependency = np.int32(-1)
                    elif k < num_virtual - 1:
                        dependency = task_of[1, k + 1, mb]
                        if num_stages > 1 and not (v_shaped and (k + 1) % num_stages == 0):
                            hop = num_virtual - 1 + k
                    elif task_of[0, k, mb] < 0:
                        dependency = np.int32(-1)
                    if dependency < 0 or (kind in (BACKWARD, INPUT) and task_of[0, k, mb] < 0):
                        break
                    if kind == FORWARD:
                        task_of[0, k, mb] = num_done + 1 if is_pair else num_done
                    elif kind != WEIGHT:
                        task_of[1, k, mb] = num_done
                    columns[0, num_done] = s
                    columns[1, num_done] = kind
                    columns[2, num_done] = chunk
                    columns[3, num_done] = mb
                    columns[4, num_done] = row
                    columns[5, num_done] = dependency
                    columns[6, num_done] = hop
                    num_done += 1
                if num_done == first:
                    break
                head[s] += num_done - first
                progressed = True
    return columns, num_done


@kernel
def play(
    stage: IntArray,
    dependency: IntArray,
    hop: IntArray,
    duration: IntArray,
    durations_ms: Floats,
    hops_ms: Floats,
    tails_ms: Floats,
    ends_ms: Floats,
    free_ms: Floats,
) -> float:
    """The step in ms: the longest path through the graph, each stage's tail after its last task included.

    durations_ms as Loads has them, hops_ms [2·(K-1) + 1] with a last zero, tails_ms [P]. Scratch, overwritten: ends_ms
    [n + 1] (end of each task; the last is the zero of tasks that wait for none), free_ms [P] (end of each stage's
    last task).
    """
    n = stage.shape[0]
    ends_ms[n] = 0.0
    for s in range(free_ms.shape[0]):
        free_ms[s] = 0.0
    for t in range(n):
        s = stage[t]
        start = ends_ms[dependency[t]] + hops_ms[hop[t]]
        if free_ms[s] > start:
            start = free_ms[s]
        end = start + durations_ms[duration[t]]
        ends_ms[t] = end
        free_ms[s] = end
    step = 0.0
    for s in range(tails_ms.shape[0]):
        end = free_ms[s] + tails_ms[s]
        if end > step:
            step = end
    return step


@kernel
def play_together(
    stage: IntArray,
    dependency: IntArray,
    hop: IntArray,
    duration: IntArray,
    durations_ms: Floats,
    hops_ms: Floats,
    tails_ms: Floats,
    shared: NDArray[np.bool_],
) -> float:
    """The step in ms of several runs that have stages in common: there a task begins in all of them once it may in
    each, and ends in all at once. durations_ms: [R, .] of each run; shared: [P]. The rest as `play` has it.
    """
    n, num_runs = stage.shape[0], durations_ms.shape[0]
    ends_ms, free_ms = np.zeros((num_runs, n + 1)), np.zeros((num_runs, tails_ms.shape[0]))
    for t in range(n):
        s, latest = stage[t], 0.0
        for run in range(num_runs):
            start = max(ends_ms[run, dependency[t]] + hops_ms[hop[t]], free_ms[run, s])
            ends_ms[run, t] = start + durations_ms[run, duration[t]]
            latest = max(latest, ends_ms[run, t])
        for run in range(num_runs):
            if shared[s]:
                ends_ms[run, t] = latest
            free_ms[run, s] = ends_ms[run, t]
    step = 0.0
    for run in range(num_runs):
        for s in range(tails_ms.shape[0]):
            step = max(step, free_ms[run, s] + tails_ms[s])
    return step


@kernel
def shifts(ends_ms: Floats, window: IntArray, previous: IntArray) -> tuple[float, float]:
    """Smallest and largest move in ms between a window of tasks and the one a period before (see `short_graph`)."""
    low, high = np.inf, -np.inf
    for i in range(window.shape[0]):
        shift = ends_ms[window[i]] - ends_ms[previous[i]]
        low = min(low, shift)
        high = max(high, shift)
    return low, high


@kernel
def before_on_path(
    task: int,
    dependency: IntArray,
    hop: IntArray,
    hops_ms: Floats,
    ends_ms: Floats,
    previous_on_stage: IntArray,
) -> int:
    """The task before `task` on the longest path through what `play` left in ends_ms; n where the step begins with it.
    Where both predecessors tie, the path stays on the stage."""
    n = dependency.shape[0]
    before = previous_on_stage[task]
    if before == n and dependency[task] == n:
        return int(n)
    if before < n and ends_ms[before] >= ends_ms[dependency[task]] + hops_ms[hop[task]]:
        return int(before)
    return int(dependency[task])


@kernel
def critical_path(
    stage: IntArray,
    dependency: IntArray,
    hop: IntArray,
    duration: IntArray,
    hops_ms: Floats,
    tails_ms: Floats,
    ends_ms: Floats,
    free_ms: Floats,
    previous_on_stage: IntArray,
    last_on_stage: IntArray,
    duration_counts: NDArray[np.int64],
    hop_counts: NDArray[np.int64],
) -> int:
    """Trace the longest path back through what `play` left in ends_ms and free_ms; returns the stage it ends on.

    Overwrites duration_counts (as durations_ms) and hop_counts [2·(K-1) + 1] with how often each entry lies on the
    path, so that the step is their dot product with the times, plus the tail of the returned stage.
    """
    for i in range(duration_counts.shape[0]):
        duration_counts[i] = 0
    for i in range(hop_counts.shape[0]):
        hop_counts[i] = 0
    last_stage = 0
    for s in range(1, tails_ms.shape[0]):
        if free_ms[s] + tails_ms[s] > free_ms[last_stage] + tails_ms[last_stage]:
            last_stage = s
    n = stage.shape[0]
    t = last_on_stage[last_stage]
    while t < n:
        duration_counts[duration[t]] += 1
        before = before_on_path(t, dependency, hop, hops_ms, ends_ms, previous_on_stage)
        if before < n and before != previous_on_stage[t]:
            hop_counts[hop[t]] += 1
        t = before
    return last_stage


@kernel
def stage_neighbours(stage: IntArray, num_stages: int) -> tuple[IntArray, IntArray]:
    """previous_on_stage [n] (n if first) and last_on_stage [P] of tasks in topological order."""
    n = stage.shape[0]
    previous = np.empty(n, dtype=np.int32)
    last = np.full(num_stages, n, dtype=np.int32)
    for t in range(n):
        previous[t] = last[stage[t]]
        last[stage[t]] = t
    return previous, last
