"""The pattern tree: an exact search over one pattern per stage, bounded by the simulator itself.

States say how much of the chain the stages before hold (units per run; with one chunk that is a position), edges which
patterns lead from one to the next. Every bound plays the schedule with some stages fixed and the others at the
componentwise least of all patterns that the state still allows: as the step is a longest path it never falls when a
time rises, so no completion is faster. Stages are fixed from the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.placement.patterns import StagePatterns, TooManyPatterns
from mm_autoparallel.placement.units import Units
from mm_autoparallel.simulate import engine
from mm_autoparallel.simulate.compiled import kernel
from mm_autoparallel.simulate.graph import TaskGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
IntArray = NDArray[np.int32]

#: Bounds this close below the best step count as reaching it: the rounding noise of long sums, far inside 1e-6.
RELATIVE_TOLERANCE = 1e-10
#: Edges between two stages' states beyond which the tree hands over to the solver.
MAX_EDGES = 1_000_000


class PlayedGraph(NamedTuple):
    """The arrays of a TaskGraph that bounding needs, and scratch: ends_ms [n + 1], free_ms [P]."""

    stage: IntArray
    dependency: IntArray
    hop: IntArray
    duration: IntArray
    window: IntArray
    previous_window: IntArray
    num_skipped_periods: int
    ends_ms: Floats
    free_ms: Floats


def played(graph: TaskGraph) -> PlayedGraph:
    return PlayedGraph(
        graph.stage,
        graph.dependency,
        graph.hop,
        graph.duration,
        graph.window,
        graph.previous_window,
        graph.num_skipped_periods,
        np.empty(graph.num_tasks + 1),
        np.empty(graph.num_stages),
    )


@kernel
def step_bounds(graph: PlayedGraph, times_ms: Floats, num_virtual: int) -> tuple[float, float]:
    """Lower and upper bound of the step, equal unless the shortened run has not settled.

    times_ms: [4K - 1 + P] forward [K], backward [K], hops forward and backward [K - 1] each, a zero, tails [P].
    """
    durations = times_ms[: 2 * num_virtual]
    hops = times_ms[2 * num_virtual : 4 * num_virtual - 1]
    tails = times_ms[4 * num_virtual - 1 :]
    step = engine.play(
        graph.stage, graph.dependency, graph.hop, graph.duration, durations, hops, tails, graph.ends_ms, graph.free_ms
    )
    if graph.num_skipped_periods == 0:
        return step, step
    low, high = engine.shifts(graph.ends_ms, graph.window, graph.previous_window)
    return step + graph.num_skipped_periods * low, step + graph.num_skipped_periods * high


class Layers(NamedTuple):
    """The layered graph of states and edges, all stages concatenated; offsets have P + 1 entries unless said otherwise.

    state_offset: [P + 2] states before stage s (state ids are global). edge_offset: edges into the states after stage s;
    edge_from, edge_to: states; edge_group: group of patterns. Edges are sorted by edge_to; into: [states + 1] first edge.
    group_offset: groups of stage s; group_begin: [groups + 1] patterns of a group. times_ms: [patterns, 4V + 1].
    first_run, last_run: [patterns, V]. slot: [P, 4V + 1] where a stage's times go in the vector of `step_bounds`.
    least_before, least_after: [states, 4K - 1 + P] least times of the stages before and from the state's stage on.
    """

    state_offset: Ints
    edge_offset: Ints
    edge_from: IntArray
    edge_to: IntArray
    edge_group: IntArray
    into: Ints
    group_offset: Ints
    group_begin: Ints
    times_ms: Floats
    first_run: Ints
    last_run: Ints
    slot: Ints
    least_before: Floats
    least_after: Floats


@kernel
def fill_least(layers: Layers, num_stages: int) -> None:
    """Fill least_before and least_after from the patterns that are left."""
    before, after = layers.least_before, layers.least_after
    before[:] = np.inf
    after[:] = np.inf
    width = layers.times_ms.shape[1]
    groups = layers.group_begin.shape[0] - 1
    least = np.empty((groups, width))
    for g in range(groups):
        for i in range(width):
            least[g, i] = layers.times_ms[layers.group_begin[g] : layers.group_begin[g + 1], i].min()
    before[0] = 0.0
    for s in range(num_stages):
        for e in range(layers.edge_offset[s], layers.edge_offset[s + 1]):
            source, target, g = layers.edge_from[e], layers.edge_to[e], layers.edge_group[e]
            for earlier in range(s):
                for i in layers.slot[earlier]:
                    before[target, i] = min(before[target, i], before[source, i])
            for i in range(width):
                at = layers.slot[s, i]
                before[target, at] = min(before[target, at], least[g, i])
    after[layers.state_offset[num_stages]] = 0.0
    for s in range(num_stages - 1, -1, -1):
        for e in range(layers.edge_offset[s], layers.edge_offset[s + 1]):
            source, target, g = layers.edge_from[e], layers.edge_to[e], layers.edge_group[e]
            for later in range(s + 1, num_stages):
                for i in layers.slot[later]:
                    after[source, i] = min(after[source, i], after[target, i])
            for i in range(width):
                at = layers.slot[s, i]
                after[source, at] = min(after[source, at], least[g, i])


@kernel
def fill_times(layers: Layers, stage: int, num_stages: int, source: int, target: int, times_ms: Floats) -> None:
    """Times of every other stage at their least between two states."""
    for earlier in range(stage):
        for i in layers.slot[earlier]:
            times_ms[i] = layers.least_before[source, i]
    for later in range(stage + 1, num_stages):
        for i in layers.slot[later]:
            times_ms[i] = layers.least_after[target, i]


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
    times = np.zeros(4 * num_virtual - 1 + num_stages)
    for e in range(edges[0], edges[1]):
        g = layers.edge_group[e]
        begin, end = layers.group_begin[g], layers.group_begin[g + 1]
        fill_times(layers, stage, num_stages, layers.edge_from[e], layers.edge_to[e], times)
        if end - begin > 1:
            for i in range(width):
                times[layers.slot[stage, i]] = layers.times_ms[begin:end, i].min()
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

    depth: [1]. child_pattern, child_edge, child_bound: [P, most] children sorted by bound; num_children, next_child: [P].
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
        times[:] = search.times_ms[depth]
        for earlier in range(stage):
            for i in layers.slot[earlier]:
                times[i] = layers.least_before[source, i]
        if end - begin > 1:
            for i in range(width):
                times[layers.slot[stage, i]] = layers.times_ms[begin:end, i].min()
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
    order = np.argsort(search.child_bound[depth, :count], kind="mergesort")
    search.child_pattern[depth, :count] = search.child_pattern[depth, :count][order]
    search.child_edge[depth, :count] = search.child_edge[depth, :count][order]
    search.child_bound[depth, :count] = search.child_bound[depth, :count][order]
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
        search.times_ms[depth + 1] = search.times_ms[depth]
        for i in range(width):
            search.times_ms[depth + 1, layers.slot[stage, i]] = layers.times_ms[pattern, i]
        if stage == 0:
            step = step_bounds(full, search.times_ms[depth + 1], num_virtual)[0]
            if step < search.best_ms[0]:
                search.best_ms[0] = step
                search.best[:] = search.chosen
            continue
        search.state[depth + 1] = layers.edge_from[search.child_edge[depth, at]]
        search.depth[0] += 1
        expand(layers, graph, search, num_stages, num_chunks, keep_fraction)
    return True


class PatternTree:
    """The search over one problem, from an upper bound on; it goes on in slices and keeps its place between them.

    best_ms: the best step known (at first the bound it began with). best: the placement's patterns with their index in
    each stage, None until something below that bound is found. lower_bound_ms holds for every placement. exhausted:
    nothing below best_ms · (1 - gap) is left.
    """

    def __init__(
        self,
        units: Units,
        patterns: list[StagePatterns],
        short: TaskGraph,
        full: TaskGraph,
        upper_ms: float,
        gap_fraction: float,
        should_stop: Callable[[], bool],
    ) -> None:
        """patterns: of each stage, all that a step below upper_ms can use. Raises TooManyPatterns (memory)."""
        problem = units.problem
        self.units = units
        self.short, self.full = played(short), played(full)
        self.tasks_per_bound = short.num_tasks
        self.best_ms = upper_ms
        self.best: list[tuple[StagePatterns, int]] | None = None
        self.exhausted = False
        self.num_nodes = 0
        self._keep = 1.0 - max(gap_fraction, RELATIVE_TOLERANCE)
        self._num_stages, self._num_chunks = problem.num_stages, problem.num_chunks
        self._search: Search | None = None
        pruned = self._prune(patterns, should_stop)
        if pruned is None:
            self.exhausted = True
            return
        self._layers, self._patterns = pruned
        num_stages, width = problem.num_stages, 4 * problem.num_virtual_stages - 1 + problem.num_stages
        group_size = np.diff(self._layers.group_begin)[self._layers.edge_group]
        most = int(np.bincount(self._layers.edge_to, weights=group_size).max())
        self._search = Search(
            depth=np.zeros(1, dtype=np.int64),
            child_pattern=np.zeros((num_stages, most), dtype=np.int64),
            child_edge=np.zeros((num_stages, most), dtype=np.int64),
            child_bound=np.zeros((num_stages, most)),
            num_children=np.zeros(num_stages, dtype=np.int64),
            next_child=np.zeros(num_stages, dtype=np.int64),
            state=np.full(num_stages + 1, self._layers.state_offset[num_stages], dtype=np.int64),
            chosen=np.full(num_stages, -1, dtype=np.int64),
            times_ms=np.zeros((num_stages + 1, width)),
            best_ms=np.array([upper_ms]),
            best=np.full(num_stages, -1, dtype=np.int64),
            num_nodes=np.zeros(1, dtype=np.int64),
        )
        expand(self._layers, self.short, self._search, num_stages, problem.num_chunks, self._keep)

    def _prune(
        self, patterns: list[StagePatterns], should_stop: Callable[[], bool]
    ) -> tuple[Layers, list[StagePatterns]] | None:
        """Drop what cannot be part of a step below the bound, until that changes little; None where nothing is left."""
        size = (np.inf, np.inf)
        while True:
            built = build_layers(self.units, patterns)
            if built is None:
                return None
            layers, patterns = built
            fill_least(layers, self._num_stages)
            now = (len(layers.times_ms), len(layers.edge_from))
            if should_stop() or (now[0] > 0.9 * size[0] and now[1] > 0.9 * size[1]):
                return layers, patterns
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
        if search is None or self.exhausted:
            self.best_ms = min(self.best_ms, upper_ms)
            return
        if upper_ms < search.best_ms[0]:
            search.best_ms[0] = upper_ms
            search.best[:] = -1
        before = int(search.num_nodes[0])
        self.exhausted = bool(
            explore(
                self._layers, self.short, self.full, search, self._num_stages, self._num_chunks, self._keep, max_nodes
            )
        )
        self.num_nodes += int(search.num_nodes[0]) - before
        self.best_ms = float(search.best_ms[0])
        self.best = None
        if search.best[0] >= 0:
            offsets = np.cumsum([0, *(len(p) for p in self._patterns)])
            self.best = [(p, int(search.best[s] - offsets[s])) for s, p in enumerate(self._patterns)]

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


def build_layers(units: Units, patterns: list[StagePatterns]) -> tuple[Layers, list[StagePatterns]] | None:
    """Link the patterns of all stages into the layered graph, dropping those on no path; None where no path is left."""
    problem = units.problem
    num_stages, num_chunks, num_virtual = problem.num_stages, problem.num_chunks, problem.num_virtual_stages
    radix = np.cumprod(np.concatenate([[1], units.run_size[:-1] + 1])) if num_chunks > 1 else None
    total = int(units.run_size @ radix) if radix is not None else units.num_units
    if radix is not None and total >= 2**62:
        raise TooManyPatterns
    keys: list[Ints] = []  # of each pattern: what it adds to the state (chunks), or where it begins (one chunk)
    deltas: list[Ints] = []
    sorted_patterns = []
    for stage_patterns in patterns:
        if radix is not None:
            delta = stage_patterns.used @ radix
            key = delta
        else:
            delta = stage_patterns.end[:, 0] - stage_patterns.begin[:, 0]
            key = stage_patterns.begin[:, 0] * (units.num_units + 1) + delta
        order = np.argsort(key, kind="stable")
        sorted_patterns.append(stage_patterns.select(order))
        keys.append(key[order])
        deltas.append(delta[order])
    states = [np.zeros(1, dtype=np.int64)]
    edges: list[tuple[Ints, Ints, Ints]] = []  # from, to (values), group key index
    group_first: list[Ints] = []
    for s in range(num_stages):
        _, first = np.unique(keys[s], return_index=True)
        group_first.append(first)
        delta = deltas[s][first]
        if len(states[-1]) * len(first) > 4 * MAX_EDGES:
            raise TooManyPatterns
        if radix is not None:
            source, group = (axis.ravel() for axis in np.meshgrid(states[-1], np.arange(len(first)), indexing="ij"))
            fits = np.ones(len(source), dtype=bool)
            for r, size in enumerate(units.run_size.tolist()):
                held = source // radix[r] % (size + 1)
                fits &= held + sorted_patterns[s].used[first, r][group] <= size
            source, group = source[fits], group[fits]
        else:
            begin = sorted_patterns[s].begin[first, 0]
            group = np.flatnonzero(np.isin(begin, states[-1]))
            source = begin[group]
        target = source + delta[group]
        if len(source) > MAX_EDGES:
            raise TooManyPatterns
        edges.append((source, target, group))
        states.append(np.unique(target))
    if total not in states[-1]:
        return None
    states[-1] = np.array([total])
    for s in range(num_stages - 1, -1, -1):
        source, target, group = edges[s]
        alive = np.isin(target, states[s + 1])
        edges[s] = (source[alive], target[alive], group[alive])
        states[s] = np.unique(edges[s][0])
    state_offset = np.cumsum([0, *(len(x) for x in states)])
    kept_patterns, edge_arrays, group_offset, group_begin, num_patterns = [], [], [0], [], 0
    for s in range(num_stages):
        source, target, group = edges[s]
        used_groups, renamed = np.unique(group, return_inverse=True)
        first = group_first[s]
        ends = np.append(first[1:], len(keys[s]))
        chosen = np.concatenate([np.arange(first[g], ends[g]) for g in used_groups])
        group_begin.append(num_patterns + np.concatenate([[0], np.cumsum(ends[used_groups] - first[used_groups])])[:-1])
        kept_patterns.append(sorted_patterns[s].select(chosen))
        num_patterns += len(chosen)
        from_id = state_offset[s] + np.searchsorted(states[s], source)
        to_id = state_offset[s + 1] + np.searchsorted(states[s + 1], target)
        order = np.lexsort((renamed, from_id, to_id))
        edge_arrays.append((from_id[order], to_id[order], group_offset[-1] + renamed.ravel()[order]))
        group_offset.append(group_offset[-1] + len(used_groups))
    edge_from, edge_to, edge_group = (np.concatenate([e[i] for e in edge_arrays]) for i in range(3))
    width = 4 * num_virtual - 1 + num_stages
    if state_offset[-1] * width > 40_000_000:
        raise TooManyPatterns
    runs_of = [(units.run[p.begin], units.run[p.end - 1]) for p in kept_patterns]
    layers = Layers(
        state_offset=state_offset,
        edge_offset=np.cumsum([0, *(len(e[0]) for e in edge_arrays)]),
        edge_from=edge_from.astype(np.int32),
        edge_to=edge_to.astype(np.int32),
        edge_group=edge_group.astype(np.int32),
        into=np.searchsorted(edge_to, np.arange(state_offset[-1] + 1)).astype(np.int64),
        group_offset=np.array(group_offset),
        group_begin=np.append(np.concatenate(group_begin), num_patterns),
        times_ms=np.concatenate([p.times_ms for p in kept_patterns]),
        first_run=np.concatenate([first for first, _ in runs_of]),
        last_run=np.concatenate([last for _, last in runs_of]),
        slot=_slots(num_stages, num_chunks),
        least_before=np.empty((state_offset[-1], width)),
        least_after=np.empty((state_offset[-1], width)),
    )
    return layers, kept_patterns


def _slots(num_stages: int, num_chunks: int) -> Ints:
    """[P, 4V + 1] where forward, backward, hops forward and backward of each chunk, and the tail of a stage go."""
    num_virtual = num_stages * num_chunks
    slot = np.empty((num_stages, 4 * num_chunks + 1), dtype=np.int64)
    for s in range(num_stages):
        for c in range(num_chunks):
            k = c * num_stages + s
            slot[s, c] = k
            slot[s, num_chunks + c] = num_virtual + k
            last = k == num_virtual - 1  # no hop leaves the last virtual stage: its zeros go to the zero entry
            slot[s, 2 * num_chunks + c] = 4 * num_virtual - 2 if last else 2 * num_virtual + k
            slot[s, 3 * num_chunks + c] = 4 * num_virtual - 2 if last else 3 * num_virtual - 1 + k
        slot[s, 4 * num_chunks] = 4 * num_virtual - 1 + s
    return slot


def boundaries_of(units: Units, best: list[tuple[StagePatterns, int]]) -> tuple[list[int], list[list[int]]]:
    """Unit boundaries [K + 1] and recompute counts [K][G] of a combination of patterns."""
    num_stages = units.problem.num_stages
    sizes, recompute = [], []
    for k in range(units.problem.num_virtual_stages):
        patterns, index = best[k % num_stages]
        chunk = k // num_stages
        sizes.append(int(patterns.end[index, chunk] - patterns.begin[index, chunk]))
        recompute.append([int(r) for r in patterns.recompute[index, chunk]])
    return [0, *np.cumsum(sizes).tolist()], recompute


