"""Cuts: paths through the schedule's graph, each with times that prove it to be one.

Whatever the placement, its step is at least as long as any path under its times. A cut keeps the times whose play has
this path as its longest, so anybody with the simulator can find the same path again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import graph_of
from mm_autoparallel.pipeline.simulate.step import CriticalPath, Timeline, trace_critical_path

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cut:
    """path: how often each time lies on it. durations_ms (as Loads has them), hops_ms [2·(K-1) + 1], tails_ms [P]: its
    witness.

    placement: the one whose times these are, if they are one's; a shorter way to write them down.
    """

    path: CriticalPath
    durations_ms: Floats
    hops_ms: Floats
    tails_ms: Floats
    placement: Placement | None = None


def cut_of_times(problem: Problem, durations_ms: Floats, hops_ms: Floats, tails_ms: Floats) -> Cut:
    """The longest path that these times have in the problem's graph."""
    return Cut(
        trace_critical_path(graph_of(problem), durations_ms, hops_ms, tails_ms)[1], durations_ms, hops_ms, tails_ms
    )


def cut_of_timeline(timeline: Timeline, placement: Placement) -> Cut:
    """The critical path of a simulated placement."""
    loads = timeline.loads
    return Cut(timeline.critical_path, loads.durations_ms, loads.hops_ms, loads.tail_ms, placement)


def stage_cuts(problem: Problem) -> list[Cut]:
    """Cuts to begin with, for each stage: the path through all its tasks (other stages weigh next to nothing), and the
    one that passes through the later stages at both ends as well (the others weigh almost as much).
    """
    graph = graph_of(problem)
    num_virtual = problem.num_virtual_stages
    of_stage = np.array(problem.stage_of)
    cuts, seen = [], set()
    for s in range(problem.num_stages):
        for others in (1e-3, 0.95):
            weight = np.where(of_stage == s, 1.0, others)
            durations = np.repeat(np.tile(weight, graph.num_kinds), graph.num_classes)
            if len(graph.pairs):
                durations = np.concatenate([durations, durations[graph.pairs].sum(axis=1), [0.0]])
            cut = cut_of_times(problem, durations, np.zeros(2 * num_virtual - 1), np.zeros(problem.num_stages))
            path = cut.path
            counts = (path.forward, path.backward, path.input, path.weight, path.pairs)
            key = (*(of_kind.tobytes() for of_kind in counts), path.end_stage)
            if key not in seen:
                seen.add(key)
                cuts.append(cut)
    return cuts
