"""Fills at which a free order is placed because bounds say no more: which, for what, and what comes of it."""

from __future__ import annotations

import math

import pytest
from one_pipeline import first_of, place_level

from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.solve.task import Answer
from mm_autoparallel.planner.search.floors import Piece
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.raising import BELOW_FRACTION, MOST_PLACED
from mm_autoparallel.planner.search.slices import next_slice_s

pytestmark = pytest.mark.usefixtures("no_clock")
FILLS, STEP = (0.93, 0.95, 0.97, 0.99), 100.0


def leave_open(schedule: str = "free") -> Pipeline:
    """A pipeline whose fills take the same by their bounds, no plan of which is known."""
    pipeline = first_of(schedule)
    place_level(pipeline, 0.5)
    pipeline.level.fill_fraction = FILLS[-1]
    pipeline.placement, pipeline.step_ms, pipeline.rank_ms = None, math.inf, math.inf
    pipeline.within_ms = STEP
    pipeline.floors.raise_to(0.9, 2.0 * STEP)
    for fill in FILLS[:-1]:
        pipeline.floors.raise_to(fill, STEP)
    return pipeline


def answer_of(pipeline: Pipeline, lower_ms: float) -> Answer:
    return Answer(pipeline.number, None, math.inf, lower_ms, 0.1)


def pieces_of(pipeline: Pipeline) -> list[Piece]:
    return pipeline.floors.pieces(pipeline.level.fill_fraction, pipeline.within_ms)


def test_the_middle_fill_is_placed_for_what_ranks_below_the_aim() -> None:
    pipeline = leave_open()
    caution, aim_ms = pipeline.caution, 1.9 * STEP
    before = pipeline.bound_ms, pipeline.num_slices, pipeline.level.num_slices
    assert pipeline.raising.begin(pipeline, aim_ms)
    assert pipeline.raising.is_on
    assert pipeline.is_probing
    assert pipeline.probe_fill_fraction == FILLS[2]
    assert pipeline.raising.cutoff_ms == aim_ms / caution.factor(FILLS[1])
    pipeline.take(answer_of(pipeline, 1.05 * STEP), math.inf)
    assert not pipeline.raising.is_on
    assert [piece.rank_ms / caution.factor(piece.above) for piece in pieces_of(pipeline)[1:]] == pytest.approx(
        [1.05 * STEP, 1.05 * STEP, 1.05 * STEP, STEP]
    )
    assert pipeline.bound_ms > before[0]
    assert (pipeline.num_slices, pipeline.level.num_slices) == before[1:]  # no slice of the level


def test_a_fill_is_placed_so_often_at_most_and_longer_each_time() -> None:
    pipeline, seconds = leave_open(), []
    for _ in range(MOST_PLACED):
        assert pipeline.raising.begin(pipeline, 1.9 * STEP)
        assert pipeline.probe_fill_fraction == FILLS[2]
        seconds.append(next_slice_s(pipeline))
        pipeline.take(answer_of(pipeline, STEP), math.inf)
    assert seconds == sorted(set(seconds))
    assert not pipeline.raising.begin(pipeline, 1.9 * STEP)
    assert not pipeline.is_probing


def test_nothing_is_placed_where_nothing_ranks_below_nor_under_named_orders() -> None:
    pipeline = leave_open()
    assert not pipeline.raising.begin(pipeline, STEP)
    named = leave_open("1f1b")
    assert not named.raising.begin(named, 1.9 * STEP)
    pipeline.num_slices = 0  # its turn comes first
    assert not pipeline.raising.begin(pipeline, 1.9 * STEP)


def test_where_a_step_is_known_what_is_emptier_than_its_plan_comes_next() -> None:
    pipeline = first_of("free")
    place_level(pipeline, 0.5)
    pipeline.within_ms, pipeline.rank_ms = 0.5 * pipeline.within_ms, math.inf
    fill = pipeline.level.fill_fraction
    assert pipeline.raising.begin(pipeline, 2.0 * pipeline.step_ms)
    probed = pipeline.probe_fill_fraction
    result = place(pipeline.problem_at(probed))
    assert result.placement is not None
    found = Answer(pipeline.number, result.placement, result.step_ms, result.lower_bound_ms, 0.1)
    pipeline.take(found, math.inf)
    assert pipeline.floors.of(probed) == result.lower_bound_ms
    assert pipeline.raising.begin(pipeline, 2.0 * pipeline.step_ms)
    own = pipeline.count_fill(result.placement)
    assert pipeline.probe_fill_fraction in (pytest.approx(own, rel=1e-8), own * (1.0 - BELOW_FRACTION), fill)


def test_the_fill_of_the_best_plan_is_placed_where_it_may_be_slower_than_the_least() -> None:
    pipeline = first_of("free")
    place_level(pipeline, 0.5)
    assert pipeline.placement is not None
    own = pipeline.count_fill(pipeline.placement)
    pipeline.within_ms = 0.8 * pipeline.step_ms
    pipeline.floors.raise_to(0.8 * own, 0.8 * pipeline.step_ms)
    fills = []
    for _ in range(2):
        assert pipeline.raising.begin(pipeline, 0.99 * pipeline.rank_ms)
        fills.append(pipeline.probe_fill_fraction)
        assert pipeline.raising.end(pipeline, answer_of(pipeline, 0.0))
    assert fills == [pytest.approx(own, rel=1e-8), pipeline.level.fill_fraction]


@pytest.mark.parametrize("raised", [False, True])
def test_turns_that_come_to_nothing_in_a_row_are_the_last(raised: bool) -> None:
    pipeline = leave_open()
    for lower_ms in (STEP, 1.05 * STEP if raised else STEP):
        assert pipeline.raising.begin(pipeline, 1.9 * STEP)
        pipeline.take(answer_of(pipeline, lower_ms), math.inf)
    pipeline.floors.raise_to(FILLS[1], 1.5 * STEP)  # so that another fill is in the middle
    assert pipeline.raising.begin(pipeline, 1.9 * STEP) == raised
