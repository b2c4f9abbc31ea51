"""What a mean error hides: where the bias lies, whether intervals hold, whether chances to run out of memory do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.predict import Prediction
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.job.model import Model

Predicted = tuple[MeasuredCase, Prediction]

NUM_BINS = 10


@dataclass(frozen=True)
class Bias:
    """Of the rows that share a value: the mean of predicted / measured − 1, and of its size."""

    num_rows: int
    bias_fraction: float
    mean_abs_fraction: float


@dataclass(frozen=True)
class Coverage:
    """Stated intervals against what was measured. covered_fraction: share of steps inside theirs; half_width_fraction:
    mean of half the interval over the predicted step.
    """

    num_rows: int
    covered_fraction: float
    half_width_fraction: float


@dataclass(frozen=True)
class ChanceBin:
    """Rows whose chance to run out of memory lay between low_fraction and high_fraction: how many there are, the
    mean of what was predicted, and the share that did run out. Both are 0 where there is no row.
    """

    low_fraction: float
    high_fraction: float
    num_rows: int
    told_fraction: float
    failed_fraction: float


def _by_recompute(case: MeasuredCase) -> str:
    found = describe_recompute(case)
    return found if found in ("none", "all", "some layers") else "operators"


AXES: Mapping[str, Callable[[MeasuredCase], str]] = {
    "TP": lambda case: str(case.plan.strategy.tp),
    "PP": lambda case: str(case.plan.strategy.pp),
    "ZeRO": lambda case: str(case.plan.strategy.zero),
    "recompute": _by_recompute,
    "parameters": lambda case: _size(count_model_parameters(case.job.model)),
}
"""By what biases are told apart, and a row's value there."""

_SIZES_BILLION = (1, 3, 10, 30, 100)


def find_biases(predicted: Sequence[Predicted]) -> dict[str, dict[str, Bias]]:
    """Axis → value → bias of the timed rows with that value, values in their order."""
    timed = [(case, found.step_ms / case.measured_ms - 1) for case, found in predicted if case.measured_ms]
    biases: dict[str, dict[str, Bias]] = {}
    for axis, value_of in AXES.items():
        by_value: dict[str, list[float]] = {}
        for case, error in timed:
            by_value.setdefault(value_of(case), []).append(error)
        biases[axis] = {
            value: Bias(len(errors), float(np.mean(errors)), float(np.mean(np.abs(errors))))
            for value, errors in sorted(by_value.items(), key=lambda item: _in_order(item[0]))
        }
    return biases


def find_coverage(predicted: Sequence[Predicted]) -> Coverage | None:
    """Of the timed rows whose prediction has an interval; None where there is none."""
    inside, half_widths = [], []
    for case, found in predicted:
        low_ms, high_ms = found.interval_ms
        if case.measured_ms is not None and low_ms < high_ms:
            inside.append(low_ms <= case.measured_ms <= high_ms)
            half_widths.append((high_ms - low_ms) / 2 / found.step_ms)
    return Coverage(len(inside), float(np.mean(inside)), float(np.mean(half_widths))) if inside else None


STATED = "all stated"


def find_coverages(predicted: Sequence[Predicted]) -> dict[str, Coverage]:
    """What widened the intervals of some rows → how these held; first of those that nothing widened."""
    by_doubt: dict[str, list[Predicted]] = {STATED: []}
    for case, found in predicted:
        for doubt in found.doubts or (STATED,):
            by_doubt.setdefault(doubt, []).append((case, found))
    coverages = {doubt: find_coverage(pairs) for doubt, pairs in by_doubt.items()}
    return {doubt: coverage for doubt, coverage in coverages.items() if coverage}


def find_chances(predicted: Sequence[Predicted]) -> tuple[ChanceBin, ...]:
    """Ten equal bins of the told chance; none where no row with a known outcome has one."""
    told = [
        (found.oom_probability, bool(case.out_of_memory))
        for case, found in predicted
        if case.out_of_memory is not None and found.oom_probability is not None
    ]
    if not told:
        return ()
    bins = []
    for index in range(NUM_BINS):
        inside = [(chance, failed) for chance, failed in told if min(int(chance * NUM_BINS), NUM_BINS - 1) == index]
        chances, failed = [chance for chance, _ in inside] or [0.0], [ran_out for _, ran_out in inside] or [False]
        low, high = index / NUM_BINS, (index + 1) / NUM_BINS
        bins.append(ChanceBin(low, high, len(inside), float(np.mean(chances)), float(np.mean(failed))))
    return tuple(bins)


def describe_recompute(case: MeasuredCase) -> str:
    """`all`, `none`, `some layers`, or operators by their names."""
    recomputed = sum(map(sum, case.plan.recompute.values()))
    if recomputed:
        return "all" if recomputed == sum(map(sum, case.plan.layers.values())) else "some layers"
    return " and ".join(case.job.workload.recompute_operators) or "none"


def count_model_parameters(model: Model) -> int:
    """All of its parameters, frozen ones included."""
    return sum(block.count * count_parameters(block.structure) for block in expand(model).blocks)


def _size(num_parameters: int) -> str:
    """`below 1 B`, `1 to 3 B`, … `above 100 B`."""
    billion = num_parameters / 1e9
    index = sum(billion >= bound for bound in _SIZES_BILLION)
    if index == 0:
        return f"below {_SIZES_BILLION[0]} B"
    if index == len(_SIZES_BILLION):
        return f"above {_SIZES_BILLION[-1]} B"
    return f"{_SIZES_BILLION[index - 1]} to {_SIZES_BILLION[index]} B"


def _in_order(value: str) -> tuple[bool, float, str]:
    """Sizes by their numbers, words by the alphabet; `below` stands first and `above` last."""
    number = next((word for word in value.split() if word.isdigit()), None)
    offset = {"below": -0.5, "above": 0.5}.get(value.split()[0], 0.0)
    return number is None, float(number or 0) + offset, value
