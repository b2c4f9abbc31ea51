"""Samples packed into sequences: none lost, changed or above the cap, and the rules are those of their names."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_autoparallel.samples.packing import pack_table
from mm_autoparallel.samples.sample import Sample
from mm_autoparallel.samples.table import SampleTable, tabulate

CAP = 100


def table_of(tokens: list[int]) -> SampleTable:
    """Each with as many images as its tokens' last digit, and audio where they are even."""
    return tabulate(
        [
            Sample(tuple(4 * i + count for i in range(count % 10)), count, audio_s=(0.5,) * (1 - count % 2))
            for count in tokens
        ]
    )


def sequences_of(packed: SampleTable) -> list[list[int]]:
    """Tokens of text of each."""
    assert packed.sequences is not None
    ends = packed.sequences.tolist()
    assert (ends[0], ends[-1], packed.num_sequences) == (0, len(packed), len(ends) - 1)
    return [packed.text_tokens[a:b].tolist() for a, b in pairwise(ends)]


def pack_one_by_one(tokens: list[int], decreasing: bool) -> list[list[int]]:
    """Either rule as it is described, sequence by sequence; within one the samples in their order."""
    held: list[list[int]] = []
    order = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)) if decreasing else range(len(tokens))
    for i in order:
        tried = held if decreasing else held[-1:]
        found = next((one for one in tried if sum(tokens[k] for k in one) + tokens[i] <= CAP), None)
        if found is None:
            held.append([i])
        else:
            found.append(i)
    return [[tokens[i] for i in sorted(one)] for one in held]


@settings(max_examples=200)
@given(st.lists(st.integers(0, CAP), min_size=1, max_size=40), st.booleans())
def test_the_rules_are_those_of_their_names(tokens: list[int], decreasing: bool) -> None:
    table = table_of(tokens)
    packed = pack_table(table, table.text_tokens, CAP, decreasing)
    found = sequences_of(packed)
    assert found == pack_one_by_one(tokens, decreasing)
    assert max(map(sum, found)) <= CAP
    assert all(found)
    whole = [packed.sample(i) for i in range(len(packed))]
    assert sorted(whole, key=repr) == sorted((table.sample(i) for i in range(len(table))), key=repr)
    assert packed.of_sequences(packed.num_images).sum() == table.num_images.sum()


def test_longest_first_fills_sequences_better() -> None:
    random = np.random.default_rng(2)
    table = table_of(random.integers(1, 60, 5000).tolist())
    in_order, decreasing = (pack_table(table, table.text_tokens, CAP, one).num_sequences for one in (False, True))
    least = table.text_tokens.sum() / CAP
    assert decreasing < 1.01 * least < 1.1 * least < in_order


def test_a_sample_longer_than_a_sequence_is_named() -> None:
    table = table_of([20, 101, 150, 3])
    with pytest.raises(ValueError, match="sample 2 has 150 tokens and 2 of 4 have more than the 100"):
        pack_table(table, table.text_tokens, CAP, decreasing=False)
