"""The fastest mix of layer strategies on every stage, and its proof.

Layers of a stage are alike, so a plan is a count for each stage and strategy. The step (`step.step_s`) is the largest
of a few sums that are linear in these counts ("pieces": a way to fill the pipeline, alone or with the exposed exchange
of one stage). Any weighted mean of pieces bounds it from below, and splits into stages; on one stage, parts of layers
allowed, a fractional knapsack is left (`hull.py`). Weights are raised towards the best such bound. What lies between it
and the best known plan is visited (`mix_search.py`). Strategies that another one beats in memory and in every piece are
left out first.

Where resharding is counted, a stage pays for each degree it uses beside its lowest. Bounds that leave that out stay
bounds without the pieces that fall where a stage computes longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.galvatron.hull import Hull
from mm_autoparallel.integrations.galvatron.step import EndsCost, LayerCost, step_s

EQUAL = 1e-12
"""Steps that differ by less, as a share, are the same: sums in another order differ by a thousandth of this."""
_ROUNDS = 12
_HALVINGS = 24
_MOST_DIVISIONS = 100_000


@dataclass(frozen=True)
class Mix:
    """Counts by stage and strategy, and the seconds of their step."""

    counts: tuple[tuple[int, ...], ...]
    step_s: float


@dataclass(frozen=True)
class Resharding:
    """degrees: of each strategy. charges_s: what a stage pays in a micro-batch for a degree beside a lower one."""

    degrees: tuple[int, ...]
    charges_s: Mapping[int, float]

    def of(self, used: Iterable[int]) -> float:
        """Seconds of a stage that uses these strategies: each change of degree at the price of the higher one, which in
        ascending order is the least there can be."""
        degrees = sorted({self.degrees[one] for one in used})
        return sum(self.charges_s[degree] for degree in degrees[1:])


class Mixing:
    """One space: what each strategy costs, layers of each stage, micro-batches.

    costs: of every strategy; their order decides among equals. layers: of each stage. spread: by how many more or fewer
    a stage may hold. counts_every_stage: as of `step_s`. resharding: None: as upstream, not counted.
    """

    def __init__(
        self,
        costs: Sequence[LayerCost],
        layers: Sequence[int],
        chunks: int,
        spread: int = 0,
        counts_every_stage: bool = False,
        resharding: Resharding | None = None,
    ) -> None:
        self.costs, self.layers, self.chunks = costs, tuple(layers), chunks
        self.spread = spread if len(self.layers) > 1 else 0
        self.counts_every_stage, self.resharding = counts_every_stage, resharding
        self.compute_s = np.array([cost.compute_s for cost in costs])
        self.synced_s = np.array([cost.synced_s for cost in costs])
        self.exchange_s = self.synced_s - self.compute_s
        self.mib = np.array([cost.stage_mib for cost in costs], dtype=np.int64).T  # by stage, strategy
        self.num_nodes = 0

    def lengths(self, stage: int) -> range:
        """How many layers the stage may hold."""
        least = max(1, self.layers[stage] - self.spread)
        return range(least, min(self.layers[stage] + self.spread, sum(self.layers) - len(self.layers) + 1) + 1)

    def _room(self, ends: EndsCost, limit_mib: Sequence[int]) -> list[int] | None:
        """MiB for the layers of each stage; None where some cannot hold its least."""
        room = [limit - own for limit, own in zip(limit_mib, ends.stage_mib, strict=True)]
        fits = all(
            self.lengths(stage)[0] * int(mib.min()) <= left
            for stage, (mib, left) in enumerate(zip(self.mib, room, strict=True))
        )
        return room if fits else None

    def quick_bound_s(self, ends: EndsCost, limit_mib: Sequence[int]) -> float:
        """A bound of the step from its first piece alone; infinite where nothing fits."""
        room = self._room(ends, limit_mib)
        if room is None:
            return math.inf
        total, last = sum(ends.compute_s) + ends.compute_s[-1] * (self.chunks - 1), len(room) - 1
        for stage, left in enumerate(room):
            lengths = self.lengths(stage)
            least = self._compute_hulls[stage].least(lengths[0], left)  # more layers cost more
            total += least * (self.chunks if stage == last else 1)
        return total

    @functools.cached_property
    def _compute_hulls(self) -> list[Hull]:
        return [Hull([*zip(map(float, mib), map(float, self.compute_s), strict=True)]) for mib in self.mib]

    def pieces(self, ends: EndsCost) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Factors of each piece on a stage's computation and on its exchange, by piece and stage; and its constant."""
        pp, chunks = len(self.layers), self.chunks
        steady = max(0, chunks + 1 - pp)
        by_last, by_first, by_rest = np.ones(pp), np.zeros(pp), np.ones(pp)
        by_last[-1] = chunks
        by_first[0] = min(pp - 1, chunks - 1) + steady
        by_rest[0] = steady
        fills = [by_last] if pp == 1 else [by_last, by_first, by_rest]
        if self.counts_every_stage:
            fills += [1.0 + (chunks - 1) * row for row in np.eye(pp)[:-1]]
        ends_s = np.array(ends.compute_s)
        compute, exchange, constant = [*fills], [np.zeros(pp)] * len(fills), [float(row @ ends_s) for row in fills]
        hidden_s = 0.0  # at least, before this stage's own layers
        for stage in range(pp):
            hidden_s += float(ends_s[stage])
            if self.lengths(stage)[-1] * self.exchange_s.max() > hidden_s * (1.0 - EQUAL):
                one = np.zeros(pp)
                one[stage] = 1.0
                before = np.zeros(pp)
                before[:stage] = 1.0
                for row in fills:
                    compute.append(row - before)
                    exchange.append(one)
                    constant.append(float(row @ ends_s - before @ ends_s - ends_s[stage]))
            hidden_s += self.lengths(stage)[0] * float(self.compute_s.min())
        return np.array(compute), np.array(exchange), np.array(constant)

    def solve(
        self, ends: EndsCost, limit_mib: Sequence[int], ceiling_s: float, max_nodes: int, look: Callable[[], None]
    ) -> tuple[Mix | None, float]:
        """The fastest mix of less than `ceiling_s` (None: there is none), and what no mix of this space is below.

        limit_mib: of each stage for its layers and ends. look: called now and then, to raise what should end it. Where
        `max_nodes` were visited the bound is below what was found.
        """
        from mm_autoparallel.integrations.galvatron.mix_search import OutOfNodes, can_list, make_search

        room = self._room(ends, limit_mib)
        if room is None:
            return None, math.inf
        bounds = Bounds(self, ends, room)
        bound_s = self.quick_bound_s(ends, limit_mib)
        if self.spread and not can_list(self, bounds):
            return self._solve_each_division(ends, limit_mib, ceiling_s, max_nodes, look)
        if not self.spread:
            bound_s = max(bound_s, bounds.raise_until(ceiling_s * (1.0 - EQUAL)))
        if bound_s >= ceiling_s * (1.0 - EQUAL):
            return None, bound_s
        search = make_search(self, bounds, ends, ceiling_s, max_nodes, look)
        try:
            search.run()
        except OutOfNodes:
            return search.best, bound_s
        finally:
            self.num_nodes += search.num_nodes
        return search.best, search.best.step_s if search.best else ceiling_s

    def _solve_each_division(
        self, ends: EndsCost, limit_mib: Sequence[int], ceiling_s: float, max_nodes: int, look: Callable[[], None]
    ) -> tuple[Mix | None, float]:
        """The same for stages of too many mixes to list, division by division."""
        best, bound_s = None, math.inf
        for layers in self._divisions():
            one = Mixing(self.costs, layers, self.chunks, 0, self.counts_every_stage, self.resharding)
            mix, own_s = one.solve(ends, limit_mib, ceiling_s, max_nodes, look)
            self.num_nodes += one.num_nodes
            bound_s = min(bound_s, own_s)
            if mix is not None:
                best, ceiling_s = mix, mix.step_s
        return best, bound_s

    def _divisions(self) -> Iterator[tuple[int, ...]]:
        """All ways to deal the layers to the stages, the most even first. Raises JobError where there are too many."""
        ways: list[tuple[int, ...]] = [()]
        for stage in range(len(self.layers)):
            ways = [(*way, own) for way in ways for own in self.lengths(stage)]
            if len(ways) > _MOST_DIVISIONS:
                raise JobError(
                    f"{len(self.layers)} stages that may differ by {self.spread} layers can be divided in more than "
                    f"{_MOST_DIVISIONS:,} ways: let them differ by fewer"
                )
        whole = [way for way in ways if sum(way) == sum(self.layers)]
        yield from sorted(
            whole, key=lambda way: sum((own - even) ** 2 for own, even in zip(way, self.layers, strict=True))
        )

    def step_of(self, counts: Sequence[Sequence[int]], ends: EndsCost) -> float:
        """Seconds of the step with these counts, added up as Galvatron does: layer by layer."""
        compute, synced = [], []
        for stage, held in enumerate(counts):
            order = np.repeat(np.arange(len(held)), held)
            moved_s = self.resharding.of(np.flatnonzero(held)) if self.resharding else 0.0
            compute.append(float(np.sum(self.compute_s[order])) + ends.compute_s[stage] + moved_s)
            synced.append(float(np.sum(self.synced_s[order])) + moved_s)
        return step_s(compute, synced, self.chunks, self.counts_every_stage)


class Bounds:
    """Lower bounds of one space with one way to hold the ends. room_mib: of each stage for its layers."""

    def __init__(self, mixing: Mixing, ends: EndsCost, room_mib: Sequence[int]) -> None:
        self.mixing, self.room_mib = mixing, room_mib
        self.compute, self.exchange, self.constant = mixing.pieces(ends)
        self.kept = [self._undominated(stage) for stage in range(len(room_mib))]
        # where resharding comes on top, pieces that fall with a stage's computation bound nothing
        is_rising = (self.compute >= 0).all(axis=1)
        self.usable = is_rising if mixing.resharding else np.ones(len(self.constant), dtype=bool)
        self.weights = np.eye(len(self.constant))[0]

    def _undominated(self, stage: int) -> list[int]:
        """Strategies that no other one beats on a stage in memory and in every piece; of equals the first."""
        mixing, mib = self.mixing, self.mixing.mib[stage]
        costs = np.outer(self.compute[:, stage], mixing.compute_s)
        costs += np.outer(self.exchange[:, stage], mixing.exchange_s)
        degrees = mixing.resharding.degrees if mixing.resharding else [0] * len(mib)
        kept: list[int] = []
        for one in sorted(range(len(mib)), key=lambda one: (mib[one], costs[:, one].sum(), one)):
            beaten = (degrees[other] == degrees[one] and (costs[:, other] <= costs[:, one]).all() for other in kept)
            if not any(beaten):  # those before take no more memory
                kept.append(one)
        return kept

    def costs(self, weights: np.ndarray, stage: int) -> np.ndarray:
        """What a layer of each strategy adds to the mean of pieces."""
        costs: np.ndarray = float(weights @ self.compute[:, stage]) * self.mixing.compute_s
        costs += float(weights @ self.exchange[:, stage]) * self.mixing.exchange_s
        return costs

    def bound(self, weights: np.ndarray) -> tuple[float, np.ndarray]:
        """The bound that these weights give, and every piece at its mix."""
        mixing = self.mixing
        total, pieces = float(weights @ self.constant), self.constant.copy()
        for stage, count in enumerate(mixing.layers):
            costs, mib = self.costs(weights, stage), mixing.mib[stage]
            cheapest: dict[float, int] = {}
            for one in self.kept[stage]:
                if costs[one] < costs[cheapest.setdefault(float(mib[one]), one)]:
                    cheapest[float(mib[one])] = one
            hull = Hull([(held, float(costs[one])) for held, one in cheapest.items()])
            total += hull.least(count, self.room_mib[stage])
            for held, share in hull.split(count, self.room_mib[stage]):
                one = cheapest[held]
                pieces += share * self.compute[:, stage] * mixing.compute_s[one]
                pieces += share * self.exchange[:, stage] * mixing.exchange_s[one]
        return total, pieces

    def raise_until(self, enough_s: float) -> float:
        """The highest bound that was found, or one of at least `enough_s`; its weights are kept."""
        pure = np.eye(len(self.constant))[self.usable]
        best_s, pieces = -math.inf, self.constant
        for weights in pure:
            value, there = self.bound(weights)
            if value > best_s:
                best_s, pieces, self.weights = value, there, weights
            if best_s >= enough_s:
                return best_s
        for _ in range(_ROUNDS):
            usable = pieces[self.usable]
            if best_s >= enough_s or usable.max() <= best_s * (1.0 + EQUAL):
                break
            start, toward = self.weights, pure[int(usable.argmax())]
            low, high, found_s = 0.0, 1.0, best_s
            for _ in range(_HALVINGS):  # the bound is concave along the way; its slope says on which side the top lies
                middle = (low + high) / 2
                weights = (1 - middle) * start + middle * toward
                value, there = self.bound(weights)
                if value > best_s:
                    best_s, pieces, self.weights = value, there, weights
                low, high = (middle, high) if float(there @ (toward - start)) > 0 else (low, middle)
            if best_s <= found_s * (1.0 + EQUAL):
                break
        return best_s
