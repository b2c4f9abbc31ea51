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

from mm_autoparallel.pipeline.placement.patterns.state_graph import Layers
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
#: Logarithm of a weight that is nothing beside 1.
NOTHING = -40.0


class Player(NamedTuple):
    """A subset of a layered graph's patterns and how much they weigh. With n patterns:

    pattern, group, stage: [n] index in the layers, its group and stage. log_weight: [n], updated by the game.
    column: which of the patterns' times are not all zero.
    """

    pattern: Ints
    group: Ints
    stage: Ints
    log_weight: Floats
    column: Ints


@kernel
def fill_costs(layers: Layers, player: Player, mixture: Floats, cost_ms: Floats, least_ms: Floats) -> None:
    """What a mixture [4K - 1 + P] makes each pattern cost, [n], and the least of each group, [groups]."""
    for g in range(least_ms.shape[0]):
        least_ms[g] = np.inf
    for a in range(player.pattern.shape[0]):
        p, s, g = player.pattern[a], player.stage[a], player.group[a]
        cost = 0.0
        for i in player.column:
            cost += mixture[layers.slot[s, i]] * layers.times_ms[p, i]
        cost_ms[a] = cost
        least_ms[g] = min(least_ms[g], cost)


@kernel
def fill_ways(layers: Layers, least_ms: Floats, before_ms: Floats, after_ms: Floats) -> float:
    """Cheapest way from nothing to each state and from it to the whole chain, [states]; returns the cheapest of all."""
    num_states = before_ms.shape[0]
    for i in range(num_states):
        before_ms[i] = np.inf
        after_ms[i] = np.inf
    before_ms[0] = 0.0
    for e in range(layers.edge_from.shape[0]):  # stage by stage
        cost = before_ms[layers.edge_from[e]] + least_ms[layers.edge_group[e]]
        before_ms[layers.edge_to[e]] = min(before_ms[layers.edge_to[e]], cost)
    after_ms[num_states - 1] = 0.0
    for e in range(layers.edge_from.shape[0] - 1, -1, -1):
        cost = after_ms[layers.edge_to[e]] + least_ms[layers.edge_group[e]]
        after_ms[layers.edge_from[e]] = min(after_ms[layers.edge_from[e]], cost)
    return float(before_ms[num_states - 1])


@kernel
def fill_least_with(layers: Layers, player: Player, mixture: Floats, total_ms: Floats) -> None:
    """The least cost of a way through each pattern, [n]; infinite where no way goes through it."""
    num_states, num_groups = layers.least_before.shape[0], layers.group_begin.shape[0] - 1
    least_ms, around_ms = np.empty(num_groups), np.full(num_groups, np.inf)
    before_ms, after_ms = np.empty(num_states), np.empty(num_states)
    fill_costs(layers, player, mixture, total_ms, least_ms)
    fill_ways(layers, least_ms, before_ms, after_ms)
    for e in range(layers.edge_from.shape[0]):
        g = layers.edge_group[e]
        around_ms[g] = min(around_ms[g], before_ms[layers.edge_from[e]] + after_ms[layers.edge_to[e]])
    for a in range(total_ms.shape[0]):
        total_ms[a] += around_ms[player.group[a]]


@kernel
def fill_shares(layers: Layers, player: Player, share: Floats, scratch: tuple[Floats, Floats, Floats]) -> None:
    """The share of each pattern, [n], where a way's share is proportional to the product of its patterns' weights.

    scratch: [groups], [groups], [states].
    """
    log_group, flow, log_before = scratch
    num_groups, num_states, num_edges = log_group.shape[0], log_before.shape[0], layers.edge_from.shape[0]
    for g in range(num_groups):
        log_group[g] = -np.inf
        flow[g] = 0.0
    for a in range(player.pattern.shape[0]):
        log_group[player.group[a]] = max(log_group[player.group[a]], player.log_weight[a])
    for a in range(player.pattern.shape[0]):
        g = player.group[a]
        share[a] = np.exp(player.log_weight[a] - log_group[g])
        flow[g] += share[a]
    for a in range(player.pattern.shape[0]):
        share[a] /= flow[player.group[a]]
    for g in range(num_groups):
        if flow[g] > 0.0:
            log_group[g] += np.log(flow[g])
        flow[g] = 0.0
    for i in range(num_states):
        log_before[i] = -np.inf
    log_before[0] = 0.0
    begin = 0
    while begin < num_edges:  # edges are sorted by the state they lead to
        target, end, most = layers.edge_to[begin], begin, -np.inf
        while end < num_edges and layers.edge_to[end] == target:
            most = max(most, log_before[layers.edge_from[end]] + log_group[layers.edge_group[end]])
            end += 1
        if most > -np.inf:
            total = 0.0
            for e in range(begin, end):
                log = log_before[layers.edge_from[e]] + log_group[layers.edge_group[e]] - most
                if log > NOTHING:
                    total += np.exp(log)
            log_before[target] = most + np.log(total)
        begin = end
    visits = np.zeros(num_states)
    visits[num_states - 1] = 1.0
    for e in range(num_edges - 1, -1, -1):
        source, target, g = layers.edge_from[e], layers.edge_to[e], layers.edge_group[e]
        if visits[target] > 0.0:
            log = log_before[source] + log_group[g] - log_before[target]
            if log > NOTHING:
                through = visits[target] * np.exp(log)
                visits[source] += through
                flow[g] += through
    for a in range(player.pattern.shape[0]):
        share[a] *= flow[player.group[a]]


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
    layers: Layers,
    graph: PlayedGraph,
    neighbours: tuple[IntArray, IntArray],
    player: Player,
    spread: Spread,
    num_open: int,
    first_round: int,
    num_rounds: int,
    target_ms: float,
    best_mixture: Floats,
    mean_share: Floats,
) -> tuple[float, int]:
    """Play up to num_rounds rounds; the best bound in ms and the number of rounds played.

    graph: of the whole step. Some way must lead through the player's patterns. spread: light kinds, on the first
    num_open virtual stages. first_round: rounds that the weights have learnt from before. It ends once the bound
    reaches target_ms, or cannot. Writes best_mixture (as TimesLayout has it) and mean_share [n], the patterns' shares
    over all rounds.
    """
    num_stages, num_virtual = graph.free_ms.shape[0], layers.slot.max() + 1  # the last slot: the tail of the last stage
    num_virtual = (num_virtual - num_stages + 1) // 4
    at = times_layout(num_virtual, num_stages)
    num_times, n = at.num_times, player.pattern.shape[0]
    num_states, num_groups = layers.least_before.shape[0], layers.group_begin.shape[0] - 1
    scratch = (np.empty(num_groups), np.empty(num_groups), np.empty(num_states))
    before_ms, after_ms, least_ms = np.empty(num_states), np.empty(num_states), np.empty(num_groups)
    share, cost_ms = np.empty(n), np.empty(n)
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
        fill_shares(layers, player, share, scratch)
        times_ms[:] = 0.0
        for a in range(n):
            mean_share[a] += number * share[a]
            for i in player.column:
                times_ms[layers.slot[player.stage[a], i]] += share[a] * layers.times_ms[player.pattern[a], i]
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
        fill_costs(layers, player, path, cost_ms, least_ms)
        rate = LEARNING_FACTOR * num_stages / (max(step_ms, 1e-300) * np.sqrt(number))
        for a in range(n):
            player.log_weight[a] -= rate * cost_ms[a]
        for e in range(num_light):
            for k in range(num_open):
                cost = path[k] * spread.forward_ms[e, k] + path[num_virtual + k] * spread.backward_ms[e, k]
                log_spread[e, k] -= SPREAD_FACTOR * num_stages / (spread_ms[e] * np.sqrt(number)) * cost
        if played % ROUNDS_BETWEEN_BOUNDS == 0 or played == num_rounds:
            for i in range(num_times):
                path[i] = total[i] / weight
            fill_costs(layers, player, path, cost_ms, least_ms)
            bound_ms = fill_ways(layers, least_ms, before_ms, after_ms) + least_spread(spread, num_open, path)
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
