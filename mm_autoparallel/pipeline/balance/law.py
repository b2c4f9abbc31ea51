"""What a dealing costs: the law by which loads of encoder and decoder become the times of a pipeline's tasks.

A stage takes of a micro-batch's load its share by its count of layers of that part, the forward a third of it (all of
it where the part is frozen) and the backward the rest; a backward that is parted gives each of its halves a third.
There are no transfers. Replicas meet at the end, so the step is the longest of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from mm_autoparallel.pipeline.balance.ordering import Floats, Tasks, play_all
from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, INPUT, WEIGHT
from mm_autoparallel.pipeline.schedules.catalog import find_schedule, parts_backwards
from mm_autoparallel.pipeline.schedules.virtual_stages import stage_of
from mm_autoparallel.pipeline.simulate.graph import TaskGraph, full_graph

PARTS = ("encoder", "decoder")
FORWARD_FRACTION = 1.0 / 3.0
"""Of forward and backward together: a backward multiplies twice what its forward multiplies once."""


@dataclass(frozen=True)
class Law:
    """A pipeline on which samples run.

    layers: of each of PARTS, on each virtual stage. frozen: of each of PARTS, whether it has no backward. schedule,
    num_stages, num_chunks, orders: as Problem has them.
    """

    schedule: str
    num_stages: int
    num_chunks: int
    layers: tuple[tuple[int, ...], tuple[int, ...]]
    frozen: tuple[bool, bool] = (False, False)
    orders: tuple[str, ...] = ()

    @cached_property
    def shares(self) -> Floats:
        """[K, 2] what each virtual stage takes of either load."""
        counts = np.array(self.layers, dtype=np.float64).T
        total = counts.sum(axis=0)
        shares: Floats = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
        return shares

    @cached_property
    def splits(self) -> bool:
        """Whether backwards are parted."""
        return parts_backwards(self.schedule, self.num_chunks, self.orders)

    @cached_property
    def of_kind(self) -> Floats:
        """[kinds, K, 2] what an action of each kind takes of either load; 4 where backwards are parted, else 2."""
        forward = np.where(self.frozen, 1.0, FORWARD_FRACTION)
        fractions = np.empty((4, 2))
        fractions[FORWARD], fractions[BACKWARD] = forward, 1.0 - forward
        fractions[INPUT] = fractions[WEIGHT] = 0.5 * (1.0 - forward)
        return fractions[: 4 if self.splits else 2, None, :] * self.shares

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """[K] the stage of each virtual stage."""
        v_shaped = find_schedule(self.schedule, self.num_chunks).v_shaped
        return tuple(stage_of(k, self.num_stages, v_shaped) for k in range(self.num_stages * self.num_chunks))

    @cached_property
    def of_stage(self) -> Floats:
        """[P, 2] what each stage takes of either load, forwards and backwards of all its chunks."""
        sums = np.zeros((self.num_stages, 2))
        np.add.at(sums, list(self.stage_of), self.shares)
        return sums

    def graph(self, num_microbatches: int) -> TaskGraph:
        """A step of so many micro-batches, each a class. Raises JobError or PlanError where there is none."""
        classes = tuple(range(num_microbatches))
        return full_graph(self.schedule, self.num_stages, self.num_chunks, num_microbatches, classes, self.orders)

    def tasks(self, num_microbatches: int) -> Tasks:
        """The same for the kernels."""
        return _tasks(self, num_microbatches)

    def replica_steps_ms(self, ms: Floats) -> Floats:
        """[R] the step of each replica. ms: [R, M, 2], load of each micro-batch of encoder and decoder."""
        num_replicas, num_microbatches, _ = ms.shape
        tasks = self.tasks(num_microbatches)
        times_ms = np.empty((num_replicas, tasks.num_durations))
        return play_all(np.ascontiguousarray(ms, dtype=np.float64).reshape(-1, 2), tasks, times_ms)


@lru_cache(maxsize=16)
def _tasks(law: Law, num_microbatches: int) -> Tasks:
    graph = law.graph(num_microbatches)
    return Tasks(
        graph.stage,
        graph.dependency,
        graph.hop,
        graph.duration,
        graph.pairs,
        law.of_kind.reshape(-1, 2).copy(),
        np.zeros(max(2 * len(law.shares) - 1, law.num_stages)),
        law.num_stages,
        num_microbatches,
        graph.num_durations,
    )


def bound_step(law: Law, ms: Floats, num_replicas: int) -> float:
    """What no dealing of these samples undercuts, in ms. ms: [n, 2].

    A stage of the replica that has most of its work runs at least the mean of all replicas. Before its first task that
    takes time a micro-batch with some sample came through the stages before, and after its last one that one's rest
    still runs; the least of either over all samples is lost at least, whatever is empty. And a sample passes through
    all stages and back by itself.
    """
    total_ms = ms.sum(axis=0) / num_replicas
    forward, back = law.of_kind[FORWARD], law.of_kind[INPUT if law.splits else BACKWARD]  # [K, 2]
    passes = forward.sum(axis=0) + back.sum(axis=0)
    before = np.cumsum(forward, axis=0) - forward
    behind = np.cumsum(back, axis=0) - back  # after a backward: those of the virtual stages before
    after = passes - np.cumsum(forward, axis=0)  # after a forward
    ends = np.where(back.any(axis=1, keepdims=True), behind, after)
    before_ms, end_ms = (_least(ms, shares) for shares in (before, ends))  # [K]
    bound_ms = float((ms @ passes).max(initial=0.0))
    for stage in range(law.num_stages):
        mine = [k for k, of in enumerate(law.stage_of) if of == stage]
        work = law.of_kind[:, mine].sum(axis=1) @ total_ms  # [kinds]
        fill_ms, drain_ms = before_ms[mine].min(), end_ms[mine].min()
        if law.splits:
            without_ms = float(work[FORWARD] + work[INPUT])
            bound_ms = max(bound_ms, without_ms + fill_ms + drain_ms, without_ms + float(work[WEIGHT]) + fill_ms)
        else:
            bound_ms = max(bound_ms, float(work.sum()) + fill_ms + drain_ms)
    return float(bound_ms)


def _least(ms: Floats, shares: Floats) -> Floats:
    """[K] the least over samples of what each row of shares [K, 2] takes of ms [n, 2]."""
    least: Floats = (shares @ ms.T).min(axis=1)
    return least
