"""Published plans load, fit, and are never faster than ours of the same sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.model.job.job import SearchSpace
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import read_plan
from mm_autoparallel.planner.search.planner import search

FOLDER = Path(__file__).parents[2] / "examples" / "published_gains"


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("internvl2_8b", "baseline"),
        ("internvl2_8b", "tuned"),
        ("internvl2_76b", "baseline"),
        ("internvl2_76b", "tuned"),
        ("qwen2vl_72b", "baseline"),
        ("qwen2vl_72b", "tuned"),
        ("qwen2vl_72b", "tuned_pp8"),
    ],
)
def test_published_plan_fits_and_ours_of_its_sizes_is_no_slower(name: str, which: str) -> None:
    job = read_job(FOLDER / f"{name}.yaml")
    plan = read_plan(FOLDER / f"{name}.{which}.json", job)
    estimate = evaluate(job, plan)
    assert estimate.fits
    own = plan.strategy
    sizes = SearchSpace(pp=(own.pp,), tp=(own.tp,), cp=(1,), dp=(own.dp,), mbs=(own.mbs,), failure_price=0.0)
    ours = search(replace(job, search=sizes), num_workers=1)
    assert ours.proven
    assert ours.figures.step_ms <= estimate.step_ms * (1 + 1e-9)
