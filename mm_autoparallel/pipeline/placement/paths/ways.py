"""Ways: the part of a layered graph that a subset of its patterns leaves, packed for kernels that go through it often.

A way leads from nothing to the whole chain, with one pattern a stage. Patterns lie side by side in the order of stages
and groups, a row for each time that is not 0 everywhere, so that a processor works on several at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.patterns.state_graph import Layers
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Ways(NamedTuple):
    """n patterns with C times, G groups, E edges; all of them lie on some way.

    times_ms: [C, n]. slot: [P, C] where the times of a stage go in the vector of `step_bounds`. stage_begin: [P + 1]
    and group_begin: [G + 1] first patterns. edge_from, edge_to: [E] states, edge_group: [E]; edges are sorted by
    edge_to, state 0 is nothing and the last of num_states the whole chain.
    """

    times_ms: Floats
    slot: Ints
    stage_begin: Ints
    group_begin: Ints
    edge_from: Ints
    edge_to: Ints
    edge_group: Ints
    num_states: int


# Sums and extremes in four parts: a processor waits for the sum before otherwise.


@kernel
def dot(left: Floats, right: Floats) -> float:
    """Sum of products."""
    a = b = c = d = 0.0
    quarter = left.shape[0] // 4
    for i in range(quarter):
        a += left[4 * i] * right[4 * i]
        b += left[4 * i + 1] * right[4 * i + 1]
        c += left[4 * i + 2] * right[4 * i + 2]
        d += left[4 * i + 3] * right[4 * i + 3]
    for i in range(4 * quarter, left.shape[0]):
        a += left[i] * right[i]
    return (a + b) + (c + d)


@kernel
def sum_of(values: Floats) -> float:
    """Sum."""
    a = b = c = d = 0.0
    quarter = values.shape[0] // 4
    for i in range(quarter):
        a += values[4 * i]
        b += values[4 * i + 1]
        c += values[4 * i + 2]
        d += values[4 * i + 3]
    for i in range(4 * quarter, values.shape[0]):
        a += values[i]
    return (a + b) + (c + d)


@kernel
def largest(values: Floats) -> float:
    """The largest; minus infinity where there is none."""
    a = b = c = d = -np.inf
    quarter = values.shape[0] // 4
    for i in range(quarter):
        a = max(a, values[4 * i])
        b = max(b, values[4 * i + 1])
        c = max(c, values[4 * i + 2])
        d = max(d, values[4 * i + 3])
    for i in range(4 * quarter, values.shape[0]):
        a = max(a, values[i])
    return max(max(a, b), max(c, d))


@kernel
def least(values: Floats) -> float:
    """The least; infinity where there is none."""
    a = b = c = d = np.inf
    quarter = values.shape[0] // 4
    for i in range(quarter):
        a = min(a, values[4 * i])
        b = min(b, values[4 * i + 1])
        c = min(c, values[4 * i + 2])
        d = min(d, values[4 * i + 3])
    for i in range(4 * quarter, values.shape[0]):
        a = min(a, values[i])
    return min(min(a, b), min(c, d))


@kernel
def mark_ways(layers: Layers, is_there: Bools) -> tuple[Bools, Bools]:
    """Which edges and groups lie on a way through groups that are there, [edges] and [groups]."""
    num_states, num_edges = layers.state_offset[-1], layers.edge_from.shape[0]
    before, after = np.zeros(num_states, dtype=np.bool_), np.zeros(num_states, dtype=np.bool_)
    edge_on_way, group_on_way = np.zeros(num_edges, dtype=np.bool_), np.zeros(is_there.shape[0], dtype=np.bool_)
    before[0] = True
    for e in range(num_edges):
        if before[layers.edge_from[e]] and is_there[layers.edge_group[e]]:
            before[layers.edge_to[e]] = True
    after[num_states - 1] = before[num_states - 1]
    for e in range(num_edges - 1, -1, -1):
        source, g = layers.edge_from[e], layers.edge_group[e]
        if after[layers.edge_to[e]] and is_there[g] and before[source]:
            after[source] = edge_on_way[e] = group_on_way[g] = True
    return edge_on_way, group_on_way


@kernel
def number_those(marked: Bools) -> tuple[Ints, int]:
    """Numbers for what is marked, in its order, and how many."""
    number, count = np.zeros(marked.shape[0], dtype=np.int64), 0
    for i in range(marked.shape[0]):
        number[i] = count
        if marked[i]:
            count += 1
    return number, count


@kernel
def pack_ways(layers: Layers, group: Ints, column: Ints, pattern: Ints) -> tuple[Ints, Ways]:
    """What is left of the patterns given, as indices into `pattern`, and the ways through them.

    group: of each of the layers' patterns. column: which of their times are packed. pattern: ascending.
    """
    num_edges, num_stages = layers.edge_from.shape[0], layers.slot.shape[0]
    is_there = np.zeros(layers.group_begin.shape[0] - 1, dtype=np.bool_)
    for p in pattern:
        is_there[group[p]] = True
    edge_on_way, group_on_way = mark_ways(layers, is_there)
    state_on_way = np.zeros(layers.state_offset[-1], dtype=np.bool_)
    for e in range(num_edges):
        if edge_on_way[e]:
            state_on_way[layers.edge_from[e]] = state_on_way[layers.edge_to[e]] = True
    state_number, num_states = number_those(state_on_way)
    group_number, num_groups = number_those(group_on_way)
    edge_number, num_left = number_those(edge_on_way)
    edge_from, edge_to = np.empty(num_left, dtype=np.int64), np.empty(num_left, dtype=np.int64)
    edge_group = np.empty(num_left, dtype=np.int64)
    for e in range(num_edges):
        if edge_on_way[e]:
            edge_from[edge_number[e]] = state_number[layers.edge_from[e]]
            edge_to[edge_number[e]] = state_number[layers.edge_to[e]]
            edge_group[edge_number[e]] = group_number[layers.edge_group[e]]
    kept, n = np.empty(pattern.shape[0], dtype=np.int64), 0
    group_begin = np.zeros(num_groups + 1, dtype=np.int64)
    for a in range(pattern.shape[0]):
        g = group[pattern[a]]
        if group_on_way[g]:
            kept[n] = a
            n += 1
            group_begin[group_number[g] + 1] = n
    kept = kept[:n].copy()
    stage_begin = np.zeros(num_stages + 1, dtype=np.int64)
    for s in range(num_stages):
        stage_begin[s + 1] = stage_begin[s]
        for g in range(layers.group_offset[s], layers.group_offset[s + 1]):
            if group_on_way[g]:
                stage_begin[s + 1] = group_begin[group_number[g] + 1]
    times_ms = np.empty((column.shape[0], n))
    slot = np.empty((num_stages, column.shape[0]), dtype=np.int64)
    for c in range(column.shape[0]):
        for s in range(num_stages):
            slot[s, c] = layers.slot[s, column[c]]
        for a in range(n):
            times_ms[c, a] = layers.times_ms[pattern[kept[a]], column[c]]
    return kept, Ways(times_ms, slot, stage_begin, group_begin, edge_from, edge_to, edge_group, num_states)


@kernel
def fill_costs(ways: Ways, mixture: Floats, cost_ms: Floats) -> None:
    """What a mixture [4K - 1 + P] makes each pattern cost, [n]."""
    for s in range(ways.slot.shape[0]):
        begin, end = ways.stage_begin[s], ways.stage_begin[s + 1]
        cost = cost_ms[begin:end]
        for a in range(cost.shape[0]):
            cost[a] = 0.0
        for c in range(ways.slot.shape[1]):
            count = mixture[ways.slot[s, c]]
            if count != 0.0:
                times_ms = ways.times_ms[c, begin:end]
                for a in range(cost.shape[0]):
                    cost[a] += count * times_ms[a]


@kernel
def fill_before(ways: Ways, cost_ms: Floats, least_ms: Floats, before_ms: Floats) -> float:
    """The least cost of each group, [groups], and of a way from nothing to each state, [states]; the least of all."""
    for g in range(least_ms.shape[0]):
        least_ms[g] = least(cost_ms[ways.group_begin[g] : ways.group_begin[g + 1]])
    for i in range(ways.num_states):
        before_ms[i] = np.inf
    before_ms[0] = 0.0
    for e in range(ways.edge_from.shape[0]):  # stage by stage
        cost = before_ms[ways.edge_from[e]] + least_ms[ways.edge_group[e]]
        before_ms[ways.edge_to[e]] = min(before_ms[ways.edge_to[e]], cost)
    return float(before_ms[ways.num_states - 1])


@kernel
def fill_around(ways: Ways, least_ms: Floats, before_ms: Floats, after_ms: Floats, around_ms: Floats) -> None:
    """The least cost of what stands beside each group on a way, [groups], from what `fill_before` left.

    after_ms: [states], overwritten.
    """
    for g in range(around_ms.shape[0]):
        around_ms[g] = np.inf
    for i in range(ways.num_states):
        after_ms[i] = np.inf
    after_ms[ways.num_states - 1] = 0.0
    for e in range(ways.edge_from.shape[0] - 1, -1, -1):
        source, g, rest = ways.edge_from[e], ways.edge_group[e], after_ms[ways.edge_to[e]]
        after_ms[source] = min(after_ms[source], rest + least_ms[g])
        around_ms[g] = min(around_ms[g], before_ms[source] + rest)


@kernel
def drop_costly(ways: Ways, mixtures: Floats, below_ms: Floats, kept: Ints) -> int:
    """Drop patterns that no way through costs below below_ms[m] on mixtures[m], in turn; how many are left.

    kept: [n] indices; those that are left come first, in their order. What is left in `ways` is of use no more.
    """
    num_groups, num_stages = ways.group_begin.shape[0] - 1, ways.slot.shape[0]
    least_ms, around_ms = np.empty(num_groups), np.empty(num_groups)
    before_ms, after_ms, cost_ms = np.empty(ways.num_states), np.empty(ways.num_states), np.empty(kept.shape[0])
    n = kept.shape[0]
    for m in range(mixtures.shape[0]):
        if n == 0:
            break
        fill_costs(ways, mixtures[m], cost_ms)
        if fill_before(ways, cost_ms, least_ms, before_ms) >= below_ms[m]:
            return 0
        fill_around(ways, least_ms, before_ms, after_ms, around_ms)
        left, at_stage = 0, 0
        for g in range(num_groups):
            begin, end = ways.group_begin[g], ways.group_begin[g + 1]
            while at_stage < num_stages and begin == ways.stage_begin[at_stage] and begin < end:
                ways.stage_begin[at_stage] = left
                at_stage += 1
            room_ms = below_ms[m] - around_ms[g]
            ways.group_begin[g] = left
            for a in range(begin, end):
                if cost_ms[a] < room_ms:
                    if left < a:
                        kept[left] = kept[a]
                        for c in range(ways.times_ms.shape[0]):
                            ways.times_ms[c, left] = ways.times_ms[c, a]
                    left += 1
        ways.group_begin[num_groups] = n = left
        for s in range(at_stage, num_stages + 1):
            ways.stage_begin[s] = left
    return int(n)
