"""Fit logarithms of figures to logarithms of measured steps: priors, robust misfits, and what the rows told.

The fit is the most probable point under log-normal priors of the figures and under misfits whose tails are those of
soft L1, because published times hold stragglers (Huber & Ronchetti 2009, Robust statistics, chapter 4). Its curvature
there is the posterior (Laplace's approximation; MacKay 2003, Information theory, inference, and learning algorithms,
chapter 27): which figures the rows told, how far each may still be off, and which errors two of them share. Rows to fit
to are chosen by what they would tell (greedy D-optimal design; Fedorov 1972, Theory of optimal experiments), before any
error is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.profiles.calibration import Calibration, Posterior
from mm_autoparallel.model.profiles.figures import Figures
from mm_autoparallel.planner.evaluate import evaluate

Floats = NDArray[np.float64]
Value = float
"""Of a figure, in its own unit."""


@dataclass(frozen=True)
class Rate:
    """Figures that move together, because step times cannot tell them apart.

    log_spread_fraction: standard deviation of the prior of their logarithm, about what one software stack differs
    from the next on one device. begin: where a fit starts of what nobody knows. largest: no figure grows beyond.
    """

    figures: tuple[str, ...]
    log_spread_fraction: float
    largest: Value = 1.0
    begin: Value = 0.0


FREE: dict[str, Rate] = {
    "matrix": Rate(("matrix_fraction", "grouped_matrix_fraction"), 0.10),
    "grouped_matrix": Rate(("grouped_matrix_fraction",), 0.30),
    "fp8_matrix": Rate(("fp8_matrix_fraction",), 0.10),
    "fp4_matrix": Rate(("fp4_matrix_fraction",), 0.15),
    "attention": Rate(("attention_forward_fraction", "attention_backward_fraction"), 0.25),
    "unfused_attention": Rate(("unfused_attention_fraction",), 0.25),
    "memory": Rate(("memory_fraction",), 0.20),
    "node": Rate(("node_fraction",), 0.50),
    "network": Rate(("network_fraction",), 0.70),
    "exchange": Rate(("exchange_node_fraction",), 0.30),
    "exchange_network": Rate(("exchange_network_fraction",), 0.30),
    "open_exchange": Rate(("exposed_exchange_fraction",), 0.40),
    "hop": Rate(("hop_fraction",), 0.70),
    "shard": Rate(("shard_gigabyte_ms",), 1.40, largest=1e4, begin=35.0),
    "node_latency": Rate(("node_latency_ms",), 0.70, begin=0.05),
    "network_latency": Rate(("network_latency_ms",), 0.70, begin=0.05),
    "layer_gap": Rate(("layer_gap_ms",), 1.00, largest=10.0, begin=0.13),
    "layer_launch": Rate(("layer_launch_ms",), 0.50, largest=10.0, begin=2.0),
    "expert_launch": Rate(("expert_launch_ms",), 0.50, largest=10.0, begin=2.0),
    "expert_host": Rate(("expert_host_ms",), 0.30, largest=100.0, begin=10.0),
    "vision_launch": Rate(("vision_launch_ms", "rotary_vision_launch_ms"), 0.30, largest=20.0, begin=2.5),
    "micro_batch": Rate(("micro_batch_ms",), 1.00, largest=1e3, begin=2.0),
    "step": Rate(("step_ms",), 1.00, largest=1e4, begin=100.0),
}
"""What can be fitted. Spreads are assumed: about what published stacks on one device differ; hosts differ by more.
Fractions end at the peak, latencies at a millisecond; launches at ten, a thousand operators from Python; the rest far
beyond what was measured anywhere."""

_SMALLEST = 1e-3
"""Nor does a figure shrink below: a thousandth of a peak, a microsecond. Assumed."""
_FAR_FRACTION = 0.03
"""Rows further off than this count less, and are as far off by chance. Assumed: twice what published rows repeat to."""
ROW_ERROR_FRACTION = _FAR_FRACTION
"""One standard deviation of a measured step around a model with right figures."""
_STEP = 0.02
"""A change of a figure's logarithm whose effect is measured: small against what a fit moves it, far above rounding."""
_MOST_ROUNDS = 30
"""Assumed: three times what the shipped calibrations needed."""
_TOLD_FRACTION = 0.97
"""A figure whose posterior is no narrower than this part of its prior stays as it was: the rows do not tell it."""


_BEGINS_AS = {
    "hop_fraction": "network_fraction",
    "exchange_node_fraction": "node_fraction",
    "exchange_network_fraction": "network_fraction",
}
"""Figures that are another's as long as nobody says them."""


def begin(figures: Figures, names: Sequence[str]) -> Figures:
    """`figures` with a beginning for those of `names` that say nothing."""
    update = {
        figure: getattr(figures, _BEGINS_AS[figure]) if figure in _BEGINS_AS else FREE[name].begin
        for name in names
        for figure in FREE[name].figures
        if not getattr(figures, figure)
    }
    return figures.model_copy(update=update)


def rates_of(figures: Figures, jobs: Sequence[Job]) -> list[str]:
    """Names of the rates that steps of `jobs` may hang on under `figures`: launches of a host that are nothing so far
    are left out, and what no job has: towers, low precision, experts; of ZeRO 3 what tensors take where the stack moves
    whole units.
    """
    has_experts = any(job.model.text.layers.experts for job in jobs)
    of_low = any(job.asks_low for job in jobs)
    known = {
        "fp8_matrix": of_low and figures.fp8_matrix_fraction,
        "fp4_matrix": of_low and figures.fp4_matrix_fraction,
        "exchange": has_experts and figures.exchange_node_fraction,
        "exchange_network": has_experts and figures.exchange_node_fraction,
        "open_exchange": has_experts and figures.exposed_exchange_fraction,
        "expert_host": has_experts and figures.expert_host_ms,
        "layer_launch": figures.layer_launch_ms,
        "expert_launch": figures.expert_launch_ms,
        "vision_launch": figures.vision_launch_ms if any(job.model.encoders for job in jobs) else 0.0,
        "shard": figures.shard_gigabyte_ms,
    }
    return [name for name in FREE if known.get(name, True)]


def move(figures: Figures, changes: Mapping[str, float]) -> Figures:
    """`figures` with those of each rate in `changes` multiplied by e to its change, inside their bounds."""
    moved = {}
    for name, change in changes.items():
        for figure in FREE[name].figures:
            if figure == "grouped_matrix_fraction" and name == "matrix" and "grouped_matrix" in changes:
                continue
            value = max(getattr(figures, figure) or 0.0, _SMALLEST) * float(np.exp(change))
            moved[figure] = min(FREE[name].largest, max(_SMALLEST, value))
    return figures.model_copy(update=moved)


def begin_all(calibration: Calibration, names: Sequence[str]) -> Calibration:
    """`calibration` as `begin` has it, on each of its devices."""
    return calibration.with_figures(lambda figures: begin(figures, names))


def move_all(calibration: Calibration, changes: Mapping[str, float]) -> Calibration:
    """`calibration` as `move` has it: the figures of all its devices by the same factors."""
    return calibration.with_figures(lambda figures: move(figures, changes))


def log_steps(cases: Sequence[MeasuredCase], calibration: Calibration) -> Floats:
    """[rows] logarithms of predicted steps in ms, each by the figures of its own device.

    Rows of one job and plan, as of several days, are predicted once.
    """
    of_device = {name: calibration.of(name) or calibration for name in calibration.devices}
    steps_ms: dict[tuple[str, str], float] = {}
    keys = [(case.job.sha256, repr(case.plan)) for case in cases]
    for key, case in zip(keys, cases, strict=True):
        if key not in steps_ms:
            used = of_device.get(case.job.cluster.device.name, calibration)
            steps_ms[key] = evaluate(CostModel(case.job, used), case.plan).step_ms
    return np.log([steps_ms[key] for key in keys])


def sensitivities(cases: Sequence[MeasuredCase], calibration: Calibration, names: Sequence[str], at: Floats) -> Floats:
    """[rows, rates] what a row's logarithm moves for one unit of a rate's. at: log_steps of `calibration`.

    A figure at its largest, on any of its devices, is moved the other way.
    """
    columns, of_devices = [], (calibration.figures, *calibration.others.values())
    for name in names:
        values = [getattr(figures, each) or 0.0 for figures in of_devices for each in FREE[name].figures]
        step = -_STEP if any(value >= FREE[name].largest for value in values) else _STEP
        columns.append((log_steps(cases, move_all(calibration, {name: step})) - at) / step)
    return np.stack(columns, axis=1) if columns else np.zeros((len(cases), 0))


def fit(
    cases: Sequence[MeasuredCase], calibration: Calibration, names: Sequence[str], spread_factor: float = 1.0
) -> tuple[Calibration, Posterior, tuple[str, ...]]:
    """`calibration` with the most probable figures around its own, the posterior of all rates of `names`, and which of
    them the rows told. Devices differ as what is assumed of them does: all move by the same factors. spread_factor: how
    many times as wide as theirs the priors are.

    Damped Gauss-Newton, reweighted for soft L1.
    """
    start = begin_all(calibration, names)
    measured = np.log([case.measured_ms or 1.0 for case in cases])
    spreads = {name: spread_factor * FREE[name].log_spread_fraction for name in names}
    springs = np.array([(_FAR_FRACTION / spreads[name]) ** 2 for name in names])
    point, damping = np.zeros(len(names)), 1e-3

    def moved_by(changes: Floats) -> Calibration:
        return move_all(start, dict(zip(names, map(float, changes), strict=True)))

    def cost_of(misfits: Floats, changes: Floats) -> float:
        soft = np.sum(2 * (np.sqrt(1 + np.square(misfits / _FAR_FRACTION)) - 1)) * _FAR_FRACTION**2
        return float(soft + springs @ np.square(changes))

    steps = log_steps(cases, moved_by(point))
    cost = cost_of(steps - measured, point)
    slopes = sensitivities(cases, moved_by(point), names, steps)
    for _ in range(_MOST_ROUNDS):
        misfits = steps - measured
        weights = 1 / np.sqrt(1 + np.square(misfits / _FAR_FRACTION))
        gradient = slopes.T @ (weights * misfits) + springs * point
        curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(springs)
        trial = point - np.clip(np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient), -1, 1)
        trial_steps = log_steps(cases, moved_by(trial))
        trial_cost = cost_of(trial_steps - measured, trial)
        if trial_cost < cost:
            settled = cost - trial_cost < 1e-7
            point, steps, cost, damping = trial, trial_steps, trial_cost, damping / 5
            if settled:
                break
            slopes = sensitivities(cases, moved_by(point), names, steps)
        else:
            damping *= 8
            if damping > 1e6:
                break
    weights = 1 / np.sqrt(1 + np.square((steps - measured) / _FAR_FRACTION))
    curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(springs)
    covariance = _FAR_FRACTION**2 * np.linalg.inv(curvature)
    posterior = Posterior(
        names=tuple(names), covariance=tuple(tuple(float(f"{each:.4g}") for each in row) for row in covariance)
    )
    told = tuple(name for name in names if posterior.log_spread(name) < _TOLD_FRACTION * spreads[name])
    changes = {name: float(change) for name, change in zip(names, point, strict=True) if name in told}
    moved = {figure for name in told for figure in FREE[name].figures}

    def settle(figures: Figures) -> Figures:
        after = move(begin(figures, names), changes)
        return figures.model_copy(update={figure: float(f"{getattr(after, figure):.4g}") for figure in moved})

    return calibration.with_figures(settle), posterior, told


def choose_rows(
    cases: Sequence[MeasuredCase], calibration: Calibration, names: Sequence[str], num_rows: int
) -> list[int]:
    """Indices of the `num_rows` cases that tell the rates of `names` most: greedily, the one that shrinks the volume of
    the posterior most. Measured times have no say in it. Of equal ones the first."""
    start = begin_all(calibration, names)
    slopes = sensitivities(cases, start, names, log_steps(cases, start))
    return design(slopes, [FREE[name].log_spread_fraction for name in names], num_rows)


def design(slopes: Floats, log_spreads: Sequence[float], num_rows: int) -> list[int]:
    """Indices of rows, in the order in which they are worth measuring. slopes: [rows, rates]."""
    covariance = np.diag(np.square(log_spreads))
    chosen: list[int] = []
    for _ in range(min(num_rows, len(slopes))):
        gains = np.einsum("ri,ij,rj->r", slopes, covariance, slopes) / _FAR_FRACTION**2
        gains[chosen] = -1.0
        best = int(np.argmax(np.round(gains, 9)))
        chosen.append(best)
        seen = covariance @ slopes[best]
        covariance = covariance - np.outer(seen, seen) / (_FAR_FRACTION**2 + slopes[best] @ seen)
    return chosen
