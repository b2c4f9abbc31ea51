"""`place` against brute force on 600 seeded small problems, nightly 5,000; every third with its certificate.

A failing problem by itself: `python tests/oracle/compare.py --files MOOD-SEED`."""

from __future__ import annotations

import pytest
from compare import compare
from generate import LARGE, MOODS, problem

BATCH = 50
BATCHES_OF_A_MOOD = 25


@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize(
    "batch",
    [
        0,
        *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(1, 3)),
        *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(3, BATCHES_OF_A_MOOD)),
    ],
)
def test_place_equals_brute_force(batch: int, mood: str) -> None:
    check(mood, range(batch * BATCH, (batch + 1) * BATCH))


@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, 10, 20])
def test_place_equals_brute_force_with_many_layers(first: int) -> None:
    check(LARGE, range(first, first + 10))


@pytest.mark.parametrize("schedule", ["seq_1f1b_2", "seq_1f1b_4"])
def test_place_equals_brute_force_where_sequences_go_in_pieces(schedule: str) -> None:
    check("tidy", range(20_000, 20_030), schedule)


def check(mood: str, seeds: range, schedule: str | None = None) -> None:
    wrong = {}
    for seed in seeds:
        name = f"{mood}-{seed}"
        document = problem(name)
        if schedule and document.get("num_chunks", 1) == 1:
            document["schedule"] = schedule
        verdict = compare(name, document, check_certificate=seed % 3 == 0)
        if verdict.wrong:
            wrong[name] = verdict.wrong
    assert not wrong
