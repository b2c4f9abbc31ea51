"""Confirm a bound of free orders: show that no placement, whatever its orders, takes less time.

What stages could hold is listed, and what own bounds exclude goes. The placements that are left are divided at a
boundary, and again at another, or at a choice of modes. A part all of whose stages take the least of what they have
left is asked of a model of their orders: if it has none, no placement of the part has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.certify.confirm_v import confirm_v
from mm_autoparallel.pipeline.certify.order_bounds import drop_slow
from mm_autoparallel.pipeline.certify.order_model import find_orders
from mm_autoparallel.pipeline.certify.order_options import Fillings, list_fillings
from mm_autoparallel.pipeline.laid_out import has_layouts
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import find_misfits, microbatch_classes
from mm_autoparallel.pipeline.simulate.step import simulate

#: Deterministic time of the solver for a part, and for one placement at first; its growth.
PART_EFFORT, FIRST_EFFORT, GROWTH = 0.05, 0.5, 2.0
#: Parts of fewer placements are divided at once.
SMALL_PART = 4


@dataclass(frozen=True, eq=False)
class _Leaf:
    """One filling of each stage. turn: how often the solver was asked."""

    fillings: list[Fillings]
    turn: int = 0


def confirm_orders(problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> Placement | None:
    """A placement with orders that fits its memory and takes less than bound_ms, or None where there is none.

    Raises Unconfirmed where it cannot tell: stopped, too much to list, figures too close for the solver's units, or
    problems of other kinds.
    """
    if microbatch_classes(problem)[0]:
        raise Unconfirmed("the search covers equal micro-batches only")
    if has_layouts(problem):
        raise Unconfirmed("the search covers one layout a layer only")
    if problem.pair_overlap_fraction > 0.0:
        raise Unconfirmed("the search covers orders without overlapping pairs only")
    if problem.num_chunks > 1:
        return confirm_v(problem, bound_ms, should_stop)
    return OrderCheck(problem, bound_ms, should_stop).run()


class OrderCheck:
    """The check of one bound: parts that are left, and how often the solver was asked."""

    def __init__(self, problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> None:
        self.problem, self.bound_ms, self.should_stop = problem, bound_ms, should_stop
        self.num_asked = 0

    def run(self) -> Placement | None:
        """See `confirm_orders`."""
        waiting = [list_fillings(self.problem, self.bound_ms, self.should_stop)]
        leaves: list[_Leaf] = []
        is_close = False
        while waiting or leaves:
            if self.should_stop():
                raise Unconfirmed(f"the search was stopped after it had asked {self.num_asked:,} times for orders")
            if waiting:
                part = self._drop_slow(waiting.pop())
                if not all(map(len, part)):
                    continue
                if all(len(of) == 1 for of in part):
                    leaves.append(_Leaf(part))
                elif _count(part) < SMALL_PART or self._ask(part, PART_EFFORT)[0] != "infeasible":
                    waiting += _divide(part)
                continue
            leaf = leaves.pop(0)
            answer, orders = self._ask(leaf.fillings, FIRST_EFFORT * GROWTH**leaf.turn, leaf.turn)
            if answer == "found":
                found = self._play(leaf.fillings, orders)
                if found is not None:
                    return found
                is_close = True
            if answer == "unknown":
                leaves.append(replace(leaf, turn=leaf.turn + 1))
        if is_close:
            raise Unconfirmed("some placement is closer to it than the solver's units can tell")
        return None

    def _drop_slow(self, part: list[Fillings]) -> list[Fillings]:
        return drop_slow(part, self.problem.num_microbatches, self.bound_ms, self.should_stop)

    def _ask(self, part: list[Fillings], effort: float, turn: int = 0) -> tuple[str, tuple[str, ...]]:
        self.num_asked += 1
        least = np.array([of.figures.min(axis=0) for of in part])
        found = find_orders(least, self.problem.num_microbatches, self.bound_ms, effort, self.should_stop, turn)
        return found.answer, found.orders

    def _play(self, fillings: list[Fillings], orders: tuple[str, ...]) -> Placement | None:
        """The placement with these orders, where played it fits and is below the bound."""
        edges = np.cumsum([0, *(len(block.modes) for block in self.problem.chain)]).tolist()
        layers = tuple(tuple(of.layers[0].tolist()) for of in fillings)
        modes = tuple(tuple(tuple(of.modes[0, a:b].tolist()) for a, b in pairwise(edges)) for of in fillings)
        placement = Placement(layers, modes, orders)
        timeline = simulate(self.problem, placement)
        misfits = find_misfits(self.problem, timeline.peak_memory_bytes, timeline.peak_host_bytes)
        return None if misfits or timeline.step_ms >= self.bound_ms else placement


def _count(part: list[Fillings]) -> float:
    """How many placements a part has."""
    ways = np.zeros(1 + max(int(of.end.max()) for of in part))
    ways[0] = 1.0
    for of in part:
        before, ways = ways, np.zeros_like(ways)
        np.add.at(ways, of.end, before[of.begin])
    return float(ways[-1])


def _divide(part: list[Fillings]) -> list[list[Fillings]]:
    """Two parts: boundaries of a stage up to its middle one, and beyond; or where all are fixed the fillings of one
    stage up to its middle one, and beyond."""
    ends = [np.unique(of.end) for of in part]
    most = int(np.argmax([len(of) for of in ends]))
    if len(ends[most]) > 1:
        middle = ends[most][(len(ends[most]) - 1) // 2]
        low = [of.select(of.end <= middle) if s == most else of for s, of in enumerate(part)]
        high = [of.select(of.end > middle) if s == most else of for s, of in enumerate(part)]
        return [high, low]
    most = int(np.argmax([len(of) for of in part]))
    half = len(part[most]) // 2
    order = np.argsort(part[most].figures.sum(axis=1), kind="stable")
    return [
        [of.select(some) if s == most else of for s, of in enumerate(part)] for some in (order[half:], order[:half])
    ]
