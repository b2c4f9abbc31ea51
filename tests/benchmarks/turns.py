"""Turns: profiling and training one after the other, so that a machine whose speed changes is the same for both.

The speed of a shared machine changes by tens of per cent within seconds, and not alike for both processes. So after
every round of samples of all blocks one plan takes a step. The pace of a rank in a round is how long its samples took.
A step is compared with the simulated one whose ranks have the paces around it, the mean of the rounds before and after;
the median of these ratios, at the median pace, which is that of the profile, is the measured step. It is known as well
as the ratios agree, which its standard error says.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from mm_autoparallel.pipeline.simulate.step import trace_critical_path
from mm_autoparallel.planner.evaluate import Estimate


class Trainer(Protocol):
    """What takes steps: an example's own."""

    def step(self, iteration: int) -> object:
        """One iteration."""


class Turns:
    """Takes a step of the next trainer after each round of a profile run.

    steps[i]: of trainer i, the ms of each step and each rank's pace around it.
    """

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self._trainers = trainers
        self._turns = cycle(range(len(trainers)))
        self._last: tuple[int, float] | None = None
        self.steps: list[list[tuple[float, list[float]]]] = [[] for _ in trainers]
        self.paces_ms: list[list[float]] = []

    def __call__(self, round_ms: float) -> None:
        paces = [torch.empty(1) for _ in range(dist.get_world_size())]
        dist.all_gather(paces, torch.tensor([round_ms]))
        self.paces_ms.append([float(pace) for pace in paces])
        if self._last is not None:
            index, step_ms = self._last
            around = [statistics.mean(pair) for pair in zip(*self.paces_ms[-2:], strict=True)]
            self.steps[index].append((step_ms, around))
        index = next(self._turns)
        dist.barrier()
        start_s = time.perf_counter()
        self._trainers[index].step(1)
        self._last = index, 1e3 * (time.perf_counter() - start_s)

    def ratios(self, index: int, estimate: Estimate) -> list[float]:
        """Each step of trainer `index` over the simulated one at the paces around it."""
        median_ms = statistics.median(pace for paces in self.paces_ms for pace in paces)
        return [
            step_ms / step_at(estimate, [pace / median_ms for pace in paces]) for step_ms, paces in self.steps[index]
        ]


def step_at(estimate: Estimate, slownesses: Sequence[float]) -> float:
    """The simulated step if all compute of rank r took slownesses[r] times as long, on as many stages, or replicas of
    one stage, as there are ranks."""
    if estimate.problem.num_stages == 1:
        return estimate.step_ms * max(slownesses)
    timeline = estimate.timeline
    factors = np.array(slownesses)
    durations_ms = timeline.loads.durations_ms.reshape(2, estimate.problem.num_chunks, len(factors), -1)
    durations_ms = (durations_ms * factors[None, None, :, None]).ravel()
    step_ms, _ = trace_critical_path(
        timeline.graph, durations_ms, timeline.loads.hops_ms, timeline.loads.tail_ms * factors
    )
    return step_ms


def standard_error(ratios: Sequence[float]) -> float:
    """Of the median of `ratios`, relative to it, from their median absolute deviation as if they lay normally.

    1.4826 deviations make a standard deviation, and the median's error is sqrt(pi / 2) of the mean's.
    """
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(ratio / middle - 1) for ratio in ratios)
    return deviation * math.sqrt(math.pi / 2 / len(ratios))
