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

from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.graph import full_graph
from mm_autoparallel.pipeline.simulate.step import neighbours

Floats = NDArray[np.float64]

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
    tasks = (graph.stage, graph.dependency, graph.hop, graph.duration)
    ends, free = np.empty(graph.num_tasks + 1), np.empty(num_stages)
    hops = np.full(2 * num_virtual - 1, hop_ms)
    hops[-1] = 0.0
    durations, hop_counts = np.empty(2 * num_durations, dtype=np.int64), np.empty(len(hops), dtype=np.int64)
    duration_sum, hop_sum, end_sum = np.zeros(2 * num_durations), np.zeros(len(hops)), np.zeros(num_stages)
    log_share = np.where(np.arange(num_virtual) < first, -np.inf, 0.0)
    of_stage = np.arange(num_virtual) % num_stages
    scale_ms = num_microbatches * max(float(np.mean(forward_ms + backward_ms)), 1e-300)
    whole = np.concatenate([np.tile(forward_ms, num_virtual), np.tile(backward_ms, num_virtual)])
    for n in range(1, num_rounds + 1):
        share = np.exp(log_share - log_share.max())
        share /= share.sum()
        times = np.tile(np.repeat(share, graph.num_classes), 2) * whole
        tails: Floats = np.bincount(of_stage, weights=share, minlength=num_stages).astype(np.float64) * tail_ms
        engine.play(*tasks, times, hops, tails, ends, free)
        end_stage = engine.critical_path(*tasks, hops, tails, ends, free, *neighbours(graph), durations, hop_counts)
        duration_sum += n * durations  # later answers count more: they answer better lay-outs
        hop_sum += n * hop_counts
        end_sum[end_stage] += n
        costs = (durations * whole).reshape(2, num_virtual, -1).sum(axis=(0, 2)) + tail_ms * (of_stage == end_stage)
        log_share -= LEARNING_FACTOR / (scale_ms * n**0.5) * costs
    weight = num_rounds * (num_rounds + 1) / 2
    return AveragePath(
        forward_count=duration_sum[:num_durations].reshape(num_virtual, -1) / weight,
        backward_count=duration_sum[num_durations:].reshape(num_virtual, -1) / weight,
        hop_forward_count=hop_sum[: num_virtual - 1] / weight,
        hop_backward_count=hop_sum[num_virtual - 1 : -1] / weight,
        end_fraction=end_sum / weight,
    )
