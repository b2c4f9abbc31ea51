"""`plan` against every plan of small jobs whose order may be found, in one chunk a stage or there and back
(tests/oracle/free_jobs.py looks at more)."""

from __future__ import annotations

import pytest
from free_jobs import compare

from mm_autoparallel.planner.search.watched import compile_search


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    """What searches of orders run is compiled before any clock does."""
    compile_search(("free",), 2)


@pytest.mark.parametrize(
    "first", [1, *(pytest.param(first, marks=pytest.mark.nightly) for first in range(101, 201, 10))]
)
def test_plans_are_the_best_of_all(first: int) -> None:
    number = 4 if first == 1 else 10
    verdicts = [compare(seed) for seed in range(first, first + number)]
    assert not {verdict.seed: verdict.wrong for verdict in verdicts if verdict.wrong}
    assert any(verdict.winner for verdict in verdicts)
