"""Emptier plans of a free order, looked for between the slices of a level: they bound nothing and are the level's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from one_pipeline import first_of, never, place_level

from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.pipeline.solve.task import Answer

pytestmark = pytest.mark.usefixtures("no_clock")


def test_what_is_placed_is_emptier_and_of_the_same_bound() -> None:
    pipeline = first_of("free")
    fill = 0.5
    place_level(pipeline, fill)
    level, cutoff_ms = pipeline.level, 2.0 * pipeline.rank_ms
    pipeline.rank_ms = 1.01 * cutoff_ms  # another pipeline has the best plan of all
    assert pipeline.trimming.begin(pipeline, cutoff_ms, never)
    trimmed, whole = pipeline.trimming.problem, level.problem
    assert trimmed is not None
    assert whole is not None
    assert all(less < more for less, more in zip(trimmed.memory_limit_bytes, whole.memory_limit_bytes, strict=True))
    assert trimmed.chain == whole.chain
    bound_ms = bound_step(whole, should_stop=never).step_ms
    assert bound_step(trimmed, should_stop=never).step_ms >= bound_ms * (1.0 - 1e-9)
    assert not pipeline.trimming.begin(pipeline, cutoff_ms, never)  # once after each slice


def test_the_best_plan_of_all_is_placed_again_at_its_own_fill() -> None:
    pipeline = first_of("free")
    place_level(pipeline, 0.5)
    assert pipeline.placement is not None
    for _ in range(2):
        pipeline.trimming._seen = math.inf, 0  # as after another slice
        assert pipeline.trimming.begin(pipeline, pipeline.rank_ms, never)
        own = pipeline.trimming.problem
        assert own is not None
        assert pipeline.trimming.cutoff_ms == pipeline.step_ms
        assert not find_misfits(own, *peaks_of(own, pipeline.placement))
        limits = tuple(limit * (1.0 - 1e-6) for limit in own.memory_limit_bytes)
        assert find_misfits(replace(own, memory_limit_bytes=limits), *peaks_of(own, pipeline.placement))
        assert pipeline.trimming.end()
    pipeline.trimming._seen = math.inf, 0
    pipeline.trimming.begin(pipeline, pipeline.rank_ms, never)
    assert pipeline.trimming.cutoff_ms != pipeline.step_ms  # what it was tried twice for


def test_where_no_plan_is_known_none_is_placed_again() -> None:
    """Nothing of its level kept the limits."""
    pipeline = first_of("free")
    place_level(pipeline, 0.5)
    pipeline.placement, pipeline.rank_ms, pipeline.step_ms = None, math.inf, math.inf
    pipeline.trimming.begin(pipeline, math.inf, never)
    assert math.isinf(pipeline.trimming.cutoff_ms)


def peaks_of(problem: Problem, placement: Placement) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    timeline = simulate(problem, placement)
    return timeline.peak_memory_bytes, timeline.peak_host_bytes


def test_it_counts_as_no_slice_and_bounds_nothing() -> None:
    pipeline = first_of("free")
    place_level(pipeline, 0.5)
    before = pipeline.level.num_slices, pipeline.num_slices, pipeline.within_ms, pipeline.bound_ms
    assert pipeline.trimming.begin(pipeline, 2.0 * pipeline.rank_ms, never) or pipeline.trimming.problem is None
    pipeline.trimming.problem = pipeline.trimming.problem or pipeline.level.problem
    nothing = Answer(
        pipeline.number, None, math.inf, 10.0 * pipeline.within_ms, 0.1, infeasible=True, reason="too tight"
    )
    pipeline.take(nothing, math.inf)
    assert (pipeline.level.num_slices, pipeline.num_slices, pipeline.within_ms, pipeline.bound_ms) == before
    assert not pipeline.infeasible
    assert pipeline.trimming.problem is None


def test_named_orders_are_not_trimmed() -> None:
    pipeline = first_of("1f1b")
    place_level(pipeline, 0.5)
    assert not pipeline.trimming.begin(pipeline, 2.0 * pipeline.rank_ms, never)
