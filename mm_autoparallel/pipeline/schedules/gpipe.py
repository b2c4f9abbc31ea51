"""GPipe (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards.

Three stages, four micro-batches (time runs right; . is idle):

    stage 0  F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
    stage 1   . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
    stage 2   .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .
"""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, StageOrder, actions, one_forward_one_backward


def gpipe(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The order of `stage`; one chunk. Every micro-batch is in flight at once."""
    micro_batches = np.arange(num_microbatches, dtype=np.int64)
    chunks = np.zeros_like(micro_batches)
    return one_forward_one_backward(
        actions(FORWARD, chunks, micro_batches), actions(BACKWARD, chunks, micro_batches), num_warmup=num_microbatches
    )
