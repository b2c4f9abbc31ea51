"""The compiled kernels that change a dealing, as the simulator's play judges it. Bin r · M + m is micro-batch m of
replica r."""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.balance.known_paths import (
    Paths,
    know_none,
    lengthen,
    play_and_note,
    reach,
    reach_within,
)
from mm_autoparallel.pipeline.balance.ordering import Ints, Tasks, play_all, set_times
from mm_autoparallel.pipeline.balance.packing import Bins, Load, below, exchange, fill_bins, has_room
from mm_autoparallel.pipeline.simulate.compiled import kernel

NUM_CHOICES = 8
"""Changes that are looked at for one that is played. Assumed: of 1 to 16 the best in equal time, of all shapes together
that tests/benchmarks/balancing.py deals."""

CHOICE_EFFORT = 36
"""What looking at a change costs, in tasks that are played. Assumed: 0.2 microseconds."""

ROUNDING_FRACTION = 1e-9
"""Of a step: sums of a path and of a play differ by less."""


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
def part_load(a: int, b: int, i: int, j: int, bins: Bins, load: Load) -> tuple[float, float]:
    """Load of encoder and decoder that goes from bin a to bin b when sample i does, and j (-1: none) comes back; when
    all of both do where i is -1."""
    if i < 0:
        return bins.ms[a, 0] - bins.ms[b, 0], bins.ms[a, 1] - bins.ms[b, 1]
    if j < 0:
        return load.ms[i, 0], load.ms[i, 1]
    return load.ms[i, 0] - load.ms[j, 0], load.ms[i, 1] - load.ms[j, 1]


@kernel
def choose(
    r: int, limit_ms: float, bins: Bins, load: Load, paths: Paths, num_replicas: int
) -> tuple[int, int, int, int]:
    """Of NUM_CHOICES changes of replica r at random the one whose known paths are shortest: a, b, i, j as `part_load`
    has them, a in replica r; a is -1 where none keeps them within limit_ms."""
    num_microbatches = bins.sizes.shape[0] // num_replicas
    least_ms, chosen = limit_ms, (-1, -1, -1, -1)
    for _ in range(NUM_CHOICES):
        dice = np.random.random()
        q = r if dice < 0.3 else below(num_replicas)
        m, to = below(num_microbatches), below(num_microbatches)
        a, b = r * num_microbatches + m, q * num_microbatches + to
        if a == b:
            continue
        i, j = -1, -1  # none: the bins trade places
        if dice >= 0.55:
            i, j = nth_sample(below(bins.sizes[a]), a, bins), nth_sample(below(bins.sizes[b] + 1), b, bins)
            given = load.tokens[j] if j >= 0 else 0
            if (j < 0 and bins.sizes[a] == 1) or not has_room(load.tokens[i] - given, a, b, bins, load):
                continue
        encoder_ms, decoder_ms = part_load(a, b, i, j, bins, load)
        if q == r:
            then_ms = reach_within(paths, r, m, to, encoder_ms, decoder_ms)
        else:
            then_ms = reach(paths, r, m, -encoder_ms, -decoder_ms)
            if then_ms < least_ms:
                then_ms = max(then_ms, reach(paths, q, to, encoder_ms, decoder_ms))
        if then_ms < least_ms:
            least_ms, chosen = then_ms, (a, b, i, j)
    return chosen


@kernel
def improve(
    bin_of: Ints, load: Load, tasks: Tasks, num_replicas: int, effort: int, play_effort: int, heat_fraction: float
) -> float:
    """Change the slowest replica until `effort` is spent: two of its bins trade places, one with another replica's, or
    samples move or swap between bins. Overwrites bin_of [n] with the best that was found, whose step is returned.
    play_effort: of one play.

    What makes the step longer is kept within a margin that falls from heat_fraction of the step to nothing (threshold
    accepting, Dueck and Scheuer 1990, J. Comput. Phys. 90): without exp, so that every machine finds the same.
    """
    np.random.seed(0)
    num_microbatches = tasks.num_microbatches
    bins = fill_bins(bin_of.copy(), load, num_replicas * num_microbatches)
    times_ms = np.empty((num_replicas, tasks.num_durations))
    steps_ms = play_all(bins.ms, tasks, times_ms)
    paths = know_none(tasks, num_replicas)
    r = int(np.argmax(steps_ms))
    best_ms, is_best = steps_ms[r], True
    margin_ms, rounding_ms = heat_fraction * best_ms, ROUNDING_FRACTION * best_ms
    spent = 0
    while spent < effort:
        limit_ms = steps_ms[r] + margin_ms * (1.0 - spent / effort)
        spent += NUM_CHOICES * CHOICE_EFFORT
        a, b, i, j = choose(r, limit_ms + rounding_ms, bins, load, paths, num_replicas)
        if a < 0:
            continue
        q, m, to = b // num_microbatches, a % num_microbatches, b % num_microbatches
        encoder_ms, decoder_ms = part_load(a, b, i, j, bins, load)
        set_times(times_ms[r], m, bins.ms[a, 0] - encoder_ms, bins.ms[a, 1] - decoder_ms, tasks)
        set_times(times_ms[q], to, bins.ms[b, 0] + encoder_ms, bins.ms[b, 1] + decoder_ms, tasks)
        lengthen(paths, r, m, -encoder_ms, -decoder_ms)
        lengthen(paths, q, to, encoder_ms, decoder_ms)
        step_ms = play_and_note(times_ms[r], tasks, paths, r)
        spent += play_effort
        other_ms = step_ms
        if q != r and step_ms <= limit_ms:
            other_ms = play_and_note(times_ms[q], tasks, paths, q)
            spent += play_effort
        if max(step_ms, other_ms) <= limit_ms:
            if is_best and max(step_ms, other_ms) > best_ms:
                bin_of[:], is_best = bins.of, False
            if i < 0:
                trade_places(a, b, bins)
            else:
                exchange(i, j, a, b, bins, load)
            steps_ms[r], steps_ms[q] = step_ms, other_ms
            r = int(np.argmax(steps_ms))
            if steps_ms[r] < best_ms:
                best_ms, is_best = steps_ms[r], True
        else:
            set_times(times_ms[r], m, bins.ms[a, 0], bins.ms[a, 1], tasks)
            set_times(times_ms[q], to, bins.ms[b, 0], bins.ms[b, 1], tasks)
            lengthen(paths, r, m, encoder_ms, decoder_ms)
            lengthen(paths, q, to, -encoder_ms, -decoder_ms)
    if is_best:
        bin_of[:] = bins.of
    return float(best_ms)
