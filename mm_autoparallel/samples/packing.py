"""Samples packed into sequences of at most so many tokens, by the rules of those who pack whole data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.samples.table import SampleTable

Ints = NDArray[np.int64]


def pack_table(table: SampleTable, tokens: Ints, token_cap: int, decreasing: bool) -> SampleTable:
    """`table` in sequences, none of more than token_cap tokens. tokens: [n] of each sample. decreasing: the longest
    first, each into the first sequence with room (first fit decreasing, Johnson 1974, J. Comput. Syst. Sci. 8); else in
    order, a sequence being closed where the next sample has no room (next fit). Sequences keep the samples' order.

    Raises ValueError, naming it, where a sample has more tokens than token_cap.
    """
    longest = int(np.argmax(tokens))
    if tokens[longest] > token_cap:
        number = int(np.count_nonzero(tokens > token_cap))
        raise ValueError(
            f"sample {longest} has {tokens[longest]:,} tokens and {number:,} of {len(tokens):,} have more than the "
            f"{token_cap:,} of a sequence; cut them, leave them out, or raise that"
        )
    of = _first_fit_decreasing(tokens, token_cap) if decreasing else _in_order(tokens.tolist(), token_cap)
    order = np.argsort(of, kind="stable")
    sizes = np.bincount(of)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return replace(table.take(order), sequences=ends)


def _in_order(tokens: Sequence[int], token_cap: int) -> Ints:
    """The sequence of each sample [n]."""
    of, at, held = np.empty(len(tokens), dtype=np.int64), 0, 0
    for i, count in enumerate(tokens):
        if held + count > token_cap:
            at, held = at + 1, 0
        of[i] = at
        held += count
    return of


def _first_fit_decreasing(tokens: Ints, token_cap: int) -> Ints:
    """The same; by a tree of which each node knows the most room of a sequence below it."""
    num_leaves = 1
    while num_leaves < len(tokens):
        num_leaves *= 2
    room = [token_cap] * (2 * num_leaves)
    of = np.empty(len(tokens), dtype=np.int64)
    order = np.argsort(-tokens, kind="stable")
    for i, count in zip(order.tolist(), tokens[order].tolist(), strict=True):
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < count:
                node += 1
        of[i] = node - num_leaves
        room[node] -= count
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return of
