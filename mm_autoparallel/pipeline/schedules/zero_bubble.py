"""Zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241): backwards run in two parts, and weight gradients wait until
a stage would be idle. I hands the gradient on, W is the weights' part.

ZB-H1, three stages, four micro-batches, all passes alike (time runs right; . is idle). Its weight gradients lag behind
by as many micro-batches as there are stages before, so no stage holds more than the first of 1F1B does:

    stage 0  F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1   . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2   .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

ZB-H2 warms up with twice as many forwards, lags twice as far and holds nearly twice as much; with 2 P - 1 micro-batches
or more no stage is idle between its first pass and its last. Six micro-batches:

    stage 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5  .  .
    stage 1   . F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5  .
    stage 2   .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

Interleaved: the groups of interleaved 1F1B with the warm-up and the lag of ZB-H1, as torch.distributed.pipelining's
ScheduleInterleavedZeroBubble has it (torch 2.13). Where rounds of about as many micro-batches as there are stages leave
some over, which torch refuses, the first round takes them. Two stages, two chunks, four micro-batches (letters in lower
case are of chunk 1):

    stage 0  F0 F1 f0 f1  . i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
    stage 1   . F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.schedules.action import FORWARD, INPUT, WEIGHT, StageOrder, actions

Ints = NDArray[np.int64]


def zb_h1(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The order of `stage`; one chunk. At most `num_stages - stage` micro-batches are in flight, `stage` more wait for
    their weight gradients."""
    micro_batches = np.arange(num_microbatches, dtype=np.int64)
    return _one_by_one(np.zeros_like(micro_batches), micro_batches, 1, num_stages - stage - 1, stage)


def zb_h2(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The order of `stage`; one chunk. At most `2 (num_stages - stage) - 1` micro-batches are in flight, `2 stage` more
    wait for their weight gradients."""
    micro_batches = np.arange(num_microbatches, dtype=np.int64)
    return _one_by_one(np.zeros_like(micro_batches), micro_batches, 1, 2 * (num_stages - stage - 1), 2 * stage)


def interleaved_zb(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """torch's order: warm-up (chunks - 1) · first round + (stages - stage - 1), weight gradients `stage` late."""
    num_rounds = max(1, num_microbatches // num_stages)
    size, left_over = divmod(num_microbatches, num_rounds)
    first = size + left_over
    ends = np.arange(first, num_microbatches + 1, size)
    chunks, micro_batches = [], []
    for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        chunks.append(np.repeat(np.arange(num_chunks, dtype=np.int64), end - begin))
        micro_batches.append(np.tile(np.arange(begin, end, dtype=np.int64), num_chunks))
    num_warmup = (num_chunks - 1) * first + num_stages - stage - 1
    return _one_by_one(np.concatenate(chunks), np.concatenate(micro_batches), num_chunks, num_warmup, stage)


def _one_by_one(chunks: Ints, micro_batches: Ints, num_chunks: int, num_warmup: int, lag: int) -> StageOrder:
    """`num_warmup` forwards, then a forward, an input gradient and a weight gradient in turn, of which the last lags
    `lag` passes behind; then what is left. chunks, micro_batches: [n] of the forwards; backwards run chunks backward.
    """
    passes = np.arange(len(chunks), dtype=np.int64)
    since = passes - min(num_warmup, len(chunks))  # the turn in which a forward runs; before the first one if negative
    turn = passes + lag
    back = num_chunks - 1 - chunks
    order = np.concatenate(
        [
            actions(FORWARD, chunks, micro_batches),
            actions(INPUT, back, micro_batches),
            actions(WEIGHT, back, micro_batches),
        ]
    )
    last = 3 * len(chunks)
    keys = np.concatenate(
        [np.where(since < 0, since, 3 * since), 3 * passes + 1, np.where(turn < len(chunks), 3 * turn + 2, last + turn)]
    )
    sorted_order: StageOrder = order[np.argsort(keys, kind="stable")]
    return sorted_order
