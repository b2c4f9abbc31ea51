"""Confirm a bound by mixtures of paths: show that every placement is too slow on some mean of paths.

A step is at least as long as every path through the schedule, so at least any weighted mean of them. On one mean the
cheapest placement is a shortest way through the states that stages link (`confirm_tree`), so one sum over all options
tells whether any placement, or any with a given option, stays below the bound. Means are found by play: shares of the
ways answer the longest path under the mean times of the shares before. Where a mean leaves something open, the options
of one stage are parted into light and heavy ones, and either part is shown by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.certify.confirm_tree import Search
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import microbatch_classes
from mm_autoparallel.pipeline.simulate.step import trace_critical_path

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: Rounds of play on one part, and rounds between two looks at what their mean shows (assumed: little is learnt later).
NUM_ROUNDS, ROUNDS_BETWEEN_LOOKS = 400, 20
#: How far shares move at first; later moves shrink with the root of the round (assumed: shares settle, none too early).
LEARNING_FACTOR = 5.0
#: A part is played again where the play before dropped this share of its options.
WORTHWHILE_FRACTION = 0.1
#: Latest means that are tried on a new part before it is played (assumed).
NUM_REMEMBERED = 8
#: How much more a stage's load counts than the times of its chunks when a part is parted.
LOAD_FACTOR = 4.0


def confirm_mixtures(problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> Placement | None:
    """A placement that fits its memory and takes less than bound_ms, or None where there is none.

    Raises Unconfirmed where it cannot tell: stopped, too much to list, or micro-batches that differ.
    """
    if microbatch_classes(problem)[0]:
        raise Unconfirmed("the search covers equal micro-batches only")
    search = Search(problem, bound_ms, should_stop)
    if not search.prepare():
        return None
    return _Parts(search).refute([np.ones(len(layer.options), dtype=np.bool_) for layer in search.layers])


class _Parts:
    """A part is a mask over each stage's options."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.num_rounds = 0
        self.latest: list[Floats] = []  # means, the last found first

    def refute(self, part: list[Bools]) -> Placement | None:
        """A placement of the part that takes less than the bound, or None where there is none."""
        waiting = [part]
        while waiting:
            part = waiting.pop()
            for mean in self.latest:
                part = self._drop(part, mean)
            if not all(mask.any() for mask in part):
                continue
            num_before, num_left = np.inf, float(sum(mask.sum() for mask in part))
            mean, shares = np.zeros(self.search.width), [mask.astype(np.float64) for mask in part]
            while len(part) < num_left <= num_before * (1.0 - WORTHWHILE_FRACTION):
                mean, shares = self._play(part)
                part = self._drop(part, mean)
                self.latest = [mean, *self.latest][:NUM_REMEMBERED]
                num_before, num_left = num_left, float(sum(mask.sum() for mask in part))
            if not all(mask.any() for mask in part):
                continue
            if num_left > len(part):
                waiting += self._halves(part, mean, shares)
                continue
            placement = self._single(part)
            if placement is not None:
                return placement
        return None

    def _play(self, part: list[Bools]) -> tuple[Floats, list[Floats]]:
        """The mean path [4K - 1 + P] that shows most for the part, and the mean share of each option."""
        search = self.search
        scores = [np.where(mask, 0.0, -np.inf) for mask in part]
        total, sums = np.zeros(search.width), [np.zeros(len(mask)) for mask in part]
        best_ms, best, least_step_ms = -np.inf, total, np.inf
        for n in range(1, NUM_ROUNDS + 1):
            shares = self._shares(scores)
            if shares is None:  # nothing links the options that are left
                break
            times_ms = np.zeros(search.width)
            for slots, layer, share, of_stage in zip(search.slots, search.layers, shares, sums, strict=True):
                np.add.at(times_ms, slots, share @ layer.options.times_ms)
                of_stage += n * share
            step_ms, path = self._longest(times_ms)
            least_step_ms = min(least_step_ms, step_ms)
            total += n * path
            rate = LEARNING_FACTOR * len(part) / (max(step_ms, 1e-300) * n**0.5)
            for slots, layer, score in zip(search.slots, search.layers, scores, strict=True):
                score -= rate * (layer.options.times_ms @ path[slots])
                score -= score.max()
            if n % ROUNDS_BETWEEN_LOOKS == 0:
                mean = 2.0 * total / (n * (n + 1))
                shown_ms = min(float(costs.min()) for costs in self._least_with(part, mean))
                if shown_ms > best_ms:
                    best_ms, best = shown_ms, mean
                if best_ms >= search.bound_ms or search.bound_ms - least_step_ms > 0.5 * (least_step_ms - best_ms):
                    break  # shown, or no mean can show it: none passes the step of mean times
        return best, [of_stage / max(float(of_stage.sum()), 1e-300) for of_stage in sums]

    def _longest(self, times_ms: Floats) -> tuple[float, Floats]:
        """The step under times [4K - 1 + P], and its longest path as counts of them."""
        search, num_virtual = self.search, self.search.problem.num_virtual_stages
        self.num_rounds += 1
        if self.num_rounds % 64 == 0 and search.should_stop():
            raise Unconfirmed(f"the search was stopped after {self.num_rounds:,} rounds of play")
        durations, hops, tails = np.split(times_ms, [2 * num_virtual, 4 * num_virtual - 1])
        step_ms, path = trace_critical_path(search.graph, durations, hops, tails)
        counts = (path.forward.ravel(), path.backward.ravel(), path.hop_forward, path.hop_backward, [0.0])
        ends = np.arange(len(tails)) == path.end_stage
        return step_ms, np.concatenate([*counts, ends]).astype(np.float64)

    def _shares(self, scores: list[Floats]) -> list[Floats] | None:
        """The share of each option where a way's share is the product of exp(score) over its options; None: no way."""
        layers = self.search.layers
        weights, groups = [], []  # of each option within its group, and of each group
        for score, layer in zip(scores, layers, strict=True):
            most = np.maximum.reduceat(score, layer.begin[:-1])
            size = np.diff(layer.begin)
            weight = np.exp(score - np.repeat(np.where(np.isfinite(most), most, 0.0), size))
            total = np.add.reduceat(weight, layer.begin[:-1])
            weights.append(weight / np.repeat(np.maximum(total, 1.0), size))
            groups.append(np.exp(most) * total)
        into = [np.ones(1)]
        for layer, of_group in zip(layers, groups, strict=True):
            passed = np.bincount(layer.target, into[-1][layer.source] * of_group[layer.group], len(layer.after_ms))
            if passed.max() <= 0.0:
                return None
            into.append(passed / passed.max())
        on: Floats = np.ones(1)
        shares: list[Floats] = []
        for layer, w, of_group, before in zip(layers[::-1], weights[::-1], groups[::-1], into[-2::-1], strict=True):
            through = before[layer.source] * of_group[layer.group] * on[layer.target]
            if through.sum() <= 0.0:
                return None
            flow: Floats = np.bincount(layer.group, through, len(of_group)) / through.sum()
            shares.insert(0, w * np.repeat(flow, np.diff(layer.begin)))
            on = np.bincount(layer.source, on[layer.target] * of_group[layer.group], len(layer.before_ms)).astype(float)
            on /= on.max()
        return shares

    def _least_with(self, part: list[Bools], mean: Floats) -> list[Floats]:
        """What the cheapest placement with each option costs on a mean path; infinite where there is none."""
        search = self.search
        costs = [
            np.where(mask, layer.options.times_ms @ mean[slots], np.inf)
            for mask, layer, slots in zip(part, search.layers, search.slots, strict=True)
        ]
        groups = [np.minimum.reduceat(cost, layer.begin[:-1]) for cost, layer in zip(costs, search.layers, strict=True)]
        before = [np.zeros(1)]
        for layer, of_group in zip(search.layers, groups, strict=True):
            least = np.full(len(layer.after_ms), np.inf)
            np.minimum.at(least, layer.target, before[-1][layer.source] + of_group[layer.group])
            before.append(least)
        after = np.zeros(1)
        total: list[Floats] = []
        for layer, of_group, cost, earlier in zip(
            search.layers[::-1], groups[::-1], costs[::-1], before[-2::-1], strict=True
        ):
            around = np.full(len(of_group), np.inf)
            np.minimum.at(around, layer.group, earlier[layer.source] + after[layer.target])
            total.insert(0, cost + np.repeat(around, np.diff(layer.begin)))
            least = np.full(len(layer.before_ms), np.inf)
            np.minimum.at(least, layer.source, after[layer.target] + of_group[layer.group])
            after = least
        return total

    def _drop(self, part: list[Bools], mean: Floats) -> list[Bools]:
        return [costs < self.search.bound_ms for costs in self._least_with(part, mean)]

    def _halves(self, part: list[Bools], mean: Floats, shares: list[Floats]) -> list[list[Bools]]:
        """Two parts that make up the one: split where the spread of a load, or of a chunk's time, costs most."""
        num_times = 2 * self.search.problem.num_chunks
        most, at, light = -1.0, -1, part[0]
        for s, (mask, layer, slots) in enumerate(zip(part, self.search.layers, self.search.slots, strict=True)):
            counts = mean[slots[:num_times]]
            times_ms = layer.options.times_ms[:, :num_times]
            columns = [(times_ms.sum(axis=1), LOAD_FACTOR * float(counts.mean()))]
            columns += list(zip(times_ms.T, counts.tolist(), strict=True))
            share = shares[s][mask] + 1e-12
            for values, count in columns:
                here = values[mask]
                if np.ptp(here) <= 1e-9 * here.max():
                    continue
                middle = float(np.average(here, weights=share))
                cost = count * float(np.average((here - middle) ** 2, weights=share)) ** 0.5
                if cost > most:
                    threshold = min(max(middle, float(here.min())), float(np.nextafter(here.max(), 0.0)))
                    most, at, light = cost, s, mask & (values <= threshold)
        if at < 0:  # equal times: any half
            at = int(np.argmax([mask.sum() for mask in part]))
            light = part[at] & (np.cumsum(part[at]) <= part[at].sum() // 2)
        return [[side if s == at else mask for s, mask in enumerate(part)] for side in (light, part[at] & ~light)]

    def _single(self, part: list[Bools]) -> Placement | None:
        """The one placement of the part, if its blocks are in order and it takes less than the bound."""
        search = self.search
        chosen = [int(np.flatnonzero(mask)[0]) for mask in part]
        times_ms = np.zeros(search.width)
        for slots, layer, option in zip(search.slots, search.layers, chosen, strict=True):
            times_ms[slots] = layer.options.times_ms[option]
        return search.placement_of(chosen) if search.step_ms(times_ms) < search.bound_ms else None
