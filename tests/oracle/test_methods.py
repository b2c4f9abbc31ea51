"""Each method by itself against brute force."""

from __future__ import annotations

import pytest
from generate import MOODS
from methods import check_methods

PROBLEMS_OF_A_MOOD = 15


@pytest.mark.slow
@pytest.mark.parametrize("mood", MOODS)
def test_every_method_equals_brute_force(mood: str) -> None:
    names = [f"{mood}-{seed}" for seed in range(PROBLEMS_OF_A_MOOD)]
    wrong = {name: what for name in names if (what := check_methods(name))}
    assert not wrong
