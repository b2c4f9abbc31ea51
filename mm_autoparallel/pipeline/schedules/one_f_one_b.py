"""1F1B, the memory-bounded schedule of PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503).

Three stages, four micro-batches (time runs right; . is idle):

    stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
    stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
    stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
"""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, StageOrder, actions, one_forward_one_backward


def one_f_one_b(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The order of `stage`; one chunk. At most `num_stages - stage` micro-batches are in flight."""
    micro_batches = np.arange(num_microbatches, dtype=np.int64)
    chunks = np.zeros_like(micro_batches)
    return one_forward_one_backward(
        actions(FORWARD, chunks, micro_batches),
        actions(BACKWARD, chunks, micro_batches),
        num_warmup=min(num_microbatches, num_stages - stage - 1),
    )
