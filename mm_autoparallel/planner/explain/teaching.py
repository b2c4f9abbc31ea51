"""Which of some plans, run and measured, would tell a calibration most: information per rate, greedy D-optimal design.

A step's logarithm is taken as linear in the logarithms of the rates (measurements/fit.py), which are known to the
calibration's posterior, or to their priors where it has none. A measured step tells jᵀ r ± ROW_ERROR_FRACTION, where j
is its row of the Jacobian J of ln T. The next run is that which takes most from the determinant of the rates'
covariance Σ; after runs it is (Σ⁻¹ + JᵀJ / error²)⁻¹ (Bishop 2006, "Pattern Recognition and Machine Learning", equation
3.54). No measured step is needed for that, nor any error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.fit import FREE, ROW_ERROR_FRACTION, begin_all, log_steps, rates_of, sensitivities
from mm_autoparallel.measurements.fit import design as choose_greedily
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.profiles.calibration import Calibration, calibration_of
from mm_autoparallel.planner.plan import Plan

Floats = NDArray[np.float64]

_LEAST_FACTOR = 1.25
_MOST_RUNS = 3
"""A further run is named where it divides the determinant by this, one rate known to 9/10 of its spread before; and no
more of them. Assumed: two or three runs suffice."""

_TOLD_FRACTION = 0.8
_NARROWED_FRACTION = 0.95
"""A rate is told where its spread falls below the first part of what it was, and narrowed by a run where it falls below
the second. Assumed."""

_MATTERS_FRACTION = 0.01
"""A rate that, off by its spread, moves no step by this much is none to learn for these plans. Assumed."""


@dataclass(frozen=True)
class RateSpread:
    """One standard deviation of a rate's logarithm before some runs and after them. told: they narrow it."""

    name: str
    before_fraction: float
    after_fraction: float

    @property
    def told(self) -> bool:
        return self.is_below(_TOLD_FRACTION)

    def is_below(self, part_fraction: float) -> bool:
        """Whether the spread is below this part of what it was."""
        return self.after_fraction < part_fraction * self.before_fraction


@dataclass(frozen=True)
class TeachingRun:
    """One plan to run. determinant_factor: what it divides the determinant of the covariance by.

    narrowed: rates with their spreads before and after it, that which it narrows most first.
    """

    plan: int
    determinant_factor: float
    narrowed: tuple[RateSpread, ...]


@dataclass(frozen=True)
class Teaching:
    """The runs in the order in which to make them, and the rates that matter to the plans, after all of them."""

    runs: tuple[TeachingRun, ...]
    rates: tuple[RateSpread, ...]

    @property
    def untold(self) -> tuple[str, ...]:
        """Rates that matter, and that none of the plans would tell."""
        return tuple(rate.name for rate in self.rates if not rate.told)


def find_teaching(job: Job, plans: Sequence[Plan], calibration: Calibration | None = None) -> Teaching:
    """Which of `plans` to run first, and which then, for a calibration of the job's device.

    calibration: whose figures the steps stand on, and whose posterior says what is known; by default what the job
    names, or the shipped one of its device. Raises PlanError and ProfileError as evaluate does.
    """
    used = calibration or calibration_of(job)
    rates = rates_of(used.figures, [job])
    names = [name for name in rates if name != "grouped_matrix"]  # which moves with the others
    cases = [
        MeasuredCase("plans", row, "", job.used_by(plan.strategy), plan, used.software, None, None, None, "")
        for row, plan in enumerate(plans)
    ]
    start = begin_all(used, names)
    slopes = sensitivities(cases, start, names, log_steps(cases, start))
    return design(names, slopes, _covariance(names, used))


def design(names: Sequence[str], slopes: Floats, covariance: Floats) -> Teaching:
    """The same of slopes [plans, rates], what a step's logarithm moves for one unit of each rate's logarithm.

    names: of the rates. covariance: [rates, rates], of what is known of them before.
    """
    root = np.linalg.cholesky(covariance)  # in its unknowns all rates are alike and independent
    alike = slopes @ root
    spreads = np.sqrt(np.diag(covariance))
    matters = np.max(np.abs(slopes) * spreads, axis=0) >= _MATTERS_FRACTION
    runs: list[TeachingRun] = []
    before, chosen = spreads, choose_greedily(alike, np.ones(len(spreads)).tolist(), _MOST_RUNS)
    known = np.eye(len(spreads))
    for plan in chosen:
        factor = 1.0 + float(alike[plan] @ np.linalg.solve(known, alike[plan])) / ROW_ERROR_FRACTION**2
        if factor < _LEAST_FACTOR:
            break
        known = known + np.outer(alike[plan], alike[plan]) / ROW_ERROR_FRACTION**2
        after = np.sqrt(np.diag(root @ np.linalg.solve(known, root.T)))
        narrowed = [rate for rate in _spreads(names, before, after, matters) if rate.is_below(_NARROWED_FRACTION)]
        narrowed.sort(key=lambda rate: rate.after_fraction / rate.before_fraction)
        runs.append(TeachingRun(plan, factor, tuple(narrowed)))
        before = after
    return Teaching(tuple(runs), tuple(_spreads(names, spreads, before, matters)))


def _covariance(names: Sequence[str], calibration: Calibration) -> Floats:
    """Of the rates' logarithms: the posterior's, and the prior's of those that it does not have."""
    covariance = np.diag(np.square([FREE[name].log_spread_fraction for name in names]))
    posterior = calibration.posterior
    if posterior is None:
        return covariance
    own = [index for index, name in enumerate(names) if name in posterior.names]
    theirs = [posterior.names.index(names[index]) for index in own]
    covariance[np.ix_(own, own)] = np.array(posterior.covariance)[np.ix_(theirs, theirs)]
    return covariance


def _spreads(names: Sequence[str], before: Floats, after: Floats, matters: NDArray[np.bool_]) -> list[RateSpread]:
    """Those of the rates that matter."""
    return [
        RateSpread(name, float(before[index]), float(after[index]))
        for index, name in enumerate(names)
        if matters[index]
    ]
