"""The compiled kernels that deal bins onto replicas and order them, judged by the simulator's own play.

Bin r · M + m is micro-batch m of replica r.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.balance.packing import Bins, Load, below, busiest, exchange, fill_bins, has_room
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


@kernel
def nth_sample(n: int, b: int, bins: Bins) -> int:
    """The n-th of bin b's list; -1 behind its end."""
    i = bins.head[b]
    for _ in range(n):
        i = bins.following[i]
    return int(i)


@kernel
def trade_places(a: int, b: int, bins: Bins) -> None:
    """Bin a becomes b, and b a."""
    for values in (bins.tokens, bins.sizes, bins.head):
        values[a], values[b] = values[b], values[a]
    for way in range(2):
        bins.ms[a, way], bins.ms[b, way] = bins.ms[b, way], bins.ms[a, way]
    for k in (a, b):
        i = bins.head[k]
        while i >= 0:
            bins.of[i] = k
            i = bins.following[i]


@kernel
def improve(
    bin_of: Ints, load: Load, tasks: Tasks, num_replicas: int, num_plays: int, heat_fraction: float, seed: int
) -> float:
    """Change the slowest replica, num_plays plays long: two of its bins trade places, one with another replica's, or
    samples move or swap between bins. Overwrites bin_of [n] with the best that was found, whose step is returned.

    What makes the step longer is kept within a margin that falls from heat_fraction of the step to nothing (threshold
    accepting, Dueck and Scheuer 1990, J. Comput. Phys. 90): without exp, so that every machine finds the same.
    """
    np.random.seed(seed)
    num_microbatches = tasks.num_microbatches
    bins = fill_bins(bin_of.copy(), load, num_replicas * num_microbatches)
    times_ms = np.empty((num_replicas, tasks.num_durations))
    steps_ms = play_all(bins.ms, tasks, times_ms)
    ends_ms, free_ms = np.empty(tasks.stage.shape[0] + 1), np.empty(tasks.num_stages)
    best_ms = steps_ms.max()
    margin_ms = heat_fraction * best_ms
    played = 0
    while played < num_plays:
        played += 1
        r = int(np.argmax(steps_ms))
        dice = np.random.random()
        q = r if dice < 0.3 else below(num_replicas)
        a, b = r * num_microbatches + below(num_microbatches), q * num_microbatches + below(num_microbatches)
        if a == b:
            continue
        i, j = -1, -1  # none: the bins trade places
        if dice < 0.55:
            encoder_ms, decoder_ms = bins.ms[a, 0] - bins.ms[b, 0], bins.ms[a, 1] - bins.ms[b, 1]
        else:
            i, j = nth_sample(below(bins.sizes[a]), a, bins), nth_sample(below(bins.sizes[b] + 1), b, bins)
            given = load.tokens[j] if j >= 0 else 0
            if (j < 0 and bins.sizes[a] == 1) or not has_room(load.tokens[i] - given, a, b, bins, load):
                continue
            encoder_ms = load.ms[i, 0] - (load.ms[j, 0] if j >= 0 else 0.0)
            decoder_ms = load.ms[i, 1] - (load.ms[j, 1] if j >= 0 else 0.0)
        set_times(times_ms[r], a % num_microbatches, bins.ms[a, 0] - encoder_ms, bins.ms[a, 1] - decoder_ms, tasks)
        set_times(times_ms[q], b % num_microbatches, bins.ms[b, 0] + encoder_ms, bins.ms[b, 1] + decoder_ms, tasks)
        limit_ms = steps_ms[r] + margin_ms * (1.0 - played / num_plays)
        step_ms = play_replica(times_ms[r], tasks, ends_ms, free_ms)
        other_ms = step_ms
        if q != r and step_ms <= limit_ms:
            other_ms = play_replica(times_ms[q], tasks, ends_ms, free_ms)
            played += 1
        if max(step_ms, other_ms) <= limit_ms:
            if i < 0:
                trade_places(a, b, bins)
            else:
                exchange(i, j, a, b, bins, load)
            steps_ms[r], steps_ms[q] = step_ms, other_ms
            if steps_ms.max() < best_ms:
                best_ms = steps_ms.max()
                bin_of[:] = bins.of
        else:
            set_times(times_ms[r], a % num_microbatches, bins.ms[a, 0], bins.ms[a, 1], tasks)
            set_times(times_ms[q], b % num_microbatches, bins.ms[b, 0], bins.ms[b, 1], tasks)
    return float(best_ms)
