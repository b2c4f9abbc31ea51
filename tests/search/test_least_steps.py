"""What its blocks cost alone is a bound on every strategy, and no loose one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mm_autoparallel.model.costs.cost_model import CostModel
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


def test_blocks_without_experts_are_priced_once_for_all_ways_to_run_experts(repository, monkeypatch) -> None:
    """And cost what they do by themselves, bit for bit, whichever strategy asked first."""
    job = read_job(repository / "examples" / "qwen3vl_30b_a3b" / "job.yaml")
    choices = {"dispatcher": ("alltoall", "deepep"), "overlap_all_to_all": ("none", "shared_experts"), "etp": (0, 1)}
    job = replace(job, search=job.search.model_copy(update={"ep": (1, 2, 8), "graphs": ("none", "partial"), **choices}))
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    chosen = random.Random(1).sample(lawful, min(60, len(lawful)))
    assert len({(s.ep, s.etp, s.dispatcher) for s in chosen}) > 4
    calls, estimate = [], CostModel._estimate
    monkeypatch.setattr(CostModel, "_estimate", lambda *given: calls.append(1) or estimate(*given))
    together = CostModel(job)
    shared = [together.look_up(strategy) for strategy in chosen]
    num_shared = len(calls)
    assert shared == [CostModel(job).look_up(strategy) for strategy in chosen]
    assert num_shared < 0.75 * (len(calls) - num_shared)
