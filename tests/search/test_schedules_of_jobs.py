"""Jobs that name a schedule whose backwards run in two parts, or whose order is to be found: from plan to plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mm_autoparallel as mmap
from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.torch.schedule_csv import write_csv
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.schedules.torch_csv import read_csv, write_rows
from mm_autoparallel.planner.edits import set_order
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan, read_plan, write_result
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_space

LAYERS = {"num_layers": 6, "hidden_size": 4096, "ffn_size": 11008, "num_heads": 32, "norm": "rms"}


def job_of(
    schedule: object, vpp: int = 1, path: Path = Path("job.json"), num_layers: int = 6, **workload: object
) -> Job:
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS | {"num_layers": num_layers}}},
        "cluster": {"num_nodes": 1, "devices_per_node": 2, "device": "h100-80g"},
        "workload": {"global_batch_size": 6, "seq_length": 4096, **workload},
        "search": {"pp": [2], "tp": [1], "mbs": [1], "zero": [1], "max_vpp": vpp, "modes": [], "schedule": schedule},
    }
    return parse_job(document, path)


def csv_of(schedule: str, num_chunks: int) -> str:
    """What torch reads of a schedule on two stages, six micro-batches."""
    rule = find_schedule(schedule, num_chunks)
    return write_rows([rule.order(2, num_chunks, 6, stage) for stage in range(2)], rule.v_shaped)


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


def test_a_v_that_is_found_goes_from_plan_to_plan(tmp_path: Path) -> None:
    """Two chunks a stage, there and back: written, read, simulated, exported to torch, changed; or refused."""
    job = job_of("free", 2, num_layers=5)
    assert {(e.strategy.vpp, e.reason) for e in list_space(job)} == {(1, None), (2, None)}
    found = search(job, num_workers=1)
    assert (found.plan.strategy.schedule, found.plan.strategy.vpp) == ("free", 2)
    named = search(job_of("zbv", 2, num_layers=5), num_workers=1)
    assert found.figures.step_ms <= named.figures.step_ms * (1 + 1e-9)
    path = tmp_path / "plan.json"
    write_result(path, found.plan, found.figures)
    again = read_plan(path, job)
    assert again == replace(found.plan, warnings=again.warnings)
    assert evaluate(job, again).timeline.step_ms == pytest.approx(found.figures.step_ms, rel=1e-9)
    orders = read_csv(write_csv(again), 2)
    assert (orders.num_chunks, orders.v_shaped) == (2, True)
    for framework in ("megatron-core", "megatron-bridge", "deepspeed", "torchtitan"):
        with pytest.raises((JobError, PlanError)) as refusal:
            export_plan(again, job, framework)
        assert "free" in str(refusal.value) or "VPP 2" in str(refusal.value), framework
    words = found.plan.orders[0].split()
    first, last = words.index("0F0"), next(i for i, word in enumerate(words) if word.endswith("F1"))
    with pytest.raises(PlanError, match="this order never ends: stage 0 waits with 0F1 for"):
        set_order(found.plan, 1, " ".join(sorted(found.plan.orders[1].split(), key=lambda word: word[-1] == "0")))
    late = [word for word in words if word[1] != "W"] + [word for word in words if word[1] == "W"]
    changed = set_order(found.plan, 0, " ".join(late))
    assert evaluate(job, changed).timeline.step_ms >= found.figures.step_ms * (1 - 1e-9)
    assert first < last


def test_no_more_than_two_chunks_are_found() -> None:
    reasons = {entry.strategy.vpp: entry.reason for entry in list_space(job_of("free", 3))}
    assert reasons[3] == "schedule free runs one chunk a stage, or 2 there and back, and VPP is 3"
    assert reasons[1] is reasons[2] is None


def test_named_orders_there_and_back_are_among_those_that_are_found() -> None:
    result = search(job_of(["zbv", "v_half", "dualpipev", "free"], 2), num_workers=1)
    ends = {one.strategy.schedule: one for one in result.candidates if one.strategy.vpp == 2 and one.bound_ms}
    least_ms = ends["free"].bound_ms or 0.0
    for name in ("zbv", "v_half"):
        assert (ends[name].bound_ms or 0.0) >= least_ms * (1 - 1e-9)
    assert "one of those" not in ends["dualpipev"].reason  # which runs pairs
    found = search(job_of("free", 2), num_workers=1, top_k=2)
    assert result.figures.step_ms == pytest.approx(found.figures.step_ms, rel=1e-9)


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


@pytest.mark.parametrize(("schedule", "vpp"), [("zb_h1", 1), ("interleaved_1f1b", 2)])
def test_an_order_from_a_file_is_planned_as_its_schedule_by_name(schedule: str, vpp: int, tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text(csv_of(schedule, vpp))
    job = job_of("order.csv", vpp, tmp_path / "job.json")
    found, named = search(job, num_workers=1), search(job_of(schedule, vpp), num_workers=1)
    assert found.plan.strategy.schedule == "given"
    assert found.figures.step_ms == pytest.approx(named.figures.step_ms, rel=1e-5)
    assert found.figures.proven
    path = tmp_path / "plan.json"
    write_result(path, found.plan, found.figures)
    again = read_plan(path, job)
    assert again == replace(found.plan, warnings=again.warnings)
    assert evaluate(job, again).timeline.step_ms == pytest.approx(found.figures.step_ms, rel=1e-9)
    assert read_csv(write_csv(again), 2).num_chunks == vpp
    other = job_of("1f1b", path=tmp_path / "job.json")
    with pytest.raises(PlanError, match="order is missing; with schedule given"):
        read_plan_text(path.read_text().replace('"order"', '"orders"'), other, tmp_path)
    with pytest.raises(PlanError, match=f"the order that is given has PP 2, VPP {vpp} and 6 micro-batches, and this"):
        read_plan_text(path.read_text().replace('"MBS": 1', '"MBS": 2'), other, tmp_path)


def read_plan_text(text: str, job: Job, folder: Path) -> Plan:
    (folder / "changed.json").write_text(text)
    return read_plan(folder / "changed.json", job)


def test_a_given_order_beside_those_that_are_found(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text(csv_of("zb_h1", 1))
    job = job_of(["order.csv", "free", "1f1b"], path=tmp_path / "job.json")
    entries = {entry.strategy.schedule: entry.reason for entry in list_space(job)}
    assert entries == dict.fromkeys(("given", "free", "1f1b"))
    found = search(job, num_workers=1)
    alone = search(job_of("order.csv", path=tmp_path / "job.json"), num_workers=1)
    assert found.figures.step_ms <= alone.figures.step_ms * (1 + 1e-9)
    assert found.plan.strategy.orders == ()
    assert {one.strategy.schedule: one.bounded_by for one in found.candidates}["given"] == "another strategy"


WAITING = "0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3,0F4,0B4,0F5,0B5\n1F0,1F1,1B0,1B1,1F2,1B2,1F3,1B3,1F4,1B4,1F5,1B5\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no file so called beside it"),
        ("", "no rows"),
        ("0F0,0X0\n1F0,1B0\n", "line 1, cell 2: '0X0' is no action"),
        ("0F0,0B0,0F0\n1F0,1B0\n", "line 1 has 0F0 twice"),
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n", "line 1 has no 1B0 or an I and a W"),
        (
            WAITING,
            "it never ends: stage 0 waits with 0B0 for 0B0 of stage 1, stage 1 waits with 1F0 for",
        ),
        (csv_of("zbv", 2), "it runs through the stages and back"),
        (csv_of("interleaved_1f1b", 2), "it runs 2 chunks a stage, and search.max_vpp is 1"),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0\n", "it has 3 rows, one for each stage, and search.pp is [2]"),
        ("0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n", "do not divide global_batch_size 6"),
    ],
)
def test_files_with_no_order_for_the_job_are_refused(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "order.csv").write_text(text)
    with pytest.raises(JobError) as refusal:
        job_of("order.csv", path=tmp_path / "job.json")
    assert words in str(refusal.value)
    assert "search.schedule names order.csv" in str(refusal.value)


def test_two_files_and_stacks_with_orders_of_their_own_are_refused(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text(csv_of("zb_h1", 1))
    with pytest.raises(JobError, match=r"order\.csv and other\.csv are two orders; a job takes one"):
        job_of(["order.csv", "other.csv"], path=tmp_path / "job.json")
    with pytest.raises(JobError, match=r"schedule given is none that workload\.stack megatron-te runs"):
        job_of("order.csv", path=tmp_path / "job.json", stack="megatron-te")
    assert job_of("order.csv", path=tmp_path / "job.json", stack="transformers").orders
