"""calibrate: the few figures of a device that measured rows can tell, fitted to them; the rest stays as it was.

What is fitted is logarithms: of figures, so that none turns negative, and of predicted over measured times, so that a
slow row counts as much as a fast one. A figure that hardly moves any of the rows, or that moves them only as others
already do, is kept (pivoted QR of the sensitivities); no more are fitted than there are rows. Rows far off count less
(soft L1), because published times hold stragglers; each figure is held to where it began by a weak spring, which
decides where two pull alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from mm_autoparallel.errors import JobError
from mm_autoparallel.job.fields import MAX_NAME
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.predict import is_row
from mm_autoparallel.profiles.calibration import (
    CALIBRATION_SCHEMA,
    Calibration,
    CalibrationRow,
    Figures,
    Interval,
    assume_calibration,
)
from mm_autoparallel.simulate.evaluate import evaluate
from mm_autoparallel.validation import describe_validation_error, nearest

Floats = NDArray[np.float64]

FREE: dict[str, tuple[str, ...]] = {
    "matrix": ("matrix_fraction", "grouped_matrix_fraction"),
    "grouped_matrix": ("grouped_matrix_fraction",),
    "attention": ("attention_forward_fraction", "attention_backward_fraction"),
    "unfused_attention": ("unfused_attention_fraction",),
    "memory": ("memory_fraction",),
    "node": ("node_fraction",),
    "network": ("network_fraction",),
    "node_latency": ("node_latency_ms",),
    "network_latency": ("network_latency_ms",),
    "layer_launch": ("layer_launch_ms",),
    "expert_launch": ("expert_launch_ms",),
}
"""What can be fitted → figures that move together: step times cannot tell forward from backward attention."""

_LARGEST = {"layer_launch_ms": 10.0, "expert_launch_ms": 10.0}
_LARGEST_ELSE = 1.0
"""No figure grows beyond: a fraction its peak; a latency a millisecond, a hundred times a short collective's; the
launch of a layer ten milliseconds, a thousand operators from Python. Assumed."""
_SMALLEST = 1e-3
"""Nor does it shrink below: a thousandth of a peak, a microsecond. Assumed."""
_TOLD_FRACTION = 0.05
"""A figure is told by rows whose times it moves by this part of its own change, on the root mean square, beyond what
the figures before it move already. Assumed: a tenth more of it moves a row by what published rows repeat to."""
_ASKED_FRACTION = 0.005
"""The same where the figure was asked for by name: enough that rows tell it at all. Assumed."""
_FAR_FRACTION = 0.03
"""Rows further off than this count less (soft L1). Assumed: twice what published rows repeat to."""
_FAR_FACTOR = 1000.0
"""No calibration is of a row that is further off. Assumed."""
_SPRING = 0.02
"""Misfit of a figure that is e times where it began, in the unit of a row's misfit. Assumed."""
_BEGIN_MS = {"node_latency_ms": 0.05, "network_latency_ms": 0.05, "layer_launch_ms": 1.0, "expert_launch_ms": 2.0}
"""Where a fit begins of what the catalog tells or nobody: one operator and some twenty, launched from Python. Assumed.
"""
_STEP = 0.02
"""A change of a figure's logarithm whose effect is measured: small against what a fit moves it, far above rounding."""
_MOST_ROUNDS = 40
"""Assumed: four times what the shipped calibrations needed."""
_MOST_ROWS = 200
"""Assumed: four times what the shipped calibrations were fitted to."""
_ENOUGH_ROWS = 8
_LEAST_SPREAD_FRACTION = 0.03
_FEW_SPREAD_FRACTION = 0.10
"""An interval is no narrower than the first around the prediction, and than the second where fewer than _ENOUGH_ROWS
rows were held out. Assumed: what published rows repeat to, and what one stack differs from the next."""


@dataclass(frozen=True)
class Kept:
    """A figure, or some that move together, that was not fitted, and why, in a few words."""

    name: str
    reason: str


@dataclass(frozen=True)
class Fitted:
    """A calibration and how it came about. fitted: names in FREE that the rows told; kept: those they did not.

    held_out: the rows that were predicted, but not fitted to.
    """

    calibration: Calibration
    fitted: tuple[str, ...]
    kept: tuple[Kept, ...]
    held_out: tuple[CalibrationRow, ...]


def calibrate(
    cases: Sequence[MeasuredCase],
    held_out: Sequence[MeasuredCase],
    name: str,
    device_name: str,
    software: str,
    free: Sequence[str] = (),
    base: Calibration | None = None,
    given: Mapping[str, float] | None = None,
    note: str = "",
    command: str = "",
) -> Fitted:
    """Fit the figures of `base` (by default the assumed ones of the device) to the step times of `cases`.

    held_out: rows that are predicted with the result, for its interval, but for those that `base` was fitted to. free:
    names in FREE that alone may move. given: figures that are known, and stay as they are. Raises JobError where there
    is nothing to fit to, the rows tell nothing, one has no step time or is of another device, or a name is unknown;
    PlanError or ProfileError as evaluate does.
    """
    _check(cases, held_out, device_name, free)
    if not 1 <= len(name) <= MAX_NAME:
        raise JobError(f"calibrate: the name has {len(name)} letters; 1 to {MAX_NAME} are expected")
    given = given or {}
    start = _begin(base or assume_calibration(device_name), given, note)
    held_out = [case for case in held_out if not any(is_row(case.content, row.content) for row in start.fitted)]
    names = [name for name in free or FREE if not given.keys() & set(FREE[name])]
    told, kept = _choose(cases, start, names, _ASKED_FRACTION if free else _TOLD_FRACTION)
    if not told:
        raise JobError(
            f"calibrate: these rows tell none of {', '.join(names) or 'the figures'}: none of them would move if it "
            "were another; name other rows or other figures"
        )
    moving = {name for group in told for name in FREE[group]}
    begun = (base or assume_calibration(device_name)).figures.model_copy(update=dict(given))
    still = {name: getattr(begun, name) for name in Figures.model_fields if name not in moving}
    start = start.model_copy(update={"figures": start.figures.model_copy(update=still)})
    figures = _fit(cases, start, told)
    sources = dict(start.sources)
    for group in told:
        sources |= dict.fromkeys(FREE[group], f"calibrated on {len(cases)} rows")
    if "matrix" in told and "grouped_matrix" not in told:
        sources["grouped_matrix_fraction"] = "as matrix_fraction: no row tells it"
    fitted, predicted = (_rows(each, start.model_copy(update={"figures": figures})) for each in (cases, held_out))
    result = Calibration(
        schema=CALIBRATION_SCHEMA,
        name=name,
        device=device_name,
        software=software,
        note=note,
        command=command,
        figures=figures,
        sources=sources,
        interval=interval_of([row.error_fraction for row in predicted]),
        fitted=(
            # what is not fitted anew stands on them still
            *(row for row in start.fitted if not any(is_row(case.content, row.content) for case in cases)),
            *fitted,
        ),
        held_out={
            table: {str(row.row): row.error_fraction for row in predicted if row.table == table}
            for table in dict.fromkeys(row.table for row in predicted)
        },
    )
    return Fitted(result, tuple(told), tuple(kept), predicted)


def interval_of(errors: Sequence[float]) -> Interval:
    """Where 90 of 100 measured steps lie around a prediction, told by the errors of rows that were held out.

    errors: predicted / measured − 1. Few rows are widened, none at all is assumed.
    """
    least_fraction = _LEAST_SPREAD_FRACTION if len(errors) >= _ENOUGH_ROWS else _FEW_SPREAD_FRACTION
    low_factor, high_factor = 1.0 - least_fraction, 1.0 + least_fraction
    if errors:
        measured = 1.0 / (1.0 + np.array(errors))
        low_factor = min(low_factor, float(np.quantile(measured, 0.05)))
        high_factor = max(high_factor, float(np.quantile(measured, 0.95)))
    source = f"5 and 95 of 100 of {len(errors)} rows held out, at least {least_fraction * 100:.0f} % either way"
    return Interval(low_factor=round(low_factor, 4), high_factor=round(high_factor, 4), source=source)


def calibration_document(calibration: Calibration) -> dict[str, Any]:
    """What is written to a calibration's file."""
    return calibration.model_dump(mode="json", by_alias=True)


def _check(
    cases: Sequence[MeasuredCase], held_out: Sequence[MeasuredCase], device_name: str, free: Sequence[str]
) -> None:
    if not cases:
        raise JobError("calibrate: no row is left to fit to; name rows that were measured on that device")
    if len(cases) > _MOST_ROWS:
        raise JobError(
            f"calibrate: {len(cases):,} rows are to be fitted to, and every one is simulated hundreds of times; choose "
            f"at most {_MOST_ROWS} with --rows, far apart from each other"
        )
    for name in free:
        if name not in FREE:
            raise JobError(
                f"calibrate: {name!r} cannot be fitted{nearest(name, list(FREE))}; known are {', '.join(FREE)}"
            )
    for case in (*cases, *held_out):
        where = f"table {case.table}: row {case.row}"
        if case.measured_ms is None:
            raise JobError(f"{where} has no step time, and times are what is calibrated; leave it out of --rows")
        if case.job.cluster.device.name != device_name:
            raise JobError(
                f"{where} was measured on {case.job.cluster.device.name}, and {device_name} is calibrated; leave it "
                "out of --rows"
            )


def _begin(base: Calibration, given: Mapping[str, float], note: str) -> Calibration:
    """`base` with the given figures, and a beginning for those that it leaves to the catalog or has none of."""
    figures = base.figures
    found = {name: begin_ms for name, begin_ms in _BEGIN_MS.items() if not getattr(figures, name)}
    sources = base.sources | dict.fromkeys(given, "given, see note" if note else "given")
    try:
        changed = Figures.model_validate({**figures.model_dump(), **found, **given})
    except ValidationError as failure:
        raise JobError(describe_validation_error(failure, "calibrate", Path("--set"), Figures, dict(given))) from None
    return base.model_copy(update={"figures": changed, "sources": sources})


def _errors(cases: Sequence[MeasuredCase], calibration: Calibration) -> list[float]:
    """Predicted / measured − 1 of each case."""
    return [evaluate(case.job, case.plan, calibration).step_ms / (case.measured_ms or 1.0) - 1.0 for case in cases]


def _misfits(cases: Sequence[MeasuredCase], start: Calibration, figures: Figures) -> Floats:
    """[rows] logarithms of predicted over measured."""
    return np.log1p(_errors(cases, start.model_copy(update={"figures": figures})))


def _moved(figures: Figures, changes: Mapping[str, float]) -> Figures:
    """`figures` with those of each group in `changes` multiplied by e to its change, inside their bounds."""
    moved = {}
    for group, change in changes.items():
        for name in FREE[group]:
            if name == "grouped_matrix_fraction" and group == "matrix" and "grouped_matrix" in changes:
                continue
            largest = _LARGEST.get(name, _LARGEST_ELSE)
            value = max(getattr(figures, name) or 0.0, _SMALLEST) * float(np.exp(change))
            moved[name] = min(largest, max(_SMALLEST, value))
    return figures.model_copy(update=moved)


def _sensitivities(
    cases: Sequence[MeasuredCase], start: Calibration, figures: Figures, groups: Sequence[str]
) -> Floats:
    """[rows, groups] what a row's logarithm moves for one unit of a group's: half as much at a bound of it."""
    columns = []
    for group in groups:
        above, below = (_misfits(cases, start, _moved(figures, {group: step})) for step in (_STEP, -_STEP))
        columns.append((above - below) / (2 * _STEP))
    return np.stack(columns, axis=1)


def _choose(
    cases: Sequence[MeasuredCase], start: Calibration, names: Sequence[str], least_fraction: float
) -> tuple[list[str], list[Kept]]:
    """The groups that the rows tell by at least `least_fraction`, most telling first; the others with their reason."""
    left = _sensitivities(cases, start, start.figures, names)
    own = np.sqrt(np.mean(left**2, axis=0))
    told: list[str] = []
    while len(told) < min(len(cases), len(names)):
        sizes = np.sqrt(np.mean(left**2, axis=0))
        best = int(np.argmax(sizes))
        if sizes[best] < least_fraction:
            break
        told.append(names[best])
        direction = left[:, best] / np.linalg.norm(left[:, best])
        left = left - np.outer(direction, direction @ left)
    kept = []
    for index, name in enumerate(names):
        if name not in told:
            moves = float(own[index])
            reason = "moves these rows as the fitted ones do" if moves >= least_fraction else "hardly moves these rows"
            kept.append(Kept(name, f"{reason} ({moves:.3f} of its change)"))
    return told, kept


def _fit(cases: Sequence[MeasuredCase], start: Calibration, groups: Sequence[str]) -> Figures:
    """Figures of least misfit: damped Gauss-Newton on logarithms, reweighted for soft L1."""
    changes = np.zeros(len(groups))
    damping = 1e-3

    def figures_at(point: Floats) -> Figures:
        return _moved(start.figures, dict(zip(groups, (float(change) for change in point), strict=True)))

    def cost_of(misfits: Floats, point: Floats) -> float:
        far = np.square(misfits / _FAR_FRACTION)
        return float(np.sum(2 * (np.sqrt(1 + far) - 1)) * _FAR_FRACTION**2 + np.sum(np.square(_SPRING * point)))

    misfits = _misfits(cases, start, figures_at(changes))
    cost = cost_of(misfits, changes)
    for _ in range(_MOST_ROUNDS):
        slopes = _sensitivities(cases, start, figures_at(changes), groups)
        weights = 1 / np.sqrt(1 + np.square(misfits / _FAR_FRACTION))
        gradient = slopes.T @ (weights * misfits) + _SPRING**2 * changes
        curvature = slopes.T @ (weights[:, None] * slopes) + _SPRING**2 * np.eye(len(groups))
        step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
        trial = changes + np.clip(step, -1.0, 1.0)
        trial_misfits = _misfits(cases, start, figures_at(trial))
        trial_cost = cost_of(trial_misfits, trial)
        if trial_cost < cost:
            settled = cost - trial_cost < 1e-8
            changes, misfits, cost, damping = trial, trial_misfits, trial_cost, damping / 3
            if settled:
                break
        else:
            damping *= 5
            if damping > 1e6:
                break
    figures = figures_at(changes)
    return figures.model_copy(
        update={name: float(f"{getattr(figures, name):.4g}") for group in groups for name in FREE[group]}
    )


def _rows(cases: Sequence[MeasuredCase], calibration: Calibration) -> tuple[CalibrationRow, ...]:
    """The cases as rows of that calibration, with their errors under it. Raises JobError where one is no such run."""
    errors = _errors(cases, calibration)
    for case, error in zip(cases, errors, strict=True):
        if not 1 / _FAR_FACTOR <= 1 + error <= _FAR_FACTOR:
            raise JobError(
                f"table {case.table}: row {case.row} was measured to take {case.measured_ms:g} ms and is predicted to "
                f"take {(case.measured_ms or 0.0) * (1 + error):g} ms; what is more than {_FAR_FACTOR:g} times off is "
                "another run or another unit: leave the row out, or mend it"
            )
    return tuple(
        CalibrationRow(
            table=case.table,
            row=case.row,
            content=dict(case.content),
            measured_ms=case.measured_ms or 0.0,
            error_fraction=round(error, 5),
        )
        for case, error in zip(cases, errors, strict=True)
    )
