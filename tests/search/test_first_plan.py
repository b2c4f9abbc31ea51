"""First plans: lawful, fitting where one that fits is met, never better than the best, the same every time."""

from __future__ import annotations

import pytest

import mm_autoparallel as mmap
from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.explain.nearest import nearest_strategy
from mm_autoparallel.planner.first_plan import first_plan
from mm_autoparallel.planner.search.space import list_entries


@pytest.fixture(scope="module")
def job() -> mmap.Job:
    return mmap.Job(
        "qwen2-7b",
        {"device": "a100-80g", "num_nodes": 1, "devices_per_node": 8},
        {"global_batch_size": 32, "seq_length": 4096},
        search={"mbs": [1, 2], "max_vpp": 2},
    )


def test_of_every_strategy_of_a_space(job: mmap.Job) -> None:
    lawful = [entry.strategy for entry in list_entries(job) if entry.reason is None]
    best = mmap.plan(job)
    fitting = 0
    for strategy in lawful:
        plan = first_plan(job, strategy)
        assert plan == first_plan(job, strategy)
        assert plan.strategy == strategy
        simulated = mmap.simulate(job, plan)
        fitting += simulated.fits
        assert not simulated.fits or simulated.step_ms >= best.lower_bound_ms * (1 - 1e-9)
    solved = sum(candidate.status in ("solved", "dominated") for candidate in best.search.candidates)
    assert fitting >= 0.9 * solved
    print(f"{fitting} of {len(lawful)} first plans fit; {solved} strategies have a plan that does, or were not asked")


def test_an_unlawful_strategy_is_refused_with_its_law(job: mmap.Job) -> None:
    with pytest.raises(PlanError, match="does not fit job"):
        first_plan(job, Strategy(pp=1, tp=8, dp=1, mbs=1))


def test_the_nearest_strategy_keeps_what_was_not_asked_for(job: mmap.Job) -> None:
    present = Strategy(pp=2, tp=2, dp=2, mbs=2)
    near = nearest_strategy(job, present, {"pp": 4})
    assert (near.pp, near.tp, near.dp, near.mbs, near.vpp) == (4, 2, 1, 2, 1)
    with pytest.raises(PlanError, match="TP 8"):
        nearest_strategy(job, present, {"tp": 8})  # 28 heads
