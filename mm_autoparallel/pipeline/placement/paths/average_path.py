"""A mixture of paths through a schedule's graph on which no virtual stage is a cheap place for work.

The step is at least as long as every path, so at least their weighted mean. Which weights give the most is a game: one
side lays work where it counts least, the other answers with the longest path under that lay-out, which the simulator
finds. Both play on; work moves by multiplicative weights (Freund & Schapire 1999, "Adaptive game playing using
multiplicative weights"), and the mean of all answers approaches the best mixture. Whatever it has reached by then is a
mixture of real paths, so a bound from it is true.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.engine import critical_path, play
from mm_autoparallel.pipeline.simulate.graph import full_graph
from mm_autoparallel.pipeline.simulate.step import neighbours

Floats = NDArray[np.float64]
IntArray = NDArray[np.int32]

#: How far work moves at first, found on pipelines of 2 to 16 stages; later moves shrink with the root of the round.
LEARNING_FACTOR = 0.5
#: Rounds, and simulated tasks, after which the game ends: some tens of milliseconds.
MAX_ROUNDS, MAX_TASKS = 1_000, 6_000_000


@dataclass(frozen=True, eq=False)
class AveragePath:
    """How often each time lies on the mixture: forward_count, backward_count [K, C] per virtual stage and class of
    micro-batches, hop_forward_count, hop_backward_count [K - 1], and end_fraction [P] of the paths that end with each
    stage's tail.
    """

    forward_count: Floats
    backward_count: Floats
    hop_forward_count: Floats
    hop_backward_count: Floats
    end_fraction: Floats


def average_path(
    schedule: str,
    num_stages: int,
    num_chunks: int,
    num_microbatches: int,
    classes: tuple[int, ...],
    forward_ms: Floats,
    backward_ms: Floats,
    tail_ms: float,
    hop_ms: float,
    first: int = 0,
) -> AveragePath | None:
    """The mixture for work of which a micro-batch of each class takes forward_ms and backward_ms [C] on all stages
    together, and tail_ms comes once at the end.

    classes: of each micro-batch, empty where there is one. hop_ms: of each hop. first: virtual stages before it take
    nothing of that work. The times say what the game is played
    for; the mixture holds for any. None where the graph is so large that the game would end before it has begun.
    """
    num_virtual = num_stages * num_chunks
    num_tasks = 2 * num_virtual * num_microbatches
    num_rounds = min(MAX_ROUNDS, MAX_TASKS // num_tasks)
    if num_rounds < num_virtual:
        return None
    graph = full_graph(schedule, num_stages, num_chunks, num_microbatches, classes)
    num_durations = num_virtual * graph.num_classes
    duration_sum, hop_sum, end_sum = _play_game(
        (graph.stage, graph.dependency, graph.hop, graph.duration),
        *neighbours(graph),
        np.asarray(forward_ms, dtype=np.float64),
        np.asarray(backward_ms, dtype=np.float64),
        float(tail_ms),
        float(hop_ms),
        num_virtual,
        first,
        num_rounds,
        num_microbatches * max(float(np.mean(forward_ms + backward_ms)), 1e-300),
    )
    weight = num_rounds * (num_rounds + 1) / 2
    return AveragePath(
        forward_count=duration_sum[:num_durations].reshape(num_virtual, -1) / weight,
        backward_count=duration_sum[num_durations:].reshape(num_virtual, -1) / weight,
        hop_forward_count=hop_sum[: num_virtual - 1] / weight,
        hop_backward_count=hop_sum[num_virtual - 1 : -1] / weight,
        end_fraction=end_sum / weight,
    )


@kernel
def _play_game(
    tasks: tuple[IntArray, IntArray, IntArray, IntArray],
    previous_on_stage: IntArray,
    last_on_stage: IntArray,
    forward_ms: Floats,
    backward_ms: Floats,
    tail_ms: float,
    hop_ms: float,
    num_virtual: int,
    first: int,
    num_rounds: int,
    scale_ms: float,
) -> tuple[Floats, Floats, Floats]:
    """How often each duration, hop and end lies on the answers; later ones count more: they answer better lay-outs."""
    stage, dependency, hop, duration = tasks
    num_stages, num_classes = last_on_stage.shape[0], forward_ms.shape[0]
    backward_at = num_virtual * num_classes
    ends, free = np.empty(stage.shape[0] + 1), np.empty(num_stages)
    hops = np.full(2 * num_virtual - 1, hop_ms)
    hops[-1] = 0.0
    times, tails = np.empty(2 * backward_at), np.empty(num_stages)
    counts, hop_counts = np.empty(2 * backward_at, dtype=np.int64), np.empty(hops.shape[0], dtype=np.int64)
    duration_sum, hop_sum, end_sum = np.zeros(2 * backward_at), np.zeros(hops.shape[0]), np.zeros(num_stages)
    log_share, share = np.zeros(num_virtual), np.zeros(num_virtual)
    for n in range(1, num_rounds + 1):
        share[first:] = np.exp(log_share[first:] - log_share[first:].max())
        share /= share.sum()
        tails[:] = 0.0
        for k in range(num_virtual):
            tails[k % num_stages] += share[k] * tail_ms
            for c in range(num_classes):
                times[k * num_classes + c] = share[k] * forward_ms[c]
                times[backward_at + k * num_classes + c] = share[k] * backward_ms[c]
        play(stage, dependency, hop, duration, times, hops, tails, ends, free)
        end_stage = critical_path(
            stage,
            dependency,
            hop,
            duration,
            hops,
            tails,
            ends,
            free,
            previous_on_stage,
            last_on_stage,
            counts,
            hop_counts,
        )
        duration_sum += n * counts
        hop_sum += n * hop_counts
        end_sum[end_stage] += n
        for k in range(first, num_virtual):
            cost = tail_ms if k % num_stages == end_stage else 0.0
            for c in range(num_classes):
                cost += counts[k * num_classes + c] * forward_ms[c]
                cost += counts[backward_at + k * num_classes + c] * backward_ms[c]
            log_share[k] -= LEARNING_FACTOR / (scale_ms * n**0.5) * cost
    return duration_sum, hop_sum, end_sum
