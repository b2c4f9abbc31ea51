"""Stage counts: which numbers of layers of the main kind the stages of a pipeline with several chunks can have.

A mean of paths over work that is shared out evenly hides that layers are whole: where eight stages share 80 layers and
a head, some stage has eleven or the last has ten beside the head, and then waits as others do. So counts of all stages
are looked for that no mixture of paths found so far rules out below an aim; for those a mixture is looked for that
counts them best (a game as in `average_path`, in which every stage has its own work to share out among its chunks); and
on with that one too. Once no counts are left, no step is below the aim:

    counts n, Σ n = N, that a step T allows:   Σ_s cost of n_s layers on stage s on mixture m  ≤  T   for every m.

What n layers of a stage cost on a mixture at least is `options`' answer, so memory and modes count too. A count of one
stage that every way through the others makes cost more than T is dropped, and what is left is divided.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.paths.average_path import AveragePath
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.engine import critical_path, play
from mm_autoparallel.pipeline.simulate.graph import full_graph
from mm_autoparallel.pipeline.simulate.step import neighbours

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
IntArray = NDArray[np.int32]
Bools = NDArray[np.bool_]

#: Rounds of a game, and simulated tasks of one at most (100 and 1,000 rounds tried on 8 and 16 stages of 3 and 4
#: chunks: 100 end up to 1.5 % lower, 1,000 less than 1 % higher).
NUM_ROUNDS, LEAST_ROUNDS, MAX_TASKS = 300, 60, 6_000_000
#: How far work moves at first (2, 4, 8, 16, 32 and 64 tried, as above: 8 and 16 reach most).
LEARNING_FACTOR = 12.0
#: Sums of two costs looked at for one answer: some milliseconds (assumed).
MAX_WORK = 5_000_000
#: Far above the rounding of sums.
ROUNDING_FRACTION = 1e-9


class Work(NamedTuple):
    """What a placement with known counts takes of each micro-batch: [K] forward and backward that lie on one virtual
    stage; [P] those of layers that each stage shares out among its virtual stages from `first` on; and of what lies
    anywhere up to `last_free`. hops_ms: [2K - 1], forth, back and 0; tails_ms: [P].
    """

    fixed_forward_ms: Floats
    fixed_backward_ms: Floats
    shared_forward_ms: Floats
    shared_backward_ms: Floats
    first: int
    free_forward_ms: float
    free_backward_ms: float
    last_free: int
    hops_ms: Floats
    tails_ms: Floats


@kernel
def fill_parts(logs: Floats, first: int, step: int, end: int, parts: Floats) -> None:
    """Shares of every step-th virtual stage from `first` to before `end`, by the logarithms of their weights."""
    most, total = -np.inf, 0.0
    for k in range(first, end, step):
        most = max(most, logs[k])
    for k in range(first, end, step):
        parts[k] = np.exp(logs[k] - most)
        total += parts[k]
    for k in range(first, end, step):
        parts[k] /= total


@kernel
def play_counts(
    tasks: tuple[IntArray, IntArray, IntArray, IntArray],
    neighbours: tuple[IntArray, IntArray],
    work: Work,
    num_rounds: int,
    scale_ms: float,
) -> tuple[Floats, Floats, Floats]:
    """How often each duration [2K], hop [2K - 1] and end [P] lies on the answers of a game, the later ones more.

    scale_ms: of all work of all micro-batches.
    """
    stage, dependency, hop, duration = tasks
    num_stages, num_virtual = work.tails_ms.shape[0], work.fixed_forward_ms.shape[0]
    ends, free = np.empty(stage.shape[0] + 1), np.empty(num_stages)
    times = np.empty(2 * num_virtual)
    counts, hop_counts = np.empty(2 * num_virtual, dtype=np.int64), np.empty(2 * num_virtual - 1, dtype=np.int64)
    duration_sum, hop_sum = np.zeros(2 * num_virtual), np.zeros(2 * num_virtual - 1)
    end_sum = np.zeros(num_stages)
    logs, free_logs = np.zeros(num_virtual), np.zeros(num_virtual)
    parts, free_parts = np.zeros(num_virtual), np.zeros(num_virtual)
    for n in range(1, num_rounds + 1):
        for s in range(num_stages):
            begin = s
            while begin < work.first:
                begin += num_stages
            fill_parts(logs, begin, num_stages, num_virtual, parts)
        fill_parts(free_logs, 0, 1, work.last_free + 1, free_parts)
        for k in range(num_virtual):
            s = k % num_stages
            forward, backward = work.fixed_forward_ms[k], work.fixed_backward_ms[k]
            forward += parts[k] * work.shared_forward_ms[s] + free_parts[k] * work.free_forward_ms
            backward += parts[k] * work.shared_backward_ms[s] + free_parts[k] * work.free_backward_ms
            times[k], times[num_virtual + k] = forward, backward
        play(stage, dependency, hop, duration, times, work.hops_ms, work.tails_ms, ends, free)
        end_stage = critical_path(
            stage,
            dependency,
            hop,
            duration,
            work.hops_ms,
            work.tails_ms,
            ends,
            free,
            neighbours[0],
            neighbours[1],
            counts,
            hop_counts,
        )
        end_sum[end_stage] += n
        rate = LEARNING_FACTOR / (scale_ms * n**0.5)
        for k in range(num_virtual):
            s = k % num_stages
            duration_sum[k] += n * counts[k]
            duration_sum[num_virtual + k] += n * counts[num_virtual + k]
            passes = counts[k], counts[num_virtual + k]
            logs[k] -= (
                rate * num_stages * (passes[0] * work.shared_forward_ms[s] + passes[1] * work.shared_backward_ms[s])
            )
            free_logs[k] -= rate * num_stages * (passes[0] * work.free_forward_ms + passes[1] * work.free_backward_ms)
        for k in range(2 * num_virtual - 1):
            hop_sum[k] += n * hop_counts[k]
    return duration_sum, hop_sum, end_sum


def path_of_counts(
    schedule: str, num_stages: int, num_chunks: int, num_microbatches: int, work: Work
) -> AveragePath | None:
    """A mixture of paths on which `work` costs much wherever each stage puts its own; None where the graph is so large
    that the game would end before it has begun."""
    num_virtual = num_stages * num_chunks
    num_rounds = min(NUM_ROUNDS, MAX_TASKS // (2 * num_virtual * num_microbatches))
    if num_rounds < LEAST_ROUNDS:
        return None
    graph = full_graph(schedule, num_stages, num_chunks, num_microbatches, ())
    total_ms = float(work.fixed_forward_ms.sum() + work.fixed_backward_ms.sum() + work.free_forward_ms)
    total_ms += float(work.shared_forward_ms.sum() + work.shared_backward_ms.sum() + work.free_backward_ms)
    passes, hops, ends = play_counts(
        (graph.stage, graph.dependency, graph.hop, graph.duration),
        neighbours(graph),
        work,
        num_rounds,
        num_microbatches * max(total_ms, 1e-300),
    )
    weight = num_rounds * (num_rounds + 1) / 2
    return AveragePath(
        forward_count=passes[:num_virtual, None] / weight,
        backward_count=passes[num_virtual:, None] / weight,
        hop_forward_count=hops[: num_virtual - 1] / weight,
        hop_backward_count=hops[num_virtual - 1 : -1] / weight,
        end_fraction=ends / weight,
    )


@kernel
def fill_ranges(allowed: Bools, ranges: Ints) -> int:
    """The least and most that each stage [0:2, s] may have, and that the stages before it [2:4, s] have then beside
    what the others may have; how many sums of two are looked at for that. -1: none are left."""
    num_stages, num_layers = allowed.shape[0], allowed.shape[1] - 1
    for s in range(num_stages):
        ranges[0, s], ranges[1, s] = num_layers + 1, -1
        for n in range(num_layers + 1):
            if allowed[s, n]:
                ranges[0, s] = min(ranges[0, s], n)
                ranges[1, s] = n
        if ranges[1, s] < 0:
            return -1
    ranges[2, 0], ranges[3, 0] = 0, 0
    for s in range(num_stages):
        ranges[2, s + 1] = ranges[2, s] + ranges[0, s]
        ranges[3, s + 1] = ranges[3, s] + ranges[1, s]
    least, most, number = num_layers, num_layers, 0
    for s in range(num_stages, -1, -1):
        ranges[2, s], ranges[3, s] = max(ranges[2, s], least), min(ranges[3, s], most)
        if ranges[2, s] > ranges[3, s]:
            return -1
        if s > 0:
            least, most = least - ranges[1, s - 1], most - ranges[0, s - 1]
            number += (ranges[1, s - 1] - ranges[0, s - 1] + 1) * (ranges[3, s] - ranges[2, s] + 1)
    return number


@kernel
def fill_ways(costs_ms: Floats, allowed: Bools, ranges: Ints, before_ms: Floats, after_ms: Floats) -> float:
    """The least cost of the first s stages with n layers, and of the others with the rest, [P + 1, N + 1], for n within
    their ranges; that of all."""
    num_stages, num_layers = costs_ms.shape[0], costs_ms.shape[1] - 1
    before_ms[0, 0] = 0.0
    for s in range(num_stages):
        for total in range(ranges[2, s + 1], ranges[3, s + 1] + 1):
            least = np.inf
            for n in range(max(ranges[0, s], total - ranges[3, s]), min(ranges[1, s], total - ranges[2, s]) + 1):
                if allowed[s, n]:
                    least = min(least, before_ms[s, total - n] + costs_ms[s, n])
            before_ms[s + 1, total] = least
    after_ms[num_stages, num_layers] = 0.0
    for s in range(num_stages - 1, -1, -1):
        for total in range(ranges[2, s], ranges[3, s] + 1):
            least = np.inf
            for n in range(
                max(ranges[0, s], ranges[2, s + 1] - total), min(ranges[1, s], ranges[3, s + 1] - total) + 1
            ):
                if allowed[s, n]:
                    least = min(least, after_ms[s + 1, total + n] + costs_ms[s, n])
            after_ms[s, total] = least
    return float(before_ms[num_stages, num_layers])


@kernel
def drop_counts(
    costs_ms: Floats, most_ms: Floats, allowed: Bools, ranges: Ints, before_ms: Floats, after_ms: Floats
) -> int:
    """Drop counts that some mixture makes cost more than its most_ms [J], whatever the others are; how many sums were
    looked at, -1 where no counts are left. costs_ms: [J, P, N + 1]."""
    num_stages, work = costs_ms.shape[1], 0
    goes_on = True
    while goes_on:
        goes_on = False
        for j in range(costs_ms.shape[0]):
            number = fill_ranges(allowed, ranges)
            if number < 0 or fill_ways(costs_ms[j], allowed, ranges, before_ms, after_ms) > most_ms[j]:
                return -1
            work += 3 * number
            for s in range(num_stages):
                for n in range(ranges[0, s], ranges[1, s] + 1):
                    if not allowed[s, n]:
                        continue
                    least = np.inf
                    for m in range(
                        max(ranges[2, s], ranges[2, s + 1] - n), min(ranges[3, s], ranges[3, s + 1] - n) + 1
                    ):
                        least = min(least, before_ms[s, m] + after_ms[s + 1, m + n])
                    if least + costs_ms[j, s, n] > most_ms[j]:
                        allowed[s, n] = False
                        goes_on = True
    return work


@kernel
def find_counts(costs_ms: Floats, most_ms: Floats, allowed: Bools, max_work: int, found: Ints) -> tuple[int, int]:
    """0: no counts are allowed; 1: those in `found` [P] are; 2: those in `found` are not, and others may be. And how
    many sums were looked at.

    costs_ms, most_ms: as in `drop_counts`. max_work: sums after which it gives up.
    """
    num_stages, num_layers = allowed.shape[0], allowed.shape[1] - 1
    before_ms, after_ms = np.empty((num_stages + 1, num_layers + 1)), np.empty((num_stages + 1, num_layers + 1))
    ranges = np.zeros((4, num_stages + 1), dtype=np.int64)
    stack = [allowed.copy()]
    work = 0
    while len(stack) > 0:
        part = stack.pop()
        number = drop_counts(costs_ms, most_ms, part, ranges, before_ms, after_ms)
        work += max(number, num_stages * num_layers)
        if number < 0:
            continue
        # the counts that the mixture with the least room makes cost least
        fill_ranges(part, ranges)
        tightest, room = 0, np.inf
        for j in range(costs_ms.shape[0]):
            left = most_ms[j] - fill_ways(costs_ms[j], part, ranges, before_ms, after_ms)
            if left < room:
                tightest, room = j, left
        fill_ways(costs_ms[tightest], part, ranges, before_ms, after_ms)
        held = 0
        for s in range(num_stages):
            least, at = np.inf, ranges[0, s]
            for n in range(max(ranges[0, s], ranges[2, s + 1] - held), min(ranges[1, s], ranges[3, s + 1] - held) + 1):
                if part[s, n] and costs_ms[tightest, s, n] + after_ms[s + 1, held + n] < least:
                    least, at = costs_ms[tightest, s, n] + after_ms[s + 1, held + n], n
            found[s] = at
            held += at
        worst, excess = -1, 0.0
        for j in range(costs_ms.shape[0]):
            total = 0.0
            for s in range(num_stages):
                total += costs_ms[j, s, found[s]]
            if total - most_ms[j] > excess:
                worst, excess = j, total - most_ms[j]
        if worst < 0:
            return 1, work
        if work >= max_work:
            return 2, work
        at, most = -1, -1.0
        for s in range(num_stages):
            least, number = np.inf, 0
            for n in range(num_layers + 1):
                if part[s, n]:
                    number += 1
                    least = min(least, costs_ms[worst, s, n])
            if number > 1 and costs_ms[worst, s, found[s]] - least > most:
                at, most = s, costs_ms[worst, s, found[s]] - least
        if at < 0:
            continue  # these counts alone are left, and are not allowed
        other = part.copy()
        other[at, found[at]] = False
        for n in range(num_layers + 1):
            part[at, n] = n == found[at]
        stack.append(other)
        stack.append(part)
    return 0, work
