"""Confirm a bound by branch and bound: show that no choice of one option per stage takes less time.

Stages are fixed from the last to the first. What all stages before one hold is its state; every bound plays the
schedule with the fixed stages as they are and each other one at the componentwise least of all options that lead to the
state. The step is a longest path and never falls when a time rises, so no completion is faster than the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.certify.layout_options import list_layout_options
from mm_autoparallel.pipeline.certify.stage_options import StageOptions, list_stage_options, may_follow
from mm_autoparallel.pipeline.laid_out import has_layouts
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.loads import graph_of, microbatch_classes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Numbers in the tables of one stage's states, and edges between two stages' states, beyond which memory would end the
#: check (assumed: about a gigabyte).
MAX_CELLS, MAX_EDGES = 50_000_000, 2_000_000
#: Pruning goes on while a round drops this share of the options; what is less the search itself drops as cheaply.
WORTHWHILE_FRACTION = 0.1


@dataclass(frozen=True, eq=False)
class Layer:
    """One stage: n options, sorted into G groups that use the same blocks, and m edges between states, sorted by group.

    begin: [G + 1] first option of each group. least_ms: [G, 4V + 1] its least times. group, source, target: [m] the
    edge's group and the states before and after the stage. before_ms: [states before, 4K - 1 + P] least times of all
    earlier stages on any way into a state; after_ms: [states after, 4K - 1 + P] of all later ones on any way out.
    """

    options: StageOptions
    begin: Ints
    least_ms: Floats
    group: Ints
    source: Ints
    target: Ints
    before_ms: Floats
    after_ms: Floats


def confirm_tree(problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> Placement | None:
    """A placement that fits its memory and takes less than bound_ms, or None where there is none.

    Raises Unconfirmed where it cannot tell: stopped, too much to list, or micro-batches that differ.
    """
    if microbatch_classes(problem)[0]:
        raise Unconfirmed("the search covers equal micro-batches only")
    return Search(problem, bound_ms, should_stop).run()


class Search:
    """The search over one problem: its schedule, how often it was played, its layers and the options fixed so far."""

    def __init__(self, problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> None:
        self.problem = problem
        self.bound_ms = bound_ms
        self.should_stop = should_stop
        self.graph = graph_of(problem)
        self.num_plays = 0
        self.width = 4 * problem.num_virtual_stages - 1 + problem.num_stages
        self.slots = [self._slots(s) for s in range(problem.num_stages)]
        none = np.zeros(0, dtype=np.int64)
        self.earlier = [np.concatenate([none, *self.slots[:s]]) for s in range(problem.num_stages)]
        self.later = [np.concatenate([none, *self.slots[s + 1 :]]) for s in range(problem.num_stages)]
        self.count = np.array([block.count for block in problem.chain], dtype=np.int64)
        self.may_follow = may_follow(problem)
        self.layers: list[Layer] = []
        self.chosen = [-1] * problem.num_stages
        self._ends_ms, self._free_ms = np.empty(self.graph.num_tasks + 1), np.empty(problem.num_stages)

    def run(self) -> Placement | None:
        """See `confirm_tree`."""
        return self._descend(self.problem.num_stages - 1, 0, np.zeros(self.width)) if self.prepare() else None

    def prepare(self) -> bool:
        """List what the stages could hold, drop what is too slow and link the rest; False where nothing is left."""
        problem = self.problem
        list_options = list_layout_options if has_layouts(problem) else list_stage_options
        options = [
            list_options(problem, self.graph, s, self.bound_ms, self.should_stop) for s in range(problem.num_stages)
        ]
        options = self._prune_alone(options)
        num_left = np.inf
        while self._link(options):
            num_before, num_left = num_left, sum(len(layer.options) for layer in self.layers)
            if num_left > num_before * (1.0 - WORTHWHILE_FRACTION):
                return True
            options = self._prune_linked()
        return False

    def placement_of(self, chosen: list[int]) -> Placement | None:
        """The placement of one option of each stage; None where their blocks are not in the order of the chain."""
        self.chosen = list(chosen)
        ordered = all(self._fits_beside(s, chosen[s]) for s in range(len(chosen) - 1, -1, -1))
        return self._placement() if ordered else None

    def step_ms(self, times_ms: Floats) -> float:
        """The step under times [4K - 1 + P]: forward, backward [K], hops forward, backward [K - 1], zero, tails [P]."""
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

    def _prune_alone(self, options: list[StageOptions]) -> list[StageOptions]:
        """Drop options that are too slow even where every other stage has the least of all its times."""
        num_before, num_left = np.inf, sum(map(len, options))
        while all(map(len, options)) and num_left <= num_before * (1.0 - WORTHWHILE_FRACTION):
            least_ms = np.zeros(self.width)
            for slots, of_stage in zip(self.slots, options, strict=True):
                least_ms[slots] = of_stage.times_ms.min(axis=0)
            kept = []
            for slots, of_stage in zip(self.slots, options, strict=True):
                times_ms = least_ms.copy()
                alive = np.zeros(len(of_stage), dtype=np.bool_)
                for i, mine_ms in enumerate(of_stage.times_ms):
                    times_ms[slots] = mine_ms
                    alive[i] = self.step_ms(times_ms) < self.bound_ms
                kept.append(of_stage.select(alive))
            options = kept
            num_before, num_left = num_left, sum(map(len, options))
        return options

    def _prune_linked(self) -> list[StageOptions]:
        """Drop options that are too slow, or fit nowhere, between any two states that they link."""
        options = []
        for s, (slots, layer) in enumerate(zip(self.slots, self.layers, strict=True)):
            alive = np.zeros(len(layer.options), dtype=np.bool_)
            for g, source, target in zip(layer.group, layer.source, layer.target, strict=True):
                left = [i for i in range(layer.begin[g], layer.begin[g + 1]) if not alive[i]]
                if not left:
                    continue
                times_ms = np.zeros(self.width)
                times_ms[self.earlier[s]] = layer.before_ms[source, self.earlier[s]]
                times_ms[self.later[s]] = layer.after_ms[target, self.later[s]]
                times_ms[slots] = layer.least_ms[g]
                if self.step_ms(times_ms) >= self.bound_ms:
                    continue
                for option in left:
                    times_ms[slots] = layer.options.times_ms[option]
                    alive[option] = self.step_ms(times_ms) < self.bound_ms
            options.append(layer.options.select(alive))
        return options

    def _link(self, options: list[StageOptions]) -> bool:
        """Fill `layers` with the states that lead from nothing held to the whole chain; False where none do."""
        if not all(map(len, options)):
            return False
        groups = [np.unique(of_stage.used, axis=0, return_inverse=True) for of_stage in options]
        states, edges = [np.zeros((1, len(self.count)), dtype=np.int64)], []
        for blocks, _ in groups:
            group, source, reached = self._reach(states[-1], blocks)
            found, target = np.unique(reached, axis=0, return_inverse=True)
            if len(found) * self.width > MAX_CELLS:
                raise Unconfirmed("the stages could hold more together than can be listed")
            states.append(found)
            edges.append((group, source, target.ravel()))
        alive = [np.all(states[-1] == self.count, axis=1)]
        for s, (_, source, target) in reversed(list(enumerate(edges))):  # what leads to the whole chain
            alive.insert(0, np.isin(np.arange(len(states[s])), source[alive[0][target]]))
        if not alive[0].any():
            return False
        number = [np.cumsum(leads) - 1 for leads in alive]
        self.layers = []
        before_ms = np.zeros((1, self.width))
        for s, (of_stage, (blocks, of_option), (group, source, target)) in enumerate(
            zip(options, groups, edges, strict=True)
        ):
            order = np.argsort(of_option.ravel(), kind="stable")
            begin = np.searchsorted(of_option.ravel()[order], np.arange(len(blocks) + 1))
            kept = alive[s + 1][target] & alive[s][source]
            layer = Layer(
                options=of_stage.select(order),
                begin=begin,
                least_ms=np.minimum.reduceat(of_stage.times_ms[order], begin[:-1]),
                group=group[kept],
                source=number[s][source[kept]],
                target=number[s + 1][target[kept]],
                before_ms=before_ms,
                after_ms=before_ms,
            )
            self.layers.append(layer)
            before_ms = self._least(layer, s, before_ms, layer.source, layer.target)
        after_ms = np.zeros((1, self.width))
        for s in range(len(self.layers) - 1, -1, -1):
            self.layers[s] = replace(self.layers[s], after_ms=after_ms)
            after_ms = self._least(self.layers[s], s, after_ms, self.layers[s].target, self.layers[s].source)
        return True

    def _reach(self, states: Ints, blocks: Ints) -> tuple[Ints, Ints, Ints]:
        """Edges from `states` [S, E] by groups that use `blocks` [G, E]: group, source, what is held then [m, E]."""
        flat = np.repeat(np.arange(len(self.count)), self.count)
        beginnings = np.concatenate(
            [[0 * self.count], np.cumsum(np.eye(len(self.count), dtype=np.int64)[flat], axis=0)]
        )
        sources, targets = [], []
        num_edges = 0
        for used in blocks:
            held = states + used
            fits = np.all(held <= self.count, axis=1)
            if self.problem.num_chunks == 1:  # what the first stages hold is where the chain begins
                fits[fits] = np.all(held[fits] == beginnings[held[fits].sum(axis=1)], axis=1)
            sources.append(np.flatnonzero(fits))
            targets.append(held[fits])
            num_edges += len(targets[-1])
            if num_edges > MAX_EDGES:
                raise Unconfirmed("the stages could hold more together than can be listed")
            if self.should_stop():
                raise Unconfirmed("the search was stopped while listing what the stages could hold together")
        group = np.repeat(np.arange(len(blocks)), [len(rows) for rows in sources])
        return group, np.concatenate(sources), np.concatenate(targets)

    def _least(self, layer: Layer, stage: int, known_ms: Floats, come_from: Ints, go_to: Ints) -> Floats:
        """Least times over the edges into each state, from those of the states they come from and the stage's own."""
        least_ms = np.full((int(go_to.max()) + 1, self.width), np.inf)
        bounds = np.searchsorted(layer.group, np.arange(len(layer.least_ms) + 1))
        for g, (begin, end) in enumerate(pairwise(bounds)):  # no two edges of one group lead to one state
            times_ms = known_ms[come_from[begin:end]]
            times_ms[:, self.slots[stage]] = layer.least_ms[g]
            least_ms[go_to[begin:end]] = np.minimum(least_ms[go_to[begin:end]], times_ms)
        return least_ms

    def _descend(self, stage: int, state: int, fixed_ms: Floats) -> Placement | None:
        """Search all options of `stage` that lead to `state`, where the later stages take fixed_ms."""
        layer, slots, earlier = self.layers[stage], self.slots[stage], self.earlier[stage]
        children = []
        for edge in np.flatnonzero(layer.target == state).tolist():
            group = layer.group[edge]
            times_ms = fixed_ms.copy()
            times_ms[earlier] = layer.before_ms[layer.source[edge], earlier]
            times_ms[slots] = layer.least_ms[group]
            if self.step_ms(times_ms) >= self.bound_ms:
                continue
            for option in range(layer.begin[group], layer.begin[group + 1]):
                if not self._fits_beside(stage, option):
                    continue
                times_ms[slots] = layer.options.times_ms[option]
                bound_ms = self.step_ms(times_ms)
                if bound_ms < self.bound_ms:
                    children.append((bound_ms, option, edge))
        for _, option, edge in sorted(children):
            self.chosen[stage] = option
            if stage == 0:
                return self._placement()
            times_ms = fixed_ms.copy()
            times_ms[slots] = layer.options.times_ms[option]
            found = self._descend(stage - 1, int(layer.source[edge]), times_ms)
            if found is not None:
                return found
        return None

    def _fits_beside(self, stage: int, option: int) -> bool:
        """Whether each chunk of `option` may lie before what the next stage holds, and round the ends likewise."""
        mine = self.layers[stage].options
        self.chosen[stage] = option
        if stage < self.problem.num_stages - 1:
            behind = self.layers[stage + 1].options.first[self.chosen[stage + 1]]
            if not self.may_follow[mine.last[option], behind].all():
                return False
        if stage == 0:
            ends = self.layers[-1].options.last[self.chosen[-1]]
            return bool(self.may_follow[ends[:-1], mine.first[option][1:]].all())
        return True

    def _placement(self) -> Placement:
        """The placement of the options that are chosen."""
        chain = self.problem.chain
        edges = np.cumsum([0, *(len(block.modes) for block in chain)]).tolist()
        layers: list[tuple[int, ...]] = []
        modes: list[tuple[tuple[int, ...], ...]] = []
        for chunk in range(self.problem.num_chunks):
            for layer, option in zip(self.layers, self.chosen, strict=True):
                counts = layer.options.modes[option, chunk].tolist()
                layers.append(tuple(layer.options.layers[option, chunk].tolist()))
                modes.append(tuple(tuple(counts[a:b]) for a, b in pairwise(edges)))
        return Placement(tuple(layers), tuple(modes))
