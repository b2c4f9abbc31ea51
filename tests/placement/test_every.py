"""Every placement of problems that have few: as many, and the same, as the oracle lists."""

from __future__ import annotations

import random

import brute_force
import numpy as np
import pytest
from expert_jobs import placements_of
from numpy.typing import NDArray
from random_problems import random_problem
from test_bounds import parted_problem

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.placement.every import list_placements, steps_with
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.problem_file import problem_document
from mm_autoparallel.pipeline.simulate.loads import sum_loads
from mm_autoparallel.pipeline.simulate.step import simulate


def test_every_placement_once() -> None:
    num_seen = 0
    for seed in range(200):
        problem = random_problem(seed, ("round", "real", "unequal")[seed % 3])
        count = brute_force.count_placements(problem_document(problem), 400)
        found = list_placements(problem, 200)
        assert (found is None) == (count > 200)
        if found is not None:
            known = list(placements_of(problem))
            assert len(found) == len(known) == count
            assert set(found) == set(known)
            num_seen += count > 1
    assert num_seen > 10


@pytest.mark.parametrize(("first", "number"), [(0, 150), pytest.param(1_000, 2_000, marks=pytest.mark.nightly)])
def test_no_step_is_below_what_any_of_its_stages_takes_it_to(first: int, number: int) -> None:
    """Whatever the order: and so placements that are short enough are all listed, while others are left out."""
    num_closer, num_listed, num_left_out = 0, 0, 0
    for seed in range(first, first + number):
        problem = (parted_problem if seed % 4 == 3 else random_problem)(seed)
        try:
            placements = list_placements(problem, 200)
        except JobError:  # too few micro-batches for its schedule
            continue
        if not placements or problem.num_chunks > 1:
            continue
        steps_ms = []
        for placement in placements:
            loads, stages = sum_loads(problem, placement), np.arange(problem.num_stages)
            forward_ms, backward_ms = loads.forward_ms.mean(axis=1), loads.backward_ms.mean(axis=1)
            least_ms = steps_with(problem, stages, forward_ms, backward_ms, loads.recompute_ms.mean(axis=1))
            steps_ms.append(simulate(problem, placement).step_ms)
            assert least_ms.max() <= steps_ms[-1], f"seed {seed}"
            num_closer += least_ms.max() > 0.9 * steps_ms[-1]
        most_ms = float(np.median(steps_ms))
        listed = list_placements(problem, 200, most_ms)
        assert listed is not None
        short = {one for one, step_ms in zip(placements, steps_ms, strict=True) if step_ms <= most_ms}
        assert short <= set(listed) <= set(placements), f"seed {seed}"
        num_listed, num_left_out = num_listed + len(listed), num_left_out + len(placements) - len(listed)
    assert num_closer > number
    assert num_left_out > 0.1 * num_listed


def test_what_a_stage_may_not_hold_is_part_of_none() -> None:
    """Of each stage some of what it could hold is wanted, at random."""
    num_kept, num_all = 0, 0
    for seed in range(200):
        problem = random_problem(seed)
        placements = list_placements(problem, 200)
        if not placements or problem.num_chunks > 1:
            continue

        def may_hold(placement: Placement, seed: int = seed) -> NDArray[np.bool_]:
            held = zip(placement.layers, placement.modes, strict=True)
            return np.array([random.Random(f"{seed} {s} {of}").random() < 0.8 for s, of in enumerate(held)])

        found = list_placements(problem, 200, may_hold=may_hold)
        if found is None:  # so many looks at ways to fill stages are too many
            continue
        assert len(found) == len(set(found))
        assert set(found) == {one for one in placements if may_hold(one).all()}
        num_kept, num_all = num_kept + len(found), num_all + len(placements)
    assert 0.2 * num_all < num_kept < 0.8 * num_all


def test_listing_ends_when_it_is_told_to() -> None:
    problem = next(p for p in map(random_problem, range(100)) if p.num_chunks == 1 and list_placements(p, 200))
    assert list_placements(problem, 200, may_hold=lambda _: np.ones(9, np.bool_), should_stop=lambda: True) is None
