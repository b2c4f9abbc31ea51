"""TaskGraph: a schedule flattened once into topological order, so that playing it is one pass over arrays.

A task is one action of one stage. It starts when the stage's previous task has ended and its data has arrived: the
output of the virtual stage before (forward) or the gradient of the one after (backward). The order does not depend on
durations, so a graph is built once for (schedule, stages, chunks, micro-batches) and played for every placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.engine import topological_order

Ints = NDArray[np.int64]
IntArray = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Arrays over tasks in topological order; K virtual stages, C classes of micro-batches.

    stage, kind, chunk, micro_batch: [n]. dependency: index of the task whose data it waits for, n if none.
    hop: which entry of the hop times lies between, [2 · (K - 1)] forward then backward; 2 · (K - 1), a zero, if none.
    duration: which entry of the durations it takes, (kind · K + k) · C + class.
    in_flight: per stage the largest counts of micro-batches in flight per chunk (rows no other dominates, [., V]).
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
    duration: IntArray
    in_flight: tuple[Ints, ...]
    window: IntArray
    previous_window: IntArray
    num_skipped_periods: int

    @property
    def num_tasks(self) -> int:
        return len(self.stage)


@lru_cache(maxsize=64)
def full_graph(
    schedule: str, num_stages: int, num_chunks: int, num_microbatches: int, classes: tuple[int, ...] = ()
) -> TaskGraph:
    """The graph of the whole step. classes: class of each micro-batch (empty: all of one class)."""
    return _build(schedule, num_stages, num_chunks, num_microbatches, classes, num_skipped_periods=0)


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
) -> TaskGraph:
    order_of = find_schedule(schedule, num_chunks).order
    orders = [order_of(num_stages, num_chunks, num_microbatches, stage) for stage in range(num_stages)]
    order = np.stack(orders)  # [P, 2VM, 3]: every stage runs each chunk's forward and backward of every micro-batch
    columns, num_tasks = topological_order(order, num_chunks, num_microbatches)
    stage, kind, chunk, micro_batch, position, dependency, hop = columns[:, :num_tasks]
    if len(stage) < order.shape[0] * order.shape[1]:
        raise RuntimeError(f"schedule {schedule} deadlocks: {_stuck_heads(order, stage)}")
    of_microbatch = np.array(classes or (0,) * num_microbatches, dtype=np.int32)
    num_classes = int(of_microbatch.max(initial=0)) + 1
    num_virtual = num_stages * num_chunks
    virtual = chunk * num_stages + stage
    duration = (kind * num_virtual + virtual) * num_classes + of_microbatch[micro_batch]
    window, previous = (
        _windows(orders, position, stage, num_stages, num_chunks) if num_skipped_periods else (_NONE, _NONE)
    )
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
        duration=duration.astype(np.int32),
        in_flight=tuple(_largest_in_flight(stage_order, num_chunks) for stage_order in orders),
        window=window,
        previous_window=previous,
        num_skipped_periods=num_skipped_periods,
    )


_NONE = np.zeros(0, dtype=np.int32)


def _stuck_heads(order: Ints, ran_stage: IntArray) -> str:
    ran = np.bincount(ran_stage, minlength=len(order))
    heads = [(s, order[s, n]) for s, n in enumerate(ran.tolist()) if n < order.shape[1]]
    return ", ".join(f"stage {s} waits at {mb}{'FB'[kind]}{chunk}" for s, (kind, chunk, mb) in heads)


def _largest_in_flight(order: Ints, num_chunks: int) -> Ints:
    """Rows of per-chunk in-flight counts after a forward that no other row dominates."""
    change = np.where(order[:, 0] == FORWARD, 1, -1)
    per_chunk = np.zeros((len(order), num_chunks), dtype=np.int64)
    per_chunk[np.arange(len(order)), order[:, 1]] = change
    counts = distinct_rows(np.cumsum(per_chunk, axis=0)[order[:, 0] == FORWARD])
    dominated = [bool(np.any(np.all(counts >= row, axis=1) & np.any(counts > row, axis=1))) for row in counts]
    largest: Ints = counts[~np.array(dominated, dtype=bool)]
    return largest


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
