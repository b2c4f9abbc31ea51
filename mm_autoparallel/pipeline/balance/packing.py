"""The compiled kernels that pack samples into bins under a cap of tokens, and refine what they packed.

A sample's load is a vector, of encoder and decoder. What a bin costs is `bin_cost`, of its busiest stage and of all its
work. Samples of bin b are a list: `head[b]`, then `following[i]` of each, until -1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WORK_WEIGHT = 0.3
"""Of a bin's whole work beside that of its busiest stage. Assumed: a trial on heavy-tailed images."""


MOST_CHECKS = 4096
"""Of a pair of bins; where there were more changes, they are of some of the samples only. Assumed: 50 microseconds."""


class Load(NamedTuple):
    """What is dealt: n samples into bins. ms: [n, 2], of encoder and decoder. tokens: [n]. token_cap: of a bin.
    stage_shares: [S + 1, 2], what each stage takes of either, and in the last row the largest of each column."""

    ms: Floats
    tokens: Ints
    token_cap: int
    stage_shares: Floats


class Bins(NamedTuple):
    """What bins hold: load [bins, 2], tokens and number of samples [bins]; their lists; of each sample its bin [n]."""

    ms: Floats
    tokens: Ints
    sizes: Ints
    head: Ints
    following: Ints
    of: Ints


@kernel
def fill_bins(of: Ints, load: Load, num_bins: int) -> Bins:
    """The bins when sample i lies in bin of[i]; lists ascend."""
    bins = Bins(
        np.zeros((num_bins, 2)),
        np.zeros(num_bins, dtype=np.int64),
        np.zeros(num_bins, dtype=np.int64),
        np.full(num_bins, -1, dtype=np.int64),
        np.full(of.shape[0], -1, dtype=np.int64),
        of,
    )
    for i in range(of.shape[0] - 1, -1, -1):
        bins.following[i] = bins.head[of[i]]
        bins.head[of[i]] = i
        bins.ms[of[i]] += load.ms[i]
        bins.tokens[of[i]] += load.tokens[i]
        bins.sizes[of[i]] += 1
    return bins


@kernel
def busiest(encoder_ms: float, decoder_ms: float, stage_shares: Floats) -> float:
    """What the busiest stage takes for such a load, in ms. stage_shares: as Load has them."""
    most = 0.0
    for s in range(stage_shares.shape[0] - 1):
        most = max(most, encoder_ms * stage_shares[s, 0] + decoder_ms * stage_shares[s, 1])
    return most


@kernel
def bin_cost(encoder_ms: float, decoder_ms: float, stage_shares: Floats) -> float:
    """What a packing makes small, summed over bins."""
    most = busiest(encoder_ms, decoder_ms, stage_shares)
    work = encoder_ms * stage_shares[-1, 0] + decoder_ms * stage_shares[-1, 1]
    return float(most * most + WORK_WEIGHT * work * work)


@kernel
def pack(order: Ints, load: Load, num_bins: int, fills_up: bool) -> Ints:
    """The bin of each sample [n]: in `order`, each into the least busy bin that has room for it (longest first: LPT),
    or where it fills_up into the busiest (best fit). No bin stays empty. -1 from a sample on that finds no room."""
    n = order.shape[0]
    bin_of = np.full(n, -1, dtype=np.int64)
    held_ms, held_tokens = np.zeros((num_bins, 2)), np.zeros(num_bins, dtype=np.int64)
    size = 1
    while size < num_bins:
        size *= 2
    least = np.full(2 * size, np.inf)  # a tree: each inner node is the lesser of its two
    for b in range(num_bins):
        least[size + b] = -1.0  # empty: before all others, whatever their samples take
    for node in range(size - 1, 0, -1):
        least[node] = min(least[2 * node], least[2 * node + 1])
    num_empty = num_bins
    for at in range(n):
        i = order[at]
        node = 1
        while node < size:
            node = 2 * node if least[2 * node] <= least[2 * node + 1] else 2 * node + 1
        best = node - size
        fills = fills_up and n - at > num_empty
        if fills or held_tokens[best] + load.tokens[i] > load.token_cap:
            best = -1
            for b in range(num_bins):
                if held_tokens[b] + load.tokens[i] <= load.token_cap and (
                    best < 0 or (least[size + b] > least[size + best]) == fills
                ):
                    best = b
            if best < 0:
                return bin_of
        num_empty -= least[size + best] < 0.0
        bin_of[i] = best
        held_tokens[best] += load.tokens[i]
        held_ms[best] += load.ms[i]
        node = size + best
        least[node] = busiest(held_ms[best, 0], held_ms[best, 1], load.stage_shares)
        while node > 1:
            node //= 2
            least[node] = min(least[2 * node], least[2 * node + 1])
    return bin_of


@kernel
def below(n: int) -> int:
    """A whole number from 0 to n - 1, at random."""
    return int(np.random.random() * n)


@kernel
def refine(bins: Bins, load: Load, num_checks: int) -> None:
    """Move or swap samples of pairs of bins while that lowers Σ `bin_cost`: one at random, the other at random or the
    dearest, the best change of each pair, until about num_checks changes were looked at. Overwrites bins."""
    np.random.seed(0)
    num_bins, shares = bins.sizes.shape[0], load.stage_shares
    cost = np.empty(num_bins)
    for b in range(num_bins):
        cost[b] = bin_cost(bins.ms[b, 0], bins.ms[b, 1], shares)
    done, trial = 0, 0
    while done < num_checks:
        a, b = below(num_bins), below(num_bins)
        if trial % 8 == 0:
            a = int(np.argmax(cost))
            done += num_bins // 8
        if cost[a] < cost[b]:
            a, b = b, a
        trial += 1
        if a == b:
            done += 8
            continue
        stride = 1 + bins.sizes[a] * (bins.sizes[b] + 1) // MOST_CHECKS
        offset = below(stride)
        done += 8 + bins.sizes[a] * (bins.sizes[b] + 1) // stride
        best, best_i, best_j = (cost[a] + cost[b]) * (1.0 - 1e-12), -1, -1
        i, nth = bins.head[a], offset
        while i >= 0:
            if nth % stride > 0:
                i, nth = bins.following[i], nth + 1
                continue
            nth += 1
            j = bins.head[b]
            while j >= 0 or bins.sizes[a] > 1:  # j = -1: i goes, and none comes
                given = load.tokens[j] if j >= 0 else 0
                encoder_ms = load.ms[i, 0] - (load.ms[j, 0] if j >= 0 else 0.0)
                decoder_ms = load.ms[i, 1] - (load.ms[j, 1] if j >= 0 else 0.0)
                then = bin_cost(bins.ms[a, 0] - encoder_ms, bins.ms[a, 1] - decoder_ms, shares)
                if then < best:
                    then += bin_cost(bins.ms[b, 0] + encoder_ms, bins.ms[b, 1] + decoder_ms, shares)
                    if then < best and has_room(load.tokens[i] - given, a, b, bins, load):
                        best, best_i, best_j = then, i, j
                if j < 0:
                    break
                j = bins.following[j]
            i = bins.following[i]
        if best_i >= 0:
            exchange(best_i, best_j, a, b, bins, load)
            cost[a] = bin_cost(bins.ms[a, 0], bins.ms[a, 1], shares)
            cost[b] = bin_cost(bins.ms[b, 0], bins.ms[b, 1], shares)


@kernel
def has_room(tokens: int, a: int, b: int, bins: Bins, load: Load) -> bool:
    """Whether bin a may give so many tokens to bin b, or take them where they are less than none."""
    return bool(bins.tokens[b] + tokens <= load.token_cap and bins.tokens[a] - tokens <= load.token_cap)


@kernel
def exchange(i: int, j: int, a: int, b: int, bins: Bins, load: Load) -> None:
    """Sample i goes from bin a to bin b, and j, if it is one (not -1), the other way."""
    for way in range(2):
        gone, start, end = (i, a, b) if way == 0 else (j, b, a)
        if gone < 0:
            continue
        if bins.head[start] == gone:
            bins.head[start] = bins.following[gone]
        else:
            before = bins.head[start]
            while bins.following[before] != gone:
                before = bins.following[before]
            bins.following[before] = bins.following[gone]
        bins.following[gone] = bins.head[end]
        bins.head[end] = gone
        bins.of[gone] = end
        bins.ms[start] -= load.ms[gone]
        bins.ms[end] += load.ms[gone]
        bins.tokens[start] -= load.tokens[gone]
        bins.tokens[end] += load.tokens[gone]
        bins.sizes[start] -= 1
        bins.sizes[end] += 1
