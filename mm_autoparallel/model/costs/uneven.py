"""What samples of unequal lengths cost a step: waits for the slowest replica, and unequal micro-batches in a pipeline.

A replica takes M micro-batches whose costs have mean 1 and deviation c. Their sum deviates by c sqrt(M), and the most
of DP such sums lies near sqrt(2 ln DP) deviations above the mean (Gumbel's limit for normal draws), so that all wait
for c sqrt(2 ln DP) / sqrt(M) of a step. In a pipeline the later of two neighbours sets the pace: the larger of two
normal draws lies 1/sqrt(pi) = 0.56 deviations above their mean, on all stages but the first.

Memory is that of the longest micro-batches: of M normal draws the largest is expected near the quantile (M - 3/8) /
(M + 1/4) (Blom 1958, Statistical Estimates and Transformed Beta-Variables). What is in flight beside it is taken to be
as long: samplers that group by length bring long ones together, and of others this is an upper figure.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.pipeline.problem import ChainBlock


def uneven_factor(workload: Workload, strategy: Strategy) -> float:
    """How many times as long the passes of all micro-batches take as those of equal ones; 1 where they are equal."""
    spread_fraction = workload.length_spread_fraction
    num_microbatches = strategy.num_microbatches(workload.global_batch_size)
    slowest = math.sqrt(2 * math.log(strategy.dp) / num_microbatches)
    neighbours = (1 - 1 / strategy.pp) / math.sqrt(math.pi)
    return 1 + spread_fraction * (slowest + neighbours)


def longest_factor(workload: Workload, num_microbatches: int) -> float:
    """How many times as long as the mean the longest of a replica's micro-batches is; 1 where they are equal."""
    if not workload.length_spread_fraction:
        return 1.0
    quantile = (num_microbatches - 0.375) / (num_microbatches + 0.25)
    return 1 + workload.length_spread_fraction * NormalDist().inv_cdf(quantile)


def at_longest(block: ChainBlock, factor: float) -> ChainBlock:
    """`block` with what it keeps and works in for micro-batches `factor` times as long. Gradients of weights, which
    pass beside that, are taken to be longer too."""
    footprint = block.footprint
    return replace(
        block,
        activation_bytes=factor * block.activation_bytes,
        transient_bytes=factor * block.transient_bytes,
        kept_for_weight_bytes=None if block.kept_for_weight_bytes is None else factor * block.kept_for_weight_bytes,
        modes=tuple(
            replace(
                mode,
                activation_bytes=factor * mode.activation_bytes,
                restored_bytes=factor * mode.restored_bytes,
                host_bytes=factor * mode.host_bytes,
            )
            for mode in block.modes
        ),
        footprint=footprint and replace(footprint, working_bytes=factor * footprint.working_bytes),
    )
