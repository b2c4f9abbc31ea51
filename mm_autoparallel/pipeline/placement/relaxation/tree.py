"""A tree of fractional placements: whole numbers of the main block on each stage, then in each virtual stage.

A mean over stages hides that one of them must hold a layer more than the others. A stage that may hold so many that
they nearly fill the step does so or does not; where the program's best has part of a layer, a stage holds fewer or
more. Either way is a program of its own, whose paths are those found for all. The least bound that is still open bounds
every placement.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut
from mm_autoparallel.pipeline.placement.relaxation.duals import Division, PriceProof, Prices
from mm_autoparallel.pipeline.placement.relaxation.linear_program import (
    NEAR_FRACTION,
    FractionalMaster,
    Limits,
    Unrelaxable,
)
from mm_autoparallel.pipeline.problem import Problem

Floats = NDArray[np.float64]

#: Solves of one part of the tree before it is divided: at the root; below, near the target and far from it (assumed).
FIRST_ROUNDS, ROUNDS, FAR_ROUNDS = 40, 20, 2
#: Shares of the ceiling that the bound is brought to in turn (assumed): what is shown early costs little.
LEVELS = (0.97, 0.98, 0.985, 0.9905, 0.995, 0.9975, 1.0)
#: Counts this near to a whole number are one.
WHOLE = 1e-4


class _Part(NamedTuple):
    """bound_ms: no placement within limits is below. number: which of equal parts came first. node: its place in the
    tree. is_heavy: made by giving a stage as much as it may hold, and not solved since.
    """

    bound_ms: float
    number: int
    limits: Limits
    node: int
    is_heavy: bool


class FractionalTree:
    """The search of one problem; it goes on in slices, to higher targets too.

    lower_bound_ms: no placement is below. exhausted: no part is left that could be divided.
    """

    def __init__(self, problem: Problem, ceiling_ms: float, known: Sequence[Cut] = ()) -> None:
        """ceiling_ms: placements that are not below it are of no interest, so the bound is never above. known: paths of
        the same graph. Raises Unrelaxable.
        """
        self.master = FractionalMaster(problem, ceiling_ms, known)
        block = problem.chain[self.master.main]
        self._problem, self._count = problem, block.count
        layer_ms = (block.forward_ms + block.backward_ms) * np.array(problem.time_factors)
        self._work_ms = layer_ms * problem.num_microbatches  # [P] of one of the main block in the whole step, at least
        self._pinned_ms = np.zeros(problem.num_stages)
        for other in problem.chain:
            if other.microbatch_scale:
                self._work_ms = np.zeros(problem.num_stages)
            elif other.pinned and other is not block:
                stage = 0 if other.pinned == "first" else -1
                load_ms = other.count * (other.forward_ms + other.backward_ms) * problem.num_microbatches
                self._pinned_ms[stage] += load_ms * problem.time_factors[stage]
        self._undividable_ms, self._ceiling_ms = np.inf, ceiling_ms
        self._number = 0
        self._open: list[_Part] = [_Part(0.0, 0, self.master.no_limits(), 0, False)]
        self._nodes: list[Division | Prices | None] = [None]  # prices of what is not divided: those that bound it best

    @property
    def lower_bound_ms(self) -> float:
        return min(self._ceiling_ms, self._undividable_ms, self._open[0].bound_ms if self._open else np.inf)

    @property
    def exhausted(self) -> bool:
        return not self._open or self._undividable_ms <= self._open[0].bound_ms

    def raise_bound(self, ceiling_ms: float, num_iterations: int, should_stop: Callable[[], bool]) -> None:
        """Bring the bound towards ceiling_ms, level by level, in about that many iterations of the solver."""
        stop_at = self.master.num_iterations + num_iterations
        for fraction in LEVELS:
            num_left = stop_at - self.master.num_iterations
            if num_left <= 0 or self.exhausted or should_stop():
                return
            self.advance(fraction * ceiling_ms, ceiling_ms, num_left, should_stop)

    def advance(
        self, target_ms: float, ceiling_ms: float, num_iterations: int, should_stop: Callable[[], bool]
    ) -> None:
        """Bound and divide parts below target_ms for about that many iterations of the solver.

        ceiling_ms: placements that are not below it are of no interest, so the bound is never above.
        """
        ceiling_ms = self._ceiling_ms = min(self._ceiling_ms, ceiling_ms)
        stop_at = self.master.num_iterations + num_iterations
        while not self.exhausted and self.lower_bound_ms < target_ms:
            if self.master.num_iterations >= stop_at or should_stop():
                return
            bound_ms, _, limits, node, is_heavy = heapq.heappop(self._open)
            tight = self._tighten(limits, ceiling_ms)
            if tight is None:
                continue
            full = self._find_full(tight, ceiling_ms)
            is_first = not self._number  # solved once before it is divided: no part is below it
            if full is not None and not (is_heavy or is_first):
                self._divide(bound_ms, tight, node, False, full, int(tight.stage_most[full]), is_heavy=True)
                continue
            fraction = None
            try:
                rounds = (FIRST_ROUNDS, FIRST_ROUNDS) if is_first else (ROUNDS, FAR_ROUNDS)
                own_ms = self.master.bound(tight, target_ms, *rounds, should_stop)
                if own_ms > bound_ms:
                    bound_ms, self._nodes[node] = own_ms, self.master.prices
                if bound_ms >= target_ms or (is_first and full is not None):
                    self._push(bound_ms, tight, node)
                    continue
                fraction = self._find_fraction()
            except Unrelaxable:
                fraction = None  # what is known of it stays all that is known
            if fraction is None:
                self._undividable_ms = min(self._undividable_ms, bound_ms)
            else:
                self._divide(bound_ms, tight, node, *fraction)

    def _used(self) -> tuple[list[Prices], list[int]]:
        """The prices that parts are bounded by, and the numbers of the paths in them."""
        prices = list({id(node): node for node in self._nodes if isinstance(node, Prices)}.values())
        return prices, sorted({path for found in prices for path in found.path_fraction})

    def list_cuts(self) -> tuple[Cut, ...]:
        """The paths that the bound rests on."""
        return tuple(self.master.cuts[n] for n in self._used()[1])

    def proof(self) -> PriceProof:
        """Why no placement is below lower_bound_ms, for whoever does not trust this code."""
        prices, used = self._used()
        number = {id(found): n for n, found in enumerate(prices)}
        path = {before: n for n, before in enumerate(used)}
        return PriceProof(
            self.master.main,
            tuple(self.master.cuts[n] for n in used),
            tuple(
                replace(found, path_fraction={path[n]: w for n, w in found.path_fraction.items()}) for found in prices
            ),
            tuple(number[id(node)] if isinstance(node, Prices) else node for node in self._nodes),
        )

    def _push(self, bound_ms: float, limits: Limits, node: int, is_heavy: bool = False) -> None:
        self._number += 1
        heapq.heappush(self._open, _Part(bound_ms, self._number, limits, node, is_heavy))

    def _divide(
        self,
        bound_ms: float,
        limits: Limits,
        node: int,
        of_virtual_stage: bool,
        at: int,
        least: int,
        is_heavy: bool = False,
    ) -> None:
        """Two parts in place of one: with fewer than `least` there, and with as many or more."""
        fewer, more = len(self._nodes), len(self._nodes) + 1
        self._nodes += [self._nodes[node]] * 2
        self._nodes[node] = Division(of_virtual_stage, at, least, fewer, more)
        kind = "virtual" if of_virtual_stage else "stage"
        self._push(bound_ms, _limit(limits, f"{kind}_most", at, least - 1), fewer)
        self._push(bound_ms, _limit(limits, f"{kind}_least", at, least), more, is_heavy)

    def _tighten(self, limits: Limits, ceiling_ms: float) -> Limits | None:
        """Limits that a step below ceiling_ms keeps as well: each stage works one task after another. None: none
        can."""
        most = np.full(self._problem.num_stages, self._count)
        works = self._work_ms > 0.0
        room_ms = (ceiling_ms - self._pinned_ms) * (1.0 + 1e-9)
        most[works] = np.minimum(most[works], np.floor(room_ms[works] / self._work_ms[works]).astype(np.int64))
        sums = [
            x.reshape(self._problem.num_chunks, -1).sum(axis=0) for x in (limits.virtual_least, limits.virtual_most)
        ]
        least = np.maximum(limits.stage_least, sums[0])
        most = np.minimum(np.minimum(limits.stage_most, most), sums[1])
        if np.any(least > most) or least.sum() > self._count or most.sum() < self._count:
            return None
        return replace(limits, stage_least=least, stage_most=most)

    def _find_full(self, limits: Limits, ceiling_ms: float) -> int | None:
        """The stage that is nearly busy for the whole step with as much as it may hold, if there is one."""
        loads_ms = limits.stage_most * self._work_ms + self._pinned_ms
        loads_ms[limits.stage_least >= limits.stage_most] = 0.0
        at = int(loads_ms.argmax())
        return at if loads_ms[at] >= NEAR_FRACTION * ceiling_ms else None

    def _find_fraction(self) -> tuple[bool, int, int] | None:
        """Where the program's best has part of the main block: whether on a virtual stage, which, and the whole number
        above; None if all are whole. Stages first, and the one furthest from whole."""
        columns = self.master.columns
        is_main = columns.block == self.master.main
        num_virtual = self._problem.num_virtual_stages
        of_virtual = np.bincount(columns.virtual[is_main], self.master.counts[is_main], num_virtual)
        of_stage = of_virtual.reshape(self._problem.num_chunks, -1).sum(axis=0)
        for of_virtual_stage, counts in ((False, of_stage), (True, of_virtual)):
            off = np.abs(counts - np.round(counts))
            if off.max() > WHOLE:
                at = int(off.argmax())
                return of_virtual_stage, at, int(np.ceil(counts[at]))
        return None


def _limit(limits: Limits, name: str, at: int, value: int) -> Limits:
    """`limits` with another value in one entry."""
    values = getattr(limits, name).copy()
    values[at] = value
    return replace(limits, **{name: values})
