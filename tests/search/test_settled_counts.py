"""Counts that stages can have: what is refuted is refuted, against every count there is and against brute force."""

from __future__ import annotations

from itertools import islice, product

import numpy as np
import pytest
from nouns import brute_force
from random_problems import random_problem

from mm_autoparallel.pipeline.placement.bounds.stage_counts import MAX_WORK, find_counts
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.loads import microbatch_classes


@pytest.mark.parametrize("max_work", [1, MAX_WORK])
def test_counts_are_found_exactly_where_there_are_some(max_work: int) -> None:
    """Two to four stages, some counts forbidden, up to six mixtures. Where it may not look at all, it says so."""
    rng, answers = np.random.default_rng(7), set()
    for _ in range(1_000):
        num_stages, num_layers = int(rng.integers(2, 5)), int(rng.integers(2, 9))
        costs_ms = rng.integers(0, 9, (int(rng.integers(1, 7)), num_stages, num_layers + 1)).astype(np.float64)
        may_be = rng.random((num_stages, num_layers + 1)) < 0.9
        most_ms = rng.integers(2 * num_stages, 5 * num_stages, len(costs_ms)) + 0.5
        every = [n for n in product(range(num_layers + 1), repeat=num_stages) if sum(n) == num_layers]
        at = np.arange(num_stages)
        good = {n for n in every if may_be[at, n].all() and (costs_ms[:, at, n].sum(axis=1) <= most_ms).all()}
        before, found = may_be.copy(), np.zeros(num_stages, dtype=np.int64)
        answer, _ = find_counts(costs_ms, most_ms, may_be, max_work, found)
        answers.add(answer)
        assert np.array_equal(before, may_be)
        assert not (answer == 0 and good)
        assert (answer == 1) == (tuple(found.tolist()) in good) or answer == 0
        assert answer != 2 or max_work == 1
        assert sum(found) == num_layers or answer == 0
    assert answers == ({0, 1, 2} if max_work == 1 else {0, 1})


def with_chunks(first: int, number: int) -> list[Problem]:
    """Of several chunks, micro-batches equal."""
    every = (random_problem(seed, ("round", "real")[seed % 2]) for seed in range(first, 10**9))
    return list(islice((p for p in every if p.num_chunks > 1 and not microbatch_classes(p)[0]), number))


@pytest.mark.parametrize(
    ("first", "number"), [(40_000, 60), *(pytest.param(n, 600, marks=pytest.mark.nightly) for n in (41_000, 42_000))]
)
def test_no_bound_is_above_the_optimum_nor_far_above_what_is_enough(first: int, number: int) -> None:
    num_raised = 0
    for problem in with_chunks(first, number):
        best_ms, _ = brute_force(problem)
        least_ms, mixed_ms = bound_step(problem).step_ms, bound_step(problem, sharpen=True).step_ms
        most_ms = bound_step(problem, sharpen=True, enough_ms=best_ms, settles=True).step_ms
        assert least_ms <= mixed_ms <= most_ms * (1 + 1e-12) <= best_ms * (1 + 1e-9)
        for enough_ms in (1.001 * least_ms, 0.9 * most_ms + 0.1 * least_ms):
            assert bound_step(problem, sharpen=True, enough_ms=enough_ms, settles=True).step_ms <= best_ms * (1 + 1e-9)
        num_raised += most_ms > 1.001 * mixed_ms
    assert num_raised > number / 10
