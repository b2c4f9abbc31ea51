"""Each method by itself against brute force."""

from __future__ import annotations

import pytest
from brute_force import brute_force
from compare import read
from generate import MOODS, problem
from methods import METHODS

PROBLEMS_OF_A_MOOD = 30


@pytest.mark.parametrize("mood", MOODS)
def test_every_method_equals_brute_force(mood: str) -> None:
    wrong = {}
    for seed in range(PROBLEMS_OF_A_MOOD):
        document = problem(f"{mood}-{seed}")
        best_ms = brute_force(document).step_ms
        for name, check in METHODS.items():
            if what := check(document, read(document), best_ms):
                wrong[f"{mood}-{seed}, {name}"] = what
    assert not wrong
