"""The compiled kernels that deal bins onto replicas in a hill, and play them by the simulator's own kernel.

Bin r · M + m is micro-batch m of replica r.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.balance.packing import busiest
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.engine import play

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
IntArray = NDArray[np.int32]


class Tasks(NamedTuple):
    """A step of one replica, whose M micro-batches are each a class: TaskGraph's arrays, and how loads become times.

    pairs: which entries of a forward and of a backward run together. shares: [kinds · K, 2], what each kind of action
    takes on each virtual stage of a load of encoder and decoder. zeros: times of hops and tails, which are none.
    """

    stage: IntArray
    dependency: IntArray
    hop: IntArray
    duration: IntArray
    pairs: Ints
    shares: Floats
    zeros: Floats
    num_stages: int
    num_microbatches: int
    num_durations: int


@kernel
def spread(order: Ints, ms: Floats, stage_shares: Floats, num_replicas: int) -> Ints:
    """The place r · M + m of each bin: in `order`, the heaviest first, each to the replica with room that is then least
    busy, and within a replica as a hill, the lightest at both ends. ms: [bins, 2]."""
    num_microbatches = order.shape[0] // num_replicas
    place_of = np.empty(order.shape[0], dtype=np.int64)
    total_ms, count = np.zeros((num_replicas, 2)), np.zeros(num_replicas, dtype=np.int64)
    for b in order:
        best, best_ms = 0, np.inf
        for r in range(num_replicas):
            if count[r] < num_microbatches:
                then_ms = busiest(total_ms[r, 0] + ms[b, 0], total_ms[r, 1] + ms[b, 1], stage_shares)
                if then_ms < best_ms:
                    best, best_ms = r, then_ms
        rank = num_microbatches - 1 - count[best]  # among its replica's, from the lightest on
        m = rank // 2 if rank % 2 == 0 else num_microbatches - 1 - rank // 2
        place_of[b] = best * num_microbatches + m
        total_ms[best] += ms[b]
        count[best] += 1
    return place_of


@kernel
def set_times(times_ms: Floats, m: int, encoder_ms: float, decoder_ms: float, tasks: Tasks) -> None:
    """Write what micro-batch m of such a load takes. times_ms: durations as TaskGraph has them."""
    for row in range(tasks.shares.shape[0]):
        times_ms[row * tasks.num_microbatches + m] = (
            encoder_ms * tasks.shares[row, 0] + decoder_ms * tasks.shares[row, 1]
        )


@kernel
def play_replica(times_ms: Floats, tasks: Tasks, ends_ms: Floats, free_ms: Floats) -> float:
    """The step of one replica; two that run together take what both take. ends_ms, free_ms: as `play` has them."""
    alone = tasks.shares.shape[0] * tasks.num_microbatches
    for p in range(tasks.pairs.shape[0]):
        times_ms[alone + p] = times_ms[tasks.pairs[p, 0]] + times_ms[tasks.pairs[p, 1]]
    return play(
        tasks.stage,
        tasks.dependency,
        tasks.hop,
        tasks.duration,
        times_ms,
        tasks.zeros,
        tasks.zeros[: tasks.num_stages],
        ends_ms,
        free_ms,
    )


@kernel
def play_all(ms: Floats, tasks: Tasks, times_ms: Floats) -> Floats:
    """The step of each replica [R]. ms: [R · M, 2], loads of bins. times_ms: [R, durations], overwritten."""
    ends_ms, free_ms = np.empty(tasks.stage.shape[0] + 1), np.empty(tasks.num_stages)
    steps_ms = np.empty(times_ms.shape[0])
    for r in range(times_ms.shape[0]):
        times_ms[r] = 0.0
        for m in range(tasks.num_microbatches):
            b = r * tasks.num_microbatches + m
            set_times(times_ms[r], m, ms[b, 0], ms[b, 1], tasks)
        steps_ms[r] = play_replica(times_ms[r], tasks, ends_ms, free_ms)
    return steps_ms
