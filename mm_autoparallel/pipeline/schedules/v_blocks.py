"""V-Half and V-Min (Qi et al. 2024, arXiv:2405.15362): V-shaped schedules that hold half and a third of what 1F1B does.

Each is a *building block*, the slots in which one micro-batch passes each stage, that repeats every six slots; weight
gradients take the slots that are left, the oldest first. How far passes are apart sets how long a stage holds a
micro-batch. Played, the orders run without the empty slots (the paper's squeezing). Offsets are those of
sail-sg/zero-bubble-pipeline-parallelism (zbv_greedy.py), where in addition a search moves passes of warm-up and
cool-down. Of four stages (letters in lower case are of chunk 1):

    V-Min    stage 0  F . . . . . . f i . . . . . . I        V-Half   stage 0  F . . . . . . . . . f . . . i . … I
             stage 1  . F . . . . f . . i . . . . I .                 stage 1  . . F . . . . . . f . . . . . . i …
             stage 2  . . F . . f . . . . i . . I . .
             stage 3  . . . F f . . . . . . i I . . .
"""

from __future__ import annotations

from collections import deque

import numpy as np

from mm_autoparallel.pipeline.schedules.action import FORWARD, INPUT, WEIGHT, StageOrder

_PERIOD = 6
"""Slots of a building block: three passes of each of two chunks."""


def v_min(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The order of `stage`; two chunks, the second of which runs back. It holds about a third of what 1F1B does."""
    gap = 2 if num_stages % 3 == 0 else 0  # else two passes of a stage would share a slot
    there = 2 * num_stages - stage - 1
    return _repeat((stage, there, 2 * num_stages + gap + stage, 2 * num_stages + gap + there), num_microbatches)


def v_half(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The order of `stage`; two chunks, the second of which runs back. It holds about half of what 1F1B does."""
    gap = 3 if num_stages % 2 == 0 else 0
    back = 3 * num_stages + gap
    return _repeat(
        (2 * stage, 3 * num_stages - stage - 2, back + 2 * stage - 1, back + 3 * num_stages - stage - 2),
        num_microbatches,
    )


def _repeat(slots: tuple[int, int, int, int], num_microbatches: int) -> StageOrder:
    """A stage's order. slots: of the first micro-batch's forward through both chunks, and back through both."""
    passes = ((FORWARD, 0), (FORWARD, 1), (INPUT, 1), (INPUT, 0))
    rows = sorted(
        (slot + _PERIOD * micro_batch, kind, chunk, micro_batch)
        for slot, (kind, chunk) in zip(slots, passes, strict=True)
        for micro_batch in range(num_microbatches)
    )
    order: list[tuple[int, int, int]] = []
    waiting: deque[tuple[int, int, int]] = deque()
    now = 0
    for slot, kind, chunk, micro_batch in rows:
        while waiting and now < slot:
            order.append(waiting.popleft())
            now += 1
        now = slot + 1
        order.append((kind, chunk, micro_batch))
        if kind == INPUT:
            waiting.append((WEIGHT, chunk, micro_batch))
    return np.array([*order, *waiting], dtype=np.int64)
