"""Confirm a bound of free orders of a V: show that no placement there and back, whatever its orders, takes less time.

Stages take units from both ends of the chain. What a stage could hold with the rest still before it is bounded by
`v_pieces` and `v_releases`; of the placements that are left each is asked of a model of its orders (`v_model`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.certify.v_model import find_v_orders
from mm_autoparallel.pipeline.certify.v_pieces import (
    FORWARD,
    HOP_BACKWARD,
    HOP_FORWARD,
    INPUT,
    TAIL,
    bound_pairs,
    extra_ms,
    list_pieces,
    list_stages,
)
from mm_autoparallel.pipeline.certify.v_releases import bound_released
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.step import simulate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Deterministic time of the solver for one placement at first; its growth; placements beyond which none is asked.
FIRST_EFFORT, GROWTH, MAX_PLACEMENTS = 0.5, 2.0, 5_000


def confirm_v(problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> Placement | None:
    """A placement with orders that fits its memory and takes less than bound_ms, or None where there is none.

    Raises Unconfirmed where it cannot tell: stopped, too much to list, or figures too close for the solver's units.
    """
    return _Check(problem, bound_ms, should_stop).run()


class _Check:
    def __init__(self, problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> None:
        self.problem, self.bound_ms, self.should_stop = problem, bound_ms, should_stop
        self.stages, self.pieces = list_stages(problem), list_pieces(problem, bound_ms, should_stop)
        self.size = sum(block.count for block in problem.chain)
        self._open: dict[tuple[int, int, int], list[tuple[int, int]]] = {}

    def run(self) -> Placement | None:
        """See `confirm_v`."""
        waiting = []
        for rows in self._placements(0, 0, self.size):
            waiting.append((rows, 0))
            if len(waiting) > MAX_PLACEMENTS:
                raise Unconfirmed("its own bounds leave more placements than can be asked")
        is_close = False
        while waiting:
            if self.should_stop():
                raise Unconfirmed("the search was stopped")
            rows, turn = waiting.pop(0)
            figures = np.array([of.figures[row] for of, row in zip(self.pieces, rows, strict=True)])
            count = self.problem.num_microbatches
            effort = FIRST_EFFORT * GROWTH**turn
            found = find_v_orders(figures, self.stages, count, self.bound_ms, effort, self.should_stop, turn)
            if found.answer == "found":
                below = self._play(rows, found.orders)
                if below is not None:
                    return below
                is_close = True
            if found.answer == "unknown":
                waiting.append((rows, turn + 1))
        if is_close:
            raise Unconfirmed("some placement is closer to it than the solver's units can tell")
        return None

    def _placements(self, s: int, begin: int, end: int) -> Iterator[tuple[int, ...]]:
        """Rows of pieces of virtual stages s to K - 1 - s that fill [begin, end), as far as bounds leave them."""
        for row, other in self._pairs(s, begin, end):
            if s == len(self.stages) - 1:
                yield row, other
                continue
            inner = int(self.pieces[s].end[row]), int(self.pieces[-1 - s].begin[other])
            for rest in self._placements(s + 1, *inner):
                yield row, *rest, other

    def _pairs(self, s: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Of stage s with [begin, end) before it: pairs of pieces that are part of some placement below the bound."""
        key = s, begin, end
        if key in self._open:
            return self._open[key]
        if self.should_stop():
            raise Unconfirmed("the search was stopped")
        first, last = self.pieces[s], self.pieces[-1 - s]
        a, z = np.flatnonzero(first.begin == begin), np.flatnonzero(last.end == end)
        inner, outer = first.end[a][:, None], last.begin[z][None, :]
        joins = inner == outer if s == len(self.stages) - 1 else inner < outer
        joins &= self._work[outer] - self._work[inner] <= self._takes_behind(s)
        at_a, at_z = np.nonzero(joins)
        rows, others = a[at_a], z[at_z]
        found = []
        if len(rows):
            of_a, of_z = first.figures[rows], last.figures[others]
            way = self._way(s, of_a, of_z, first.end[rows], last.begin[others], end)
            head, above = self._ends[0][s][begin], self._ends[1][s][begin]
            m = float(self.problem.num_microbatches)
            bounds = bound_pairs(of_a, of_z, self.stages[s], m, head, above, way)
            left = np.flatnonzero(bounds < self.bound_ms)
            rates = self._rates(s, begin, end, first.end[rows[left]], last.begin[others[left]])
            of_left = way[0][left], way[1][left], way[2][left]
            released = bound_released(of_a[left], of_z[left], self.stages[s], int(m), (head, above), of_left, rates)
            for p in left[released < self.bound_ms].tolist():
                row, other = int(rows[p]), int(others[p])
                is_last = s == len(self.stages) - 1
                if is_last or self._pairs(s + 1, int(first.end[row]), int(last.begin[other])):
                    found.append((row, other))
        self._open[key] = found
        return found

    def _takes_behind(self, s: int) -> float:
        """Work that the stages after s can do for one micro-batch in a step below the bound, at a time factor of 1."""
        behind = list(zip(self.problem.time_factors, self.stages, strict=True))[s + 1 :]
        if any(factor <= 0.0 for factor, _ in behind):
            return math.inf
        rooms_ms = [max(0.0, self.bound_ms - stage.tail_ms) / factor for factor, stage in behind]
        return sum(rooms_ms) / self.problem.num_microbatches * (1.0 + 1e-9)

    @cached_property
    def _work(self) -> Floats:
        """[N + 1] prefix sums of the least that forward and backward take, over the flat chain."""
        each = [0.0]
        for block in self.problem.chain:
            more = [0.0, *(mode.extra_forward_ms for mode in block.modes)]
            again = [0.0, *(mode.extra_backward_ms for mode in block.modes)]
            each += [block.forward_ms + min(more) + block.backward_ms + min(again)] * block.count
        return np.cumsum(each)

    def _way(self, s: int, a: Floats, z: Floats, inner: Ints, outer: Ints, end: int) -> tuple[Floats, Floats, Floats]:
        """Least times from forward to forward, on to the gradient, and from gradient to gradient."""
        forward, gradient, hops = self._sums
        far = len(self.pieces) - 1 - s
        out = a[:, HOP_FORWARD] + hops[0, far] - hops[0, s + 1] + forward[outer] - forward[inner]
        home = a[:, HOP_BACKWARD] + hops[1, far] - hops[1, s + 1] + gradient[outer] - gradient[inner]
        beyond = forward[-1] - forward[end] + gradient[-1] - gradient[end]
        if far < len(self.pieces) - 1:
            beyond += float(np.sum(hops[:, len(self.pieces) - 1] - hops[:, far + 1]))
        turn = z[:, HOP_FORWARD] + z[:, HOP_BACKWARD] + beyond
        return np.maximum(out, 0.0), turn, np.maximum(home, 0.0)

    def _rates(self, s: int, begin: int, end: int, inner: Ints, outer: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """See `bound_released`: what lies on the stages before takes of each micro-batch, or on those behind, in the
        mean of these stages."""
        forward, gradient, _ = self._sums
        before, behind = max(1, s), max(1, len(self.stages) - 1 - s)
        beyond = forward[-1] - forward[end] + gradient[-1] - gradient[end]
        inside, back = forward[outer] - forward[inner], gradient[outer] - gradient[inner]
        first, third = forward[begin] / before, (forward[begin] + beyond) / before
        return np.full(len(inner), first), inside / behind, np.full(len(inner), third), (inside + back) / behind

    @cached_property
    def _sums(self) -> tuple[Floats, Floats, Floats]:
        """Prefix sums [N + 1] of least forwards and gradients over the flat chain, and [2, K + 1] of least hops."""
        factor = min(self.problem.time_factors)
        forward, gradient = [0.0], [0.0]
        for block in self.problem.chain:
            more = [0.0, *(mode.extra_forward_ms for mode in block.modes)]
            again = [0.0, *(mode.extra_backward_ms for mode in block.modes)]
            for _ in range(block.count):
                forward.append(forward[-1] + factor * (block.forward_ms + min(more)))
                of_input = max(0.0, block.backward_ms - block.backward_weight_ms + min(again))
                gradient.append(gradient[-1] + factor * of_input)
        hops = np.zeros((2, len(self.pieces) + 1))
        for k, of in enumerate(self.pieces):
            for row, column in enumerate((HOP_FORWARD, HOP_BACKWARD)):
                hops[row, k + 1] = hops[row, k] + (of.figures[:, column].min() if len(of.figures) else 0.0)
        return np.array(forward), np.array(gradient), hops

    @cached_property
    def _ends(self) -> tuple[list[Floats], list[Floats]]:
        """Of each stage [N + 1]: the least time before its first forward, and after its last gradient of an input on
        the stages before, by where its first piece begins."""
        head, above = np.full(self.size + 1, np.inf), np.full(self.size + 1, np.inf)
        head[0], above[0] = 0.0, 0.0
        heads, aboves = [], []
        for of, stage in zip(self.pieces, self.stages, strict=False):
            heads.append(head)
            aboves.append(above)
            rows = of.figures
            before, after = head[of.begin], above[of.begin]
            head, above = np.full(self.size + 1, np.inf), np.full(self.size + 1, np.inf)
            np.minimum.at(head, of.end, before + rows[:, FORWARD] + rows[:, HOP_FORWARD])
            later = np.maximum(extra_ms(rows) + rows[:, TAIL] + stage.tail_ms, after)
            np.minimum.at(above, of.end, rows[:, HOP_BACKWARD] + rows[:, INPUT] + later)
        return heads, aboves

    def _play(self, rows: tuple[int, ...], orders: tuple[str, ...]) -> Placement | None:
        """The placement with these orders, where played it fits and is below the bound."""
        edges = np.cumsum([0, *(len(block.modes) for block in self.problem.chain)]).tolist()
        layers, modes = [], []
        for of, row in zip(self.pieces, rows, strict=True):
            layers.append(tuple(of.layers[row].tolist()))
            modes.append(tuple(tuple(of.modes[row, a:b].tolist()) for a, b in pairwise(edges)))
        placement = Placement(tuple(layers), tuple(modes), orders)
        timeline = simulate(self.problem, placement)
        misfits = find_misfits(self.problem, timeline.peak_memory_bytes, timeline.peak_host_bytes)
        return None if misfits or timeline.step_ms >= self.bound_ms else placement
