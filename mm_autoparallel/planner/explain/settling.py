"""Whether two plans are within each other's error, and which measurements would settle which one is faster.

How far the difference of two steps may be off is linear in the errors of their sources (cost_source.CostSource). Errors
are normal and independent, but for those of one cause, which are alike to ALIKE_FRACTION. A measurement tells all of a
source's error but MEASURED_ERROR_FRACTION, and what it tells of those that are alike; the next one to make is always
that which leaves least of the difference's variance, given those before (a normal vector under conditions; Bishop 2006,
"Pattern Recognition and Machine Learning", equation 2.82).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.costs.cost_source import MEASURED_ERROR_FRACTION, BlockPoint, CostSource, MessagePoint

ALIKE_FRACTION = 0.9
"""Correlation of two uncalibrated errors of one cause. Rows of one model on an uncalibrated device, of which two tables
have more than one, are predicted with errors that correlate to 0.97 and 0.99 (megatron_bridge.csv,
mindspeed_mm_ci.csv); those of calibrated ones to 0.1 on average (vtrain.csv, megatron_ci.csv, simumax_b200*.csv)."""

LIKELY_FRACTION = 0.05
"""A rival that is the faster one with this probability is within the error. Assumed: one in twenty."""

ENOUGH_FRACTION = 0.95
"""Measurements are listed until they explain this much of the variance, or until another explains less than
LEAST_FRACTION of it. Assumed."""
LEAST_FRACTION = 0.01

NAMED_FRACTION = 0.1
"""Of a run's sources those are named that move the difference by this much of what the first one does. Assumed."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Settling:
    """One run and what it measures that matters, the source that moves the difference most first.

    explained_fraction: of the variance of the difference, what this run and those before it take away; error_ms: one
    standard deviation of the difference after them.
    """

    sources: tuple[CostSource, ...]
    explained_fraction: float
    error_ms: float


@dataclass(frozen=True)
class Rivalry:
    """The first plan and a rival. difference_ms: the rival's step less the first one's; error_ms: one standard
    deviation of that. faster_fraction: the probability that the rival is the faster one. settling: what to measure, in
    this order; empty where nothing that could be measured is left.
    """

    rival: int
    difference_ms: float
    error_ms: float
    faster_fraction: float
    settling: tuple[Settling, ...]

    @property
    def within_error(self) -> bool:
        """Whether these costs cannot tell which of both is faster."""
        return LIKELY_FRACTION <= self.faster_fraction <= 1.0 - LIKELY_FRACTION


def compare_pair(
    rival: int, difference_ms: float, sources: Sequence[CostSource], slopes_ms: Sequence[float]
) -> Rivalry:
    """The first plan and plan number `rival`. slopes_ms: [K], how the difference moves if a source's times double."""
    errors = np.array([source.error_fraction for source in sources])
    slopes = np.array(slopes_ms)
    known = np.minimum(errors, MEASURED_ERROR_FRACTION)  # what no measurement takes away
    unknown = np.outer(errors, errors) * _correlations(sources) - np.diag(known**2)
    stays_variance = float(np.sum((slopes * known) ** 2))
    variance = stays_variance + float(slopes @ unknown @ slopes)
    error_ms = math.sqrt(max(0.0, variance))
    return Rivalry(
        rival=rival,
        difference_ms=difference_ms,
        error_ms=error_ms,
        faster_fraction=_normal_below(-difference_ms, error_ms),
        settling=_choose_runs(sources, slopes, unknown, variance) if variance > 0 else (),
    )


def run_of(source: CostSource) -> Hashable:
    """What is measured together: all blocks and the optimizer at one division, all operations of one group."""
    at = source.at
    if isinstance(at, MessagePoint):
        return at.num_ranks, at.level, at.inside
    if isinstance(at, BlockPoint):
        return at.point.tp, at.point.cp, at.point.mbs, at.ep, at.etp
    return at.tp, 1, at.mbs, 1, 0


def _choose_runs(
    sources: Sequence[CostSource], slopes: Floats, unknown: Floats, variance: float
) -> tuple[Settling, ...]:
    """`unknown`: covariance [K, K] of what measurements could tell of the sources' errors."""
    runs: dict[Hashable, list[int]] = {}
    for index, source in enumerate(sources):
        if unknown[index, index] > 0:
            runs.setdefault(run_of(source), []).append(index)
    chosen: list[Settling] = []
    explained = 0.0
    while runs and explained < ENOUGH_FRACTION:
        gains = {run: _told_variance(slopes, unknown, members) / variance for run, members in runs.items()}
        best = max(gains, key=lambda run: gains[run])
        if gains[best] < LEAST_FRACTION:
            break
        members = runs.pop(best)
        moves = {index: abs(slopes[index]) * math.sqrt(unknown[index, index]) for index in members}
        named = sorted(members, key=lambda index: -moves[index])
        named = [index for index in named if moves[index] >= NAMED_FRACTION * moves[named[0]]]
        explained += gains[best]
        error_ms = math.sqrt(max(0.0, variance * (1.0 - explained)))
        chosen.append(Settling(tuple(sources[index] for index in named), min(1.0, explained), error_ms))
        told = unknown[:, members]
        unknown = unknown - told @ np.linalg.pinv(unknown[np.ix_(members, members)], hermitian=True) @ told.T
    return tuple(chosen)


def _told_variance(slopes: Floats, unknown: Floats, members: list[int]) -> float:
    """What of the difference's variance knowing these sources takes away."""
    with_difference = unknown[members] @ slopes
    own = unknown[np.ix_(members, members)]
    return float(with_difference @ np.linalg.pinv(own, hermitian=True) @ with_difference)


def _correlations(sources: Sequence[CostSource]) -> Floats:
    """[K, K]: 1 with itself, ALIKE_FRACTION with what has the same cause."""
    matrix = np.eye(len(sources))
    for row, one in enumerate(sources):
        for column, other in enumerate(sources):
            if row != column and one.cause and one.cause == other.cause:
                matrix[row, column] = ALIKE_FRACTION
    return matrix


def _normal_below(value_ms: float, deviation_ms: float) -> float:
    """The probability that a normal error around 0 is below `value_ms`; a half at 0."""
    if deviation_ms == 0:
        return 0.5 if value_ms == 0 else float(value_ms > 0)
    return 0.5 * (1.0 + math.erf(value_ms / deviation_ms / math.sqrt(2)))
