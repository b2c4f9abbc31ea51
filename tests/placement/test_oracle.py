"""Path cuts by themselves against brute force; all of `place` is compared with it in tests/oracle."""

from __future__ import annotations

import numpy as np
import pytest
from nouns import brute_force
from random_problems import random_problem

from mm_autoparallel.placement.cpsat import solve_with_cuts
from mm_autoparallel.placement.cuts import stage_cuts
from mm_autoparallel.placement.units import cut_into_units
from mm_autoparallel.problem import Placement, Problem
from mm_autoparallel.simulate.loads import overfull_stages
from mm_autoparallel.simulate.step import simulate


@pytest.mark.parametrize("first", [0])
def test_path_cuts_alone_equal_brute_force(first: int) -> None:
    """The CP-SAT loop by itself, at real magnitudes: the tree settles small problems before it is asked."""
    checked = 0
    for seed in range(first, first + 100):
        problem = random_problem(3 * 10**6 + seed, "real")
        best_ms, best = brute_force(problem)
        if best is None:
            continue
        found: list[tuple[float, Placement]] = []

        def offer(
            placement: Placement, problem: Problem = problem, found: list[tuple[float, Placement]] = found
        ) -> None:
            timeline = simulate(problem, placement)
            assert not overfull_stages(problem, timeline.peak_memory_bytes)
            found.append((timeline.step_ms, placement))

        result = solve_with_cuts(
            cut_into_units(problem),
            1.5 * best_ms,
            stage_cuts(problem),
            np.inf,
            0.0,
            lambda: False,
            lambda: np.inf,
            offer,
        )
        assert result.exhausted
        assert min(step_ms for step_ms, _ in found) == pytest.approx(best_ms, rel=5e-6), f"seed {seed}"
        assert result.lower_bound_ms <= best_ms * (1 + 1e-9)
        checked += 1
    assert checked > 20
