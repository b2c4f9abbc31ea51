"""Layouts of encoder and decoder against brute force: 60 seeded jobs, nightly 500; of two encoders of the same images
two, nightly 100; of passes beside another's own ranks two, nightly 100; of encoders of several CP three, nightly 150;
of ZeRO 2 and 3 three, nightly 150, of two encoders one, nightly 30; of cached features ten and four, nightly 200, 80.

Failing ones by themselves: `python tests/oracle/module_layouts.py --jobs 1 --seed N`."""

from __future__ import annotations

import pytest
from module_layouts import checked_jobs

BATCH, FEW = 15, 5


@pytest.mark.parametrize(
    "batch",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(2, 34)),
    ],
)
def test_search_equals_brute_force(batch: int) -> None:
    wrong = {name: told for name, told in checked_jobs(BATCH, 1 + batch * BATCH).items() if told}
    assert not wrong


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(1, 50))])
def test_two_encoders_equal_brute_force(batch: int) -> None:
    wrong = {name: told for name, told in checked_jobs(FEW, 1 + batch * FEW, num_towers=2).items() if told}
    assert not wrong


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(1, 50))])
def test_passes_beside_another_encoder_s_own_ranks_equal_brute_force(batch: int) -> None:
    wrong = checked_jobs(2, 1 + batch * 2, num_towers=2, beside_apart=True)
    assert not {name: told for name, told in wrong.items() if told}


@pytest.mark.parametrize("seed", [4, 5, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(6, 25))])
def test_passes_in_pieces_equal_brute_force(seed: int) -> None:
    wrong = checked_jobs(1, seed, pieces=True) | checked_jobs(1, seed, num_towers=2, pieces=True)
    assert not {name: told for name, told in wrong.items() if told}


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(1, 50))])
def test_two_encoders_of_the_same_images_equal_brute_force(batch: int) -> None:
    wrong = checked_jobs(2, 1 + batch * 2, num_towers=2, same_images=True)
    assert not {name: told for name, told in wrong.items() if told}


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(1, 50))])
def test_encoders_that_share_images_equal_brute_force(batch: int) -> None:
    wrong = checked_jobs(3, 1 + batch * 3, context=True)
    assert not {name: told for name, told in wrong.items() if told}


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(1, 50))])
def test_modules_in_shards_equal_brute_force(batch: int) -> None:
    wrong = checked_jobs(3, 1 + batch * 3, shards=True)
    assert not {name: told for name, told in wrong.items() if told}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 31))])
def test_two_encoders_in_shards_equal_brute_force(seed: int) -> None:
    wrong = checked_jobs(1, seed, num_towers=2, shards=True)
    assert not {name: told for name, told in wrong.items() if told}


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(1, 20))])
def test_cached_features_equal_brute_force(batch: int) -> None:
    wrong = checked_jobs(10, 1 + batch * 10, cached=True)
    wrong |= {f"of two: {name}": told for name, told in checked_jobs(4, 1 + batch * 4, 2, cached=True).items()}
    assert not {name: told for name, told in wrong.items() if told}
