"""What samples of unequal lengths cost a step: waits for the slowest replica, and unequal micro-batches in a pipeline.

A replica takes M micro-batches whose costs have mean 1 and deviation c. Their sum deviates by c sqrt(M), and the most
of DP such sums lies near sqrt(2 ln DP) deviations above the mean (Gumbel's limit for normal draws), so that all wait
for c sqrt(2 ln DP) / sqrt(M) of a step. In a pipeline the later of two neighbours sets the pace: the larger of two
normal draws lies 1/sqrt(pi) = 0.56 deviations above their mean, on all stages but the first.
"""

from __future__ import annotations

import math

from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.job.workload import Workload


def uneven_factor(workload: Workload, strategy: Strategy) -> float:
    """How many times as long the passes of all micro-batches take as those of equal ones; 1 where they are equal."""
    spread_fraction = workload.length_spread_fraction
    num_microbatches = strategy.num_microbatches(workload.global_batch_size)
    slowest = math.sqrt(2 * math.log(strategy.dp) / num_microbatches)
    neighbours = (1 - 1 / strategy.pp) / math.sqrt(math.pi)
    return 1 + spread_fraction * (slowest + neighbours)
