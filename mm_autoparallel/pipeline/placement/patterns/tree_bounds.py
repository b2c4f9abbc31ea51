"""Bounds of a step by playing its schedule, for the kernels of the tree and of local search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.stage_times import wide_layout

Floats = NDArray[np.float64]
IntArray = NDArray[np.int32]


class PlayedGraph(NamedTuple):
    """The arrays of a TaskGraph that bounding needs, how many durations it has, and scratch: ends_ms [n + 1], free_ms
    [P]."""

    stage: IntArray
    dependency: IntArray
    hop: IntArray
    duration: IntArray
    window: IntArray
    previous_window: IntArray
    num_skipped_periods: int
    num_durations: int
    ends_ms: Floats
    free_ms: Floats


def played(graph: TaskGraph) -> PlayedGraph:
    """What the kernels need of `graph`, with scratch of its own: one for each thread."""
    return PlayedGraph(
        graph.stage,
        graph.dependency,
        graph.hop,
        graph.duration,
        graph.window,
        graph.previous_window,
        graph.num_skipped_periods,
        graph.num_durations,
        np.empty(graph.num_tasks + 1),
        np.empty(graph.num_stages),
    )


@kernel
def step_bounds(graph: PlayedGraph, times_ms: Floats, num_virtual: int) -> tuple[float, float]:
    """Lower and upper bound of the step, equal unless the shortened run has not settled.

    times_ms: as TimesLayout has them.
    """
    at = wide_layout(graph.num_durations, num_virtual, graph.free_ms.shape[0])
    durations, hops, tails = times_ms[: at.hop_forward], times_ms[at.hop_forward : at.tail], times_ms[at.tail :]
    step = engine.play(
        graph.stage, graph.dependency, graph.hop, graph.duration, durations, hops, tails, graph.ends_ms, graph.free_ms
    )
    if graph.num_skipped_periods == 0:
        return step, step
    low, high = engine.shifts(graph.ends_ms, graph.window, graph.previous_window)
    return step + graph.num_skipped_periods * low, step + graph.num_skipped_periods * high
