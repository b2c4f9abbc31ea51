"""Space: the placements of a V that can still win, listed in order of their bound."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT_MS,
    TAIL_MS,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.v_shape.bounds import EVERY, bound_states, list_pairs, stage_figures
from mm_autoparallel.pipeline.placement.orders.v_shape.pieces import Pieces
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Pairs of pieces that one stage may have with the same segments left, beyond which they are not listed; and pairs of
#: all stages, beyond which nothing is bounded: some seconds.
MAX_PAIRS, MAX_LOOKED = 200_000, 50_000_000


@dataclass(frozen=True)
class Chosen:
    """A placement: boundaries [K + 1] in segments and the pieces' rows [K], and its bound."""

    bound_ms: float
    boundaries: tuple[int, ...]
    rows: tuple[int, ...]


class Space:
    """All placements of `pieces`, and the bound of each whose step may be below most_ms."""

    def __init__(self, pieces: Pieces, most_ms: float) -> None:
        """Raises TooManyPatterns."""
        problem = pieces.segments.problem
        self.pieces, self.most_ms = pieces, most_ms
        self._num_stages, self._num_virtual = problem.num_stages, problem.num_virtual_stages
        self.stages = stage_figures(pieces)
        size = pieces.segments.num_segments + 1
        spans = np.ascontiguousarray(np.column_stack([pieces.begin, pieces.end]))
        ends_in = np.lexsort((pieces.begin, pieces.end, pieces.virtual))
        by_begin = _edges(pieces.virtual, pieces.begin, self._num_virtual, size)
        by_end = _edges(pieces.virtual[ends_in], pieces.end[ends_in], self._num_virtual, size)
        self._spans = spans
        sums, hops = _sums(pieces)
        self._of_pairs = (
            problem.num_microbatches,
            np.ascontiguousarray(pieces.relaxed),
            spans,
            by_begin,
            by_end,
            ends_in,
        )
        self._sums, self._hops = sums, hops
        self._behind = _loads_behind(problem, most_ms)
        self._buffer = np.empty((MAX_PAIRS, 2), np.int64), np.empty(MAX_PAIRS)
        self.rest_ms = self._bound(False)

    def _bound(self, only_excess: bool) -> Floats:
        size = self.pieces.segments.num_segments + 1
        rest = np.full((self._num_stages + 1, size, size), np.inf)
        if len(np.unique(self.pieces.virtual)) < self._num_virtual:
            return rest
        most = np.inf if only_excess else self.most_ms
        behind = np.full(self._num_stages, np.inf) if only_excess else self._behind
        others = self._sums, self._hops, self.stages, only_excess, most, behind
        if not bound_states(*self._of_pairs, *others, MAX_LOOKED, rest):
            raise TooManyPatterns
        return rest

    @property
    def least_ms(self) -> float:
        """A bound on every placement and order; infinite where none is below most_ms."""
        return float(self.rest_ms[0, 0, -1])

    @property
    def excess_bytes(self) -> float:
        """By how much some device exceeds its limit at least, with one micro-batch at a time; infinite where a host
        does, or pieces join to no placement."""
        return float(self._bound(True)[0, 0, -1])

    def pairs(self, stage: int, begin: int, end: int) -> tuple[Ints, Floats]:
        """Rows [n, 2] and bounds [n] of the pairs with which `stage` goes on from segments [begin, end). Raises
        TooManyPatterns."""
        rows, bounds = self._buffer
        found = list_pairs(
            stage,
            begin,
            end,
            *self._of_pairs,
            self._sums[stage],
            self._hops,
            self.stages,
            False,
            self.most_ms,
            float(self._behind[stage]),
            EVERY,
            self.rest_ms[stage],
            np.zeros(1, np.int64),
            rows,
            bounds,
        )
        if found > len(bounds):
            raise TooManyPatterns
        return rows[:found].copy(), bounds[:found].copy()

    def list(self, most_ms: float) -> Iterator[Chosen]:
        """Placements below most_ms in order of their bound; of equal bounds the longest beginning goes on first. Raises
        TooManyPatterns."""
        size = self.pieces.segments.num_segments
        number = 0
        waiting: list[tuple[float, int, int, float, tuple[int, int], tuple[tuple[int, int], ...]]] = []
        heapq.heappush(waiting, (self.least_ms, self._num_stages, number, 0.0, (0, size), ()))
        while waiting:
            bound_ms, num_left, _, so_far_ms, (begin, end), chosen = heapq.heappop(waiting)
            if bound_ms >= most_ms:
                return
            s = self._num_stages - num_left
            if num_left == 0:
                yield self._join(bound_ms, chosen)
                continue
            rows, own_ms = self.pairs(s, begin, end)
            own_ms = np.maximum(own_ms, so_far_ms)
            inner, outer = self._spans[rows[:, 0], 1], self._spans[rows[:, 1], 0]
            whole_ms = np.maximum(own_ms, self.rest_ms[s + 1, inner, outer])
            for p in np.flatnonzero(whole_ms < most_ms).tolist():
                number += 1
                pair = int(rows[p, 0]), int(rows[p, 1])
                at = int(inner[p]), int(outer[p])
                entry = float(whole_ms[p]), num_left - 1, number, float(own_ms[p]), at, (*chosen, pair)
                heapq.heappush(waiting, entry)

    def _join(self, bound_ms: float, chosen: tuple[tuple[int, int], ...]) -> Chosen:
        rows = (*(a for a, _ in chosen), *(z for _, z in reversed(chosen)))
        begins = self._spans[list(rows), 0].tolist()
        return Chosen(bound_ms, (*begins, self.pieces.segments.num_segments), rows)


def _edges(virtual: Ints, segment: Ints, num_virtual: int, size: int) -> Ints:
    """[K, N + 2] where the rows of each virtual stage and segment begin; both in order."""
    keys = np.arange(num_virtual)[:, None] * (size + 1) + np.arange(size + 1)[None, :]
    edges: Ints = np.searchsorted(virtual * (size + 1) + segment, keys)
    return edges


def _loads_behind(problem: Problem, most_ms: float) -> Floats:
    """[P] the work, at a time factor of 1, that the stages behind each can take for one micro-batch in such a step."""
    factors = np.array(problem.time_factors)
    rooms_ms = np.maximum(most_ms - np.array(problem.stage_tail_ms), 0.0) * (1.0 + 1e-9) / problem.num_microbatches
    rooms_ms = np.where(factors > 0.0, rooms_ms / np.maximum(factors, np.finfo(float).tiny), np.inf)
    behind: Floats = np.append(np.cumsum(rooms_ms[:0:-1])[::-1], 0.0)
    return behind


def _sums(pieces: Pieces) -> tuple[Floats, Floats]:
    """[P, 5, N + 1] least head and back of every stage, and prefix sums of segments' forwards and input gradients, and
    of all their work at a time factor of 1; [2, K + 1] prefix sums of the least hops, forward and backward."""
    problem, segments, of = pieces.segments.problem, pieces.segments, pieces.relaxed.T
    num_stages, num_virtual, size = problem.num_stages, problem.num_virtual_stages, segments.num_segments + 1
    sums, hops = np.full((num_stages, 5, size), np.inf), np.zeros((2, num_virtual + 1))
    head, back = np.full(size, np.inf), np.full(size, np.inf)
    head[0] = back[0] = 0.0
    for k in range(num_virtual):
        mine = np.flatnonzero(pieces.virtual == k)
        for column, hop in ((0, HOP_FORWARD_MS), (1, HOP_BACKWARD_MS)):
            hops[column, k + 1] = hops[column, k] + of[hop, mine].min(initial=np.inf)
        if k >= num_stages or not len(mine):
            continue
        sums[k, 0], sums[k, 1] = head, back
        first, last = pieces.begin[mine], pieces.end[mine]
        before, after = head[first], back[first]
        head, back = np.full(size, np.inf), np.full(size, np.inf)
        np.minimum.at(head, last, before + of[FORWARD_MS, mine] + of[HOP_FORWARD_MS, mine])
        later = np.maximum(of[WEIGHT_MS, mine] + of[TAIL_MS, mine] + problem.stage_tail_ms[k], after)
        np.minimum.at(back, last, of[HOP_BACKWARD_MS, mine] + of[INPUT_MS, mine] + later)
    factor = min(problem.time_factors)
    forward, gradient, work = [], [], []
    for e in segments.flat.tolist():
        block = problem.chain[e]
        forward.append(block.forward_ms + min(0.0, *(mode.extra_forward_ms for mode in block.modes), 0.0))
        more_ms = min(0.0, *(mode.extra_backward_ms for mode in block.modes), 0.0)
        gradient.append(max(0.0, block.backward_ms - block.backward_weight_ms + more_ms))
        work.append(forward[-1] + block.backward_ms + more_ms)
    for row, each in ((2, forward), (3, gradient)):
        sums[:, row] = factor * np.concatenate([[0.0], np.cumsum(each)])[segments.start]
    sums[:, 4] = np.concatenate([[0.0], np.cumsum(work)])[segments.start]
    return sums, hops
