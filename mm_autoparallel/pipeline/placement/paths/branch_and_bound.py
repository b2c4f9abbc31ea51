"""Splits: show that no placement takes less than a target, part by part, each part refuted by a mixture of paths.

A part is a subset of every stage's patterns. Where a mixture (see `mixtures`) costs the target or more on all of its
placements, none of them takes less. Where it does so on all placements with some pattern, that pattern is dropped.
What is left is split in two: by the load of one stage first, since a mean over light and heavy loads of a stage hides
that one of them limits the step, then by the times of its chunks. A part of one pattern a stage is simply played; or,
where light blocks are spread beside the patterns (`thinned`), it is as far as its mixture shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.paths.mixtures import least_spread, play_game
from mm_autoparallel.pipeline.placement.paths.ways import Ways, drop_costly, pack_ways
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import StagePatterns
from mm_autoparallel.pipeline.placement.patterns.state_graph import NO_RUN, Layers
from mm_autoparallel.pipeline.placement.patterns.thinned import Spread, nothing_spread
from mm_autoparallel.pipeline.placement.patterns.tree_bounds import played, step_bounds
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.stage_times import times_layout
from mm_autoparallel.pipeline.simulate.step import neighbours

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Rounds of one game (150, 300 and 1,000 tried on interleaved problems of 8 and 16 stages: 150 takes the least time),
#: and games on one part while they go on dropping patterns (assumed).
NUM_ROUNDS, NUM_GAMES = 150, 6
#: A game is repeated where the one before dropped this share of the patterns (assumed).
WORTHWHILE_FRACTION = 0.1
#: Latest mixtures that are tried on a new part before a game is played for it, those of lower targets among them. 300
#: and 1,000 tried on three open and two drawn interleaved problems, of 6 to 16 stages: with 1,000 all five took less
#: time to the highest target that both reached, down to half of it. A try costs a hundredth of a game or less.
NUM_REMEMBERED = 1_000
#: A part goes on from the weights of the one it was split from as if they had learnt for this share of its rounds
#: (assumed).
INHERITED_FRACTION, MOST_INHERITED = 0.25, 100
#: Sums over times of patterns that take as long as a simulated task: a processor makes several at once.
SUMS_A_TASK = 8
#: How much more a stage's load counts than the times of its chunks when a split is chosen (2, 4, 8 and 16 tried, as
#: above: 16 stages need three times as many parts with 2 as with 4, and over a third fewer with 8; split by layers in
#: place of load, one of the problems needs thirty times as many parts).
LOAD_FACTOR = 8.0


class _Part(NamedTuple):
    """pattern: [n] indices of the patterns that are left. log_weight: [n]. num_rounds: what the weights have learnt."""

    pattern: Ints
    log_weight: Floats
    num_rounds: int


class BranchAndBound:
    """The refutation of all placements below `target_ms`; it goes on in slices and keeps its place between them.

    exhausted: every part is refuted, or was looked at as far as that goes. best_ms, best: the fastest placement that
    came up below the target, as patterns with their index in each stage. num_tasks: simulated tasks, and sums over
    patterns counted as such. mixtures: [m, 4K - 1 + P] those remembered, the latest first.
    """

    def __init__(
        self,
        problem: Problem,
        layers: Layers,
        patterns: list[StagePatterns],
        full: TaskGraph,
        target_ms: float,
        heavy_first: bool = False,
        spread: Spread | None = None,
        mixtures: Floats | None = None,
    ) -> None:
        """layers, patterns: at least what a step below target_ms can use. full: the graph of the whole step.
        heavy_first: of two parts that with the longer times is looked at first, where placements come up sooner.
        spread: light blocks that the patterns are without. mixtures: found before, by others of the same graph."""
        self.target_ms, self._heavy_first = target_ms, heavy_first
        self.best_ms = np.inf
        self.best: list[tuple[StagePatterns, int]] | None = None
        self.num_tasks = 0
        self._layers, self._patterns, self._spread = layers, patterns, spread or nothing_spread(problem)
        self._least_left_ms = np.inf  # of parts that no mixture refutes
        self._is_empty = layers.first_run == NO_RUN
        self._graph, self._neighbours = played(full), neighbours(full)
        self._num_stages, self._num_chunks = problem.num_stages, problem.num_chunks
        num_groups = len(layers.group_begin) - 1
        self._group = np.repeat(np.arange(num_groups), np.diff(layers.group_begin))
        self._stage = np.repeat(np.arange(problem.num_stages), np.diff(layers.group_offset))[self._group]
        self._column = np.flatnonzero(layers.times_ms.any(axis=0))
        times_ms = layers.times_ms[:, : 2 * problem.num_chunks]  # forward and backward of each chunk
        self._features = np.concatenate([times_ms.sum(axis=1, keepdims=True), times_ms], axis=1)
        self.mixtures = np.empty((0, layers.least_before.shape[1])) if mixtures is None else mixtures
        num_patterns = len(layers.times_ms)
        self._parts = [_Part(np.arange(num_patterns), np.zeros(num_patterns), 0)]

    @property
    def exhausted(self) -> bool:
        return not self._parts

    @property
    def lower_bound_ms(self) -> float:
        """No placement takes less, once exhausted; 0 before."""
        return min(self.target_ms, self.best_ms, self._least_left_ms) if self.exhausted else 0.0

    def advance(self, num_tasks: int, should_stop: Callable[[], bool]) -> None:
        """Refute or split parts for about num_tasks more tasks."""
        stop_at = self.num_tasks + num_tasks
        while self._parts and self.num_tasks < stop_at and not should_stop():
            self._parts += self._refute(*self._drop(self._parts.pop(), self.mixtures))

    def _drop(self, part: _Part, mixtures: Floats) -> tuple[_Part, Ways]:
        """Drop the patterns on which one of the mixtures reaches the target, whatever stands beside them; the ways that
        are left."""
        kept, ways = pack_ways(self._layers, self._group, self._column, part.pattern)
        if len(kept) and len(mixtures):
            below_ms = np.full(len(mixtures), self.target_ms)
            if len(self._spread.forward_ms):
                num_open = self._num_open(part)
                below_ms -= [least_spread(self._spread, num_open, mixture) for mixture in mixtures]
            num_sums = len(kept) * len(self._column) + 2 * len(ways.edge_from)
            self.num_tasks += len(mixtures) * num_sums // SUMS_A_TASK
            kept = kept[: drop_costly(ways, mixtures, below_ms, kept)]
            again, ways = pack_ways(self._layers, self._group, self._column, part.pattern[kept])
            kept = kept[again]
        return _Part(part.pattern[kept], part.log_weight[kept], part.num_rounds), ways

    def _num_open(self, part: _Part) -> int:
        """Virtual stages that may hold light blocks: up to the first that holds something else in all of the part."""
        may_be_empty = np.zeros((self._num_chunks, self._num_stages), dtype=bool)
        np.logical_or.at(may_be_empty.T, self._stage[part.pattern], self._is_empty[part.pattern])
        return min(int(np.argmin(np.append(may_be_empty.ravel(), False))) + 1, may_be_empty.size)

    def _refute(self, part: _Part, ways: Ways) -> list[_Part]:
        """What is left to refute of a part: nothing, or the two that it is split into."""
        has_light = bool(len(self._spread.forward_ms))
        shares, mixture = np.zeros(len(self._group)), np.zeros(self.mixtures.shape[1])
        for _ in range(NUM_GAMES):
            num_before = len(part.pattern)
            is_single = num_before <= self._num_stages
            if num_before == 0 or (is_single and not has_light):
                self._play(part.pattern)
                return []
            mixture, share = np.zeros_like(mixture), np.empty(num_before)
            bound_ms, num_rounds = play_game(
                ways,
                self._graph,
                self._neighbours,
                part.log_weight,
                self._spread,
                self._num_open(part) if has_light else 1,
                part.num_rounds,
                NUM_ROUNDS,
                self.target_ms,
                mixture,
                share,
            )
            num_sums = 2 * (num_before * len(self._column) + len(ways.edge_from))
            self.num_tasks += num_rounds * (len(self._graph.stage) + num_sums // SUMS_A_TASK)
            self.mixtures = np.concatenate([mixture[None], self.mixtures[: NUM_REMEMBERED - 1]])
            if bound_ms >= self.target_ms:
                return []
            if is_single:
                self._least_left_ms = min(self._least_left_ms, bound_ms)
                return []
            learnt = min(int(INHERITED_FRACTION * (part.num_rounds + num_rounds)), MOST_INHERITED)
            shares[part.pattern] = share
            part, ways = self._drop(part._replace(num_rounds=learnt), self.mixtures[:1])
            if len(part.pattern) > (1.0 - WORTHWHILE_FRACTION) * num_before:
                break
        return self._split(part, shares[part.pattern], mixture) if len(part.pattern) else []

    def _split(self, part: _Part, share: Floats, mixture: Floats) -> list[_Part]:
        """Two parts, by that time of that stage whose spread costs most on the mixture, between values round its mean.

        share: [n] of each pattern in the mean over all games.
        """
        num_stages, num_chunks = self._num_stages, self._num_chunks
        layout = times_layout(num_stages * num_chunks, num_stages)
        chunks = (layout.forward, layout.backward), (layout.backward, layout.hop_forward)
        most, of_stage = 0.0, self._stage[part.pattern]
        at = int(np.bincount(of_stage).argmax())  # where no time differs: any half
        above = np.flatnonzero(of_stage == at)[: np.count_nonzero(of_stage == at) // 2]
        for s in range(num_stages):
            mine = np.flatnonzero(of_stage == s)
            values = self._features[part.pattern[mine]]
            chances = share[mine] + 1e-12
            chances /= chances.sum()
            mean = chances @ values
            counts = np.concatenate([mixture[first + s : last : num_stages] for first, last in chunks])
            counts = np.concatenate([[LOAD_FACTOR * counts[:num_chunks].mean()], counts])
            costs = np.sqrt(chances @ (values - mean) ** 2) * counts
            costs[np.ptp(values, axis=0) <= 1e-9 * np.abs(values).max()] = 0.0
            if costs.max() > most:
                most, column, at = float(costs.max()), int(costs.argmax()), s
                above = mine[values[:, column] > _between(values[:, column], float(mean[column]))]
        upper = np.isin(np.arange(len(of_stage)), above)
        lower = (of_stage == at) & ~upper
        left_out = (lower, upper) if self._heavy_first else (upper, lower)  # the last is looked at first
        return [_Part(part.pattern[~other], part.log_weight[~other], part.num_rounds) for other in left_out]

    def _play(self, pattern: Ints) -> None:
        """Play the one placement that a part holds, if it is one: blocks in the order of the chain."""
        layers, num_stages, num_chunks = self._layers, self._num_stages, self._num_chunks
        if not np.array_equal(self._stage[pattern], np.arange(num_stages)):
            return
        first, last = layers.first_run[pattern].T.ravel(), layers.last_run[pattern].T.ravel()  # along the chain
        if np.any(last[:-1] > first[1:]):
            return
        num_virtual = num_stages * num_chunks
        times_ms = np.zeros(layers.least_before.shape[1])
        for slot, p in zip(layers.slot, pattern.tolist(), strict=True):
            times_ms[slot] = layers.times_ms[p]
        step_ms = step_bounds(self._graph, times_ms, num_virtual)[0]
        self.num_tasks += len(self._graph.stage)
        if step_ms < min(self.target_ms, self.best_ms):
            self.best_ms = step_ms
            offsets = np.cumsum([0, *(len(p) for p in self._patterns)]).tolist()
            self.best = [
                (of_stage, p - begin)
                for of_stage, p, begin in zip(self._patterns, pattern.tolist(), offsets[:-1], strict=True)
            ]


def _between(values: Floats, mean: float) -> float:
    """A threshold next to `mean`, midway between two of the values, that leaves some on either side."""
    distinct = np.unique(values)
    gaps = np.diff(distinct) > 1e-9 * np.abs(distinct).max()
    lows, highs = distinct[:-1][gaps], distinct[1:][gaps]
    at = int(np.clip(np.searchsorted(highs, mean), 0, len(highs) - 1))
    return float(0.5 * (lows[at] + highs[at]))
