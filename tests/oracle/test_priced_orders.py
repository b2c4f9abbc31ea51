"""Free orders where failed starts have a price: what a search ranks, proves and bounds against all plans of small jobs.

Every placement with every word of two micro-batches on each of two stages is evaluated like any plan of a person's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
from expert_jobs import placements_of, rank_ms
from free_jobs import random_job
from plain_words import words

from mm_autoparallel.errors import NoFeasiblePlan, PlannerError
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.evaluate import evaluate, plan_from_placement
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_space
from mm_autoparallel.planner.search.watched import compile_search

MOST_PLACEMENTS = 12
WORDS = [" ".join(f"{m}{letter}0" for m, letter in word) for word in words(2)]


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    compile_search(("free",), 1)


def priced_job(seed: int) -> Job | None:
    """A job of one pipeline of two stages and two micro-batches, in any order; None where that seed gives none."""
    job, _ = random_job(seed)
    limits = {"schedule": ("free",), "max_vpp": 1, "pp": (2,), "failure_price": 1.0}
    job = replace(job, search=job.search.model_copy(update=limits))
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    num = len(lawful) == 1 and lawful[0].num_microbatches(job.workload.global_batch_size)
    if num != 2 or sum(1 for _ in placements_of(build_problem(job, lawful[0]))) > MOST_PLACEMENTS:
        return None
    return job


def list_ranks(job: Job) -> list[float]:
    strategy = next(entry.strategy for entry in list_space(job) if entry.reason is None)
    problem, batch, ranks = build_problem(job, strategy), job.workload.global_batch_size, []
    with mock.patch("mm_autoparallel.planner.evaluate.build_problem", return_value=problem):  # built once for all
        for placement, orders in product(placements_of(problem), product(WORDS, repeat=2)):
            try:
                estimate = evaluate(
                    job, plan_from_placement(problem, replace(placement, orders=orders), strategy, batch)
                )
            except PlannerError:  # words that wait for one another
                continue
            ranks.append(rank_ms(job, estimate))
    return ranks


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.nightly) for first in range(100, 400, 100))]
)
def test_the_plan_that_ranks_least_is_found_and_no_bound_is_above_it(first: int) -> None:
    jobs = [job for job in map(priced_job, range(first, first + 100)) if job is not None][: 6 if first == 0 else 20]
    assert jobs
    num_priced = 0
    for job in jobs:
        least_ms = min(list_ranks(job))
        try:
            found = search(job, time_limit_s=20.0, num_workers=1)
        except NoFeasiblePlan:
            assert math.isinf(least_ms)
            continue
        assert found.objective.rank_bound_ms <= least_ms * (1 + 1e-9)
        assert found.objective.rank_ms >= least_ms * (1 - 1e-9)
        assert not found.proven or found.objective.rank_ms <= least_ms * (1 + 1e-3)
        num_priced += found.objective.rank_ms > found.objective.step_ms * 1.0001
    assert num_priced
