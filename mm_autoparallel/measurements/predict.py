"""predict: a case through evaluate, under the calibration of its device and software."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.measurements.case import MeasuredCase, Refused
from mm_autoparallel.measurements.catalog import read_content
from mm_autoparallel.measurements.impossible import impossible_reason
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.doubt import UNSTATED, Doubt, widen
from mm_autoparallel.model.job.stacks import FACTS, software_of
from mm_autoparallel.model.profiles.calibration import (
    Calibration,
    CalibrationRow,
    assume_calibration,
    calibration_of,
    find_calibration,
)
from mm_autoparallel.pipeline.simulate.loads import overfull_hosts
from mm_autoparallel.planner.evaluate import Estimate, evaluate

NOT_CONTENT = ("source", "note")
"""Columns that say who measured a row, not what."""

UNCALIBRATED = "uncalibrated"
"""What a prediction calls the assumed figures of a device."""

LIKELY = 0.5
"""The chance to run out of memory from which on a run is predicted to do so."""


@dataclass(frozen=True)
class Prediction:
    """What a case is expected to take.

    step_ms: one step; interval_ms: between which steps a measured one is expected, whatever the row leaves unstated.
    peak_allocated_bytes: per pipeline stage, what tensors and workspaces take of a device, its context aside;
    peak_interval_bytes: the least and the most of that under what the row leaves unstated. resting_bytes: per stage,
    what stays allocated between steps. fits: the prediction is that the run does not
    end out of memory (_is_expected_to_fit). calibration: its name, `uncalibrated`, or `measured` where the job's
    profiles hold every block's time. calibrated_on: the row is one that the calibration was fitted to. oom_probability:
    the chance that the run ends out of memory; None where there is none. doubts: what widened the interval beside the
    calibration's own (model/costs/doubt.py).
    """

    step_ms: float
    interval_ms: tuple[float, float]
    peak_allocated_bytes: tuple[float, ...]
    peak_interval_bytes: tuple[tuple[float, float], ...]
    fits: bool
    calibration: str
    calibrated_on: bool
    oom_probability: float | None = None
    resting_bytes: tuple[float, ...] = ()
    doubts: tuple[str, ...] = ()


def predict(case: MeasuredCase, calibration: Calibration | None = None) -> Prediction:
    """What `case` is expected to take, from its job and plan alone.

    calibration: where it is of the case's device, in place of what its job names, or else of the shipped one of that
    device and software. Raises PlanError or ProfileError as evaluate does.
    """
    device_name = case.job.cluster.device.name
    used = calibration and calibration.of(device_name)
    if used is None:
        low = (device_name, case.software, case.job.asks_low)
        used = calibration_of(case.job) if case.job.calibration else _find_calibration(*low)
    estimate = evaluate(CostModel(case.job, used), case.plan)
    allocated = _peaks(case, estimate)
    readings = [estimate, *(evaluate(CostModel(job, used), case.plan) for job in case.alternatives)]
    bounds = [evaluate(CostModel(job, used), case.plan) for job in case.memory_alternatives]
    peaks = list(zip(*(_peaks(case, reading) for reading in (*readings, *bounds)), strict=True))
    name = used.name if used.calibrated else UNCALIBRATED
    doubts = (UNSTATED,) if case.is_open else ()
    intervals = [_interval(one, doubts) for one in readings]
    return Prediction(
        step_ms=estimate.step_ms,
        interval_ms=(min(low for low, _ in intervals), max(high for _, high in intervals)),
        peak_allocated_bytes=allocated,
        peak_interval_bytes=tuple((min(of_stage), max(of_stage)) for of_stage in peaks),
        fits=_is_expected_to_fit(estimate, case),
        calibration="measured" if estimate.interval is None else name,
        calibrated_on=_is_fitted(case, used),
        oom_probability=estimate.oom_probability,
        resting_bytes=estimate.resting_allocated_bytes,
        doubts=(*(estimate.interval.widened_by if estimate.interval else ()), *(doubt.name for doubt in doubts)),
    )


def _is_expected_to_fit(estimate: Estimate, case: MeasuredCase) -> bool:
    """Whether a run is to fit: within its limit where its job sets one, else where it more likely does than not.

    The limit that is assumed where none is set leaves room that a planner can spare; a run that others made has none.
    """
    if "memory_fraction" in case.job.cluster.model_fields_set:
        return estimate.fits
    return estimate.oom_probability < LIKELY and not overfull_hosts(estimate.problem, estimate.timeline.peak_host_bytes)


def _interval(estimate: Estimate, doubts: Sequence[Doubt]) -> tuple[float, float]:
    """Between which steps a measured one is expected, where a row leaves `doubts` beside those of its job."""
    if estimate.interval is None:
        return estimate.step_ms, estimate.step_ms
    near = widen(estimate.interval, doubts)
    return estimate.step_ms * near.low_factor, estimate.step_ms * near.high_factor


def _peaks(case: MeasuredCase, estimate: Estimate) -> tuple[float, ...]:
    return estimate.first_step_allocated_bytes if case.first_step else estimate.peak_allocated_bytes


def predict_all(
    cases: Sequence[MeasuredCase], calibration: Calibration | None = None
) -> tuple[list[tuple[MeasuredCase, Prediction]], list[Refused]]:
    """Each case with its prediction, and those that evaluate refuses or whose step no device can have reached, with the
    reason. calibration: as in predict.
    """
    predicted: list[tuple[MeasuredCase, Prediction]] = []
    refused: list[Refused] = []
    for case in cases:
        reason = impossible_reason(case)
        found = Refused(case.row, reason) if reason else _try_to_predict(case, calibration)
        if isinstance(found, Prediction):
            predicted.append((case, found))
        else:
            refused.append(found)
    return predicted, refused


def predict_uncalibrated(cases: Sequence[MeasuredCase]) -> list[tuple[MeasuredCase, Prediction]]:
    """Each case by the assumed figures of its device under its software; those that evaluate refuses are left out."""
    found = [
        (case, _try_to_predict(case, _assume(case.job.cluster.device.name, _software(case), case.job.asks_low)))
        for case in cases
    ]
    return [(case, prediction) for case, prediction in found if isinstance(prediction, Prediction)]


def _try_to_predict(case: MeasuredCase, calibration: Calibration | None) -> Prediction | Refused:
    try:
        return predict(case, calibration)
    except PlannerError as failure:
        return Refused(case.row, str(failure))


def _is_fitted(case: MeasuredCase, calibration: Calibration) -> bool:
    """Whether a calibration was fitted to this very run, in whatever table, format or words it stands."""
    measured_ms = case.measured_ms
    return measured_ms is not None and any(
        math.isclose(measured_ms, fitted.measured_ms, rel_tol=1e-6)
        and (
            is_row(case.content, fitted.content)
            or (run is not None and run.job.sha256 == case.job.sha256 and run.plan == case.plan)
        )
        for fitted, run in _fitted_runs(calibration.fitted)
    )


def is_row(content: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two rows of a table say the same, sources and notes aside."""
    return _facts(content) == _facts(other)


def _facts(content: Mapping[str, str]) -> dict[str, str]:
    return {
        column: cell
        for column, cell in content.items()
        if column not in NOT_CONTENT and not column.startswith("derived_")
    }


_Fitted = tuple[CalibrationRow, ...]
_Runs = tuple[tuple[CalibrationRow, MeasuredCase | None], ...]
_runs: dict[int, tuple[_Fitted, _Runs]] = {}


def _fitted_runs(fitted: _Fitted) -> _Runs:
    """The rows of a calibration and what they are as cases, read once for each calibration."""
    if id(fitted) not in _runs:
        _runs[id(fitted)] = fitted, tuple((row, read_content(row.content, row.table)) for row in fitted)
    return _runs[id(fitted)][1]


def _software(case: MeasuredCase) -> str:
    """What ran it, or what its job's stack stands for where nobody knows that."""
    return case.software if case.software in FACTS else software_of(case.job.workload.stack)


_assume = lru_cache(maxsize=64)(assume_calibration)


@lru_cache(maxsize=64)
def _find_calibration(device_name: str, software: str, asks_low: bool) -> Calibration:
    found = find_calibration(device_name, software)
    return _assume(device_name, software, asks_low) if asks_low and not found.figures.fp8_matrix_fraction else found
