"""The fastest mix of layer strategies on every stage, and its proof.

Layers of a stage are alike, so a plan is a count for each stage and strategy. The step (`step.step_s`) is the largest of
a few sums that are linear in these counts ("pieces": a way to fill the pipeline, alone or with the exposed exchange of
one stage). Any weighted mean of pieces bounds it from below, and splits into stages; on one stage, dropping that counts
are whole leaves a fractional knapsack, whose answer lies on the lower convex hull of strategies over their memory. Weights
are raised towards the best such bound; a depth-first search over counts then visits all that lies between bound and
the best known plan. Strategies that another one beats in memory and in every piece are left out first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mm_autoparallel.integrations.galvatron.hull import Hull
from mm_autoparallel.integrations.galvatron.step import EndsCost, LayerCost, step_s

EQUAL = 1e-12
"""Steps that differ by less, as a share, are the same: sums in another order differ by a thousandth of this."""
_ROUNDS = 12
_HALVINGS = 24
_MOST_MIXES = 200_000
"""Of a stage, that are listed."""


@dataclass(frozen=True)
class Mix:
    """Counts by stage and strategy, the seconds of its step, and what no plan is below."""

    counts: tuple[tuple[int, ...], ...]
    step_s: float


class OutOfNodes(Exception):
    """The search has visited as many nodes as it may."""


class Mixing:
    """One space: what each strategy costs, layers of each stage, micro-batches.

    costs: of every strategy; their order decides among equals. layers: of each stage.
    """

    def __init__(self, costs: Sequence[LayerCost], layers: Sequence[int], chunks: int) -> None:
        self.costs, self.layers, self.chunks = costs, tuple(layers), chunks
        self.compute_s = np.array([cost.compute_s for cost in costs])
        self.exchange_s = np.array([cost.exchange_s for cost in costs])
        self.mib = np.array([cost.stage_mib for cost in costs], dtype=np.int64).T  # by stage, strategy
        self.num_nodes = 0

    def least_mib(self, stage: int) -> int:
        """What the layers of a stage take at least."""
        return int(self.mib[stage].min()) * self.layers[stage]

    def pieces(self, ends: EndsCost) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Factors of each piece on a stage's computation and on its exchange, by piece and stage; and its constant."""
        pp, chunks = len(self.layers), self.chunks
        fills = np.ones((3, pp))
        fills[0, -1] += chunks - 1
        steady = max(0, chunks + 1 - pp)
        fills[1] = 0.0
        fills[1, 0] = min(pp - 1, chunks - 1) + steady
        fills[2, 0] = steady
        if pp == 1:
            fills = fills[:1]
        ends_s = np.array(ends.compute_s)
        compute, exchange, constant = [*fills], [np.zeros(pp)] * len(fills), [float(row @ ends_s) for row in fills]
        hidden_s = 0.0  # at least, before this stage's own layers
        for stage in range(pp):
            hidden_s += float(ends_s[stage])
            if self.layers[stage] * self.exchange_s.max() > hidden_s * (1.0 - EQUAL):
                one = np.zeros(pp)
                one[stage] = 1.0
                before = np.zeros(pp)
                before[:stage] = 1.0
                for row in fills:
                    compute.append(row - before)
                    exchange.append(one)
                    constant.append(float(row @ ends_s - before @ ends_s - ends_s[stage]))
            hidden_s += self.layers[stage] * float(self.compute_s.min())
        return np.array(compute), np.array(exchange), np.array(constant)

    def quick_bound_s(self, ends: EndsCost, limit_mib: Sequence[int]) -> float:
        """A bound of the step from its first piece alone; infinite where nothing fits."""
        room = [limit - own for limit, own in zip(limit_mib, ends.stage_mib, strict=True)]
        total = sum(ends.compute_s) + ends.compute_s[-1] * (self.chunks - 1)
        last = len(room) - 1
        for stage, left in enumerate(room):
            least = self._compute_hulls[stage].least(self.layers[stage], left)
            total += least * (self.chunks if stage == last else 1)
        return total

    @functools.cached_property
    def _compute_hulls(self) -> list[Hull]:
        return [Hull([*zip(map(float, mib), map(float, self.compute_s), strict=True)]) for mib in self.mib]

    def solve(
        self, ends: EndsCost, limit_mib: Sequence[int], ceiling_s: float, max_nodes: int, look: Callable[[], None]
    ) -> tuple[Mix | None, float]:
        """The fastest mix of less than `ceiling_s` (None: there is none), and what no mix of this space is below.

        limit_mib: of each stage for its layers and ends. look: called now and then, to raise what should end it. Where
        `max_nodes` were visited the bound is below what was found.
        """
        room = [limit - own for limit, own in zip(limit_mib, ends.stage_mib, strict=True)]
        if any(self.least_mib(stage) > left for stage, left in enumerate(room)):
            return None, math.inf
        bounds = _Bounds(self, ends, room)
        bound_s = bounds.raise_until(ceiling_s * (1.0 - EQUAL))
        if bound_s >= ceiling_s * (1.0 - EQUAL):
            return None, bound_s
        whole = [_count_mixes(count, len(kept)) for count, kept in zip(self.layers, bounds.kept, strict=True)]
        if len(room) > 1 and max(whole) <= _MOST_MIXES:
            best = _Choice(self, bounds, ends, room, ceiling_s, look).run()
            return best, best.step_s if best else ceiling_s
        search = _Search(self, bounds, ends, room, ceiling_s, max_nodes, look)
        try:
            search.run()
        except OutOfNodes:
            return search.best, bound_s
        finally:
            self.num_nodes += search.num_nodes
        return search.best, search.best.step_s if search.best else ceiling_s

    def step_of(self, counts: Sequence[Sequence[int]], ends: EndsCost) -> float:
        """Seconds of the step with these counts, added up as Galvatron does: layer by layer."""
        compute, synced = [], []
        for stage, held in enumerate(counts):
            order = np.repeat(np.arange(len(held)), held)
            compute.append(float(np.sum(self.compute_s[order])) + ends.compute_s[stage])
            synced.append(float(np.sum(np.array([self.costs[each].synced_s for each in order]))))
        return step_s(compute, synced, self.chunks)


class _Bounds:
    """Lower bounds of one space with one way to hold the ends."""

    def __init__(self, mixing: Mixing, ends: EndsCost, room: Sequence[int]) -> None:
        self.mixing, self.room = mixing, room
        self.compute, self.exchange, self.constant = mixing.pieces(ends)
        self.kept = [self._undominated(stage) for stage in range(len(room))]
        self.weights = np.zeros(len(self.constant))
        self.best_s = -math.inf

    def _undominated(self, stage: int) -> list[int]:
        """Strategies that no other one beats on a stage in memory and in every piece; of equals the first."""
        mixing, mib = self.mixing, self.mixing.mib[stage]
        costs = np.outer(self.compute[:, stage], mixing.compute_s) + np.outer(self.exchange[:, stage], mixing.exchange_s)
        kept: list[int] = []
        for one in sorted(range(len(mib)), key=lambda one: (mib[one], costs[:, one].sum(), one)):
            if not any((costs[:, other] <= costs[:, one]).all() for other in kept):  # those before take no more memory
                kept.append(one)
        return kept

    def costs(self, weights: np.ndarray, stage: int) -> np.ndarray:
        """What a layer of each strategy adds to the mean of pieces."""
        factor = float(weights @ self.compute[:, stage])
        return factor * self.mixing.compute_s + float(weights @ self.exchange[:, stage]) * self.mixing.exchange_s

    def bound(self, weights: np.ndarray) -> tuple[float, np.ndarray]:
        """The bound that these weights give, and every piece at its mix."""
        total, pieces = float(weights @ self.constant), self.constant.copy()
        for stage, count in enumerate(self.mixing.layers):
            kept, costs, mib = self.kept[stage], self.costs(weights, stage), self.mixing.mib[stage]
            hull = Hull([(float(mib[one]), float(costs[one])) for one in kept])
            total += hull.least(count, self.room[stage])
            by_mib = {}
            for one in kept:
                at = by_mib.setdefault(float(mib[one]), one)
                if costs[one] < costs[at]:
                    by_mib[float(mib[one])] = one
            for held_mib, share in hull.split(count, self.room[stage]):
                one = by_mib[held_mib]
                pieces += share * (
                    self.compute[:, stage] * self.mixing.compute_s[one]
                    + self.exchange[:, stage] * self.mixing.exchange_s[one]
                )
        return total, pieces

    def raise_until(self, enough_s: float) -> float:
        """The highest bound that was found, or one of at least `enough_s`; weights are kept for the search."""
        num = len(self.constant)
        at: list[tuple[float, np.ndarray, np.ndarray]] = []
        for piece in range(num):
            weights = np.zeros(num)
            weights[piece] = 1.0
            at.append((*self.bound(weights), weights))
            if at[-1][0] >= enough_s:
                break
        best_s, pieces, weights = max(at, key=lambda each: each[0])
        for _ in range(_ROUNDS):
            if best_s >= enough_s or pieces.max() <= best_s * (1.0 + EQUAL):
                break
            toward = np.zeros(num)
            toward[int(pieces.argmax())] = 1.0
            low, high, found = 0.0, 1.0, best_s
            for _ in range(_HALVINGS):  # the bound is concave along the way; its slope says on which side the top lies
                middle = (low + high) / 2
                mixed = (1 - middle) * weights + middle * toward
                value, there = self.bound(mixed)
                if value > best_s:
                    best_s, best_weights, pieces = value, mixed, there
                slope = float(there @ (toward - weights))
                low, high = (middle, high) if slope > 0 else (low, middle)
            if best_s <= found * (1.0 + EQUAL):
                break
            weights = best_weights
        self.weights, self.best_s = weights, best_s
        return best_s


class _Choice:
    """One of all mixes of each stage, where these can be listed: stage by stage, the best first, below every piece and
    below the weighted mean of pieces."""

    def __init__(
        self,
        mixing: Mixing,
        bounds: _Bounds,
        ends: EndsCost,
        room: Sequence[int],
        ceiling_s: float,
        look: Callable[[], None],
    ) -> None:
        self.mixing, self.ends, self.ceiling_s, self.look = mixing, ends, ceiling_s, look
        self.best: Mix | None = None
        rows = np.vstack([np.eye(len(bounds.constant)), bounds.weights])
        self.constant = rows @ bounds.constant
        self.counts: list[np.ndarray] = []
        self.values: list[np.ndarray] = []  # of each stage: what a mix adds to each piece and to the mean
        for stage, count in enumerate(mixing.layers):
            kept = bounds.kept[stage]
            mixes = _list_mixes(count, len(kept))
            mixes = mixes[mixes @ mixing.mib[stage][kept] <= room[stage]]
            compute_s, exchange_s = mixes @ mixing.compute_s[kept], mixes @ mixing.exchange_s[kept]
            factors = np.array([bounds.compute[:, stage], bounds.exchange[:, stage]]).T
            useful = _frontier(compute_s, exchange_s, factors)
            values = rows @ (factors @ np.array([compute_s[useful], exchange_s[useful]]))
            held = np.zeros((len(useful), len(mixing.costs)), dtype=np.int64)
            held[:, kept] = mixes[useful]
            self.counts.append(held)
            self.values.append(values)
        least = [values.min(axis=1) for values in self.values]
        self.after = [np.sum(least[stage + 1 :], axis=0) for stage in range(len(least))]
        self.chosen = [0] * len(least)

    def run(self) -> Mix | None:
        """The fastest choice below the ceiling."""
        self._visit(0, self.constant)
        return self.best

    def _visit(self, stage: int, sums: np.ndarray) -> None:
        self.look()
        self.mixing.num_nodes += 1
        bound = (sums[:, None] + self.values[stage] + np.reshape(self.after[stage], (-1, 1))).max(axis=0)
        for one in np.argsort(bound, kind="stable"):
            if bound[one] >= self.ceiling_s * (1.0 - EQUAL):
                return
            self.chosen[stage] = int(one)
            if stage + 1 < len(self.values):
                self._visit(stage + 1, sums + self.values[stage][:, one])
                continue
            counts = [held[at] for held, at in zip(self.counts, self.chosen, strict=True)]
            step = self.mixing.step_of(counts, self.ends)
            if step < self.ceiling_s * (1.0 - EQUAL):
                self.ceiling_s = step
                self.best = Mix(tuple(tuple(map(int, held)) for held in counts), step)


def _frontier(compute_s: np.ndarray, exchange_s: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Which mixes no other one beats in every piece. factors: of computation and exchange in each."""
    told = np.unique(factors[np.abs(factors).sum(axis=1) > 0], axis=0)
    if not len(told) or (told < 0).any():  # pieces that pull apart: only equals go
        return np.unique(np.array([compute_s, exchange_s]), axis=1, return_index=True)[1]
    angles = np.arctan2(told[:, 1], told[:, 0])  # all pieces lie between the outer two
    one, other = (factor[0] * compute_s + factor[1] * exchange_s for factor in (told[angles.argmin()], told[angles.argmax()]))
    order = np.lexsort((other, one))
    lowest = np.minimum.accumulate(other[order])
    is_lower = np.ones(len(order), dtype=bool)
    is_lower[1:] = other[order][1:] < lowest[:-1]
    return order[is_lower]


def _count_mixes(count: int, num: int) -> int:
    """Ways to deal `count` layers to `num` strategies."""
    return math.comb(count + num - 1, num - 1)


@functools.cache
def _list_mixes(count: int, num: int) -> np.ndarray:
    """All of them, a row each."""
    if num == 1:
        return np.array([[count]], dtype=np.int64)
    parts = []
    for own in range(count, -1, -1):
        rest = _list_mixes(count - own, num - 1)
        parts.append(np.hstack([np.full((len(rest), 1), own, dtype=np.int64), rest]))
    return np.vstack(parts)


class _Search:
    """Depth-first over stages, strategies and counts; see the module's docstring."""

    def __init__(
        self,
        mixing: Mixing,
        bounds: _Bounds,
        ends: EndsCost,
        room: Sequence[int],
        ceiling_s: float,
        max_nodes: int,
        look: Callable[[], None],
    ) -> None:
        self.mixing, self.bounds, self.ends, self.room = mixing, bounds, ends, room
        self.ceiling_s, self.max_nodes, self.look = ceiling_s, max_nodes, look
        self.num_nodes = 0
        self.best: Mix | None = None
        self.stages: list[tuple[list[int], list[float], list[int], list[Hull]]] = []
        for stage in range(len(room)):
            costs, mib = bounds.costs(bounds.weights, stage), mixing.mib[stage]
            order = sorted(bounds.kept[stage], key=lambda one: (costs[one], mib[one]))
            hulls = [
                Hull([(float(mib[one]), float(costs[one])) for one in order[start:]]) for start in range(len(order))
            ]
            self.stages.append((order, [float(costs[one]) for one in order], [int(mib[one]) for one in order], hulls))
        after = [hulls[0].least(mixing.layers[stage], room[stage]) for stage, (_, _, _, hulls) in enumerate(self.stages)]
        self.after = [sum(after[stage + 1 :]) for stage in range(len(after))]
        self.counts = [[0] * len(mixing.costs) for _ in room]

    def run(self) -> None:
        """Visits what may be faster than the ceiling. Raises OutOfNodes."""
        self._visit(0, 0, self.mixing.layers[0], self.room[0], float(self.bounds.weights @ self.bounds.constant))

    def _visit(self, stage: int, place: int, left: int, room_mib: int, sum_s: float) -> None:
        self.num_nodes += 1
        if self.num_nodes % 1024 == 0:
            self.look()
        if self.num_nodes > self.max_nodes:
            raise OutOfNodes
        order, costs, mib, hulls = self.stages[stage]
        if not left:
            if stage + 1 < len(self.stages):
                self._visit(stage + 1, 0, self.mixing.layers[stage + 1], self.room[stage + 1], sum_s)
            else:
                self._reach()
            return
        if place == len(order):
            return
        held = self.counts[stage]
        most = min(left, room_mib // mib[place]) if mib[place] > 0 else left
        least = left if place + 1 == len(order) else 0
        ways = []
        for count in range(most, least - 1, -1):
            rest, own_s = left - count, sum_s + count * costs[place]
            after = hulls[place + 1].least(rest, room_mib - count * mib[place]) if rest else 0.0
            ways.append((own_s + after + self.after[stage], own_s, count))
        ways.sort()
        for bound_s, own_s, count in ways:
            if bound_s >= self.ceiling_s * (1.0 - EQUAL):
                break
            held[order[place]] = count
            self._visit(stage, place + 1, left - count, room_mib - count * mib[place], own_s)
        held[order[place]] = 0

    def _reach(self) -> None:
        step = self.mixing.step_of(self.counts, self.ends)
        if step < self.ceiling_s * (1.0 - EQUAL):
            self.ceiling_s = step
            self.best = Mix(tuple(tuple(held) for held in self.counts), step)
