"""Level: the placements of a pipeline that fill at most a part of a device, and what is known of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.catalog import FREE
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.search.pricing import Pricing


@dataclass(eq=False)
class Level:
    """What is known of the placements of a pipeline that fill at most fill_fraction of a device (search/caution.py).

    problem: one that has all of them; None: the pipeline's own. step_ms, placement: the best found of it. num_slices:
    how often it was placed; slice_s: how long last. is_recalled: the cache was asked for it. pricing: its linear
    program, known_cuts what that begins with, priced_ms what it has shown.
    """

    fill_fraction: float = math.inf
    problem: Problem | None = None
    key: str = ""
    step_ms: float = math.inf
    placement: Placement | None = None
    num_slices: int = 0
    slice_s: float = 0.0
    is_recalled: bool = False
    pricing: Pricing | None = None
    known_cuts: tuple[Cut, ...] = ()
    priced_ms: float = 0.0

    def has_turns(self, before_placing: bool) -> bool:
        """Whether its linear program has turns left, without the one that comes after it was placed."""
        return self.pricing is None or self.pricing.has_turns(before_placing)

    def price(self, problem: Problem, ceiling_ms: float, should_stop: Callable[[], bool]) -> bool:
        """Have another turn of the linear program of `problem`, its own; whether there was one."""
        self.pricing = self.pricing or Pricing(problem, self.known_cuts)
        if not self.pricing.has_turns(before_placing=not self.num_slices):
            return False
        self.pricing.advance(ceiling_ms, should_stop)
        self.priced_ms = self.pricing.lower_bound_ms
        return True

    def list_cuts(self) -> tuple[Cut, ...]:
        """The paths that its bound rests on, for other levels of the pipeline."""
        return self.pricing.list_cuts() if self.pricing else self.known_cuts


def list_counted(problem: Problem, placement: Placement) -> NDArray[np.float64]:
    """[P] how full the stages of a limited problem are counted, in parts of their limits."""
    counted: NDArray[np.float64] = simulate(problem, placement).peak_memory_bytes / np.array(problem.memory_limit_bytes)
    return counted


def is_known(bound_ms: float, step_ms: float, gap_fraction: float) -> bool:
    """Whether a placement of step_ms, infinite where none was found, is the best: none is below bound_ms."""
    return bound_ms >= (1.0 - max(gap_fraction, OPTIMAL_GAP_FRACTION)) * step_ms


def bounded_to(cutoff_ms: float, strategy: Strategy, settles: bool = False) -> float:
    """Up to where bounds of a strategy are looked for while the best is cutoff_ms. Those of named orders cost little,
    and how far above it they are tells which plans could win; settles: but where counts are settled too."""
    return cutoff_ms if settles or strategy.schedule == FREE else math.inf
