"""Visits the mixes that may be faster than a ceiling (`mixes.py` has the bounds).

`Choice` lists all mixes of each stage, keeps those that no other one beats, and chooses stage by stage, the best first,
below every piece and below the weighted mean of pieces. `Descent` is for stages of too many mixes to list: depth-first
over stages, strategies and counts, below the weighted mean alone.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from mm_autoparallel.integrations.galvatron.hull import Hull
from mm_autoparallel.integrations.galvatron.mixes import EQUAL, Bounds, Mix, Mixing
from mm_autoparallel.integrations.galvatron.step import EndsCost

_MOST_MIXES = 200_000
"""Of a stage, that are listed."""
_LOOK_EVERY = 16
"""Nodes."""


class OutOfNodes(Exception):
    """The search has visited as many nodes as it may, or was asked to stop."""


class MixSearch(ABC):
    """A search of one space with one way to hold the ends. best: of what `run` has visited so far."""

    def __init__(
        self,
        mixing: Mixing,
        bounds: Bounds,
        ends: EndsCost,
        ceiling_s: float,
        max_nodes: int,
        look: Callable[[], None],
    ) -> None:
        self.mixing, self.bounds, self.ends = mixing, bounds, ends
        self.ceiling_s, self.max_nodes, self.look = ceiling_s, max_nodes, look
        self.best: Mix | None = None
        self.num_nodes = 0
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """What is worked out once, before `run`."""

    @abstractmethod
    def run(self) -> None:
        """Visits what may be faster than the ceiling. Raises OutOfNodes."""

    def count_node(self) -> None:
        """Raises OutOfNodes where it is one too many, or where the search is asked to stop."""
        self.num_nodes += 1
        if self.num_nodes % _LOOK_EVERY == 1:
            self.look()
        if self.num_nodes > self.max_nodes:
            raise OutOfNodes

    def reach(self, counts: Sequence[Sequence[int]]) -> None:
        """Keeps these counts by stage and strategy if they are faster than all before."""
        step = self.mixing.step_of(counts, self.ends)
        if step < self.ceiling_s * (1.0 - EQUAL):
            self.ceiling_s = step
            self.best = Mix(tuple(tuple(map(int, held)) for held in counts), step)


def can_list(mixing: Mixing, bounds: Bounds) -> bool:
    """Whether all mixes of every stage are few enough."""
    return all(
        sum(_count_mixes(count, len(kept)) for count in mixing.lengths(stage)) <= _MOST_MIXES
        for stage, kept in enumerate(bounds.kept)
    )


def make_search(
    mixing: Mixing, bounds: Bounds, ends: EndsCost, ceiling_s: float, max_nodes: int, look: Callable[[], None]
) -> MixSearch:
    """The search that suits."""
    is_choice = len(mixing.layers) > 1 and can_list(mixing, bounds)
    return (Choice if is_choice else Descent)(mixing, bounds, ends, ceiling_s, max_nodes, look)


class Choice(MixSearch):
    """One of all mixes of each stage."""

    def prepare(self) -> None:
        """Lists the stages' mixes."""
        mixing, bounds = self.mixing, self.bounds
        rows = np.vstack([np.eye(len(bounds.constant)), bounds.weights])
        self.constant = rows @ bounds.constant
        self.counts: list[np.ndarray] = []
        self.lengths: list[np.ndarray] = []
        self.values: list[np.ndarray] = []  # of each stage: what a mix adds to each piece and to the mean
        for stage in range(len(mixing.layers)):
            counts, values = _list_stage(mixing, bounds, stage, rows)
            self.counts.append(counts)
            self.lengths.append(counts.sum(axis=1))
            self.values.append(values)
        self.after = self._bound_rest()
        self.chosen = [0] * len(mixing.layers)

    def _bound_rest(self) -> list[dict[int, np.ndarray]]:
        """What stages from each on add at least to each piece, by the layers that they hold together."""
        after: list[dict[int, np.ndarray]] = [{0: np.zeros_like(self.constant)}]
        for lengths, values in zip(reversed(self.lengths), reversed(self.values), strict=True):
            here: dict[int, np.ndarray] = {}
            for own in np.unique(lengths):
                least = values[:, lengths == own].min(axis=1)
                for rest, there in after[0].items():
                    both = int(own) + rest
                    here[both] = np.minimum(here[both], least + there) if both in here else least + there
            after.insert(0, here)
        return after

    def run(self) -> None:
        """See MixSearch."""
        if sum(self.mixing.layers) in self.after[0]:
            self._visit(0, sum(self.mixing.layers), self.constant)

    def _visit(self, stage: int, left: int, sums: np.ndarray) -> None:
        self.count_node()
        values, lengths, after = self.values[stage], self.lengths[stage], self.after[stage + 1]
        bound = np.full(len(lengths), math.inf)
        for own in np.unique(lengths):
            rest = after.get(left - int(own))
            if rest is not None:
                bound[lengths == own] = ((sums + rest)[:, None] + values[:, lengths == own]).max(axis=0)
        for one in np.argsort(bound, kind="stable"):
            if bound[one] >= self.ceiling_s * (1.0 - EQUAL):
                return
            self.chosen[stage] = int(one)
            if stage + 1 < len(self.values):
                self._visit(stage + 1, left - int(lengths[one]), sums + values[:, one])
            else:
                self.reach([held[at] for held, at in zip(self.counts, self.chosen, strict=True)])


def _list_stage(mixing: Mixing, bounds: Bounds, stage: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts by mix and strategy, of mixes that fit a stage and that no other of as many layers beats in every piece,
    and what each adds to each of `rows`."""
    kept = bounds.kept[stage]
    factors = np.array([bounds.compute[:, stage], bounds.exchange[:, stage]]).T
    counts, values = [], []
    for count in mixing.lengths(stage):
        mixes = _list_mixes(count, len(kept))
        mixes = mixes[mixes @ mixing.mib[stage][kept] <= bounds.room_mib[stage]]
        compute_s, exchange_s = mixes @ mixing.compute_s[kept], mixes @ mixing.exchange_s[kept]
        if mixing.resharding:
            compute_s = compute_s + _charges_s(mixing, np.array(kept), mixes)
        useful = _frontier(compute_s, exchange_s, factors)
        held = np.zeros((len(useful), len(mixing.costs)), dtype=np.int64)
        held[:, kept] = mixes[useful]
        counts.append(held)
        values.append(rows @ (factors @ np.array([compute_s[useful], exchange_s[useful]])))
    return np.vstack(counts), np.hstack(values)


def _charges_s(mixing: Mixing, kept: np.ndarray, mixes: np.ndarray) -> np.ndarray:
    """What each mix pays for resharding."""
    assert mixing.resharding is not None
    degrees = np.array(mixing.resharding.degrees)[kept]
    total, is_first = np.zeros(len(mixes)), np.ones(len(mixes), dtype=bool)
    for degree in np.unique(degrees):
        uses = mixes[:, degrees == degree].any(axis=1)
        total[uses & ~is_first] += mixing.resharding.charges_s[int(degree)]
        is_first &= ~uses
    return total


def _frontier(compute_s: np.ndarray, exchange_s: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Which mixes no other one beats in every piece. factors: of computation and exchange in each."""
    told = np.unique(factors[np.abs(factors).sum(axis=1) > 0], axis=0)
    if not len(told) or (told < 0).any():  # pieces that pull apart: only equals go
        return np.unique(np.array([compute_s, exchange_s]), axis=1, return_index=True)[1]
    angles = np.arctan2(told[:, 1], told[:, 0])  # all pieces lie between the outer two
    outer = told[angles.argmin()], told[angles.argmax()]
    one, other = (factor[0] * compute_s + factor[1] * exchange_s for factor in outer)
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


class Descent(MixSearch):
    """Depth-first over stages, strategies and counts."""

    def prepare(self) -> None:
        """Orders the strategies of each stage, and bounds what comes after each."""
        mixing, bounds = self.mixing, self.bounds
        self.stages: list[tuple[list[int], list[float], list[int], list[Hull]]] = []
        for stage in range(len(mixing.layers)):
            costs, mib = bounds.costs(bounds.weights, stage), mixing.mib[stage]
            order = sorted(bounds.kept[stage], key=lambda one: (costs[one], mib[one]))
            hulls = [
                Hull([(float(mib[one]), float(costs[one])) for one in order[start:]]) for start in range(len(order))
            ]
            self.stages.append((order, [float(costs[one]) for one in order], [int(mib[one]) for one in order], hulls))
        least = [
            hulls[0].least(count, room)
            for (_, _, _, hulls), count, room in zip(self.stages, mixing.layers, bounds.room_mib, strict=True)
        ]
        self.after = [sum(least[stage + 1 :]) for stage in range(len(least))]
        self.charged = [float(bounds.weights @ bounds.compute[:, stage]) for stage in range(len(least))]
        self.counts = [[0] * len(mixing.costs) for _ in mixing.layers]

    def run(self) -> None:
        """See MixSearch."""
        self._enter(0, float(self.bounds.weights @ self.bounds.constant))

    def _enter(self, stage: int, sum_s: float) -> None:
        if stage < len(self.stages):
            self._visit(stage, 0, self.mixing.layers[stage], self.bounds.room_mib[stage], sum_s)
        else:
            self.reach(self.counts)

    def _visit(self, stage: int, place: int, left: int, room_mib: int, sum_s: float) -> None:
        self.count_node()
        moved_s = 0.0
        if self.mixing.resharding:
            used = [one for one, count in enumerate(self.counts[stage]) if count]
            moved_s = self.charged[stage] * self.mixing.resharding.of(used)
        if not left:
            self._enter(stage + 1, sum_s + moved_s)
            return
        order, costs, mib, hulls = self.stages[stage]
        if place == len(order):
            return
        held = self.counts[stage]
        most = min(left, room_mib // mib[place]) if mib[place] > 0 else left
        least = left if place + 1 == len(order) else 0
        ways = []
        for count in range(most, least - 1, -1):
            rest, own_s = left - count, sum_s + count * costs[place]
            after = hulls[place + 1].least(rest, room_mib - count * mib[place]) if rest else 0.0
            ways.append((own_s + after + moved_s + self.after[stage], own_s, count))
        ways.sort()
        for bound_s, own_s, count in ways:
            if bound_s >= self.ceiling_s * (1.0 - EQUAL):
                break
            held[order[place]] = count
            self._visit(stage, place + 1, left - count, room_mib - count * mib[place], own_s)
        held[order[place]] = 0
