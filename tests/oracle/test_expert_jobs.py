"""`plan` against every plan of small jobs with experts; `make nightly` looks at 200 (tests/oracle/expert_jobs.py)."""

from __future__ import annotations

import pytest
from expert_jobs import compare


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 5, *(pytest.param(first, marks=pytest.mark.nightly) for first in (9, 13, 17))])
def test_plans_are_the_best_of_all(first: int) -> None:
    wrong = {seed: verdict.wrong for seed in range(first, first + 4) if (verdict := compare(seed, most=60)).wrong}
    assert not wrong
