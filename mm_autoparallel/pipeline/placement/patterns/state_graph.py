"""Layers: the graph of states and patterns that the tree walks, and the least times its bounds are made of.

States say how much of the chain the stages before hold (segments per run; with one chunk that is a position), edges
which patterns lead from one to the next. Patterns on no path from nothing to the whole chain are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import StagePatterns
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.stage_times import times_layout

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
IntArray = NDArray[np.int32]

#: Edges between two stages' states beyond which the tree hands over to the solver.
MAX_EDGES = 1_000_000
#: Times kept for all states together, beyond which likewise (some 300 MB).
MAX_LEAST_TIMES = 40_000_000
#: The run of a chunk that holds nothing, which comes before all others.
NO_RUN = -1


class Layers(NamedTuple):
    """The layered graph of states and edges, all stages concatenated; offsets have P + 1 entries unless said otherwise.

    state_offset: [P + 2] states before stage s (ids are global). edge_offset: edges into the states after stage s;
    edge_from, edge_to: states; edge_group: group of patterns. Edges are sorted by edge_to; into: [states + 1] first
    edge.
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
def least_of(times_ms: Floats, begin: int, end: int, column: int) -> float:
    """The least entry of a column in rows begin to end."""
    least = np.inf
    for p in range(begin, end):
        least = min(least, times_ms[p, column])
    return least


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
            least[g, i] = least_of(layers.times_ms, layers.group_begin[g], layers.group_begin[g + 1], i)
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


class _Sorted(NamedTuple):
    """Patterns of one stage, those of a group side by side: patterns with equal effect on the state.

    first: of each group its first pattern. delta: of each group what it adds to the state. ends: where groups end.
    """

    patterns: StagePatterns
    first: Ints
    delta: Ints
    ends: Ints


def build_layers(segments: Segments, patterns: list[StagePatterns]) -> tuple[Layers, list[StagePatterns]] | None:
    """Link the patterns of all stages into the layered graph, dropping those on no path; None where no path is left.

    Raises TooManyPatterns.
    """
    radix = np.cumprod(np.concatenate([[1], segments.run_size[:-1] + 1])) if segments.problem.num_chunks > 1 else None
    total = int(segments.run_size @ radix) if radix is not None else segments.num_segments
    if radix is not None and total >= 2**62:
        raise TooManyPatterns
    of_stages = [_sort(segments, of_stage, radix) for of_stage in patterns]
    states = [np.zeros(1, dtype=np.int64)]
    edges: list[tuple[Ints, Ints, Ints]] = []  # from, to (values), group
    for of_stage in of_stages:
        edges.append(_edges_from(segments, states[-1], of_stage, radix))
        states.append(np.unique(edges[-1][1]))
    if total not in states[-1]:
        return None
    states[-1] = np.array([total])
    for s in range(len(edges) - 1, -1, -1):
        source, target, group = edges[s]
        alive = np.isin(target, states[s + 1])
        edges[s] = (source[alive], target[alive], group[alive])
        states[s] = np.unique(edges[s][0])
    return _number(segments, of_stages, states, edges)


def _sort(segments: Segments, patterns: StagePatterns, radix: Ints | None) -> _Sorted:
    """radix: what a segment of each run counts in a state; None with one chunk, where a state is a position."""
    if radix is not None:
        key = delta = patterns.used @ radix
    else:
        delta = patterns.end[:, 0] - patterns.begin[:, 0]
        key = patterns.begin[:, 0] * (segments.num_segments + 1) + delta
    order = np.argsort(key, kind="stable")
    _, first = np.unique(key[order], return_index=True)
    return _Sorted(patterns.select(order), first, delta[order][first], np.append(first[1:], len(key)))


def _edges_from(segments: Segments, states: Ints, stage: _Sorted, radix: Ints | None) -> tuple[Ints, Ints, Ints]:
    """From, to and group of every edge that leaves `states`. Raises TooManyPatterns."""
    if len(states) * len(stage.first) > 4 * MAX_EDGES:
        raise TooManyPatterns
    if radix is not None:
        source, group = (axis.ravel() for axis in np.meshgrid(states, np.arange(len(stage.first)), indexing="ij"))
        fits = np.ones(len(source), dtype=bool)
        for r, size in enumerate(segments.run_size.tolist()):
            held = source // radix[r] % (size + 1)
            fits &= held + stage.patterns.used[stage.first, r][group] <= size
        source, group = source[fits], group[fits]
    else:
        begin = stage.patterns.begin[stage.first, 0]
        group = np.flatnonzero(np.isin(begin, states))
        source = begin[group]
    if len(source) > MAX_EDGES:
        raise TooManyPatterns
    return source, source + stage.delta[group], group


def _number(
    segments: Segments, of_stages: list[_Sorted], states: list[Ints], edges: list[tuple[Ints, Ints, Ints]]
) -> tuple[Layers, list[StagePatterns]]:
    """The graph of these states and edges, all numbered through, and the patterns that are on them.

    Raises TooManyPatterns where the times to be kept of its states are too many.
    """
    problem, num_stages = segments.problem, len(of_stages)
    state_offset = np.cumsum([0, *(len(x) for x in states)])
    kept_patterns, edge_arrays, group_offset, group_begin, num_patterns = [], [], [0], [], 0
    for s, (of_stage, (source, target, group)) in enumerate(zip(of_stages, edges, strict=True)):
        used_groups, renamed = np.unique(group, return_inverse=True)
        first, ends = of_stage.first[used_groups], of_stage.ends[used_groups]
        chosen = np.concatenate([np.arange(begin, end) for begin, end in zip(first, ends, strict=True)])
        group_begin.append(num_patterns + np.concatenate([[0], np.cumsum(ends - first)])[:-1])
        kept_patterns.append(of_stage.patterns.select(chosen))
        num_patterns += len(chosen)
        from_id = state_offset[s] + np.searchsorted(states[s], source)
        to_id = state_offset[s + 1] + np.searchsorted(states[s + 1], target)
        order = np.lexsort((renamed, from_id, to_id))
        edge_arrays.append((from_id[order], to_id[order], group_offset[-1] + renamed.ravel()[order]))
        group_offset.append(group_offset[-1] + len(used_groups))
    edge_from, edge_to, edge_group = (np.concatenate([e[i] for e in edge_arrays]) for i in range(3))
    width = 4 * problem.num_virtual_stages - 1 + num_stages
    if state_offset[-1] * width > MAX_LEAST_TIMES:
        raise TooManyPatterns
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
        first_run=np.concatenate([np.where(p.end > 0, segments.run[p.begin], NO_RUN) for p in kept_patterns]),
        last_run=np.concatenate([np.where(p.end > 0, segments.run[p.end - 1], NO_RUN) for p in kept_patterns]),
        slot=_slots(num_stages, problem.num_chunks),
        least_before=np.empty((state_offset[-1], width)),
        least_after=np.empty((state_offset[-1], width)),
    )
    return layers, kept_patterns


def _slots(num_stages: int, num_chunks: int) -> Ints:
    """[P, 4V + 1] where forward, backward, hops forward and backward of each chunk, and the tail of a stage go."""
    num_virtual = num_stages * num_chunks
    at = times_layout(num_virtual, num_stages)
    slot = np.empty((num_stages, 4 * num_chunks + 1), dtype=np.int64)
    for s in range(num_stages):
        for c in range(num_chunks):
            k = c * num_stages + s
            slot[s, c] = at.forward + k
            slot[s, num_chunks + c] = at.backward + k
            last = k == num_virtual - 1  # no hop leaves the last virtual stage: its zeros go to the zero entry
            slot[s, 2 * num_chunks + c] = at.zero if last else at.hop_forward + k
            slot[s, 3 * num_chunks + c] = at.zero if last else at.hop_backward + k
        slot[s, 4 * num_chunks] = at.tail + s
    return slot
