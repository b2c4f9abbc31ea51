"""Placement against brute force, on thousands of seeded small problems, infeasible ones included."""

from __future__ import annotations

import os

import numpy as np
import pytest
from random_problems import random_problem

from mm_autoparallel.placement import place
from mm_autoparallel.placement.cpsat import solve_with_cuts
from mm_autoparallel.placement.cuts import stage_cuts
from mm_autoparallel.placement.proof.brute_force import brute_force
from mm_autoparallel.placement.units import cut_into_units
from mm_autoparallel.problem import Placement, Problem
from mm_autoparallel.simulate.loads import overfull_stages
from mm_autoparallel.simulate.step import simulate

#: 250 in every run; FUZZ_PROBLEMS=20000 (or more) for the long one.
NUM_REAL_PROBLEMS = int(os.environ.get("FUZZ_PROBLEMS", "250"))


def check_against_oracle(problem: Problem, seed: int) -> bool:
    """Same answer as brute force, to 1e-6 (the oracle's sums are its own); True where something fits."""
    best_ms, best = brute_force(problem)
    result = place(problem)
    if best is None:
        assert result.status == "infeasible", f"seed {seed}: {result.status}, nothing fits"
        assert result.reason
        return False
    assert result.status == "optimal", f"seed {seed}: {result.status} {result.reason}"
    assert result.step_ms == pytest.approx(best_ms, rel=1e-6), f"seed {seed}"
    assert result.lower_bound_ms <= best_ms * (1 + 1e-9), f"seed {seed}: a bound above the optimum"
    assert simulate(problem, best).step_ms == pytest.approx(best_ms, rel=1e-9), f"seed {seed}"
    return True


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 250))
def test_placement_equals_brute_force(first: int) -> None:
    """500 problems with small round numbers, which tie a lot."""
    feasible = sum(check_against_oracle(random_problem(seed), seed) for seed in range(first, first + 250))
    assert 50 < feasible < 250  # both kinds are there


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_REAL_PROBLEMS, 250))
def test_placement_equals_brute_force_at_real_magnitudes(first: int) -> None:
    """Milliseconds to minutes and gigabytes: where ortools 9.15 answers wrongly if it is let."""
    feasible = sum(
        check_against_oracle(random_problem(10**6 + seed, "real"), seed) for seed in range(first, first + 250)
    )
    assert 50 < feasible < 250


def test_the_first_problems_equal_brute_force() -> None:
    """A few of each kind, for the quick run."""
    for seed in range(60):
        check_against_oracle(random_problem(seed), seed)
        check_against_oracle(random_problem(10**6 + seed, "real"), seed)


def test_unequal_microbatches_equal_brute_force() -> None:
    feasible = sum(check_against_oracle(random_problem(2 * 10**6 + seed, "unequal"), seed) for seed in range(60))
    assert feasible > 15


@pytest.mark.parametrize("first", range(0, 200, 100))
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
