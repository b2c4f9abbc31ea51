"""calibrate: the few figures of a device that measured rows can tell, fitted to them; the rest stays as it was.

How figures are fitted stands in fit.py. Every figure is held by a prior about the device's assumed figures or those of
a base, so that few rows suffice and none is fitted that they do not tell.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import ValidationError

from mm_autoparallel.errors import JobError
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.decisions import name_jobs
from mm_autoparallel.measurements.fit import FREE, choose_rows, fit, log_steps, rates_of
from mm_autoparallel.measurements.predict import is_row
from mm_autoparallel.model.profiles.calibration import (
    CALIBRATION_SCHEMA,
    Calibration,
    CalibrationRow,
    Posterior,
    assume_calibration,
)
from mm_autoparallel.model.profiles.figures import Figures
from mm_autoparallel.model.profiles.interval import Interval
from mm_autoparallel.records import MAX_NAME
from mm_autoparallel.validation import nearest, validation_error

_FAR_FACTOR = 1000.0
"""No calibration is of a row that is further off. Assumed."""
_MOST_ROWS = 200
"""Assumed: four times what the shipped calibrations were fitted to."""
_CAMPAIGN_ROWS = 4
_CONTRADICTING_FACTOR = 1.8
"""Rows of one job from which a spread is told; a spread so many times the median one is of runs that no other campaign
of that stack explains, as another network or another machine's neighbours would do. Assumed."""
_LEVEL = 0.93
"""Part of the rows held out that an interval covers: of subjects left out 90 of 100 are then covered (conformal
prediction is a little short where subjects are few; assumed from published stacks)."""
_ENOUGH_ROWS = 8
_LEAST_SPREAD_FRACTION = 0.03
_FEW_SPREAD_FRACTION = 0.10
"""An interval is no narrower than the first around the prediction, and than the second where fewer than _ENOUGH_ROWS
rows were held out. Assumed: what published rows repeat to, and what one stack differs from the next."""


GivenFigures = Mapping[str, float]
"""Name of a figure → its value, in that figure's unit."""


@dataclass(frozen=True)
class Target:
    """What a calibration is of, and what of it may move.

    name: of the calibration. free: names in FREE that alone may move; none: all that the rows may tell. base: whose
    figures are fitted; None: the assumed ones of the device. A base of several devices (Calibration.others) is fitted
    to rows of all of them at once. given: figures that are known, and stay as they are. note, command: as they stand in
    the calibration. spread_factor: how many times as wide as usual the priors are.
    """

    name: str
    device_name: str
    software: str
    free: Sequence[str] = ()
    base: Calibration | None = None
    given: GivenFigures = field(default_factory=dict)
    note: str = ""
    command: str = ""
    spread_factor: float = 1.0

    def begin(self) -> Calibration:
        """The base, or what is assumed, with the given figures. Raises JobError where one of these cannot be."""
        base = self.base or assume_calibration(self.device_name, self.software)
        sources = base.sources | dict.fromkeys(self.given, "given, see note" if self.note else "given")
        try:
            changed = base.with_figures(lambda figures: Figures.model_validate({**figures.model_dump(), **self.given}))
        except ValidationError as failure:
            raise validation_error(failure, "calibrate --set", Figures, dict(self.given)) from None
        return changed.model_copy(update={"sources": sources})

    def names(self, start: Calibration, cases: Sequence[MeasuredCase]) -> list[str]:
        """Names in FREE that rows like `cases` may move from `start`."""
        names = self.free or rates_of(start.figures, [case.job for case in cases])
        return [name for name in names if not self.given.keys() & set(FREE[name].figures)]


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


def calibrate(cases: Sequence[MeasuredCase], held_out: Sequence[MeasuredCase], target: Target) -> Fitted:
    """Fit the figures of the target's base to the step times of `cases`.

    held_out: rows that are predicted with the result, for its interval, but for those that the base was fitted to.
    Raises JobError where there is nothing to fit to, the rows tell nothing, one has no step time or is of another
    device, or a name is unknown; PlanError or ProfileError as evaluate does.
    """
    start = target.begin()
    _check(cases, held_out, start.devices, target.free)
    if not 1 <= len(target.name) <= MAX_NAME:
        raise JobError(f"calibrate: the name has {len(target.name)} letters; 1 to {MAX_NAME} are expected")
    held_out = [case for case in held_out if not any(is_row(case.content, row.content) for row in start.fitted)]
    names = target.names(start, cases)
    moved, posterior, told = fit(cases, start, names, target.spread_factor)
    if not told:
        raise JobError(
            f"calibrate: these rows tell none of {', '.join(names) or 'the figures'}: none of them would move if it "
            "were another; name other rows or other figures"
        )
    sources = dict(start.sources)
    for group in told:
        sources |= dict.fromkeys(FREE[group].figures, f"calibrated on {len(cases)} rows")
    if "matrix" in told and "grouped_matrix" not in told:
        sources["grouped_matrix_fraction"] = "as matrix_fraction: no row tells it"
    fitted, predicted = (_rows(each, moved) for each in (cases, held_out))
    result = Calibration(
        schema=CALIBRATION_SCHEMA,
        name=target.name,
        device=target.device_name,
        software=target.software,
        note=target.note,
        command=target.command,
        figures=moved.figures,
        others=moved.others,
        sources=sources,
        interval=interval_of(
            # what a row does not state widens its own interval
            [row.error_fraction for case, row in zip(held_out, predicted, strict=True) if not case.is_open],
            [row.error_fraction for row in fitted],
        ),
        posterior=posterior,
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
    kept = tuple(Kept(name, _untold(name, posterior, target.spread_factor)) for name in names if name not in told)
    return Fitted(result, told, kept, predicted)


def choose_cases(
    cases: Sequence[MeasuredCase], num_rows: int, target: Target
) -> tuple[list[MeasuredCase], list[MeasuredCase]]:
    """The `num_rows` cases that tell most of what is fitted, and the others.

    Campaigns (runs of one job) that contradict the others are not chosen from, nor rows that do not state what they
    ran. Raises JobError where there are not so many rows, or none is asked for.
    """
    stated = [case for case in cases if not case.is_open]
    if not 1 <= num_rows <= len(stated):
        raise JobError(
            f"calibrate: {num_rows} rows are to be chosen of {len(stated)} with a step time that state all they ran"
        )
    start = target.begin()
    names = target.names(start, stated)
    chosen = [stated[index] for index in choose_rows(stated, start, names, num_rows)]
    agreeing = _agreeing(stated, chosen, start, names)
    if num_rows <= len(agreeing) < len(stated):
        chosen = [agreeing[index] for index in choose_rows(agreeing, start, names, num_rows)]
    return chosen, [case for case in cases if case not in chosen]


def _agreeing(
    cases: Sequence[MeasuredCase], chosen: Sequence[MeasuredCase], start: Calibration, names: Sequence[str]
) -> list[MeasuredCase]:
    """The cases but for campaigns whose errors, after a fit to the chosen rows, spread far more than the others'."""
    misfits = log_steps(cases, fit(chosen, start, names)[0]) - np.log([case.measured_ms or 1.0 for case in cases])
    campaigns: dict[Hashable, list[float]] = {}
    jobs = name_jobs(cases)
    for job, misfit in zip(jobs, misfits, strict=True):
        campaigns.setdefault(job, []).append(float(misfit))
    spreads = {job: float(np.std(found)) for job, found in campaigns.items() if len(found) >= _CAMPAIGN_ROWS}
    limit = _CONTRADICTING_FACTOR * float(np.median(list(spreads.values()))) if len(spreads) > 2 else np.inf
    return [case for case, job in zip(cases, jobs, strict=True) if spreads.get(job, 0.0) <= limit]


def interval_of(errors: Sequence[float], of_fitted: Sequence[float] = ()) -> Interval:
    """Where 90 of 100 measured steps lie around a prediction, told by the errors of rows that were held out.

    errors: predicted / measured − 1. Few rows are widened; where none was held out those of fitted ones, `of_fitted`,
    say at least how far off it may be, and without any it is assumed.
    """
    least_fraction = _LEAST_SPREAD_FRACTION if len(errors) >= _ENOUGH_ROWS else _FEW_SPREAD_FRACTION
    half_log = math.log1p(least_fraction)
    told, how = (errors, "held out") if errors or not of_fitted else (of_fitted, "that it was fitted to")
    if told:
        half_log = max(half_log, float(np.quantile(np.abs(np.log1p(told)), _LEVEL)))
    return Interval(
        low_factor=round(math.exp(-half_log), 4),
        high_factor=round(math.exp(half_log), 4),
        source=f"{_LEVEL * 100:.0f} of 100 of {len(told)} rows {how}, at least {least_fraction * 100:.0f} % off",
    )


def _check(
    cases: Sequence[MeasuredCase], held_out: Sequence[MeasuredCase], device_names: Sequence[str], free: Sequence[str]
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
        if case.job.cluster.device.name not in device_names:
            raise JobError(
                f"{where} was measured on {case.job.cluster.device.name}, and {', '.join(device_names)} is calibrated; "
                "leave it out of --rows"
            )


def _untold(name: str, posterior: Posterior, spread_factor: float) -> str:
    """In words, that the rows do not tell a rate, whose prior is so many times as wide as usual."""
    narrower = 1 - posterior.log_spread(name) / (spread_factor * FREE[name].log_spread_fraction)
    return f"the rows do not tell it (they narrow it by {max(0.0, narrower) * 100:.1f} %)"


def _rows(cases: Sequence[MeasuredCase], calibration: Calibration) -> tuple[CalibrationRow, ...]:
    """The cases as rows of that calibration, with their errors under it. Raises JobError where one is no such run."""
    steps_ms = np.exp(log_steps(cases, calibration))
    errors = [float(step_ms / (case.measured_ms or 1.0) - 1.0) for case, step_ms in zip(cases, steps_ms, strict=True)]
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
