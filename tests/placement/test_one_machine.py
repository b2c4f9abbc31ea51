"""Precedences of one machine's actions: what trees say is what a plain look at every pair and every deadline says."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.one_machine import raise_starts

Floats = NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    compile_orders()


def earliest_end(starts: Floats, durations: Floats, chosen: NDArray[np.bool_]) -> float:
    """Of chosen actions that run one at a time: the most over all subsets that start late."""
    chosen = chosen & (durations > 0.0)
    ends = [start + durations[chosen & (starts >= start)].sum() for start in starts[chosen]]
    return max(ends, default=-np.inf)


def look(starts: Floats, ends: Floats, durations: Floats) -> Floats | None:
    """The starts as precedences raise them; None where some actions cannot all end in time."""
    raised = starts.copy()
    for limit in ends:
        early = ends <= limit
        end = earliest_end(starts, durations, early)
        if end > limit:
            return None
        for x in np.flatnonzero(~early & (durations > 0.0)):
            with_it = early.copy()
            with_it[x] = True
            if earliest_end(starts, durations, with_it) > limit:
                raised[x] = max(raised[x], end)
    for y in range(len(starts)):
        before = starts[y] + durations[y] > ends - durations
        before[y] = False
        raised[y] = max(raised[y], earliest_end(starts, durations, before))
    return raised


@pytest.mark.parametrize("seed", range(20))
def test_starts_rise_as_a_plain_look_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_overloaded = num_raised = 0
    for _ in range(40):
        n = int(rng.integers(1, 12))
        durations = rng.integers(0, 6, n).astype(np.float64)
        starts = rng.integers(0, 16, n).astype(np.float64)
        ends = starts + durations + rng.integers(0, 14, n)
        expected, found = look(starts, ends, durations), starts.copy()
        moved, overloaded = raise_starts(found, ends, durations, 1e-9)
        assert overloaded == (expected is None)
        num_overloaded += overloaded
        if expected is not None:
            assert np.array_equal(found, expected)
            assert moved == bool(np.any(expected > starts))
            num_raised += moved
    assert num_overloaded
    assert num_raised
