"""Seq1F1B (Sun et al. 2024, arXiv:2406.03488): 1F1B whose units are pieces of each micro-batch's sequences.

Pieces of a micro-batch run forward in order and backward in reverse order, for a piece's keys and values wait for the
gradients of all later ones. What a problem calls micro-batches are pieces here, `num_pieces` to a micro-batch in turn;
where they do not divide, the last one has fewer. MindFormers calls it seqpipe with seq_split_num.

Two stages, two micro-batches of two pieces (time runs right; . is idle):

    stage 0  F0 F1 F2  . B1 F3 B0  . B3 B2
    stage 1   . F0 F1 B1 F2 B0 F3 B3 B2  .
"""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, StageOrder, actions, one_forward_one_backward


def seq_one_f_one_b(num_pieces: int, num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The order of `stage`; one chunk. At most `num_stages - stage + num_pieces - 1` pieces are in flight."""
    pieces = np.arange(num_microbatches, dtype=np.int64)
    first = pieces - pieces % num_pieces
    last = np.minimum(first + num_pieces, num_microbatches) - 1
    chunks = np.zeros_like(pieces)
    return one_forward_one_backward(
        actions(FORWARD, chunks, pieces),
        actions(BACKWARD, chunks, first + last - pieces),
        num_warmup=min(num_microbatches, num_stages - stage - 1 + num_pieces - 1),
    )
