"""The compiled kernels that remember long paths through a replica's step, so that many changes need no play.

A path's length is a sum of loads times shares, so a change of two micro-batches changes it by a few products; and no
step is shorter than any of its paths. Each play leaves its longest one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mm_autoparallel.pipeline.balance.ordering import Floats, Ints, Tasks
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.engine import stage_neighbours

NUM_PATHS = 4
"""That are remembered of each replica. Assumed: with 8 and 16 steps were as long."""


class Paths(NamedTuple):
    """Of each replica NUM_PATHS paths: length_ms [R, C] and what each takes of the load of every micro-batch, shares
    [R, M, C, 2]. dependency, before: [n] what each task waits for, and the one before it on its stage (n: none); last:
    [P] of each stage; duration: as Tasks has it. ends_ms: [n + 1] of the last play, of which the last is zero."""

    length_ms: Floats
    shares: Floats
    dependency: Ints
    before: Ints
    last: Ints
    duration: Ints
    ends_ms: Floats


@kernel
def know_none(tasks: Tasks, num_replicas: int) -> Paths:
    """No path yet: all are of no length."""
    before, last = stage_neighbours(tasks.stage, tasks.num_stages)
    return Paths(
        np.zeros((num_replicas, NUM_PATHS)),
        np.zeros((num_replicas, tasks.num_microbatches, NUM_PATHS, 2)),
        tasks.dependency.astype(np.int64),
        before.astype(np.int64),
        last.astype(np.int64),
        tasks.duration.astype(np.int64),
        np.zeros(tasks.stage.shape[0] + 1),
    )


@kernel
def reach(paths: Paths, r: int, m: int, encoder_ms: float, decoder_ms: float) -> float:
    """What replica r's step is not below once micro-batch m has so much more load."""
    most_ms = 0.0
    for c in range(NUM_PATHS):
        then_ms = paths.length_ms[r, c]
        then_ms += encoder_ms * paths.shares[r, m, c, 0] + decoder_ms * paths.shares[r, m, c, 1]
        most_ms = max(most_ms, then_ms)
    return most_ms


@kernel
def reach_within(paths: Paths, r: int, m: int, to: int, encoder_ms: float, decoder_ms: float) -> float:
    """The same once so much load goes from micro-batch m to another of that replica."""
    most_ms = 0.0
    for c in range(NUM_PATHS):
        then_ms = paths.length_ms[r, c]
        then_ms += encoder_ms * (paths.shares[r, to, c, 0] - paths.shares[r, m, c, 0])
        then_ms += decoder_ms * (paths.shares[r, to, c, 1] - paths.shares[r, m, c, 1])
        most_ms = max(most_ms, then_ms)
    return most_ms


@kernel
def lengthen(paths: Paths, r: int, m: int, encoder_ms: float, decoder_ms: float) -> None:
    """Micro-batch m of replica r has so much more load."""
    for c in range(NUM_PATHS):
        paths.length_ms[r, c] += encoder_ms * paths.shares[r, m, c, 0] + decoder_ms * paths.shares[r, m, c, 1]


@kernel
def play_and_note(times_ms: Floats, tasks: Tasks, paths: Paths, r: int) -> float:
    """The step of replica r, as `play_replica` has it; its longest path takes the place of the shortest known one."""
    ends_ms, n = paths.ends_ms, tasks.stage.shape[0]
    alone = tasks.shares.shape[0] * tasks.num_microbatches
    for p in range(tasks.pairs.shape[0]):
        times_ms[alone + p] = times_ms[tasks.pairs[p, 0]] + times_ms[tasks.pairs[p, 1]]
    for t in range(n):
        start_ms = max(ends_ms[paths.dependency[t]], ends_ms[paths.before[t]])
        ends_ms[t] = start_ms + times_ms[paths.duration[t]]
    c = 0
    for k in range(1, NUM_PATHS):
        if paths.length_ms[r, k] < paths.length_ms[r, c]:
            c = k
    for m in range(tasks.num_microbatches):
        paths.shares[r, m, c, 0] = paths.shares[r, m, c, 1] = 0.0
    at = paths.last[0]
    for s in range(1, tasks.num_stages):
        if ends_ms[paths.last[s]] > ends_ms[at]:
            at = paths.last[s]
    step_ms = ends_ms[at]
    while at < n:
        entry = paths.duration[at]
        if entry < alone:
            take_entry(entry, paths, r, c, tasks)
        elif entry < alone + tasks.pairs.shape[0]:
            take_entry(tasks.pairs[entry - alone, 0], paths, r, c, tasks)
            take_entry(tasks.pairs[entry - alone, 1], paths, r, c, tasks)
        before, fed_by = paths.before[at], paths.dependency[at]
        at = before if fed_by == n or (before < n and ends_ms[before] >= ends_ms[fed_by]) else fed_by
    paths.length_ms[r, c] = step_ms
    return float(step_ms)


@kernel
def take_entry(entry: int, paths: Paths, r: int, c: int, tasks: Tasks) -> None:
    """Path c of replica r passes through this entry of its times."""
    row, m = entry // tasks.num_microbatches, entry % tasks.num_microbatches
    paths.shares[r, m, c, 0] += tasks.shares[row, 0]
    paths.shares[r, m, c, 1] += tasks.shares[row, 1]
