"""ZB-V (Qi et al. 2023, arXiv:2401.10241, section 6): a V of two chunks a stage, so that the stage which begins a
micro-batch also ends it, and backwards in two parts. As torch.distributed.pipelining's ScheduleZBVZeroBubble has it
(torch 2.13). Where forwards, input and weight gradients take as long, no stage is idle from its first pass to its last.

Two stages, four micro-batches, all passes alike (time runs right; letters in lower case are of chunk 1; . is idle):

    stage 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3  .
    stage 1   . F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
"""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.schedules.action import FORWARD, INPUT, WEIGHT, StageOrder


def zbv(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The order of `stage`; two chunks, the second of which runs back. At most `2 num_stages` micro-batches of a chunk
    are in flight or wait for their weight gradients."""
    most = max(2 * num_stages - 1, num_microbatches)  # of fewer, those that are not there are left out
    forwards, inputs, weights = [0, 0], [0, 0], [0, 0]
    rows: list[tuple[int, int, int]] = []

    def run(kind: int, counts: list[int], chunk: int) -> None:
        rows.append((kind, chunk, counts[chunk]))
        counts[chunk] += 1

    def run_back(chunk: int) -> None:
        run(INPUT, inputs, chunk)
        run(WEIGHT, weights, chunk)

    for _ in range(2 * (num_stages - stage) - 1):
        run(FORWARD, forwards, 0)
    for _ in range(stage):
        run(FORWARD, forwards, 1)
        run(FORWARD, forwards, 0)
    for _ in range(num_stages - stage):
        run(FORWARD, forwards, 1)
        run_back(1)
    while forwards[1] < forwards[0] or forwards[0] < most:
        if forwards[0] < most:
            run(FORWARD, forwards, 0)
        run_back(0)
        run(FORWARD, forwards, 1)
        run_back(1)
    for _ in range(stage):
        run(INPUT, inputs, 0)
        run(INPUT, inputs, 1)
    for _ in range(num_stages - stage):
        run_back(0)
    for chunk in (1, 0):
        while weights[chunk] < inputs[chunk]:
            run(WEIGHT, weights, chunk)
    order = np.array(rows, dtype=np.int64)
    there: StageOrder = order[order[:, 2] < num_microbatches]
    return there
