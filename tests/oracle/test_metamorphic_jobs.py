"""The first random jobs of metamorphic_jobs.py, each beside one that is looser."""

from __future__ import annotations

import pytest
from metamorphic_jobs import examine


@pytest.mark.parametrize("seed", [5, 6])
def test_a_looser_job_has_no_worse_answer_and_no_plan_is_below_its_bound(seed: int) -> None:
    verdict = examine(seed, limit_s=60.0, number=1)
    assert verdict.wrong == []
    assert verdict.num_plans > 20
