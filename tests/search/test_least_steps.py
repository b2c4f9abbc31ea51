"""What its blocks cost alone is a bound on every strategy, and no loose one."""

from __future__ import annotations

import random

import pytest

from mm_autoparallel.model.costs.least_step import LeastSteps
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.pipeline.placement.bounds.step import work_bound_ms
from mm_autoparallel.planner.search.space import list_space


@pytest.mark.parametrize("scale", [{}, {"vision": (0.5, 1.5), "text": (1.0, 2.0, 0.5)}], ids=["equal", "unequal"])
def test_blocks_alone_never_say_more_than_the_problem(make_job, scale: dict[str, tuple[float, ...]]) -> None:
    job = make_job(max_vpp=2, zero=(0, 1), num_nodes=2, workload={"micro_batch_scale": scale})
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    steps = LeastSteps(job)
    for strategy in lawful:
        least_ms, problem = steps.least_ms(strategy), build_problem(job, strategy)
        assert 0.5 * work_bound_ms(problem) < least_ms <= work_bound_ms(problem) * (1 + 1e-12)


@pytest.mark.parametrize("example", ["three_level_network", "qwen3vl_30b_a3b"])
def test_so_it_is_for_networks_and_experts(repository, example: str) -> None:
    job = read_job(repository / "examples" / example / "job.yaml")
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    steps = LeastSteps(job)
    for strategy in random.Random(1).sample(lawful, min(100, len(lawful))):
        assert steps.least_ms(strategy) <= work_bound_ms(build_problem(job, strategy)) * (1 + 1e-12)
