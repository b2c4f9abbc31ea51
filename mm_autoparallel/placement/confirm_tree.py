"""Confirm a bound by branch and bound: show that no choice of one option per stage takes less time.

Stages are fixed from the last to the first. What all stages up to one hold is its state; every bound plays the schedule
with the fixed stages as they are and the others at the componentwise least of all options that lead to the state. The
step is a longest path and never falls when a time rises, so no completion is faster than the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.placement.certificate import Unconfirmed
from mm_autoparallel.placement.stage_options import StageOptions, list_stage_options, may_follow
from mm_autoparallel.problem import Placement, Problem
from mm_autoparallel.simulate import engine
from mm_autoparallel.simulate.loads import microbatch_classes
from mm_autoparallel.simulate.step import graph_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Numbers in the tables of one stage's states, beyond which memory would end the check (assumed: a gigabyte).
MAX_CELLS = 100_000_000
#: Pruning goes on while a round drops this share of the options; less is dropped as cheaply by the search itself.
WORTHWHILE_FRACTION = 0.1


@dataclass(frozen=True, eq=False)
class Layer:
    """One stage: its n options sorted into G groups that use the same blocks, and the S states before it.

    begin: [G + 1] first option of each group. used: [G, E] blocks it uses. least_ms: [G, 4V + 1] its least times.
    state_keys: [S] sorted. before_ms: [S, 4K - 1 + P] least times of the stages before, over all ways into the state.
    """

    options: StageOptions
    begin: Ints
    used: Ints
    least_ms: Floats
    state_keys: Ints
    states: Ints
    before_ms: Floats
    after_ms: Floats


def confirm_tree(problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> Placement | None:
    """A placement that fits its memory and takes less than bound_ms, or None where there is none.

    Raises Unconfirmed where it cannot tell: stopped, too much to list, or micro-batches that differ.
    """
    if microbatch_classes(problem)[0]:
        raise Unconfirmed("the search covers equal micro-batches only")
    return _Search(problem, bound_ms, should_stop).run()


class _Search:
    """The search over one problem: its schedule, how often it was played, its layers and the stages fixed so far."""

    def __init__(self, problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> None:
        self.problem = problem
        self.bound_ms = bound_ms
        self.should_stop = should_stop
        self.graph = graph_of(problem)
        self.num_plays = 0
        num_virtual = problem.num_virtual_stages
        self.width = 4 * num_virtual - 1 + problem.num_stages
        self.slots = [self._slots(s) for s in range(problem.num_stages)]
        self.count = np.array([block.count for block in problem.chain], dtype=np.int64)
        self.weights = self._state_weights()
        self.may_follow = may_follow(problem)
        self.layers: list[Layer] = []
        self.chosen = [-1] * problem.num_stages
        self._ends_ms, self._free_ms = np.empty(self.graph.num_tasks + 1), np.empty(problem.num_stages)

    def run(self) -> Placement | None:
        """See `confirm_tree`."""
        problem = self.problem
        options = [
            list_stage_options(problem, self.graph, s, self.bound_ms, self.should_stop)
            for s in range(problem.num_stages)
        ]
        options = self._prune_alone(options)
        if any(len(of_stage) == 0 for of_stage in options):
            return None
        nb=np.inf
        while (nl:=sum(map(len,options)))<=nb*.9:
            nb=nl
            if any(len(of_stage) == 0 for of_stage in options):
                return None
            if not self._link(options): return None
            options = self._prune_linked()
            print('   round', self.num_plays, sum(map(len,options)))
        if any(len(of_stage) == 0 for of_stage in options) or not self._link(options): return None
        return self._descend(problem.num_stages - 1, self.count, np.zeros(self.width))

    def step_ms(self, times_ms: Floats) -> float:
        """The step under times laid out as forward [K], backward [K], hops forward and backward [K - 1] each, 0, tails [P]."""
        graph, num_virtual = self.graph, self.problem.num_virtual_stages
        self.num_plays += 1
        if self.num_plays % 64 == 0 and self.should_stop():
            raise Unconfirmed(f"the search was stopped after {self.num_plays:,} plays of the schedule")
        step_ms: float = engine.play(
            graph.stage,
            graph.dependency,
            graph.hop,
            graph.duration,
            times_ms[: 2 * num_virtual],
            times_ms[2 * num_virtual : 4 * num_virtual - 1],
            times_ms[4 * num_virtual - 1 :],
            self._ends_ms,
            self._free_ms,
        )
        return step_ms

    def _slots(self, stage: int) -> Ints:
        """[4V + 1] where a stage's times go in the vector that `step_ms` takes."""
        num_stages, num_virtual = self.problem.num_stages, self.problem.num_virtual_stages
        k = np.arange(stage, num_virtual, num_stages)
        nothing = 4 * num_virtual - 2  # no hop leaves the last virtual stage: its zeros go to the zero entry
        hops = [np.where(k < num_virtual - 1, first + k, nothing) for first in (2 * num_virtual, 3 * num_virtual - 1)]
        return np.concatenate([k, num_virtual + k, *hops, [4 * num_virtual - 1 + stage]])

    def _state_weights(self) -> Ints:
        """[E] weights that make the sum over what is held a key of its own for every state."""
        if self.problem.num_chunks == 1:  # states are beginnings of the chain: their length tells them apart
            return np.ones_like(self.count)
        radix = np.cumprod(np.concatenate([[1.0], self.count + 1.0]))
        if radix[-1] > 2.0**62:
            raise Unconfirmed("the chain has too many kinds of blocks to list what the stages could hold together")
        return radix[:-1].astype(np.int64)

    def _prune_alone(self, options: list[StageOptions]) -> list[StageOptions]:
        """Drop options that are too slow even where every other stage has the least of all its times."""
        num_before = np.inf
        while 0 < (num_left := sum(map(len, options))) <= num_before * (1.0 - WORTHWHILE_FRACTION):
            num_before = num_left
            least_ms = np.zeros(self.width)
            for slots, of_stage in zip(self.slots, options, strict=True):
                if len(of_stage) == 0:
                    return options
                least_ms[slots] = of_stage.times_ms.min(axis=0)
            for s, (slots, of_stage) in enumerate(zip(self.slots, options, strict=True)):
                times_ms = least_ms.copy()
                alive = np.zeros(len(of_stage), dtype=np.bool_)
                for i, mine_ms in enumerate(of_stage.times_ms):
                    times_ms[slots] = mine_ms
                    alive[i] = self.step_ms(times_ms) < self.bound_ms
                options[s] = of_stage.select(alive)
        return options

    def _prune_linked(self) -> list[StageOptions]:
        """Drop options that are too slow, or fit nowhere, between any two states that they link."""
        options = []
        for s, (slots, layer) in enumerate(zip(self.slots, self.layers, strict=True)):
            alive = np.zeros(len(layer.options), dtype=np.bool_)
            earlier = np.concatenate([slots[:0], *self.slots[:s]])
            later = np.concatenate([slots[:0], *self.slots[s + 1 :]])
            for g, blocks in enumerate(layer.used):
                source, target = self._edges(layer, self.layers[s + 1].state_keys if s + 1 < len(self.layers) else self.count[None] @ self.weights, blocks)
                group = np.arange(layer.begin[g], layer.begin[g + 1])
                for before, after in zip(source, target, strict=True):
                    times_ms = np.zeros(self.width)
                    times_ms[earlier] = layer.before_ms[before, earlier]
                    times_ms[later] = layer.after_ms[after, later]
                    times_ms[slots] = layer.least_ms[g]
                    if alive[group].all():
                        break
                    if self.step_ms(times_ms) >= self.bound_ms:
                        continue
                    for option in group[~alive[group]]:
                        times_ms[slots] = layer.options.times_ms[option]
                        alive[option] = self.step_ms(times_ms) < self.bound_ms
            options.append(layer.options.select(alive))
        return options

    def _edges(self, layer: Layer, keys_after: Ints, blocks: Ints) -> tuple[Ints, Ints]:
        target = layer.states + blocks
        fits = np.all(target <= self.count, axis=1)
        if self.problem.num_chunks == 1:
            fits[fits] = np.all(target[fits] == self.begins[target[fits].sum(axis=1)], axis=1)
        key = target @ self.weights
        at = np.minimum(np.searchsorted(keys_after, key), len(keys_after) - 1)
        fits &= keys_after[at] == key
        return np.flatnonzero(fits), at[fits]

    def _link(self, options: list[StageOptions]) -> bool:
        """Fill `layers`: all states from the first stage on, with the least times of the stages that lead to them."""
        self.layers = []
        flat = np.repeat(np.arange(len(self.count)), self.count)
        self.begins = np.concatenate([[0 * self.count], np.cumsum(np.eye(len(self.count), dtype=np.int64)[flat], axis=0)])
        states, before_ms = np.zeros((1, len(self.count)), dtype=np.int64), np.zeros((1, self.width))
        for slots, of_stage in zip(self.slots, options, strict=True):
            key = of_stage.used @ self.weights
            if self.problem.num_chunks == 1:  # equal lengths may be different stretches
                key = np.unique(of_stage.used, axis=0, return_inverse=True)[1].ravel()
            order = np.argsort(key, kind="stable")
            begin = np.flatnonzero(np.diff(key[order], prepend=-1))
            sorted_options = of_stage.select(order)
            used = sorted_options.used[begin]
            least_ms = np.minimum.reduceat(sorted_options.times_ms, begin)
            self.layers.append(
                Layer(sorted_options, np.append(begin, len(order)), used, least_ms, states @ self.weights, states, before_ms, before_ms)
            )
            if len(states) * len(used) * (self.width if len(states) > 1 else 1) > MAX_CELLS * 10:
                raise Unconfirmed("the stages could hold more together than can be listed")
            reached = []
            for blocks in used:
                target = states + blocks
                fits = np.all(target <= self.count, axis=1)
                if self.problem.num_chunks == 1:
                    fits[fits] = np.all(target[fits] == self.begins[target[fits].sum(axis=1)], axis=1)
                reached.append((np.flatnonzero(fits), target[fits]))
            found = np.concatenate([target for _, target in reached])
            keys, once = np.unique(found @ self.weights, return_index=True)
            after_ms = np.full((len(keys), self.width), np.inf)
            for (source, target), mine_ms in zip(reached, least_ms, strict=True):
                times_ms = before_ms[source]
                times_ms[:, slots] = mine_ms
                at = np.searchsorted(keys, target @ self.weights)
                after_ms[at] = np.minimum(after_ms[at], times_ms)
            states, before_ms = found[once], after_ms
        keys_after = self.count[None] @ self.weights
        after_ms = np.zeros((1, self.width))
        from dataclasses import replace
        for s in range(len(self.layers)-1,-1,-1):
            layer, slots = self.layers[s], self.slots[s]
            mine = np.full((len(layer.states), self.width), np.inf)
            for g, blocks in enumerate(layer.used):
                source, target = self._edges(layer, keys_after, blocks)
                times_ms = after_ms[target]
                times_ms[:, slots] = layer.least_ms[g]
                mine[source] = np.minimum(mine[source], times_ms)
            alive = np.isfinite(mine[:, slots[0]])
            if not alive.any(): return False
            self.layers[s] = replace(layer, after_ms=after_ms, states=layer.states[alive], state_keys=layer.state_keys[alive], before_ms=layer.before_ms[alive])
            after_ms, keys_after = mine[alive], layer.state_keys[alive]
        return True

    def _descend(self, stage: int, held: Ints, fixed_ms: Floats) -> Placement | None:
        """Search all options of `stage` where the stages up to it hold `held` and the later ones take fixed_ms."""
        layer, slots = self.layers[stage], self.slots[stage]
        source_keys = (held - layer.used) @ self.weights
        at = np.minimum(np.searchsorted(layer.state_keys, source_keys), len(layer.state_keys) - 1)
        known = np.all(layer.used <= held, axis=1) & (layer.state_keys[at] == source_keys)
        earlier = np.concatenate([np.zeros(0, dtype=np.int64), *self.slots[:stage]])
        children = []
        for g in np.flatnonzero(known):
            times_ms = fixed_ms.copy()
            times_ms[earlier] = layer.before_ms[at[g], earlier]
            times_ms[slots] = layer.least_ms[g]
            if self.step_ms(times_ms) >= self.bound_ms:
                continue
            for option in range(layer.begin[g], layer.begin[g + 1]):
                if not self._fits_beside(stage, option):
                    continue
                times_ms[slots] = layer.options.times_ms[option]
                bound_ms = self.step_ms(times_ms)
                if bound_ms < self.bound_ms:
                    children.append((bound_ms, option, int(g)))
        for _, option, g in sorted(children):
            self.chosen[stage] = option
            if stage == 0:
                return self._placement()
            mine_ms = fixed_ms.copy()
            mine_ms[slots] = layer.options.times_ms[option]
            found = self._descend(stage - 1, held - layer.used[g], mine_ms)
            if found is not None:
                return found
        return None

    def _fits_beside(self, stage: int, option: int) -> bool:
        """Whether each chunk of `option` may lie before what the next stage holds, and round the ends likewise."""
        num_stages, mine = self.problem.num_stages, self.layers[stage].options
        self.chosen[stage] = option
        if stage < num_stages - 1:
            behind = self.layers[stage + 1].options.first[self.chosen[stage + 1]]
            if not self.may_follow[mine.last[option], behind].all():
                return False
        if stage == 0:
            ends = self.layers[-1].options.last[self.chosen[-1]]
            return bool(self.may_follow[ends[:-1], mine.first[option][1:]].all())
        return True

    def _placement(self) -> Placement:
        layers: list[tuple[int, ...]] = []
        recompute: list[tuple[int, ...]] = []
        for chunk in range(self.problem.num_chunks):
            for layer, option in zip(self.layers, self.chosen, strict=True):
                layers.append(tuple(layer.options.layers[option, chunk].tolist()))
                recompute.append(tuple(layer.options.recompute[option, chunk].tolist()))
        return Placement(tuple(layers), tuple(recompute))
