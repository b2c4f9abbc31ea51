"""Placing under schedules that part backwards, under given orders and V-shapes: the best of all placements, and proofs
that the second solver confirms."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from split_problems import play_by_the_rules, random_split_problem

from mm_autoparallel.pipeline.certify.certificate import read_certificate, write_certificate
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.placement.every import list_placements
from mm_autoparallel.pipeline.placement.methods import METHODS
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.schedules.action import format_order
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.step import simulate

NAMES = ("zb_h1", "zb_h2", "interleaved_zb", "zbv", "v_half", "v_min", "dualpipev", "given")
SEEDS = range(16)
BY_DAY = ("zb_h1", "zbv")
"""Schedules whose placing is proven by day, one of each kind; the others by night."""


def draw(name: str, seed: int) -> Problem:
    """A problem of at most two stages of two chunks, or three of one."""
    rng = random.Random(seed)
    num_chunks = 2 if SCHEDULES[name].v_shaped or name == "interleaved_zb" else 1 + (name == "given" and seed % 3 == 0)
    num_stages = 2 if num_chunks == 2 else rng.choice([2, 3])
    num_microbatches = rng.randint(1, 4) + SCHEDULES[name].least_rounds * num_stages
    return random_split_problem(seed, name, num_stages, num_chunks, num_microbatches)


def orders_of(problem: Problem) -> tuple[str, ...]:
    """The order of each stage as text."""
    rule = SCHEDULES[problem.schedule]
    shape = (problem.num_stages, problem.num_chunks, problem.num_microbatches)
    return problem.orders or tuple(format_order(rule.order(*shape, stage)) for stage in range(problem.num_stages))


def best_of_all(problem: Problem) -> tuple[float, Placement | None]:
    """The least step of all placements that fit, each played by the documented rules."""
    placements = list_placements(problem)
    assert placements is not None
    best: tuple[float, Placement | None] = (np.inf, None)
    for placement in placements:
        timeline = simulate(problem, placement)
        if timeline.step_ms < best[0] and not find_misfits(
            problem, timeline.peak_memory_bytes, timeline.peak_host_bytes
        ):
            best = timeline.step_ms, placement
    return best


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in NAMES]
)
def test_the_best_of_all_placements_is_found_and_proven(name: str, tmp_path: Path) -> None:
    num_placed = 0
    for seed in SEEDS:
        problem = draw(name, seed)
        step_ms, best = best_of_all(problem)
        result = place(problem, time_limit_s=60.0)
        if best is None:
            assert result.status == "infeasible", (name, seed)
            continue
        num_placed += 1
        assert bound_step(problem, sharpen=True).step_ms <= step_ms * (1 + 1e-9), (name, seed)
        assert result.status == "optimal", (name, seed)
        assert result.placement is not None
        assert result.step_ms == pytest.approx(step_ms, rel=1e-5), (name, seed)
        assert result.lower_bound_ms <= step_ms * (1 + 1e-9), (name, seed)
        rule = SCHEDULES[name]
        played, span, peaks = play_by_the_rules(problem, result.placement, orders_of(problem), rule.v_shaped)
        assert result.step_ms == pytest.approx(played)
        assert result.timeline is not None
        assert result.timeline.span_ms == pytest.approx(span)
        assert list(result.peak_memory_bytes) == pytest.approx(peaks)
        assert result.proof == "cuts"
        if seed % 4 == 0:
            path = tmp_path / f"{seed}.json"
            write_certificate(path, problem, result)
            assert verify(read_certificate(path)).lower_bound_ms == pytest.approx(result.lower_bound_ms)
    assert num_placed >= len(SEEDS) // 3


def test_passes_that_overlap_count_as_little_as_they_take() -> None:
    """Pairs of one chunk: two passes may take no longer than one, and neither solver nor bound counts more."""
    orders = ("0F0 1F0 (2F0;0B0) (3F0;1B0) 2B0 3B0", "0F0 (1F0;0B0) (2F0;1B0) (3F0;2B0) 3B0")
    chain = (ChainBlock("layer", "text", 6, 1.0, 1.0, activation_bytes=1.0, backward_weight_ms=0.5),)
    none = (0.0, 0.0)
    problem = Problem(
        2, 1, 4, "given", chain, (1e9, 1e9), none, none, (0.0,), (0.0,), orders=orders, pair_overlap_fraction=1.0
    )
    step_ms, _ = best_of_all(problem)
    result = place(problem, time_limit_s=60.0)
    assert result.status == "optimal"
    assert result.step_ms == pytest.approx(step_ms)
    assert bound_step(problem).step_ms <= step_ms
    apart_ms, _ = best_of_all(replace(problem, pair_overlap_fraction=0.0))
    assert step_ms < apart_ms


@pytest.mark.parametrize("name", NAMES)
def test_cuts_alone_bound_every_placement(name: str) -> None:
    """From the first cuts on: whatever the solver has had time for, its bound is below every placement that fits."""
    able = [method for method in METHODS if method.name in ("annealing", "least overflow", "path cuts")]
    for seed in range(100, 105):
        problem = draw(name, seed)
        step_ms, _ = best_of_all(problem)
        result = place(problem, time_limit_s=0.5, methods=able)
        assert result.status == "infeasible" or result.lower_bound_ms <= step_ms * (1 + 1e-9), (name, seed)


@pytest.mark.parametrize("name", NAMES)
def test_played_orders_are_those_of_the_rules(name: str) -> None:
    for seed in range(200, 220):
        problem = draw(name, seed)
        placements = list_placements(problem)
        assert placements
        placement = random.Random(seed).choice(placements)
        timeline = simulate(problem, placement)
        step, span, peaks = play_by_the_rules(problem, placement, orders_of(problem), SCHEDULES[name].v_shaped)
        assert timeline.step_ms == pytest.approx(step)
        assert timeline.span_ms == pytest.approx(span)
        assert timeline.peak_memory_bytes.tolist() == pytest.approx(peaks)
