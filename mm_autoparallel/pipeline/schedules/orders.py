"""Orders that a person or a search gives, one text a stage: that every action is there once, in its turn, and that the
stages do not wait for one another for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.schedules.action import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    PAIRED,
    WEIGHT,
    StageOrder,
    format_action,
    parse_order,
)
from mm_autoparallel.pipeline.schedules.virtual_stages import stage_of, virtual_stage

_MOST_TOLD = 6
"""Stages of a deadlock that are told. Assumed: a reader follows no longer chain."""


def read_orders(
    texts: Sequence[str],
    num_stages: int,
    num_chunks: int,
    num_microbatches: int,
    name_stage: Callable[[int], str] = "orders[{}]".format,
) -> tuple[StageOrder, ...]:
    """The orders of all stages. Raises PlanError, naming stage and action, where one is no action, is missing, is
    repeated, or stands before what it needs of its own stage. name_stage: what a stage's order is called there."""
    if len(texts) != num_stages:
        raise PlanError(f"orders has {len(texts)} entries; num_stages is {num_stages}, and each stage needs its own")
    orders = []
    for stage, text in enumerate(texts):
        order = _parse(text, name_stage(stage))
        _check_order(order, name_stage(stage), num_chunks, num_microbatches)
        orders.append(order)
    return tuple(orders)


@lru_cache(maxsize=64)
def count_sizes(texts: tuple[str, ...]) -> tuple[int, int, int]:
    """Stages, and chunks and micro-batches by the largest number of an action. Raises PlanError as `read_orders`."""
    orders = [_parse(text, f"orders[{stage}]") for stage, text in enumerate(texts)]
    most = np.max([order.max(axis=0, initial=-1) for order in orders], axis=0, initial=-1)
    return len(texts), int(most[1]) + 1, int(most[2]) + 1


def _parse(text: str, where: str) -> StageOrder:
    try:
        return parse_order(text)
    except ValueError as error:
        raise PlanError(f"{where}: {error}") from None


def _check_order(order: StageOrder, where: str, num_chunks: int, num_microbatches: int) -> None:
    seen: set[tuple[int, int, int]] = set()
    for kind, chunk, micro_batch in order.tolist():
        word = format_action(kind, chunk, micro_batch)
        if chunk >= num_chunks or micro_batch >= num_microbatches:
            raise PlanError(
                f"{where} has {word}; chunks are 0 to {num_chunks - 1}, and micro-batches 0 to {num_microbatches - 1}"
            )
        action = kind % PAIRED, chunk, micro_batch
        if action in seen:
            raise PlanError(f"{where} has {word} twice; each action runs once")
        for other, needed in ((BACKWARD, INPUT), (INPUT, BACKWARD)):
            if kind == other and (needed, chunk, micro_batch) in seen:
                raise PlanError(
                    f"{where} has {word} and {format_action(needed, chunk, micro_batch)}; a backward is either whole, "
                    f"B, or an I and a W"
                )
        before = {BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}.get(kind)
        if before is not None and (before, chunk, micro_batch) not in seen:
            raise PlanError(f"{where} has {word} with no {format_action(before, chunk, micro_batch)} before it")
        seen.add(action)
    for (kind, *forward), (_, *backward) in pairwise(order.tolist()):
        if kind == PAIRED and forward == backward:
            raise PlanError(f"{where} pairs {format_action(kind, *forward)} with its own backward, which waits for it")
    for chunk in range(num_chunks):
        for micro_batch in range(num_microbatches):
            of_one = [kind for kind in range(len(KINDS)) if (kind, chunk, micro_batch) in seen]
            if of_one not in ([FORWARD, BACKWARD], [FORWARD, INPUT, WEIGHT]):
                needed = FORWARD if FORWARD not in of_one else WEIGHT if INPUT in of_one else BACKWARD
                told = format_action(needed, chunk, micro_batch) + (" or an I and a W" if needed == BACKWARD else "")
                raise PlanError(f"{where} has no {told}; a stage runs every micro-batch through each of its chunks")


def find_deadlock(orders: Sequence[StageOrder], num_chunks: int, v_shaped: bool) -> str:
    """Which actions wait for which where the stages wait for one another for ever; nothing where all of them end.

    orders: of all stages, as `read_orders` takes them.
    """
    num_stages = len(orders)
    num_virtual = num_stages * num_chunks
    rows = [order.tolist() for order in orders]
    done: set[tuple[bool, int, int]] = set()  # (is a gradient, virtual stage, micro-batch)

    def missing(stage: int, kind: int, chunk: int, micro_batch: int) -> tuple[bool, int, int] | None:
        """What an action waits for that has not run."""
        k = virtual_stage(chunk, stage, num_stages, v_shaped)
        needs = {
            FORWARD: [(False, k - 1, micro_batch)],
            WEIGHT: [(True, k, micro_batch)],
            BACKWARD: [(False, k, micro_batch), (True, k + 1, micro_batch)],
        }[FORWARD if kind == PAIRED else BACKWARD if kind == INPUT else kind]
        return next((need for need in needs if 0 <= need[1] < num_virtual and need not in done), None)

    at = [0] * num_stages
    ready = list(range(num_stages))
    while ready:
        stage = ready.pop()
        began = at[stage]
        while at[stage] < len(rows[stage]):
            some = rows[stage][at[stage] : at[stage] + (2 if rows[stage][at[stage]][0] == PAIRED else 1)]
            if any(missing(stage, *row) for row in some):
                break
            for kind, chunk, micro_batch in some:
                if kind != WEIGHT:
                    k = virtual_stage(chunk, stage, num_stages, v_shaped)
                    done.add((kind in (BACKWARD, INPUT), k, micro_batch))
            at[stage] += len(some)
        if at[stage] > began:
            ready = list(range(num_stages))
    told = []
    for stage, row in enumerate(rows):
        if at[stage] == len(row):
            continue
        head = row[at[stage] : at[stage] + 2] if row[at[stage]][0] == PAIRED else [row[at[stage]]]
        action, need = next((one, found) for one in head if (found := missing(stage, *one)))
        is_gradient, k, micro_batch = need
        other, chunk = stage_of(k, num_stages, v_shaped), k // num_stages
        kinds = {int(kind) for kind, *rest in rows[other] if rest == [chunk, micro_batch]}
        kind = FORWARD if not is_gradient else INPUT if INPUT in kinds else BACKWARD
        told.append(
            f"stage {stage} waits with {format_action(*action)} for {format_action(kind, chunk, micro_batch)} of "
            f"stage {other}"
        )
    more = f", and {len(told) - _MOST_TOLD} more stages wait" if len(told) > _MOST_TOLD else ""
    return ", ".join(told[:_MOST_TOLD]) + more


def pad_orders(orders: Sequence[StageOrder]) -> StageOrder:
    """[P, n, 3] orders of all stages as one array; rows that a shorter one lacks are -1."""
    longest = max(len(order) for order in orders)
    padded = np.full((len(orders), longest, 3), -1, dtype=np.int64)
    for stage, order in enumerate(orders):
        padded[stage, : len(order)] = order
    return padded
