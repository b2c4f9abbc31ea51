"""A first placement at once: balanced, with the modes that its memory asks for, and a short local search after it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.placement.bubbles.bounds import bound_placed
from mm_autoparallel.pipeline.placement.bubbles.construct import construct
from mm_autoparallel.pipeline.placement.incumbents.anneal import NOTHING_FITS, Annealer
from mm_autoparallel.pipeline.placement.incumbents.balanced import balanced_starts
from mm_autoparallel.pipeline.placement.infeasible import explain_windows
from mm_autoparallel.pipeline.placement.segments import Segments, cut_into_segments
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.encoders.orders import write_orders
from mm_autoparallel.pipeline.simulate.encoders.play import Player
from mm_autoparallel.pipeline.simulate.encoders.step import part_encoders
from mm_autoparallel.pipeline.simulate.encoders.tasks import decoder_on_devices, list_tasks
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.loads import equal_graphs
from mm_autoparallel.pipeline.simulate.step import simulate

MOVES, MOVE_TASKS = 100, 2_000_000
"""Of the local search, moves for each virtual stage, and simulated tasks at most: some 20 ms. Assumed."""
ORDERS = 5
"""Orders of encoders' passes that are tried. Assumed."""


def place_at_once(problem: Problem) -> tuple[Placement, bool]:
    """A good placement of `problem` in some tens of milliseconds, and whether it fits; the best is `place`'s to find.

    Where none that fits is met, it is the one that is over its limits least. The same problem gives the same placement.
    Raises JobError where no placement is lawful, or the problem contradicts itself.
    """
    if problem.encoders:
        return _place_beside(part_encoders(problem))
    segments = cut_into_segments(problem)
    reason = explain_windows(segments)
    if reason:
        raise JobError(reason)
    short, full = equal_graphs(problem)
    if segments.has_layouts:
        return _place_mixes(segments, full)
    annealer = Annealer(segments, short, full, seed=0)
    num_moves = min(MOVES * problem.num_virtual_stages, MOVE_TASKS // short.num_tasks)
    annealer.run(max(1, num_moves), True, lambda: False)
    placement = segments.placement(*annealer.best_boundaries())
    return placement, bool(np.isfinite(annealer.best_ms) and annealer.best_ms < NOTHING_FITS)


def _place_beside(problem: EncodedProblem) -> tuple[Placement, bool]:
    """The same with encoders: passes of theirs between the decoder's actions, in a few orders, of which the best."""
    alone, decoder_fits = place_at_once(decoder_on_devices(problem))
    tasks = list_tasks(problem, alone)
    least_ms = bound_placed(tasks, simulate(problem.decoder, alone).step_ms)
    for is_limited in (True, False):
        _, words = construct(Player(tasks, is_limited), least_ms, ORDERS, lambda: False)
        if words is not None:
            orders = write_orders(tasks, words)[: problem.decoder.num_stages]
            return replace(alone, orders=orders), decoder_fits and is_limited
    raise JobError("no order of the encoders' passes was found that ends")


def _place_mixes(segments: Segments, graph: TaskGraph) -> tuple[Placement, bool]:
    """The same where layers have several layouts: the fastest of the balanced starts, which fit where there are any."""
    best_ms, best = np.inf, None

    def offer(placement: Placement) -> float:
        nonlocal best_ms, best
        step_ms = simulate(segments.problem, placement).step_ms
        if step_ms < best_ms:
            best_ms, best = step_ms, placement
        return best_ms

    balanced_starts(segments, graph, offer)
    if best is not None:
        return best, True
    boundaries = np.linspace(0, segments.num_segments, segments.problem.num_stages + 1).astype(int)
    boundaries = np.clip(boundaries, segments.first, segments.last)
    return segments.placement(boundaries.tolist(), [[0] * segments.num_lanes] * segments.problem.num_stages), False
