"""Orders whose first virtual stages run whole backwards, as who cannot part them there needs them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from mm_autoparallel.pipeline.schedules.action import BACKWARD, INPUT, WEIGHT, StageOrder
from mm_autoparallel.pipeline.schedules.orders import find_deadlock
from mm_autoparallel.pipeline.schedules.virtual_stages import stage_of


def join_backwards(
    orders: Sequence[StageOrder], num_chunks: int, v_shaped: bool, num_virtual: int
) -> tuple[tuple[StageOrder, ...], tuple[int, ...]]:
    """`orders` with whole backwards on the first `num_virtual` virtual stages, and which of these had them parted.

    Nothing before the last of these waits for its input gradient but what is joined too. So a whole backward stands
    where its W stood: then nothing ends later than it did. Where an order would never end so (a stage before waits for
    its turn), it stands where its I stood. orders: of all stages, complete ones that end.
    """
    num_stages = len(orders)
    joined: list[StageOrder] = list(orders)
    parted: list[int] = []
    for k in range(min(num_virtual, num_stages * num_chunks)):
        stage, chunk = stage_of(k, num_stages, v_shaped), k // num_stages
        order = joined[stage]
        if not np.any((order[:, 0] == INPUT) & (order[:, 1] == chunk)):
            continue
        parted.append(k)
        joined[stage] = _join(order, chunk, place=WEIGHT)
        if find_deadlock(joined, num_chunks, v_shaped):
            joined[stage] = _join(order, chunk, place=INPUT)
    return tuple(joined), tuple(parted)


def join_at_inputs(
    orders: Sequence[StageOrder], num_chunks: int, v_shaped: bool, virtual: Collection[int]
) -> tuple[StageOrder, ...]:
    """`orders` with whole backwards on these virtual stages, where their I stood: what waits for it waits longer."""
    num_stages = len(orders)
    joined: list[StageOrder] = list(orders)
    for k in virtual:
        stage = stage_of(k, num_stages, v_shaped)
        joined[stage] = _join(joined[stage], k // num_stages, place=INPUT)
    return tuple(joined)


def _join(order: StageOrder, chunk: int, place: int) -> StageOrder:
    """`order` with the I and W of `chunk` as one B, at the place of the one of kind `place`."""
    dropped = WEIGHT if place == INPUT else INPUT
    kind, of_chunk = order[:, 0], order[:, 1] == chunk
    kept: StageOrder = order[~((kind == dropped) & of_chunk)].copy()
    kept[(kept[:, 0] == place) & (kept[:, 1] == chunk), 0] = BACKWARD
    return kept
