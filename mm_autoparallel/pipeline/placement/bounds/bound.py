"""Bound: what no placement of a problem can beat, and what the ways of finding one share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, allowed_host_bytes
from mm_autoparallel.units import GB

Floats = NDArray[np.float64]

#: Bisection ends this close; the lower end counts.
PRECISION_FRACTION = 1e-5
#: Far above the rounding of sums, far below what matters; always to the side that keeps a bound true.
ROUNDING_FRACTION = 1e-10
#: Longer than any step, and short enough that sums of some stay finite.
ANY_STEP_MS = 1e300


class Stopped(Exception):
    """The search was stopped while a bound was worked out; what is known of the problem then is its work."""


#: Called several times a second while a bound is worked out; raises Stopped where the search is.
Look = Callable[[], None]


@dataclass(frozen=True)
class Bound:
    """No placement of the problem is below step_ms; infinite where none fits, and then `reason` says why.

    overflow_bytes: where it is memory, by how much the worst stage exceeds its limit in every placement. exact: some
    placement exceeds by no more, so limits that much higher would do. by_host: it is what may lie on hosts.
    is_partial: only what is below was looked at, and another call would say more.
    """

    step_ms: float
    reason: str = ""
    overflow_bytes: float = 0.0
    exact: bool = False
    by_host: bool = False
    is_partial: bool = False


def least_step(floor_ms: float, is_possible: Callable[[float], bool], look: Look, enough_ms: float = np.inf) -> Bound:
    """The largest step found impossible, within PRECISION_FRACTION of the least possible one, and at least `floor_ms`.

    is_possible: whether a necessary condition holds, which holds for all longer steps if it holds for one. enough_ms:
    where that step is impossible, it is the answer, and none above is looked at.
    """
    low, high = floor_ms, max(floor_ms, 1e-9) * 1.05
    if is_possible(low) or not is_possible(ANY_STEP_MS):
        return Bound(low)
    if low < enough_ms < ANY_STEP_MS and not is_possible(enough_ms):
        return Bound(enough_ms)
    while not is_possible(high):
        look()
        low, high = high, high * 1.5
    while high - low > PRECISION_FRACTION * high:
        look()
        middle = 0.5 * (low + high)
        if is_possible(middle):
            high = middle
        else:
            low = middle
    return Bound(max(floor_ms, low * (1.0 - ROUNDING_FRACTION)))


def available_bytes(problem: Problem) -> Floats:
    """[P] what blocks may fill; a little more than the simulator allows, so that rounding never makes a bound false."""
    room: Floats = allowed_bytes(problem) * (1.0 + ROUNDING_FRACTION) - np.array(problem.stage_static_bytes)
    return room


def available_host_bytes(problem: Problem) -> Floats:
    """[P] what stages may keep on their hosts, likewise; infinite where that is not limited."""
    room: Floats = allowed_host_bytes(problem) * (1.0 + ROUNDING_FRACTION)
    return room


def overfull_host(problem: Problem) -> Bound:
    """The bound of a problem that no placement fits, and some would without its limits of hosts."""
    least_bytes, most_bytes = min(problem.host_limit_bytes), max(problem.host_limit_bytes)
    told = (
        f"{most_bytes / GB:.4g} GB"
        if least_bytes == most_bytes
        else f"{least_bytes / GB:.4g} to {most_bytes / GB:.4g} GB"
    )
    reason = (
        f"host memory: with at most {told} on the host for each device some stage does not fit, whatever the "
        f"layers and whatever modes they run in (recompute is one); without that limit it might"
    )
    return Bound(np.inf, reason, by_host=True)


def overfull(problem: Problem, excess_bytes: float, stage: int | None, exact: bool) -> Bound:
    """The bound of a problem that no placement fits; stage None: some stage, not always the same."""
    where = "some stage" if stage is None else f"stage {stage}"
    limit_bytes = min(problem.memory_limit_bytes) if stage is None else problem.memory_limit_bytes[stage]
    reason = (
        f"memory: {where} is {excess_bytes / GB:.3g} GB over its {limit_bytes / GB:.4g} GB at the least, whatever the "
        f"layers and whatever modes they run in (recompute is one)"
    )
    return Bound(np.inf, reason, excess_bytes, exact)
