"""Jobs that name a schedule whose backwards run in two parts, or whose order is to be found: from plan to plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mm_autoparallel as mmap
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.torch.schedule_csv import read_csv, write_csv
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import read_plan, write_result
from mm_autoparallel.planner.search.planner import search

LAYERS = {"num_layers": 6, "hidden_size": 2048, "ffn_size": 5504, "num_heads": 16, "norm": "rms"}


def job_of(schedule: str, vpp: int = 1, **workload: object) -> Job:
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS}},
        "cluster": {"num_nodes": 1, "devices_per_node": 2, "device": "h100-80g"},
        "workload": {"global_batch_size": 6, "seq_length": 2048, **workload},
        "search": {"pp": [2], "tp": [1], "mbs": [1], "zero": [1], "max_vpp": vpp, "modes": [], "schedule": schedule},
    }
    return parse_job(document, Path("job.json"))


@pytest.mark.parametrize(("schedule", "vpp"), [("zb_h1", 1), ("zbv", 2), ("free", 1)])
def test_its_plan_is_read_back_and_simulates_the_same(schedule: str, vpp: int, tmp_path: Path) -> None:
    job = job_of(schedule, vpp)
    found = search(job, num_workers=1)
    assert found.plan.strategy.schedule == schedule
    assert bool(found.plan.orders) == (schedule == "free")
    path = tmp_path / "plan.json"
    write_result(path, found.plan, found.figures)
    again = read_plan(path, job)
    assert again == replace(found.plan, warnings=again.warnings)
    assert evaluate(job, again).timeline.step_ms == pytest.approx(found.figures.step_ms, rel=1e-9)
    orders = read_csv(write_csv(again), 2)
    assert orders.num_chunks == vpp
    assert orders.v_shaped == (schedule == "zbv")


def test_a_found_order_is_never_slower_than_named_ones() -> None:
    steps = {name: search(job_of(name), num_workers=1).figures.step_ms for name in ("1f1b", "zb_h1", "free")}
    assert steps["free"] <= steps["zb_h1"] * (1 + 1e-9)
    assert steps["free"] <= steps["1f1b"] * (1 + 1e-9)
    assert steps["zb_h1"] < steps["1f1b"]


def test_frameworks_that_do_not_run_it_say_so() -> None:
    with pytest.raises(JobError, match=r"schedule zb_h1 is none that workload\.stack megatron-te runs"):
        search(job_of("zb_h1", stack="megatron-te"), num_workers=1)
    with pytest.raises(JobError, match=r"names zbv, .* there and back, and search\.max_vpp is 1"):
        search(job_of("zbv"), num_workers=1)


def test_a_plan_without_its_order_is_refused(tmp_path: Path) -> None:
    job = job_of("free")
    found = search(job, num_workers=1)
    path = tmp_path / "plan.json"
    write_result(path, replace(found.plan, orders=()), found.figures)
    with pytest.raises(PlanError, match="order is missing; with schedule free a list of actions"):
        read_plan(path, job)
    cut = tuple(order.rsplit(" ", 1)[0] for order in found.plan.orders)
    write_result(path, replace(found.plan, orders=cut), found.figures)
    with pytest.raises(PlanError, match="0"):
        mmap.simulate(job, read_plan(path, job))
