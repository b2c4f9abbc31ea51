"""How far apart steps are at least where no stage waits for the others at their end (post-validation).

Each stage then begins its next step as soon as it has ended its own, so steps are no closer than the busiest stage's
work: all its micro-batches, and its part of the optimizer's step. Fill and drain are no part of that, so bounds of one
step by itself are none of this.

    work      that of all stages shared out evenly, and the largest block whole (`work_bound_ms`, which has no more)
    busiest   with one chunk a stage, the least of the busiest stage over all ways to cut the chain into stages; memory,
              pins and attached blocks are left out
"""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.laid_out import relaxed
from mm_autoparallel.pipeline.placement.bounds.bound import ROUNDING_FRACTION
from mm_autoparallel.pipeline.placement.bounds.step import work_bound_ms
from mm_autoparallel.pipeline.problem import Problem

MOST_BLOCKS = 1_000
"""Of a chain that is cut: more would take seconds."""


def apart_bound_ms(problem: Problem) -> float:
    """Under no placement and order are steps less apart than this."""
    least_ms = work_bound_ms(problem)
    if problem.num_chunks == 1 and sum(block.count for block in problem.chain) <= MOST_BLOCKS:
        least_ms = max(least_ms, _least_busiest_ms(relaxed(problem)) * (1.0 - ROUNDING_FRACTION))
    return least_ms


def _least_busiest_ms(problem: Problem) -> float:
    """Over all cuts of the chain, stages that hold nothing included."""
    counts, blocks = [block.count for block in problem.chain], problem.chain
    passes = [sum(block.microbatch_scale) or float(problem.num_microbatches) for block in blocks]
    each_ms = [(block.forward_ms + block.backward_ms) * number for block, number in zip(blocks, passes, strict=True)]
    work_ms = np.concatenate([[0.0], np.cumsum(np.repeat(each_ms, counts))]) * problem.least_load_fraction
    tails_ms = np.concatenate([[0.0], np.cumsum(np.repeat([block.tail_ms for block in blocks], counts))])
    held_ms, after_ms = work_ms[None, :] - work_ms[:, None], tails_ms[None, :] - tails_ms[:, None]
    backwards = np.tri(len(work_ms), k=-1, dtype=bool)
    busiest_ms = np.full(len(work_ms), np.inf)  # of the stages so far, which hold all before each cut
    busiest_ms[0] = 0.0
    for factor, tail_ms in zip(problem.time_factors, problem.stage_tail_ms, strict=True):
        stage_ms = np.where(backwards, np.inf, factor * held_ms + after_ms + tail_ms)
        busiest_ms = np.min(np.maximum(busiest_ms[:, None], stage_ms), axis=0)
    return float(busiest_ms[-1])
