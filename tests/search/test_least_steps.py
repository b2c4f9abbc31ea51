"""What its blocks cost alone is a bound on every strategy, and no loose one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.least_step import LeastSteps, least_path_ms
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.pipeline.placement.bounds.step import bound_step, work_bound_ms
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.planner.search.space import list_space


@pytest.mark.parametrize("scale", [{}, {"vision": (0.5, 1.5), "text": (1.0, 2.0, 0.5)}], ids=["equal", "unequal"])
def test_blocks_alone_never_say_more_than_the_problem(make_job, scale: dict[str, tuple[float, ...]]) -> None:
    job = make_job(max_vpp=2, zero=(0, 1), num_nodes=2, workload={"micro_batch_scale": scale})
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    steps = LeastSteps(job)
    for strategy in lawful:
        least_ms, problem = steps.least_ms(strategy), build_problem(job, strategy)
        assert 0.5 * work_bound_ms(problem) < least_ms <= bound_step(problem).step_ms * (1 + 1e-12)
        assert strategy.vpp == 1 or least_ms <= work_bound_ms(problem) * (1 + 1e-12)


@pytest.mark.parametrize("example", ["three_level_network", "qwen3vl_30b_a3b"])
def test_so_it_is_for_networks_and_experts(repository, example: str) -> None:
    job = read_job(repository / "examples" / example / "job.yaml")
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    steps = LeastSteps(job)
    for strategy in random.Random(1).sample(lawful, min(100, len(lawful))):
        problem = build_problem(job, strategy)
        bound = bound_step(problem)
        assert steps.least_ms(strategy) <= max(work_bound_ms(problem), bound.step_ms) * (1 + 1e-12) or bound.reason


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_of_few_microbatches_all_but_the_bubble_is_left_out(make_job, schedule: str) -> None:
    """No best placement is below, and where layers are many and small it is close to that."""
    job = make_job(num_layers=24, memory_bytes=90e9, freeze_vision=False, schedule=schedule, pp=(2, 4), max_vpp=1)
    ratios = []
    for strategy in (entry.strategy for entry in list_space(job) if entry.reason is None):
        problem = build_problem(job, strategy)
        placed = place(problem, time_limit_s=20.0)
        if placed.placement is not None:
            least_ms, tail_ms = LeastSteps(job).least_ms(strategy), max(problem.stage_tail_ms)
            assert least_ms <= placed.step_ms
            ratios.append((least_ms + tail_ms) / placed.step_ms)
    assert len(ratios) > 10
    assert min(ratios) > 0.7


@pytest.mark.parametrize("num_stages", [1, 2, 5, 16])
@pytest.mark.parametrize("num_microbatches", [1, 2, 7, 64])
def test_the_path_through_stages_that_fill_and_drain(num_stages: int, num_microbatches: int) -> None:
    """All stages end together where each has (C - S) / M, and any other way to share the work out takes longer."""
    least_ms, before_ms = least_path_ms(100.0 * num_microbatches, num_stages, num_microbatches), 0.0
    for _ in range(num_stages):
        before_ms += (least_ms - before_ms) / num_microbatches
    assert before_ms == pytest.approx(100.0)
    draw = random.Random(num_stages * num_microbatches)
    for _ in range(200):
        parts = [draw.expovariate(1.0) for _ in range(num_stages)]
        each_ms = [100.0 * part / sum(parts) for part in parts]
        steps_ms = [sum(each_ms[:stage]) + num_microbatches * ms for stage, ms in enumerate(each_ms)]
        assert max(steps_ms) >= least_ms * (1 - 1e-12)


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
