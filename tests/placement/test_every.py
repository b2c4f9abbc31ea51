"""Every placement of problems that have few: as many, and the same, as the oracle lists."""

from __future__ import annotations

import brute_force
from expert_jobs import placements_of
from random_problems import random_problem

from mm_autoparallel.pipeline.placement.every import list_placements
from mm_autoparallel.pipeline.problem_file import problem_document


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
