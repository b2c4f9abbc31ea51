"""Mixtures of paths: the bound of a whole set of placements by one weighted mean of paths through the schedule.

A step is at least as long as every path, so at least any weighted mean of paths. Such a mixture is linear in the times,
so the least it can cost is a shortest way through the layered graph of states: exact over all placements at once, with
their least recompute, their memory and the layers that the stages share. Which mixture bounds most is a game (compare
average_path.py): one side holds a distribution over all ways through the graph, the other answers with the
longest path under its mean times. The distribution learns by multiplicative weights over ways (Takimoto & Warmuth 2003,
"Path kernels and multiplicative updates"): the weight of a way is the product of its patterns' weights, so sums over
all ways come from one pass forward and one back. Whatever mixture the game has reached, its bound is true; the longest
path under the mean times is how much any mixture can reach at most, so a game that cannot succeed ends early.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.paths.ways import Ways, dot, fill_before, fill_costs, largest, sum_of
from mm_autoparallel.pipeline.placement.patterns.thinned import Spread
from mm_autoparallel.pipeline.placement.patterns.tree_bounds import PlayedGraph
from mm_autoparallel.pipeline.simulate import engine
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.stage_times import times_layout

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
IntArray = NDArray[np.int32]

#: How far weights move at first; later moves shrink with the root of the round. 2.5, 5, 10 and 20 tried on three
#: interleaved problems of 8 and 16 stages: 5 refutes with the fewest rounds.
LEARNING_FACTOR = 5.0
#: The same of light kinds, whose costs are fractions of their own work (assumed).
SPREAD_FACTOR = 1.0
#: Rounds between two looks at the bound.
ROUNDS_BETWEEN_BOUNDS = 20
#: Logarithm of the least weight beside 1: a normal number.
LEAST_LOG = -700.0
LOG2_OF_E, LOG_OF_2 = 1.4426950408889634, 0.6931471805599453
#: 1.5 · 2**52: a number of moderate size that is added to it is rounded to a whole one, in the lowest bits of the sum.
ROUNDING = 6755399441055744.0
#: Where a double's exponent begins.
EXPONENT_AT = 52


class Scratch(NamedTuple):
    """What a round of a game overwrites, of n patterns, G groups, E edges and S states.

    share, power: [n] and share_bits, power_bits the same memory as whole numbers; edge, edge_power: [E], likewise.
    sums, flow: [G]. before, after: [S].
    """

    share: Floats
    share_bits: Ints
    power: Floats
    power_bits: Ints
    edge: Floats
    edge_bits: Ints
    edge_power: Floats
    edge_power_bits: Ints
    sums: Floats
    flow: Floats
    before: Floats
    after: Floats


@kernel
def make_scratch(ways: Ways) -> Scratch:
    """Room for one game."""
    n, num_groups, num_edges = ways.times_ms.shape[1], ways.group_begin.shape[0] - 1, ways.edge_from.shape[0]
    share, power, edge, edge_power = np.empty(n), np.empty(n), np.empty(num_edges), np.empty(num_edges)
    return Scratch(
        share,
        share.view(np.int64),
        power,
        power.view(np.int64),
        edge,
        edge.view(np.int64),
        edge_power,
        edge_power.view(np.int64),
        np.empty(num_groups),
        np.empty(num_groups),
        np.empty(ways.num_states),
        np.empty(ways.num_states),
    )


@kernel
def exponentiate(values: Floats, value_bits: Ints, power: Floats, power_bits: Ints) -> None:
    """Put exp(v), to some millionths, in place of values v of at most 0; of less than LEAST_LOG as of that.

    value_bits, power_bits: the same memory as values and power [n]. Without calls and branches, so that a processor
    works on several at once: 2 to the whole part of v / log 2 goes into the exponent, the rest into a polynomial.
    """
    for i in range(values.shape[0]):
        binary = max(values[i], LEAST_LOG) * LOG2_OF_E
        rounded = binary + ROUNDING
        power[i] = rounded
        x = (binary - (rounded - ROUNDING)) * LOG_OF_2
        values[i] = 1.0 + x * (1.0 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
    for i in range(values.shape[0]):
        value_bits[i] += power_bits[i] << EXPONENT_AT


@kernel
def fill_shares(ways: Ways, log_weight: Floats, scratch: Scratch) -> None:
    """The share of each pattern, [n], where a way's share is proportional to the product of its patterns' weights.

    Weights of ways lie too far apart for numbers. So an edge's is taken by the heaviest way to where it leads to: 1 on
    the heaviest ways, less on others, and products along a way are what they would be, but for one factor of them all.
    """
    share, edge, sums, flow = scratch.share, scratch.edge, scratch.sums, scratch.flow
    before, after = scratch.before, scratch.after
    num_groups, num_edges = sums.shape[0], edge.shape[0]
    for g in range(num_groups):
        begin, end = ways.group_begin[g], ways.group_begin[g + 1]
        own, out = log_weight[begin:end], share[begin:end]
        flow[g] = largest(own)
        for a in range(out.shape[0]):
            out[a] = own[a] - flow[g]
    exponentiate(share, scratch.share_bits, scratch.power, scratch.power_bits)
    for g in range(num_groups):
        sums[g] = sum_of(share[ways.group_begin[g] : ways.group_begin[g + 1]])
    for i in range(ways.num_states):
        before[i] = -np.inf
    before[0] = 0.0
    for e in range(num_edges):
        edge[e] = before[ways.edge_from[e]] + flow[ways.edge_group[e]]
        before[ways.edge_to[e]] = max(before[ways.edge_to[e]], edge[e])
    for e in range(num_edges):
        edge[e] -= before[ways.edge_to[e]]
    exponentiate(edge, scratch.edge_bits, scratch.edge_power, scratch.edge_power_bits)
    for i in range(ways.num_states):
        before[i] = 0.0
        after[i] = 0.0
    before[0] = 1.0
    for e in range(num_edges):
        edge[e] *= sums[ways.edge_group[e]]
        before[ways.edge_to[e]] += before[ways.edge_from[e]] * edge[e]
    for g in range(num_groups):
        flow[g] = 0.0
    after[ways.num_states - 1] = 1.0 / before[ways.num_states - 1]
    for e in range(num_edges - 1, -1, -1):
        through = after[ways.edge_to[e]] * edge[e]
        after[ways.edge_from[e]] += through
        flow[ways.edge_group[e]] += through * before[ways.edge_from[e]]
    for g in range(num_groups):
        part = share[ways.group_begin[g] : ways.group_begin[g + 1]]
        factor = flow[g] / sums[g]
        for a in range(part.shape[0]):
            part[a] *= factor


@kernel
def add_mean_times(ways: Ways, share: Floats, times_ms: Floats) -> None:
    """Add what patterns of these shares take to the times of their stages."""
    for s in range(ways.slot.shape[0]):
        begin, end = ways.stage_begin[s], ways.stage_begin[s + 1]
        for c in range(ways.slot.shape[1]):
            times_ms[ways.slot[s, c]] += dot(share[begin:end], ways.times_ms[c, begin:end])


@kernel
def least_spread(spread: Spread, num_open: int, mixture: Floats) -> float:
    """What light kinds make a mixture cost at least, each on one of the first num_open virtual stages."""
    total, num_virtual = 0.0, spread.forward_ms.shape[1]
    for e in range(spread.forward_ms.shape[0]):
        least = np.inf
        for k in range(num_open):
            cost = mixture[k] * spread.forward_ms[e, k] + mixture[num_virtual + k] * spread.backward_ms[e, k]
            least = min(least, cost)
        total += least
    return total


@kernel
def play_game(
    ways: Ways,
    graph: PlayedGraph,
    neighbours: tuple[IntArray, IntArray],
    log_weight: Floats,
    spread: Spread,
    num_open: int,
    first_round: int,
    num_rounds: int,
    target_ms: float,
    best_mixture: Floats,
    mean_share: Floats,
) -> tuple[float, int]:
    """Play up to num_rounds rounds; the best bound in ms and the number of rounds played.

    graph: of the whole step. log_weight: [n] of the patterns, updated. spread: light kinds, on the first num_open
    virtual stages. first_round: rounds that the weights have learnt from before. It ends once the bound reaches
    target_ms, or cannot. Writes best_mixture (as TimesLayout has it) and mean_share [n], the patterns' shares over all
    rounds.
    """
    num_stages, num_times, n = graph.free_ms.shape[0], best_mixture.shape[0], log_weight.shape[0]
    num_virtual = (num_times - num_stages + 1) // 4
    at = times_layout(num_virtual, num_stages)
    scratch = make_scratch(ways)
    share, cost_ms = scratch.share, scratch.power
    times_ms, path, total = np.empty(num_times), np.zeros(num_times), np.zeros(num_times)
    hops_ms, hop_counts = np.zeros(2 * num_virtual - 1), np.zeros(2 * num_virtual - 1, dtype=np.int64)
    counts = np.zeros(2 * num_virtual, dtype=np.int64)
    mean_share[:] = 0.0
    num_light = spread.forward_ms.shape[0]
    log_spread, spread_ms = np.zeros((num_light, num_open)), np.empty(num_light)
    for e in range(num_light):
        all_ms = spread.forward_ms[e].max() + spread.backward_ms[e].max()
        spread_ms[e] = max(all_ms * (graph.stage.shape[0] // (2 * num_virtual)), 1e-300)
    weight, best_ms, reachable_ms = 0.0, 0.0, np.inf
    for played in range(1, num_rounds + 1):
        number = first_round + played
        fill_shares(ways, log_weight, scratch)
        times_ms[:] = 0.0
        add_mean_times(ways, share, times_ms)
        for a in range(n):
            mean_share[a] += number * share[a]
        for e in range(num_light):
            most, parts = log_spread[e].max(), 0.0
            for k in range(num_open):
                parts += np.exp(log_spread[e, k] - most)
            for k in range(num_open):
                part = np.exp(log_spread[e, k] - most) / parts
                times_ms[k] += part * spread.forward_ms[e, k]
                times_ms[num_virtual + k] += part * spread.backward_ms[e, k]
        for i in range(2 * num_virtual - 2):
            hops_ms[i] = times_ms[at.hop_forward + i]
        tails_ms = times_ms[at.tail :]
        step_ms = engine.play(
            graph.stage,
            graph.dependency,
            graph.hop,
            graph.duration,
            times_ms[: at.hop_forward],
            hops_ms,
            tails_ms,
            graph.ends_ms,
            graph.free_ms,
        )
        reachable_ms = min(reachable_ms, step_ms)
        end_stage = engine.critical_path(
            graph.stage,
            graph.dependency,
            graph.hop,
            graph.duration,
            hops_ms,
            tails_ms,
            graph.ends_ms,
            graph.free_ms,
            neighbours[0],
            neighbours[1],
            counts,
            hop_counts,
        )
        path[:] = 0.0
        for i in range(2 * num_virtual):
            path[i] = counts[i]
        for i in range(2 * num_virtual - 2):
            path[at.hop_forward + i] = hop_counts[i]
        path[at.tail + end_stage] = 1.0
        for i in range(num_times):  # later answers count more: they answer better distributions
            total[i] += number * path[i]
        weight += number
        fill_costs(ways, path, cost_ms)
        rate = LEARNING_FACTOR * num_stages / (max(step_ms, 1e-300) * np.sqrt(number))
        for a in range(n):
            log_weight[a] -= rate * cost_ms[a]
        for e in range(num_light):
            for k in range(num_open):
                cost = path[k] * spread.forward_ms[e, k] + path[num_virtual + k] * spread.backward_ms[e, k]
                log_spread[e, k] -= SPREAD_FACTOR * num_stages / (spread_ms[e] * np.sqrt(number)) * cost
        if played % ROUNDS_BETWEEN_BOUNDS == 0 or played == num_rounds:
            for i in range(num_times):
                path[i] = total[i] / weight
            fill_costs(ways, path, cost_ms)
            bound_ms = fill_before(ways, cost_ms, scratch.sums, scratch.before) + least_spread(spread, num_open, path)
            if bound_ms > best_ms:
                best_ms = bound_ms
                for i in range(num_times):  # a loop: numba takes seconds to compile assignments of whole arrays
                    best_mixture[i] = path[i]
            # No mixture reaches more than reachable_ms; there is little left to learn once the bound is near it.
            if best_ms >= target_ms or target_ms - reachable_ms > 0.5 * (reachable_ms - best_ms):
                break
    for a in range(n):
        mean_share[a] /= weight
    return best_ms, played
