"""TaskGraph: a schedule flattened once into topological order, so that playing it is one pass over arrays.

A task is one action of one stage. It starts when the stage's previous task has ended and its data has arrived: the
output of the virtual stage before (forward) or the gradient of the one after (backward, input gradient); a weight
gradient waits for its stage alone. A pair is two tasks: the forward, which takes no time and waits for its input, and
after it the backward, which takes the time of both and is the end of both. The order does not depend on
durations, so a graph is built once for (schedule, stages, chunks, micro-batches) and played for every placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, INPUT, KINDS, PAIRED, WEIGHT
from mm_autoparallel.pipeline.schedules.catalog import check_rounds, find_schedule
from mm_autoparallel.pipeline.schedules.orders import find_deadlock, pad_orders, read_orders
from mm_autoparallel.pipeline.schedules.virtual_stages import stage_of, virtual_stage
from mm_autoparallel.pipeline.simulate.engine import topological_order

Ints = NDArray[np.int64]
IntArray = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Arrays over tasks in topological order; K virtual stages, C classes of micro-batches.

    stage, kind, chunk, micro_batch: [n]. dependency: index of the task whose data it waits for, n if none.
    hop: which entry of the hop times lies between, [2 · (K - 1)] forward then backward; 2 · (K - 1), a zero, if none.
    place: [n] k · C + class, of its virtual stage k and micro-batch. duration: which entry of the durations it takes:
    K · C of each kind of action, kind · K · C + place; then one of each pair and a zero, if there are any. num_kinds:
    4, or 2 where no backward is parted. pairs: [., 2] which entries of a forward and of a backward run together.
    v_shaped: see schedules/virtual_stages.py.
    in_flight, pending: per stage the largest counts per chunk of micro-batches in flight, and of those whose weight
    gradient alone is left (rows of both that no other dominates, [., V]).
    window, previous_window: task pairs one period apart in the steady state; empty where the run was not shortened.
    num_skipped_periods: periods of the full run that this graph leaves out (0: it is the full run).
    """

    num_stages: int
    num_chunks: int
    num_microbatches: int
    num_classes: int
    stage: IntArray
    kind: IntArray
    chunk: IntArray
    micro_batch: IntArray
    dependency: IntArray
    hop: IntArray
    place: IntArray
    duration: IntArray
    num_kinds: int
    pairs: Ints
    v_shaped: bool
    in_flight: tuple[Ints, ...]
    pending: tuple[Ints, ...]
    window: IntArray
    previous_window: IntArray
    num_skipped_periods: int

    @property
    def num_tasks(self) -> int:
        return len(self.stage)

    @property
    def num_durations(self) -> int:
        """Of all kinds of actions, of pairs, and the zero."""
        alone = self.num_kinds * self.num_stages * self.num_chunks * self.num_classes
        return alone + len(self.pairs) + bool(len(self.pairs))

    @property
    def stage_of(self) -> tuple[int, ...]:
        """[K] the stage that holds each virtual stage."""
        return tuple(stage_of(k, self.num_stages, self.v_shaped) for k in range(self.num_stages * self.num_chunks))


@lru_cache(maxsize=64)
def full_graph(
    schedule: str,
    num_stages: int,
    num_chunks: int,
    num_microbatches: int,
    classes: tuple[int, ...] = (),
    orders: tuple[str, ...] = (),
) -> TaskGraph:
    """The graph of the whole step. classes: class of each micro-batch (empty: all of one class). orders: of each stage,
    where no rule gives them. Raises PlanError where these are wrong or never end, JobError where there are none.
    """
    return _build(schedule, num_stages, num_chunks, num_microbatches, classes, 0, orders)


@lru_cache(maxsize=64)
def short_graph(schedule: str, num_stages: int, num_chunks: int, num_microbatches: int) -> TaskGraph:
    """A graph that leaves out periods of the steady state of equal micro-batches, or the full one where nothing is
    gained.

    The run is a max-plus linear system (Baccelli et al., Synchronization and Linearity, 1992): if between two periods
    every task moved by at least lo and at most hi, then so does every later period, and the full step lies in
    [short + skipped · lo, short + skipped · hi]; it is exact where lo = hi.
    """
    num_simulated = 5 * num_stages + num_microbatches % num_stages
    if not find_schedule(schedule, num_chunks).periodic or num_microbatches < num_simulated + 2 * num_stages:
        return full_graph(schedule, num_stages, num_chunks, num_microbatches)
    skipped = (num_microbatches - num_simulated) // num_stages
    return _build(schedule, num_stages, num_chunks, num_simulated, (), num_skipped_periods=skipped)


def _build(
    schedule: str,
    num_stages: int,
    num_chunks: int,
    num_microbatches: int,
    classes: tuple[int, ...],
    num_skipped_periods: int,
    texts: tuple[str, ...] = (),
) -> TaskGraph:
    rule = find_schedule(schedule, num_chunks)
    check_rounds(rule, num_stages, num_microbatches)
    if texts:
        orders = [*read_orders(texts, num_stages, num_chunks, num_microbatches)]
    else:
        orders = [rule.order(num_stages, num_chunks, num_microbatches, stage) for stage in range(num_stages)]
    order = pad_orders(orders)
    columns, num_tasks = topological_order(order, num_chunks, num_microbatches, rule.v_shaped)
    stage, kind, chunk, micro_batch, position, dependency, hop = columns[:, :num_tasks]
    if num_tasks < columns.shape[1]:
        waiting = find_deadlock(orders, num_chunks, rule.v_shaped)
        raise PlanError(f"orders never end: {waiting}") if texts else RuntimeError(f"{schedule} deadlocks: {waiting}")
    of_microbatch = np.array(classes or (0,) * num_microbatches, dtype=np.int32)
    num_classes = int(of_microbatch.max(initial=0)) + 1
    of_chunk = np.array(
        [[virtual_stage(c, s, num_stages, rule.v_shaped) for s in range(num_stages)] for c in range(num_chunks)],
        dtype=np.int32,
    )
    place = of_chunk[chunk, stage] * num_classes + of_microbatch[micro_batch]
    num_places = num_stages * num_chunks * num_classes
    splits = rule.splits or bool(np.any(kind == INPUT))
    num_kinds = len(KINDS) if splits else 2
    duration = (kind * num_places + place).astype(np.int32)
    pairs = _join_pairs(order[stage, position, 0] == PAIRED, duration, num_kinds * num_places)
    window, previous = (
        _windows(orders, position, stage, num_stages, num_chunks) if num_skipped_periods else (_NONE, _NONE)
    )
    held = [_most_held(stage_order, num_chunks, splits) for stage_order in orders]
    return TaskGraph(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        num_classes=num_classes,
        stage=stage,
        kind=kind,
        chunk=chunk,
        micro_batch=micro_batch,
        dependency=dependency,
        hop=hop,
        place=place,
        duration=duration,
        num_kinds=num_kinds,
        pairs=pairs,
        v_shaped=rule.v_shaped,
        in_flight=tuple(rows[:, :num_chunks] for rows in held),
        pending=tuple(rows[:, num_chunks:] if splits else np.zeros_like(rows) for rows in held),
        window=window,
        previous_window=previous,
        num_skipped_periods=num_skipped_periods,
    )


_NONE = np.zeros(0, dtype=np.int32)


def _join_pairs(is_paired: NDArray[np.bool_], duration: IntArray, num_alone: int) -> Ints:
    """Give the tasks of pairs their entries, behind the `num_alone` of actions that run alone; which pairs there are,
    [., 2]. is_paired: of forwards, each with its backward as the next task of its stage.
    """
    (forwards,) = np.nonzero(is_paired)
    if not len(forwards):
        return np.zeros((0, 2), dtype=np.int64)
    backwards = forwards + 1  # flattened at once
    both = np.column_stack([duration[forwards], duration[backwards]]).astype(np.int64)
    pairs, of_task = np.unique(both, axis=0, return_inverse=True)
    duration[forwards] = num_alone + len(pairs)
    duration[backwards] = num_alone + np.ravel(of_task)
    return pairs


def _most_held(order: Ints, num_chunks: int, splits: bool) -> Ints:
    """Rows of per-chunk counts that no other row dominates: in flight, and where backwards are parted also pending,
    after each forward and after each input gradient.
    """
    kind, chunk = order[:, 0], order[:, 1]
    is_forward = (kind == FORWARD) | (kind == PAIRED)
    change = np.zeros((len(order), (2 if splits else 1) * num_chunks), dtype=np.int64)
    at = np.arange(len(order))
    change[at, chunk] = np.where(is_forward, 1, np.where(kind == WEIGHT, 0, -1))
    if splits:
        change[at, num_chunks + chunk] = np.where(kind == INPUT, 1, np.where(kind == WEIGHT, -1, 0))
    counts = distinct_rows(np.cumsum(change, axis=0)[is_forward | (kind == INPUT)])
    largest: Ints = counts[~dominated_rows(counts)]
    return largest


def dominated_rows(rows: Ints) -> NDArray[np.bool_]:
    """Which of different rows are nowhere above some other one."""
    parts = np.array_split(rows, 1 + len(rows) // 256)  # what is compared at once stays small
    above = [np.sum(np.all(rows[None, :, :] >= part[:, None, :], axis=2), axis=1) > 1 for part in parts]
    return np.concatenate(above)


def distinct_rows(rows: Ints) -> Ints:
    """The different rows of non-negative numbers [n, m], sorted; where they fit into one number each, by those."""
    radix = rows.max(axis=0, initial=0) + 1
    if float(np.prod(radix.astype(np.float64))) >= 2.0**62:
        return np.unique(rows, axis=0)
    places = np.append(np.cumprod(radix[:0:-1])[::-1], 1)
    codes = np.unique(rows @ places)
    distinct: Ints = codes[:, None] // places % radix
    return distinct


def _windows(
    orders: list[Ints], position: IntArray, stage: IntArray, num_stages: int, num_chunks: int
) -> tuple[IntArray, IntArray]:
    """Task pairs one period (`num_stages` micro-batches) apart, at the end of the steady state.

    Iteration i of stage s is its i-th forward-backward pair after warm-up. With the cut of stage s at iteration
    i* + s every dependency points backward by at most one period (forward: +1 or +2 iterations a stage and at most
    num_stages at the wrap; backward: 0 and num_stages), so one period of ends determines all later ones.
    """
    period = num_stages * num_chunks
    num_tasks = len(orders[0])
    warmups = [int(np.argmax(order[:, 0] == BACKWARD)) - 1 for order in orders]  # the first backward ends iteration 0
    num_iterations = [num_tasks // 2 - warmup for warmup in warmups]
    cut = min(n - s for s, n in enumerate(num_iterations))
    by_position = np.empty((num_stages, num_tasks), dtype=np.int32)
    by_position[stage, position] = np.arange(len(stage), dtype=np.int32)
    window, previous = [], []
    for s, warmup in enumerate(warmups):
        end = warmup + 2 * (cut + s)
        window.append(by_position[s, end - 2 * period : end])
        previous.append(by_position[s, end - 4 * period : end - 2 * period])
    return np.concatenate(window), np.concatenate(previous)
