"""The pattern tree: an exact search over one pattern per stage, bounded by the simulator itself.

Every bound plays the schedule with some stages fixed and the others at the componentwise least of all patterns that the
state still allows: as the step is a longest path it never falls when a time rises, so no completion is faster. Stages
are fixed from the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import StagePatterns
from mm_autoparallel.pipeline.placement.patterns.state_graph import (
    Layers,
    build_layers,
    fill_least,
    fill_times,
    least_of,
)
from mm_autoparallel.pipeline.placement.patterns.tree_bounds import PlayedGraph, played, step_bounds
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.stage_times import times_layout

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Bounds this close below the best step count as reaching it: the rounding noise of long sums, far inside 1e-6.
RELATIVE_TOLERANCE = 1e-10
#: Simulated tasks of one pass of pruning beyond which the tree hands over to the solver: it would take most of a
#: search. The known cases need 4e8 at most, 72B on 16 stages of 3 and of 4 chunks 9e9 and 3e10.
MAX_PRUNING_TASKS = 1_000_000_000


@kernel
def prune(
    layers: Layers,
    graph: PlayedGraph,
    stage: int,
    num_stages: int,
    num_virtual: int,
    upper_ms: float,
    edges: tuple[int, int],
    keep_pattern: NDArray[np.bool_],
) -> None:
    """Mark in keep_pattern which patterns can be part of a step below upper_ms on an edge of `stage` in that range."""
    width = layers.times_ms.shape[1]
    times = np.zeros(times_layout(num_virtual, num_stages).num_times)
    for e in range(edges[0], edges[1]):
        g = layers.edge_group[e]
        begin, end = layers.group_begin[g], layers.group_begin[g + 1]
        fill_times(layers, stage, num_stages, layers.edge_from[e], layers.edge_to[e], times)
        if end - begin > 1:
            for i in range(width):
                times[layers.slot[stage, i]] = least_of(layers.times_ms, begin, end, i)
            if step_bounds(graph, times, num_virtual)[0] >= upper_ms:
                continue
        for p in range(begin, end):
            if keep_pattern[p]:
                continue
            for i in range(width):
                times[layers.slot[stage, i]] = layers.times_ms[p, i]
            if step_bounds(graph, times, num_virtual)[0] < upper_ms:
                keep_pattern[p] = True


class Search(NamedTuple):
    """State of a depth-first search between slices; depth d fixes stage P - 1 - d.

    depth: [1]. child_pattern, child_edge, child_bound: [P, most] children sorted by bound; num_children, next_child:
    [P].
    state: [P + 1] state below each depth. chosen: [P] pattern of each stage. times_ms: [P + 1, 4K - 1 + P] of the fixed
    stages. best_ms: [1]; best: [P] its patterns, -1 if none. num_nodes: [1].
    """

    depth: Ints
    child_pattern: Ints
    child_edge: Ints
    child_bound: Floats
    num_children: Ints
    next_child: Ints
    state: Ints
    chosen: Ints
    times_ms: Floats
    best_ms: Floats
    best: Ints
    num_nodes: Ints


@kernel
def sort_children(search: Search, depth: int, count: int) -> None:
    """Shell sort by bound; the order of equal bounds is fixed, and it compiles in no time."""
    gap = count // 2
    while gap > 0:
        for i in range(gap, count):
            bound = search.child_bound[depth, i]
            pattern, edge = search.child_pattern[depth, i], search.child_edge[depth, i]
            j = i
            while j >= gap and search.child_bound[depth, j - gap] > bound:
                search.child_bound[depth, j] = search.child_bound[depth, j - gap]
                search.child_pattern[depth, j] = search.child_pattern[depth, j - gap]
                search.child_edge[depth, j] = search.child_edge[depth, j - gap]
                j -= gap
            search.child_bound[depth, j] = bound
            search.child_pattern[depth, j] = pattern
            search.child_edge[depth, j] = edge
        gap //= 2


@kernel
def expand(
    layers: Layers, graph: PlayedGraph, search: Search, num_stages: int, num_chunks: int, keep_fraction: float
) -> None:
    """List the children of the current depth that may lead below the best step, the most promising first."""
    depth = search.depth[0]
    stage = num_stages - 1 - depth
    num_virtual = num_stages * num_chunks
    target = search.state[depth]
    width = layers.times_ms.shape[1]
    times = np.empty(search.times_ms.shape[1])
    count = 0
    threshold = search.best_ms[0] * keep_fraction
    for e in range(layers.into[target], layers.into[target + 1]):
        source, g = layers.edge_from[e], layers.edge_group[e]
        begin, end = layers.group_begin[g], layers.group_begin[g + 1]
        for i in range(times.shape[0]):
            times[i] = search.times_ms[depth, i]
        for earlier in range(stage):
            for i in layers.slot[earlier]:
                times[i] = layers.least_before[source, i]
        if end - begin > 1:
            for i in range(width):
                times[layers.slot[stage, i]] = least_of(layers.times_ms, begin, end, i)
            search.num_nodes[0] += 1
            if step_bounds(graph, times, num_virtual)[0] >= threshold:
                continue
        for p in range(begin, end):
            fits = True
            for c in range(num_chunks):
                if depth > 0 and layers.last_run[p, c] > layers.first_run[search.chosen[stage + 1], c]:
                    fits = False
                if stage == 0 and c + 1 < num_chunks:
                    end_run = layers.last_run[search.chosen[num_stages - 1] if num_stages > 1 else p, c]
                    if end_run > layers.first_run[p, c + 1]:
                        fits = False
            if not fits:
                continue
            for i in range(width):
                times[layers.slot[stage, i]] = layers.times_ms[p, i]
            search.num_nodes[0] += 1
            bound = step_bounds(graph, times, num_virtual)[0]
            if bound < threshold:
                search.child_pattern[depth, count] = p
                search.child_edge[depth, count] = e
                search.child_bound[depth, count] = bound
                count += 1
    sort_children(search, depth, count)
    search.num_children[depth] = count
    search.next_child[depth] = 0


@kernel
def explore(
    layers: Layers,
    graph: PlayedGraph,
    full: PlayedGraph,
    search: Search,
    num_stages: int,
    num_chunks: int,
    keep_fraction: float,
    max_nodes: int,
) -> bool:
    """Go on with the search for about max_nodes bounds; True once the tree is exhausted."""
    num_virtual = num_stages * num_chunks
    width = layers.times_ms.shape[1]
    stop_at = search.num_nodes[0] + max_nodes
    while search.depth[0] >= 0:
        if search.num_nodes[0] >= stop_at:
            return False
        depth = search.depth[0]
        at = search.next_child[depth]
        threshold = search.best_ms[0] * keep_fraction
        if at == search.num_children[depth] or search.child_bound[depth, at] >= threshold:
            search.num_children[depth] = 0
            search.next_child[depth] = 0
            search.depth[0] -= 1
            continue
        search.next_child[depth] += 1
        stage = num_stages - 1 - depth
        pattern = search.child_pattern[depth, at]
        search.chosen[stage] = pattern
        for i in range(search.times_ms.shape[1]):
            search.times_ms[depth + 1, i] = search.times_ms[depth, i]
        for i in range(width):
            search.times_ms[depth + 1, layers.slot[stage, i]] = layers.times_ms[pattern, i]
        if stage == 0:
            step = step_bounds(full, search.times_ms[depth + 1], num_virtual)[0]
            if step < search.best_ms[0]:
                search.best_ms[0] = step
                for s in range(num_stages):
                    search.best[s] = search.chosen[s]
            continue
        search.state[depth + 1] = layers.edge_from[search.child_edge[depth, at]]
        search.depth[0] += 1
        expand(layers, graph, search, num_stages, num_chunks, keep_fraction)
    return True


class PatternTree:
    """The search over one problem, from an upper bound on; it goes on in slices and keeps its place between them.

    best_ms: the best step known (at first the bound it began with). best: the placement's patterns with their index in
    each stage, None until something below that bound is found. lower_bound_ms holds for every placement. exhausted:
    nothing below best_ms · (1 - gap) is left. layers, patterns: what pruning has left; None, [] where that is nothing.
    """

    def __init__(
        self,
        segments: Segments,
        patterns: list[StagePatterns],
        short: TaskGraph,
        full: TaskGraph,
        upper_ms: float,
        gap_fraction: float,
        should_stop: Callable[[], bool],
    ) -> None:
        """patterns: of each stage, all that a step below upper_ms can use. Raises TooManyPatterns (memory)."""
        problem = segments.problem
        self.segments = segments
        self.short, self.full = played(short), played(full)
        self.tasks_per_bound = short.num_tasks
        self.best_ms = upper_ms
        self.best: list[tuple[StagePatterns, int]] | None = None
        self.exhausted = False
        self.num_nodes = 0
        self._keep = 1.0 - max(gap_fraction, RELATIVE_TOLERANCE)
        self._num_stages, self._num_chunks = problem.num_stages, problem.num_chunks
        self._search: Search | None = None
        self.layers: Layers | None = None
        self.patterns: list[StagePatterns] = []
        pruned = self._prune(patterns, should_stop)
        if pruned is None:
            self.exhausted = True
            return
        self.layers, self.patterns = pruned
        num_stages, width = problem.num_stages, self.layers.least_before.shape[1]
        group_size = np.diff(self.layers.group_begin)[self.layers.edge_group]
        most = int(np.bincount(self.layers.edge_to, weights=group_size).max())
        self._search = Search(
            depth=np.zeros(1, dtype=np.int64),
            child_pattern=np.zeros((num_stages, most), dtype=np.int64),
            child_edge=np.zeros((num_stages, most), dtype=np.int64),
            child_bound=np.zeros((num_stages, most)),
            num_children=np.zeros(num_stages, dtype=np.int64),
            next_child=np.zeros(num_stages, dtype=np.int64),
            state=np.full(num_stages + 1, self.layers.state_offset[num_stages], dtype=np.int64),
            chosen=np.full(num_stages, -1, dtype=np.int64),
            times_ms=np.zeros((num_stages + 1, width)),
            best_ms=np.array([upper_ms]),
            best=np.full(num_stages, -1, dtype=np.int64),
            num_nodes=np.zeros(1, dtype=np.int64),
        )
        expand(self.layers, self.short, self._search, num_stages, problem.num_chunks, self._keep)

    def _prune(
        self, patterns: list[StagePatterns], should_stop: Callable[[], bool]
    ) -> tuple[Layers, list[StagePatterns]] | None:
        """Drop what cannot be part of a step below the bound, until that changes little; None where nothing is left.

        Raises TooManyPatterns.
        """
        size = (np.inf, np.inf)
        while True:
            built = build_layers(self.segments, patterns)
            if built is None:
                return None
            layers, patterns = built
            fill_least(layers, self._num_stages)
            now = (len(layers.times_ms), len(layers.edge_from))
            if should_stop() or (now[0] > 0.9 * size[0] and now[1] > 0.9 * size[1]):
                return layers, patterns
            if sum(now) * self.tasks_per_bound > MAX_PRUNING_TASKS:
                raise TooManyPatterns
            size = now
            keep = np.zeros(now[0], dtype=np.bool_)
            some = max(1, 10_000_000 // self.tasks_per_bound)
            for s, (begin, end) in enumerate(pairwise(layers.edge_offset.tolist())):
                for e in range(begin, end, some):
                    if should_stop():
                        return layers, patterns
                    prune(
                        layers,
                        self.short,
                        s,
                        self._num_stages,
                        self._num_stages * self._num_chunks,
                        self.best_ms * self._keep,
                        (e, min(end, e + some)),
                        keep,
                    )
            self.num_nodes += now[0] + now[1]
            ends = np.cumsum([len(p) for p in patterns])[:-1]
            patterns = [p.select(kept) for p, kept in zip(patterns, np.split(keep, ends), strict=True)]
            if any(len(p) == 0 for p in patterns):
                return None

    def advance(self, max_nodes: int, upper_ms: float) -> None:
        """Compute about max_nodes more bounds; upper_ms: a step that something else has reached meanwhile."""
        search = self._search
        if search is None or self.layers is None or self.exhausted:
            self.best_ms = min(self.best_ms, upper_ms)
            return
        if upper_ms < search.best_ms[0]:
            search.best_ms[0] = upper_ms
            search.best[:] = -1
        before = int(search.num_nodes[0])
        self.exhausted = bool(
            explore(
                self.layers, self.short, self.full, search, self._num_stages, self._num_chunks, self._keep, max_nodes
            )
        )
        self.num_nodes += int(search.num_nodes[0]) - before
        self.best_ms = float(search.best_ms[0])
        self.best = None
        if search.best[0] >= 0:
            offsets = np.cumsum([0, *(len(p) for p in self.patterns)])
            self.best = [(p, int(search.best[s] - offsets[s])) for s, p in enumerate(self.patterns)]

    @property
    def lower_bound_ms(self) -> float:
        """No placement is faster: the least bound among what is still open, or the best step less the gap."""
        lower = self.best_ms * self._keep
        search = self._search
        if search is not None and not self.exhausted:
            for depth in range(int(search.depth[0]) + 1):
                if search.next_child[depth] < search.num_children[depth]:
                    lower = min(lower, float(search.child_bound[depth, search.next_child[depth]]))
        elif not self.exhausted:
            return 0.0
        return lower


def boundaries_of(segments: Segments, best: list[tuple[StagePatterns, int]]) -> tuple[list[int], list[list[int]]]:
    """Segment boundaries [K + 1] and counts of lanes [K][L] of a combination of patterns."""
    num_stages = segments.problem.num_stages
    sizes, lanes = [], []
    for k in range(segments.problem.num_virtual_stages):
        patterns, index = best[k % num_stages]
        chunk = k // num_stages
        sizes.append(int(patterns.end[index, chunk] - patterns.begin[index, chunk]))
        lanes.append([int(n) for n in patterns.lanes[index, chunk]])
    return [0, *np.cumsum(sizes).tolist()], lanes
