"""What a pipeline's placements rank at, by what fills were found to take at least."""

from __future__ import annotations

import math
from itertools import product

import pytest

from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.floors import Floors
from mm_autoparallel.planner.search.planner import search

STEPS = {0.7: 130.0, 0.85: 112.0, 0.95: 104.0}  # by the fill of a placement; the last two are the fastest up to it
LEVEL, WITHIN = 1.05, 100.0


@pytest.fixture
def job(make_job) -> Job:
    return make_job(memory_bytes=40e9, failure_price=0.1)


def _true_floors(caution: Caution) -> Floors:
    floors = Floors(caution)
    for fill in STEPS:
        floors.raise_to(fill, min(step for known, step in STEPS.items() if known <= fill))
    return floors


def test_no_placement_ranks_below_and_the_pieces_are_all_there_is(job) -> None:
    caution = Caution(job)
    floors = _true_floors(caution)
    pieces = floors.pieces(LEVEL, WITHIN)
    assert [piece.fill for piece in pieces] == [*STEPS, LEVEL]
    assert [piece.above for piece in pieces] == [0.0, *STEPS]
    placements = [*STEPS.items(), (LEVEL, WITHIN), (0.96, WITHIN)]
    ranks = [step * caution.factor(fill) for fill, step in placements]
    assert WITHIN < floors.rank_ms(LEVEL, WITHIN) <= min(ranks)
    for (fill, step), piece in product(placements, pieces):
        if piece.above < fill <= piece.fill:
            assert step * caution.factor(fill) >= piece.rank_ms


def test_nothing_known_is_what_the_level_takes(job) -> None:
    floors = Floors(Caution(job))
    assert floors.rank_ms(LEVEL, WITHIN) == WITHIN
    assert floors.rank_ms(LEVEL, math.inf) == math.inf
    floors.raise_to(0.5, math.inf)  # nothing is that empty
    assert floors.rank_ms(LEVEL, WITHIN) == WITHIN * Caution(job).factor(0.5)


def test_what_was_found_of_fuller_ones_holds_for_emptier_ones(job) -> None:
    floors = Floors(Caution(job))
    floors.raise_to(0.9, 110.0)
    floors.raise_to(0.8, 105.0)
    assert floors.of(0.7) == floors.of(0.8) == floors.of(0.9) == 110.0
    assert floors.of(0.91) == 0.0


@pytest.mark.parametrize("memory_bytes", [6e9, 7e9, 8e9])
def test_the_bound_of_a_search_is_below_every_plan_met(make_job, no_clock, memory_bytes: float) -> None:
    """And what is proven with floors is what is proven without the price's detours: the plan that ranks least."""
    job = make_job(memory_bytes=memory_bytes, num_layers=8, num_nodes=2, failure_price=1.0)
    result = search(job, num_workers=1)
    ranks = [c.rank_ms for c in result.candidates if c.rank_ms is not None]
    assert result.objective.rank_bound_ms <= min(ranks) * (1.0 + 1e-9)
    assert result.objective.rank_ms == pytest.approx(min(ranks), rel=1e-6)
