"""What more memory brings, on jobs where it binds and where it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.planner.evaluate import Estimate, evaluate, plan_from_placement
from mm_autoparallel.planner.explain.headroom import find_headroom
from mm_autoparallel.planner.plan import Plan

MakeJob = Callable[..., Job]
STRATEGY = Strategy(pp=4, tp=1, dp=1, mbs=2)
BATCH = 16
MORE_BYTES = 2e9


def best(job: Job) -> Estimate:
    plan = Plan(
        STRATEGY, {"vision": (2, 0, 0, 0), "text": (2, 4, 4, 2)}, dict.fromkeys(("vision", "text"), (0,) * 4), BATCH
    )
    problem = evaluate(job, plan).problem
    found = place(problem, time_limit_s=60)
    assert found.status == "optimal"
    assert found.placement
    return evaluate(job, plan_from_placement(problem, found.placement, STRATEGY, BATCH))


def test_memory_that_is_plentiful_brings_nothing(make_job: MakeJob) -> None:
    estimate = best(make_job(memory_bytes=80e9, num_layers=12))
    found = find_headroom(estimate, 60.0, extra_bytes=MORE_BYTES)
    assert found.best_ms == pytest.approx(estimate.step_ms)
    assert found.all_gain_ms == 0
    assert found.gain_ms == (0.0,) * 4
    assert all(left > 0 for left in found.left_bytes)


def test_where_it_binds_all_stages_gain_no_less_than_any(make_job: MakeJob) -> None:
    job = make_job(memory_bytes=10.5e9, num_layers=12)
    estimate = best(job)
    assert sum(estimate.plan.recompute["text"]) > 0
    found = find_headroom(estimate, 60.0, extra_bytes=MORE_BYTES)
    assert found.all_gain_ms
    gains = [gain for gain in found.gain_ms if gain is not None]
    assert len(gains) == 4
    assert 0 < max(gains) <= found.all_gain_ms * (1 + 1e-3)


def test_a_plan_that_lies_badly_is_held_against_its_best(make_job: MakeJob) -> None:
    job = make_job(memory_bytes=80e9, num_layers=12)
    layers = {"vision": (2, 0, 0, 0), "text": (1, 1, 1, 9)}
    bad = evaluate(job, Plan(STRATEGY, layers, dict.fromkeys(("vision", "text"), (0,) * 4), BATCH))
    found = find_headroom(bad, 60.0)
    assert found.best_ms is not None
    assert found.best_ms == pytest.approx(best(job).step_ms, rel=2e-4)
    assert found.best_ms < bad.step_ms


def test_hosts_that_hold_it_back_are_told(make_job: MakeJob) -> None:
    """What layers gain by being sent to the host, they lose where the host has no room for them."""
    job = make_job(memory_bytes=10.5e9, num_layers=12, modes=("offload", "recompute"), host_link_bytes_per_s=150e9)
    estimate = best(job)
    assert max(estimate.host_bytes) > 0
    assert find_headroom(estimate, 60.0, extra_bytes=MORE_BYTES).host_gain_ms == 0
    closed = replace(job, cluster=Cluster(**(dict(job.cluster) | {"host_memory_bytes": 1})))
    found = find_headroom(best(closed), 60.0, extra_bytes=MORE_BYTES)
    assert found.best_ms is not None
    assert found.best_ms - (found.host_gain_ms or 0) == pytest.approx(estimate.step_ms, rel=2e-4)
    assert found.host_gain_ms


def test_no_time_is_no_answer(make_job: MakeJob) -> None:
    estimate = best(make_job(memory_bytes=80e9, num_layers=12))
    found = find_headroom(estimate, 60.0, should_stop=lambda: True)
    assert (found.best_ms, found.all_gain_ms, found.gain_ms) == (None, None, (None,) * 4)
