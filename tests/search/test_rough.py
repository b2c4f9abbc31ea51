"""How close to the best levels of memory end, and how long their turns are."""

from __future__ import annotations

import math

import pytest

from mm_autoparallel.planner.search.rough import Roughness, of_level, rough_fraction
from mm_autoparallel.planner.search.slices import FIRST_SLICE_S, level_slice_s


@pytest.mark.parametrize(
    ("elapsed_s", "left_s", "fraction"),
    [(10.0, 50.0, 0.0), (24.0, 36.0, 0.0), (25.0, 35.0, 0.004), (43.0, 17.0, 0.006), (55.0, 5.0, 0.008)],
)
def test_less_may_do_as_time_runs_out(elapsed_s: float, left_s: float, fraction: float) -> None:
    assert rough_fraction(elapsed_s, left_s) == fraction


def test_a_level_that_gets_on_ends_closer() -> None:
    assert [of_level(0.008, num_slices) for num_slices in range(4)] == [0.004, 0.004, 0.008, 0.008]
    assert of_level(0.0, 9) == 0.0


def test_without_a_limit_nothing_is_rough_and_turns_stay_as_they_are() -> None:
    assert rough_fraction(1e6, math.inf) == 0.0
    assert level_slice_s(81.0, 27.0, 1e6, math.inf) == 81.0


def test_a_turn_ends_where_less_of_a_level_may_do() -> None:
    assert level_slice_s(27.0, 9.0, 15.0, 45.0) == pytest.approx(24.0 - 15.0)
    assert level_slice_s(27.0, 9.0, 23.0, 37.0) == FIRST_SLICE_S
    assert level_slice_s(2.0, 1.0, 15.0, 45.0) == 2.0


def test_levels_to_come_share_what_is_left() -> None:
    assert level_slice_s(27.0, 0.0, 30.0, 30.0) == 30.0 / 5.0
    assert level_slice_s(27.0, 3.0, 30.0, 30.0) == 9.0
    assert level_slice_s(81.0, 9.0, 30.0, 30.0) == pytest.approx(42.0 - 30.0)


def test_a_level_that_ends_roughly_ends_no_lower_than_is_known(make_job, agenda_and_met) -> None:
    job = make_job(memory_bytes=6.5e9, failure_price=0.1, tp=(1,), cp=(1,), pp=(2,), mbs=(1,))
    agenda, _ = agenda_and_met(job)
    pipeline = agenda.next_open(math.inf, 0.0, 0.0, lambda: False)
    pipeline.level.num_slices, known_ms = 2, pipeline.bound_ms
    assert pipeline.descend(1.004 * known_ms, 0.0, 0.008, lambda: False)
    assert math.isfinite(pipeline.level.fill_fraction)
    assert known_ms <= pipeline.bound_ms < 1.004 * known_ms


def test_what_ended_roughly_is_looked_at_once_more(make_job, agenda_and_met) -> None:
    job = make_job(memory_bytes=6.5e9, failure_price=0.1, tp=(1,), cp=(1,), pp=(2,), mbs=(1,))
    agenda, _ = agenda_and_met(job)
    pipeline, roughness = agenda.next_open(math.inf, 0.0, 0.0, lambda: False), Roughness()
    pipeline.level.num_slices, known_ms = 2, pipeline.bound_ms
    was = pipeline.level.fill_fraction, pipeline.within_ms, pipeline.elsewhere_ms
    cutoff_ms = 1.0045 * known_ms
    assert pipeline.descend(cutoff_ms, 0.0, 0.008, lambda: False)
    assert roughness.fraction(59.0, 1.0) == 0.008
    assert not Roughness().begin_again(agenda, pipeline.bound_ms)  # as good as known
    assert roughness.begin_again(agenda, cutoff_ms)
    assert (pipeline.level.fill_fraction, pipeline.within_ms, pipeline.elsewhere_ms) == was
    assert pipeline.bound_ms >= known_ms
    assert roughness.fraction(59.0, 1.0) == 0.004
    assert not roughness.begin_again(agenda, math.inf)
