"""Orders drawn for tests: complete ones that end, for they are what stages did that ran whatever they could."""

from __future__ import annotations

import random

import numpy as np

from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, INPUT, WEIGHT, StageOrder
from mm_autoparallel.pipeline.schedules.virtual_stages import stage_of


def draw_order(
    rng: random.Random, num_stages: int, num_chunks: int, num_microbatches: int, v_shaped: bool, parted: float = 0.7
) -> tuple[StageOrder, ...]:
    """The orders of all stages. parted: how likely a backward is in two parts, drawn for each."""
    num_virtual = num_stages * num_chunks
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(num_stages)]
    forwards = {(0, micro_batch) for micro_batch in range(num_microbatches)}
    backwards: set[tuple[int, int]] = set()
    weights: set[tuple[int, int]] = set()
    while forwards or backwards or weights:
        kind, (k, micro_batch) = rng.choice(
            [*((FORWARD, each) for each in sorted(forwards))]
            + 3 * [*((BACKWARD, each) for each in sorted(backwards))]
            + [*((WEIGHT, each) for each in sorted(weights))]
        )
        if kind == FORWARD:
            forwards.remove((k, micro_batch))
            (forwards if k + 1 < num_virtual else backwards).add((min(k + 1, num_virtual - 1), micro_batch))
        elif kind == BACKWARD:
            backwards.remove((k, micro_batch))
            if k:
                backwards.add((k - 1, micro_batch))
            if rng.random() < parted:
                kind = INPUT
                weights.add((k, micro_batch))
        else:
            weights.remove((k, micro_batch))
        rows[stage_of(k, num_stages, v_shaped)].append((kind, k // num_stages, micro_batch))
    return tuple(np.array(row, dtype=np.int64) for row in rows)
