"""One fit to rows of several devices: all move alike, each row is predicted by its own device's figures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.errors import JobError, ProfileError
from mm_autoparallel.measurements.calibrate import Target, calibrate, choose_cases
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.fit import log_steps, move_all, rates_of
from mm_autoparallel.measurements.predict import predict
from mm_autoparallel.model.costs.doubt import UNSTATED, widen
from mm_autoparallel.model.profiles.calibration import (
    Calibration,
    assume_calibration,
    calibration_document,
    resolve_calibration,
    together,
)
from mm_autoparallel.model.profiles.disk import write_measurements
from mm_autoparallel.model.profiles.interval import Interval

TABLE = Path(__file__).parents[1] / "fixtures" / "bridge_performance.csv"
DEVICES = ("gb300-288g", "h100-80g", "gb200-192g")
FREE = ["fp8_matrix", "memory"]


@pytest.fixture(scope="module")
def start() -> Calibration:
    return together([assume_calibration(name, "megatron-bridge") for name in DEVICES])


@pytest.fixture(scope="module")
def cases(start: Calibration) -> list[MeasuredCase]:
    """Rows of three devices as they are under products 6 % slower and memory 10 % faster than assumed."""
    rows = [case for case in read_table(TABLE)[0] if case.job.cluster.device.name in DEVICES]
    truth = move_all(start, {"fp8_matrix": math.log(0.94), "memory": math.log(1.1)})
    steps = log_steps(rows, truth)
    return [replace(row, measured_ms=math.exp(step)) for row, step in zip(rows, steps, strict=True)]


@pytest.fixture(scope="module")
def found(cases: list[MeasuredCase], start: Calibration) -> Calibration:
    assert {case.job.cluster.device.name for case in cases[:5]} == set(DEVICES[:2])
    return calibrate(cases[:5], cases[5:], Target("x", DEVICES[0], "megatron-bridge", FREE, start)).calibration


def test_all_devices_move_by_the_same_factors(start: Calibration, found: Calibration) -> None:
    assert found.devices == DEVICES
    for name in DEVICES:
        before, after = start.of(name), found.of(name)
        assert before
        assert after
        assert after.device == name
        # drawn to the truth, as far as five rows tell
        assert (after.figures.fp8_matrix_fraction or 0) / (before.figures.fp8_matrix_fraction or 1) == pytest.approx(
            0.94, rel=0.04
        )
        assert after.figures.memory_fraction / before.figures.memory_fraction == pytest.approx(1.1, rel=0.06)
        assert after.figures.attention_forward_fraction == before.figures.attention_forward_fraction
    assert found.of("b200-192g") is None


def test_rows_held_out_are_of_other_devices_too(cases: list[MeasuredCase], found: Calibration) -> None:
    errors = next(iter(found.held_out.values()))
    held_out = [case for case in cases[5:] if str(case.row) in errors]
    assert {case.job.cluster.device.name for case in held_out} == {"gb300-288g", "gb200-192g"}
    assert max(abs(error) for error in errors.values()) < 0.02
    step_ms = predict(held_out[0], found).step_ms
    assert step_ms == pytest.approx((held_out[0].measured_ms or 0) * (1 + errors[str(held_out[0].row)]), rel=1e-4)


def test_its_file_serves_each_device(found: Calibration, tmp_path: Path) -> None:
    assert Calibration.model_validate(calibration_document(found)) == found
    write_measurements(tmp_path / "all.json", calibration_document(found))
    own = resolve_calibration("all.json", tmp_path, "h100-80g", "calibration")
    assert (own.device, own.figures) == ("h100-80g", found.others["h100-80g"])
    assert own.of("gb300-288g") is not None
    with pytest.raises(ProfileError, match=r"is of gb300-288g, h100-80g, gb200-192g, and the device is a100-80g"):
        resolve_calibration("all.json", tmp_path, "a100-80g", "calibration")


def test_a_row_of_another_device_is_refused(cases: list[MeasuredCase]) -> None:
    one = [case for case in cases if case.job.cluster.device.name == "h100-80g"]
    with pytest.raises(JobError, match="measured on h100-80g, and gb300-288g is calibrated"):
        calibrate(one, [], Target("x", "gb300-288g", "megatron-bridge", FREE))


def test_rows_that_do_not_state_what_they_ran_are_not_chosen(cases: list[MeasuredCase], start: Calibration) -> None:
    vague = [replace(case, unstated=("graphs",)) for case in cases[:3]]
    with pytest.raises(JobError, match="1 rows are to be chosen of 0 with a step time that state all they ran"):
        choose_cases(vague, 1, Target("x", DEVICES[0], "megatron-bridge", FREE, start))
    chosen, others = choose_cases([*vague, *cases[3:5]], 1, Target("x", DEVICES[0], "megatron-bridge", FREE, start))
    assert chosen[0] in cases[3:5]
    assert len(others) == 4


def test_rates_are_those_that_a_job_has(cases: list[MeasuredCase], start: Calibration) -> None:
    modern = {"fp8_matrix", "fp4_matrix", "exchange", "exchange_network", "open_exchange", "expert_host"}
    dense = [case.job for case in cases if case.job.model.text.layers.experts is None]
    experts = [case.job for case in cases if case.job.model.text.layers.experts]
    assert modern <= set(rates_of(start.figures, experts))
    assert modern & set(rates_of(start.figures, dense)) == {"fp8_matrix", "fp4_matrix"}
    old = assume_calibration("a100-80g").figures
    assert not modern & set(rates_of(old, []))


def test_what_a_row_does_not_state_widens_its_interval(cases: list[MeasuredCase], start: Calibration) -> None:
    stated = next(case for case in cases if case.job.model.text.layers.experts is None)
    near, far = predict(stated, start), predict(replace(stated, unstated=("graphs",)), start)
    assert (near.doubts, far.doubts) == ((), ("facts not stated",))
    assert near.interval_ms[1] / near.step_ms < 1.1
    assert far.interval_ms[1] / far.step_ms == pytest.approx(math.exp(math.hypot(math.log(1.25), math.log(1.085))))


def test_doubts_add_in_quadrature() -> None:
    near = Interval(low_factor=0.9, high_factor=1.1, source="s")
    assert widen(near, ()) is near
    wide = widen(near, (UNSTATED, UNSTATED))
    assert math.log(wide.high_factor) ** 2 == pytest.approx(math.log(1.1) ** 2 + 2 * math.log(1.25) ** 2)
    assert wide.widened_by == (UNSTATED.name,) * 2


@pytest.mark.parametrize(
    ("changes", "doubts"),
    [
        ({}, ()),
        ({"graphs": "none", "dispatcher": "alltoall"}, ("layers wait for their host",)),
        ({"graphs": "", "dispatcher": ""}, ("facts not stated",)),
    ],
)
def test_what_a_job_does_not_state_widens_its_interval(
    cases: list[MeasuredCase], start: Calibration, changes: dict[str, str], doubts: tuple[str, ...]
) -> None:
    case = next(
        case for case in cases if case.job.model.text.layers.experts and case.job.workload.known_facts.graphs == "full"
    )
    facts = case.job.workload.known_facts.model_copy(update=changes)
    workload = case.job.workload.model_copy(update={"facts": facts})
    slow_host = start.with_figures(lambda figures: figures.model_copy(update={"expert_host_ms": 100.0}))
    assert predict(replace(case, job=replace(case.job, workload=workload)), slow_host).doubts == doubts
