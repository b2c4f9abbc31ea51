"""The chance to fit: what a device holds at its fullest moment, its allocator's losses included, and how likely that is
too much.

The chance is a logistic curve over the logarithm of the count, fitted to the outcomes of 284 runs of Llama 13B and 30B
on A100 80GB, 149 of which ran out of memory (Hagemann et al. 2023, arXiv:2311.05610). What is called assumed here,
shelved bytes and the bytes of a score (model/operators/attention.py) were chosen with those outcomes in sight; all
else is counted. The centre lies above the device's memory because an allocator that finds no room gives back what it
had kept and tries again (c10/cuda/CUDACachingAllocator.cpp): fragments are fewer exactly where they would kill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mm_autoparallel.pipeline.simulate.memory import StageMemory
from mm_autoparallel.units import GIB

FRAGMENTED_FACTOR = 1.22
"""Assumed: what the allocator reserves for tensors that come and go, over their bytes; those runs are told best so."""

KIND_BYTES = GIB
"""Assumed: outside the allocator, for each kind of communicator, the context with it; those runs are told best so."""

_CENTRE_FACTOR = 1.046
_LOG_WIDTH = 0.043
"""Of the logistic curve: count over memory at which half of the runs fit, and its scale on the logarithm."""


def device_peak_bytes(memory: StageMemory, shelved_bytes: float = 0.0, num_kinds: int = 0) -> float:
    """What a stage takes of its device: weights, gradients and optimizer states as they are, all else of the allocator
    with its fragments, and what lies outside the allocator.

    shelved_bytes: of list_shelved_bytes. num_kinds: of communicators; they count with what is known of the device, but
    with no less than KIND_BYTES each. Placement counts the same parts (StageMemory.total_bytes) but for fragments and
    shelved bytes: these are what `Cluster.memory_fraction` leaves room for there.
    """
    static_bytes = memory.weight_bytes + memory.gradient_bytes + memory.optimizer_bytes
    passing_bytes = memory.allocated_bytes - static_bytes + shelved_bytes
    outside = outside_bytes(memory.communicator_bytes + memory.context_bytes, num_kinds)
    return static_bytes + FRAGMENTED_FACTOR * passing_bytes + outside


def outside_bytes(known_bytes: float, num_kinds: int) -> float:
    """What lies outside the allocator: what is known of the device, or KIND_BYTES of each kind of communicator."""
    return max(known_bytes, num_kinds * KIND_BYTES)


def oom_probability(device_peak_bytes: float, memory_bytes: float) -> float:
    """The probability that a stage runs out of memory on a device of `memory_bytes`, 0 to 1; grows with the peak.

    1 / (1 + exp(-(ln peak - ln(1.046 · memory)) / 0.043)).
    """
    if device_peak_bytes <= 0:
        return 0.0
    exponent = (math.log(_CENTRE_FACTOR * memory_bytes) - math.log(device_peak_bytes)) / _LOG_WIDTH
    return 1.0 / (1.0 + math.exp(exponent)) if exponent < 700 else 0.0


def failure_factor(probability: float, price: float) -> float:
    """By what a step is dearer for the starts that are expected to fail, each at `price` of the run.

    1 + price · P / (1 − P): so many starts fail before one does not (the mean of a geometric distribution). Infinite
    where every start fails.
    """
    if price == 0.0:
        return 1.0
    return 1.0 + price * probability / (1.0 - probability) if probability < 1.0 else math.inf


def most_likely_to_fail(peaks_bytes: Sequence[float], memory_bytes: Sequence[float]) -> int:
    """The stage that fills its device most. Both per stage; devices may be of several kinds."""
    return max(range(len(peaks_bytes)), key=lambda stage: peaks_bytes[stage] / memory_bytes[stage])
