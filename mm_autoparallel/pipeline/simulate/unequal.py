"""The steps of one placement under micro-batches that all differ, by factors on the times of each modality.

What a virtual stage takes is a sum over its blocks, so that the times of each modality by itself are worked out once,
by sum_loads, and every other micro-batch is a product. Hops and tails stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.schedules.action import WEIGHT
from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.graph import TaskGraph, full_graph
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.loads import Loads, sum_loads

Floats = NDArray[np.float64]


def list_modalities(problem: Problem) -> tuple[str, ...]:
    """Those of its blocks, in the order of the chain."""
    return tuple(dict.fromkeys(block.modality for block in problem.chain))


@dataclass(frozen=True, eq=False)
class UnequalSteps:
    """A placement, ready to be played under any factors.

    each_ms: [kinds, modalities, K] what one modality takes of each kind of action on each virtual stage; host_ms:
    [modalities, K] what its bytes take to the host, or back; hops_ms, tails_ms: as `Loads` has them.
    """

    problem: Problem
    graph: TaskGraph
    each_ms: Floats
    host_ms: Floats
    hops_ms: Floats
    tails_ms: Floats

    def play(self, factors: Floats) -> Floats:
        """[R] steps in ms. factors: [R, modalities, M] on the times of each modality in each micro-batch of R runs."""
        steps, durations = np.empty(len(factors)), self._durations_ms(factors)
        graph = self.graph
        ends, free = np.empty(graph.num_tasks + 1), np.empty(graph.num_stages)
        tasks = (graph.stage, graph.dependency, graph.hop, graph.duration)
        for run, durations_ms in enumerate(durations):
            steps[run] = engine.play(*tasks, durations_ms, self.hops_ms, self.tails_ms, ends, free)
        return steps

    def play_together(self, factors: Floats, shared: NDArray[np.bool_]) -> float:
        """The step in ms of R runs at once that have some stages in common. shared: [P] which; factors on what runs
        there are the same in all runs. factors: as play has them."""
        graph = self.graph
        tasks = (graph.stage, graph.dependency, graph.hop, graph.duration)
        return float(engine.play_together(*tasks, self._durations_ms(factors), self.hops_ms, self.tails_ms, shared))

    def _durations_ms(self, factors: Floats) -> Floats:
        """[R, .] in the layout that `TaskGraph.duration` indexes."""
        num_runs = len(factors)
        alone = np.einsum("amk,rmj->rakj", self.each_ms, factors, optimize=True)
        if self.host_ms.any():
            host = np.einsum("mk,rmj->rkj", self.host_ms, factors, optimize=True)
            alone[:, :WEIGHT] = np.maximum(alone[:, :WEIGHT], host[:, None])  # no bytes move beside weights' gradients
        rows = np.ascontiguousarray(alone.reshape(num_runs, -1))
        if not len(self.graph.pairs):
            return rows
        forward, backward = rows[:, self.graph.pairs[:, 0]], rows[:, self.graph.pairs[:, 1]]
        both = forward + backward - self.problem.pair_overlap_fraction * np.minimum(forward, backward)
        return np.concatenate([rows, both, np.zeros((num_runs, 1))], axis=1)


def prepare(problem: Problem, placement: Placement) -> UnequalSteps:
    """`placement`, to be played under factors in place of those of the problem's own micro-batches, which must be
    equal.

    Raises PlanError where it does not fit the problem.
    """
    check_placement(problem, placement)
    modalities = list_modalities(problem)
    links = replace(problem, host_ms_per_byte=(0.0,) * problem.num_stages)
    computed = [sum_loads(_alone(links, [name]), placement) for name in modalities]
    moved = [sum_loads(_alone(problem, [name], computes=False), placement) for name in modalities]
    whole = sum_loads(problem, placement)
    graph = full_graph(
        problem.schedule,
        problem.num_stages,
        problem.num_chunks,
        problem.num_microbatches,
        tuple(range(problem.num_microbatches)),
        problem.orders or placement.orders,
    )
    return UnequalSteps(
        problem=problem,
        graph=graph,
        each_ms=np.array([[_kinds(loads)[kind] for loads in computed] for kind in range(graph.num_kinds)]),
        host_ms=np.array([loads.forward_ms[:, 0] for loads in moved]),
        hops_ms=whole.hops_ms,
        tails_ms=whole.tail_ms,
    )


def _kinds(loads: Loads) -> list[Floats]:
    """[K] of each kind of action, in the order of their codes."""
    of_kinds = (loads.forward_ms, loads.backward_ms, loads.input_ms, loads.weight_ms)
    return [times[:, 0] for times in of_kinds if len(times)]


def _alone(problem: Problem, modalities: Sequence[str], computes: bool = True) -> Problem:
    """The problem in which other modalities take no time; or in which nothing does, and only their bytes move."""

    def idle(block: ChainBlock) -> ChainBlock:
        mine = block.modality in modalities
        if mine and computes:
            return block
        modes = tuple(
            replace(mode, extra_forward_ms=0.0, extra_backward_ms=0.0, host_bytes=mode.host_bytes if mine else 0.0)
            for mode in block.modes
        )
        return replace(block, forward_ms=0.0, backward_ms=0.0, backward_weight_ms=0.0, split_extra_ms=0.0, modes=modes)

    return replace(problem, chain=tuple(map(idle, problem.chain)))
