"""Compile the kernels of placement before any clock runs, where this machine has never done so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.placement.incumbents.anneal import Annealer
from mm_autoparallel.pipeline.placement.incumbents.balanced import balanced_starts
from mm_autoparallel.pipeline.placement.paths.branch_and_bound import BranchAndBound
from mm_autoparallel.pipeline.placement.patterns.mode_choices import undominated_rows
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import list_patterns, load_limits
from mm_autoparallel.pipeline.placement.patterns.tree import PatternTree
from mm_autoparallel.pipeline.placement.segments import Segments, cut_into_segments
from mm_autoparallel.pipeline.problem import RECOMPUTE, ChainBlock, Mode, Placement, Problem
from mm_autoparallel.pipeline.simulate.graph import TaskGraph, full_graph, short_graph
from mm_autoparallel.pipeline.simulate.rooms import compile_rooms
from mm_autoparallel.pipeline.simulate.step import simulate


def compile_kernels() -> None:
    """Compile what `place` runs, or wait for a process that does; standard error says why."""
    compile_rooms(PLACEMENT)


def _compile_local_search() -> None:
    """It makes a few moves."""
    for segments, graphs in samples():
        Annealer(segments, *graphs, seed=0).run(10, True, lambda: False)


def _compile_proofs() -> None:
    """Compile starts, tree and splits, which look for placements far from the best."""
    for segments, (short, full) in samples():
        problem = segments.problem
        stages, num_virtual = range(problem.num_stages), problem.num_virtual_stages
        even = Placement(((problem.chain[0].count // num_virtual,),) * num_virtual, (((0, 0),),) * num_virtual)
        roomy_ms = 2.0 * simulate(problem, even).step_ms
        if problem.num_chunks == 1:
            balanced_starts(segments, full, lambda _: np.inf)
        patterns = [list_patterns(segments, full, s, *load_limits(problem, segments, s, roomy_ms)) for s in stages]
        tree = PatternTree(segments, patterns, short, full, roomy_ms, 0.0, lambda: False)
        if tree.layers is not None:  # enough is left for a game
            BranchAndBound(problem, tree.layers, tree.patterns, full, roomy_ms).advance(1, lambda: False)
        tree.advance(10, roomy_ms)
    undominated_rows(np.eye(4))  # four columns, more than the samples' layers have


def _compile_bounds() -> None:
    for segments, _ in samples():
        problem = segments.problem
        bound = bound_step(problem, sharpen=True)
        bound_step(problem, sharpen=True, enough_ms=1.01 * bound.step_ms, settles=True)
        bound_step(replace(problem, memory_limit_bytes=(0.0,) * problem.num_stages))
        if problem.num_chunks == 1:
            bound_step(replace(problem, encoders=(_ENCODER,)))


def samples() -> Iterator[tuple[Segments, tuple[TaskGraph, TaskGraph]]]:
    """Small problems that together run every kernel, of one chunk and of two, with their short and full graphs."""
    modes = (Mode(RECOMPUTE, 0.0, 1.0), Mode("activation", 0.0, 0.5, 0.5))
    chain = (ChainBlock("layer", "text", 8, 1.0, 2.0, 1.0, 1.0, modes),)
    for num_chunks, schedule in ((1, "1f1b"), (2, "interleaved_1f1b")):
        hops = (0.0,) * (2 * num_chunks - 1)
        problem = Problem(2, num_chunks, 20, schedule, chain, (16.0, 16.0), (0.0, 0.0), (0.0, 0.0), hops, hops)
        of = (schedule, 2, num_chunks, 20)
        yield cut_into_segments(problem), (short_graph(*of), full_graph(*of))


_ENCODER = Encoder("any", (1.0,), (1.0,), ((0,), (1,)), static_bytes=(0.0,), activation_bytes=(0.0,))

PLACEMENT = (_compile_local_search, _compile_proofs, _compile_bounds)
"""Rooms whose kernels `place` runs; the longest first."""
