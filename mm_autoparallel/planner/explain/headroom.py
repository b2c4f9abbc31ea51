"""Which memory costs time: the plan's strategy placed again with limits of single stages raised, or none of hosts.

More memory never makes the best placement slower, and one stage's is part of all stages' together: where those bring
nothing, no stage does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.placement.result import PlacementResult
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.units import GIB

EXTRA_BYTES = float(GIB)
"""By which limits are raised: some layers' activations. Assumed."""

GAP_FRACTION = 1e-4
_SETTLED_FRACTION = 2 * GAP_FRACTION
"""Gains below the first of the step are none; a placement this close to its bound, the second, is the best one."""

_MOST_SHARE_FRACTION = 0.4
"""Of the time that is left, what one of several questions may take. Assumed."""


@dataclass(frozen=True)
class Headroom:
    """What memory would bring.

    best_ms: the best placement of the strategy that was found, with limits as they are; None where nothing was, or
    fits. left_bytes: per stage, limit less the plan's peak. gain_ms: per stage, what `extra_bytes` more on it alone
    take off best_ms at the least; None where the time did not suffice to tell. all_gain_ms: the same of all stages.
    host_gain_ms: the same of hosts that are not limited; 0 where they are not.
    """

    extra_bytes: float
    best_ms: float | None
    left_bytes: tuple[float, ...]
    gain_ms: tuple[float | None, ...]
    all_gain_ms: float | None
    host_gain_ms: float | None


def find_headroom(
    estimate: Estimate,
    time_limit_s: float,
    should_stop: Callable[[], bool] = lambda: False,
    extra_bytes: float = EXTRA_BYTES,
) -> Headroom:
    """Place the strategy of `estimate` again: as it is, with all limits raised, and with each alone, fullest first."""
    problem, ends_s = estimate.problem, time.monotonic() + time_limit_s
    limits, stages = problem.memory_limit_bytes, range(problem.num_stages)
    left_bytes = tuple(limit - peak for limit, peak in zip(limits, estimate.peak_memory_bytes, strict=True))

    def ask(changed: Problem, cutoff_ms: float, hint: Placement | None) -> PlacementResult | None:
        left_s = ends_s - time.monotonic()
        if left_s <= 0 or should_stop():
            return None
        return place(
            changed,
            time_limit_s=_MOST_SHARE_FRACTION * left_s,
            should_stop=should_stop,
            cutoff_ms=cutoff_ms,
            gap_fraction=GAP_FRACTION,
            hint=hint,
        )

    def raised(some: Collection[int]) -> Problem:
        limit_bytes = (limit + extra_bytes * (stage in some) for stage, limit in enumerate(limits))
        return replace(problem, memory_limit_bytes=tuple(limit_bytes))

    base = ask(problem, np.inf, estimate.placement if estimate.fits else None)
    if base is None or base.placement is None or base.gap_fraction > _SETTLED_FRACTION:
        # a placement that is not the best may be beaten without more memory
        known_ms = base.step_ms if base and base.placement else None
        return Headroom(extra_bytes, known_ms, left_bytes, (None,) * problem.num_stages, None, None)
    best_ms = base.step_ms

    def gain_ms(changed: Problem) -> float | None:
        result = ask(changed, best_ms * (1.0 - GAP_FRACTION), base.placement)
        if result is not None and result.placement is not None:
            return best_ms - result.step_ms
        return 0.0 if result is not None and result.status == "dominated" else None

    all_gain_ms = gain_ms(raised(stages))
    host_gain_ms = gain_ms(replace(problem, host_limit_bytes=())) if problem.host_limit_bytes else 0.0
    gains: dict[int, float | None] = dict.fromkeys(stages, 0.0)
    if all_gain_ms != 0:
        gains |= {stage: gain_ms(raised((stage,))) for stage in sorted(stages, key=lambda stage: left_bytes[stage])}
    return Headroom(
        extra_bytes, best_ms, left_bytes, tuple(gains[stage] for stage in stages), all_gain_ms, host_gain_ms
    )
