"""Which of some plans, run and measured, would tell a calibration most: information per rate, greedy D-optimal design.

A step's logarithm is taken as linear in the logarithms of what a device reaches (rates; profiles/calibration.Figures).
Before a run each is known to its spread in _RATES; a measured step tells jᵀ r ± ROW_ERROR, where j is the row of the
Jacobian of ln T. The best next run is that which takes most from the determinant of the rates' covariance Σ: the one of
largest jᵀ Σ j (Chaloner & Verdinelli 1995, Statistical Science 10, section 2). Σ after it is that of a normal vector
under one observation (Bishop 2006, equation 2.82). No measured step is needed, nor any error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.job.job import Job
from mm_autoparallel.plan import Plan
from mm_autoparallel.profiles.calibration import Calibration, Figures, calibration_of
from mm_autoparallel.simulate.evaluate import evaluate, used_part

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rate:
    """Figures that move together. spread_fraction: one standard deviation of their logarithm before any run.

    begin_ms: what stands for one that is 0 or left to the catalog.
    """

    name: str
    figures: tuple[str, ...]
    spread_fraction: float
    begin_ms: float | None = None


_RATES = (
    Rate("matrix", ("matrix_fraction", "grouped_matrix_fraction"), 0.10),
    Rate("attention", ("attention_forward_fraction", "attention_backward_fraction"), 0.25),
    Rate("unfused_attention", ("unfused_attention_fraction",), 0.25),
    Rate("memory", ("memory_fraction",), 0.20),
    Rate("node", ("node_fraction",), 0.50),
    Rate("network", ("network_fraction",), 0.70),
    Rate("node_latency", ("node_latency_ms",), 0.50, 0.02),
    Rate("network_latency", ("network_latency_ms",), 0.50, 0.05),
    Rate("layer_launch", ("layer_launch_ms",), 1.00, 0.13),
    Rate("expert_launch", ("expert_launch_ms",), 1.00, 0.13),
)
"""Names as `calibrate --free` has them. Spreads and launches: how far the fitted rates of published runs on three
stacks lie apart (NVIDIA A100; Llama, BLOOM, InternLM). Latencies assumed."""

ROW_ERROR_FRACTION = 0.03
"""One standard deviation of a measured step around a model with right rates. Assumed: what published rows repeat to and
the model leaves."""

_STEP = 0.02
"""Change of a logarithm whose effect is measured: small against the spreads, far above rounding."""

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
    """One rate before any of the runs, and after all that are named. told: they narrow it."""

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

    calibration: whose figures the steps stand on; by default what the job names, or the shipped one of its device.
    Raises PlanError and ProfileError as evaluate does.
    """
    used = calibration or calibration_of(job)
    jacobian = np.stack([_sensitivities(used_part(job, plan.strategy), plan, used) for plan in plans])
    return design(jacobian)


def design(jacobian: Floats) -> Teaching:
    """The same of [plans, rates], what a step's logarithm moves for one unit of each rate's."""
    spreads = np.array([rate.spread_fraction for rate in _RATES])
    matters = np.max(np.abs(jacobian), axis=0) * spreads >= _MATTERS_FRACTION
    covariance = np.diag(spreads**2)
    runs: list[TeachingRun] = []
    while len(runs) < min(_MOST_RUNS, len(jacobian)):
        variances = np.einsum("pi,ij,pj->p", jacobian, covariance, jacobian)
        variances[[run.plan for run in runs]] = 0.0  # a second run of one plan tells little that is new
        best = int(np.argmax(variances))
        factor = 1.0 + float(variances[best]) / ROW_ERROR_FRACTION**2
        if factor < _LEAST_FACTOR:
            break
        told = covariance @ jacobian[best]
        after = covariance - np.outer(told, told) / (ROW_ERROR_FRACTION**2 + variances[best])
        before_each, after_each = np.sqrt(np.diag(covariance)), np.sqrt(np.maximum(0.0, np.diag(after)))
        narrowed = [
            RateSpread(rate.name, float(before_each[index]), float(after_each[index]))
            for index, rate in enumerate(_RATES)
            if matters[index]
        ]
        narrowed.sort(key=lambda rate: rate.after_fraction / rate.before_fraction)
        narrowed = [rate for rate in narrowed if rate.is_below(_NARROWED_FRACTION)]
        runs.append(TeachingRun(best, factor, tuple(narrowed)))
        covariance = after
    last = np.sqrt(np.maximum(0.0, np.diag(covariance)))
    rates = zip(_RATES, (float(spread) for spread in last), matters, strict=True)
    return Teaching(tuple(runs), tuple(RateSpread(rate.name, rate.spread_fraction, s) for rate, s, m in rates if m))


def _sensitivities(job: Job, plan: Plan, calibration: Calibration) -> Floats:
    """[rates] the derivative of the step's logarithm by each rate's, by differences either way."""
    begun = calibration.figures.model_copy(
        update={
            rate.figures[0]: rate.begin_ms
            for rate in _RATES
            if rate.begin_ms is not None and not getattr(calibration.figures, rate.figures[0])
        }
    )
    slopes = []
    for rate in _RATES:
        above, below = (
            math.log(evaluate(job, plan, calibration.model_copy(update={"figures": _moved(begun, rate, step)})).step_ms)
            for step in (_STEP, -_STEP)
        )
        slopes.append((above - below) / (2 * _STEP))
    return np.array(slopes)


def _moved(figures: Figures, rate: Rate, change: float) -> Figures:
    return figures.model_copy(update={name: getattr(figures, name) * math.exp(change) for name in rate.figures})
