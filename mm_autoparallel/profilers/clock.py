"""Timing on any device: marks on a device's own time line, warm-up until the times settle, then samples.

On an accelerator a mark is an event on its stream, so that what is timed is the device's work; on CPU it is the clock
of the process. Ranks that measure together take every sample together (lockstep.py), as they train together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mm_autoparallel.model.profiles.store import Timing
from mm_autoparallel.profilers.lockstep import ALONE, Lockstep
from mm_autoparallel.profilers.torch_releases import device_module

Mark = Any
"""Seconds of the process's clock on CPU, else an event of the device."""

SETTLED_FRACTION = 0.03
"""Assumed: times have settled when the median of three rounds moves by less than this from one round to the next."""


@dataclass(frozen=True)
class Effort:
    """How long to measure. All figures assumed.

    budget_s: of time for warm-up and samples together; min_rounds, max_rounds: samples that are taken whatever the
    budget, and at most; max_warm_up: rounds of warm-up at most, one at least.
    """

    budget_s: float = 4.0
    min_rounds: int = 5
    max_rounds: int = 40
    max_warm_up: int = 5


class Stopwatch:
    """Marks on the time line of `device`, and the milliseconds between them.

    now: seconds of a CPU's clock; a thread's own time where others have a part of the machine.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now

    def mark(self) -> Mark:
        """Now: after all work that was given to the device so far."""
        if self._device.type == "cpu":
            return self._now()
        event = device_module(self._device.type).Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Waits until the device has done all its work."""
        if self._device.type != "cpu":
            device_module(self._device.type).synchronize(self._device)

    def between_ms(self, start: Mark, end: Mark) -> float:
        """Milliseconds from one mark to the other. On an accelerator `settle` must have been called since."""
        return (end - start) * 1e3 if isinstance(start, float) else float(start.elapsed_time(end))

    def time_ms(self, run: Callable[[], object]) -> float:
        """Milliseconds that the device takes for what `run` gives it."""
        start = self.mark()
        run()
        end = self.mark()
        self.settle()
        return self.between_ms(start, end)


def collect_samples(
    run_round: Callable[[], Mapping[str, float]], effort: Effort, lockstep: Lockstep = ALONE
) -> dict[str, list[float]]:
    """Times in ms by name, of rounds of which each gives some of them.

    Rounds are dropped until the median of how long the last three took has settled. All ranks of `lockstep` run equally
    many rounds: they decide by the slowest one's clock.
    """
    start_s = time.perf_counter()
    lockstep.wait()
    totals: list[float] = []
    settled = False
    while not settled:
        round_start_s = time.perf_counter()
        run_round()
        totals.append(_elapsed_s(round_start_s))
        restless = len(totals) < effort.max_warm_up and _moves(totals) and _elapsed_s(start_s) < effort.budget_s / 2
        settled = lockstep.largest(float(restless)) == 0.0
    samples: dict[str, list[float]] = {}
    num_rounds, going = 0, True
    while going:
        for name, time_ms in run_round().items():
            samples.setdefault(name, []).append(time_ms)
        num_rounds += 1
        elapsed_s = lockstep.largest(_elapsed_s(start_s))
        going = num_rounds < effort.min_rounds or (num_rounds < effort.max_rounds and elapsed_s < effort.budget_s)
    return samples


def time_callable(
    run: Callable[[], object], device: torch.device, effort: Effort | None = None, lockstep: Lockstep = ALONE
) -> Timing:
    """How long `run` takes on `device`, averaged over the ranks of `lockstep`, which start each sample together."""
    stopwatch = Stopwatch(device)

    def run_round() -> dict[str, float]:
        lockstep.wait()
        return {"run": stopwatch.time_ms(run)}

    return summarize(collect_samples(run_round, effort or Effort(), lockstep)["run"], lockstep)


def summarize(samples_ms: Sequence[float], lockstep: Lockstep = ALONE) -> Timing:
    """Median and median absolute deviation, each averaged over the ranks; a difference below nothing is nothing."""
    median_ms = statistics.median(samples_ms)
    mad_ms = statistics.median(abs(sample - median_ms) for sample in samples_ms)
    median_ms, mad_ms = lockstep.average([median_ms, mad_ms])
    return Timing(median_ms=max(0.0, median_ms), mad_ms=mad_ms, num_samples=len(samples_ms))


def _elapsed_s(start_s: float) -> float:
    return time.perf_counter() - start_s


def _moves(totals: list[float]) -> bool:
    """True until the median of the last three differs from that of the three before by little."""
    if len(totals) < 4:
        return len(totals) < 2 or abs(totals[-1] / totals[-2] - 1) > SETTLED_FRACTION
    last, before = statistics.median(totals[-3:]), statistics.median(totals[-4:-1])
    return abs(last / before - 1) > SETTLED_FRACTION
