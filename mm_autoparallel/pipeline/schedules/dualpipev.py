"""DualPipeV (DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe): a V of two chunks a stage whose main part runs a
forward and a whole backward together, so that the one's exchanges hide behind the other's products. As torch's
ScheduleDualPipeV has it (torch 2.13). The last stage is idle for (P - 1) (F&B + B - 3 W), where F&B is what a pair
takes and P the stages; DeepSeek counts twice as many, those of its two directions. MindSpeed runs the same order with
--dualpipev-dw-detach, and without it one whose last backwards are whole (core/pipeline_parallel/dualpipev,
forward_backward_pipelining_with_cutinhalf).

Two stages, five micro-batches, in order (letters in lower case are of chunk 1, brackets run together):

    stage 0  F0 F1 F2 f0 i0 w0 f1 (F3 b1) (f2 B0) (F4 b2) (f3 B1) b3 (f4 B2) b4 I3 W3 I4 W4
    stage 1  F0 f0 F1 f1 F2 b0 (f2 B0) (F3 b1) (f3 B1) (F4 b2) (f4 B2) b3 B3 i4 I4 w4 W4"""

from __future__ import annotations

from collections import deque

import numpy as np

from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, INPUT, PAIRED, WEIGHT, StageOrder

LEAST_ROUNDS = 2
"""Micro-batches that it needs for each stage: fewer do not fill both directions."""


def dualpipev(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The order of `stage`; two chunks, the second of which runs back. It holds at most `2 num_stages + 1`
    forwards of its chunks at once."""
    return _order(num_stages, num_microbatches, stage, parts_last=True)


def dualpipev_whole(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The order of `stage`; two chunks, the second of which runs back: as dualpipev, but for the last backwards, which
    are whole. It holds as much at most, and stages idle longer at the end."""
    return _order(num_stages, num_microbatches, stage, parts_last=False)


def _order(num_stages: int, num_microbatches: int, stage: int, parts_last: bool) -> StageOrder:
    later = num_stages - stage - 1
    forwards, backwards = [0, 0], [0, 0]
    rows: list[tuple[int, int, int]] = []
    waiting: deque[tuple[int, int, int]] = deque()

    def forward(chunk: int, kind: int = FORWARD) -> None:
        rows.append((kind, chunk, forwards[chunk]))
        forwards[chunk] += 1

    def backward(chunk: int, parted: bool = False) -> None:
        rows.append((INPUT if parted else BACKWARD, chunk, backwards[chunk]))
        if parted:
            waiting.append((WEIGHT, chunk, backwards[chunk]))
        backwards[chunk] += 1

    def weight() -> None:
        if waiting:
            rows.append(waiting.popleft())

    def together(forward_chunk: int) -> None:
        forward(forward_chunk, PAIRED)
        backward(1 - forward_chunk)

    for _ in range(2 * later):
        forward(0)
    for _ in range(stage + 1):
        forward(0)
        forward(1)
    for _ in range(later):
        backward(1, parted=True)
        weight()
        forward(1)
    for i in range(num_microbatches - 2 * num_stages + stage + 1):
        if i == 0 and later == 0:  # apart: the last stage has nothing to wait for yet
            forward(0)
            backward(1)
        else:
            together(0)
        together(1)
    for _ in range(later):
        backward(1)
        together(1)
    parted = False
    for i in range(stage + 1):
        is_middle = i == (stage + 1) // 2
        parted = parted or (parts_last and is_middle and stage % 2 == 1)
        backward(1, parted)
        parted = parted or (parts_last and is_middle and stage % 2 == 0)
        backward(0, parted)
    for _ in range(later):
        weight()
        backward(0, parted)
    for _ in range(stage + 1):
        weight()
    return np.array(rows, dtype=np.int64)
