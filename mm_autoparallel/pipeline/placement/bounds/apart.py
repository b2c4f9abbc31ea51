"""How far apart steps are at least where no stage waits for the others at their end (post-validation).

Each stage then begins its next step as soon as it has ended its own, so steps are no closer than the busiest stage's
work: all its micro-batches, and its part of the optimizer's step. Fill and drain are no part of that, so bounds of one
step by itself are none of this.

    work      that of all stages shared out evenly, and the largest block whole (`work_bound_ms`, which has no more)
    busiest   the least of the busiest stage over all ways to cut the chain into stages of one chunk, or of two, there
              and back, so that stages take it from both its ends; memory, pins and attached blocks are left out
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.laid_out import relaxed
from mm_autoparallel.pipeline.placement.bounds.bound import ROUNDING_FRACTION, least_step
from mm_autoparallel.pipeline.placement.bounds.step import work_bound_ms
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.schedules.catalog import V_CHUNKS

Floats = NDArray[np.float64]

MOST_BLOCKS = 500
"""Of a chain that is cut: more would take seconds."""


def apart_bound_ms(problem: Problem) -> float:
    """Under no placement and order are steps less apart than this."""
    least_ms = work_bound_ms(problem)
    is_v = problem.v_shaped and problem.num_chunks == V_CHUNKS
    if not (problem.num_chunks == 1 or is_v) or sum(block.count for block in problem.chain) > MOST_BLOCKS:
        return least_ms
    stages = _Stages.of(relaxed(problem))
    if is_v:
        return least_step(least_ms, stages.fit_from_both_ends, lambda: None).step_ms * (1.0 - ROUNDING_FRACTION)
    return max(least_ms, stages.least_busiest_ms() * (1.0 - ROUNDING_FRACTION))


@dataclass(frozen=True, eq=False)
class _Stages:
    """held_ms: [P, N + 1] of each stage, what it takes a step for the first n blocks of the chain, so that a piece of
    it is a difference. tail_ms: [P] what it takes beside."""

    held_ms: Floats
    tail_ms: Floats

    @classmethod
    def of(cls, problem: Problem) -> _Stages:
        counts, blocks = [block.count for block in problem.chain], problem.chain
        passes = [sum(block.microbatch_scale) or float(problem.num_microbatches) for block in blocks]
        each_ms = [
            (block.forward_ms + block.backward_ms) * number for block, number in zip(blocks, passes, strict=True)
        ]
        work_ms = np.concatenate([[0.0], np.cumsum(np.repeat(each_ms, counts))]) * problem.least_load_fraction
        after_ms = np.concatenate([[0.0], np.cumsum(np.repeat([block.tail_ms for block in blocks], counts))])
        return cls(np.outer(problem.time_factors, work_ms) + after_ms, np.array(problem.stage_tail_ms))

    def least_busiest_ms(self) -> float:
        """Over all cuts into a piece for each stage, empty ones included."""
        num_cuts = self.held_ms.shape[1]
        backwards = np.tri(num_cuts, k=-1, dtype=bool)
        busiest_ms = np.full(num_cuts, np.inf)  # of the stages so far, which hold all before each cut
        busiest_ms[0] = 0.0
        for held_ms, tail_ms in zip(self.held_ms, self.tail_ms, strict=True):
            stage_ms = np.where(backwards, np.inf, held_ms[None, :] - held_ms[:, None] + tail_ms)
            busiest_ms = np.min(np.maximum(busiest_ms[:, None], stage_ms), axis=0)
        return float(busiest_ms[-1])

    def fit_from_both_ends(self, step_ms: float) -> bool:
        """Whether stages that take no longer than step_ms can take the whole chain, each a piece behind those of the
        stages before it and one before theirs at the other end. Of states that have taken as much at the front, the one
        that has left least at the back can do what the others can."""
        num_cuts = self.held_ms.shape[1]
        ends = np.full(num_cuts, num_cuts)  # [front] where what is left ends at least; num_cuts: it cannot be
        ends[0] = num_cuts - 1
        for held_ms, tail_ms in zip(self.held_ms, self.tail_ms, strict=True):
            budget_ms = step_ms * (1.0 + ROUNDING_FRACTION) - tail_ms
            (fronts,) = np.nonzero(ends < num_cuts)
            left_ms = budget_ms - (held_ms[None, :] - held_ms[fronts, None])
            found = np.searchsorted(held_ms, held_ms[ends[fronts], None] - left_ms)
            is_lawful = (left_ms >= 0.0) & (np.arange(num_cuts)[None, :] >= fronts[:, None])
            ends = np.min(np.where(is_lawful, found, num_cuts), axis=0, initial=num_cuts)
            if np.any(ends <= np.arange(num_cuts)):
                return True
        return False
