"""Windows that are cut: every order below the goal lies within them, and they refute more than windows alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from test_order_rules import draw_figures

from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.figures import NUM_KINDS
from mm_autoparallel.pipeline.placement.orders.leaf import Leaf, solve_leaf
from mm_autoparallel.pipeline.placement.orders.propagate import refutes
from mm_autoparallel.pipeline.placement.orders.rules import NUM_RULES, begin_rules, make_words
from mm_autoparallel.pipeline.placement.orders.shaving import Shaving
from mm_autoparallel.pipeline.placement.orders.words import play_words

Floats = NDArray[np.float64]
#: A pipeline of 8 stages that hold two to four of 16 micro-batches: times, hops, tail, bytes, and how many they hold.
TIGHT = np.array(
    [
        [76, 91, 48, 1, 1, 0, 21, 21, 96, 4, 4, 4],
        [100, 130, 60, 1, 1, 0, 30, 30, 90, 3, 3, 3],
        [100, 130, 60, 1, 1, 0, 30, 30, 90, 3, 3, 3],
        [171, 202, 146, 1, 1, 0, 24, 24, 80, 3, 3, 3],
        [184, 216, 160, 1, 1, 0, 24, 24, 78, 3, 3, 3],
        [253, 297, 220, 1, 1, 0, 33, 33, 66, 2, 2, 2],
        [207, 243, 180, 1, 1, 0, 27, 27, 74, 2, 2, 2],
        [264, 308, 231, 0, 0, 0, 33, 33, 66, 2, 2, 2],
    ],
    dtype=np.float64,
)


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    compile_orders()


def shaved(figures: Floats, num_microbatches: int, goal_ms: float) -> Shaving:
    shaving = Shaving(num_microbatches, figures, goal_ms)
    while not shaving.is_done:
        shaving.go_on()
    return shaving


def solved(figures: Floats, num_microbatches: int, goal_ms: float, windows: tuple[Floats, Floats] | None) -> Leaf:
    return solve_leaf(figures, num_microbatches, goal_ms, 2.0, lambda: False, 0, windows)


@pytest.mark.parametrize("seed", range(60))
def test_orders_below_the_goal_lie_within_the_windows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_stages, count = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    figures = draw_figures(rng, num_stages, count)
    rules, words = np.empty((num_stages, NUM_RULES)), np.zeros((num_stages, NUM_KINDS * count), np.int8)
    begin_rules(count, rules)
    make_words(figures, rules, words)
    starts, position = np.empty((num_stages, NUM_KINDS * count)), np.empty((num_stages, NUM_KINDS, count), np.int64)
    step_ms = play_words(words, figures, starts, position)[0]
    shaving = shaved(figures, count, step_ms * (1.0 + 1e-6))
    assert not shaving.is_refuted
    began = np.array([np.take(starts[s], position[s]) for s in range(num_stages)])
    assert np.all(shaving.earliest <= began + 1e-9 * step_ms)
    assert np.all(began + figures[:, :NUM_KINDS, None] <= shaving.latest + 1e-5 * step_ms)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_refuted_has_no_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_stages, count = int(rng.integers(2, 4)), int(rng.integers(2, 6))
    figures = draw_figures(rng, num_stages, count)
    figures[:, :6] = np.ceil(figures[:, :6])
    low_ms, high_ms = 0.0, 1000.0  # whole times: the least step is a whole number
    while high_ms - low_ms > 1.0:
        middle_ms = np.floor(0.5 * (low_ms + high_ms))
        answer = solved(figures, count, middle_ms + 0.5, None).answer
        assert answer != "unknown"
        low_ms, high_ms = (low_ms, middle_ms) if answer == "found" else (middle_ms, high_ms)
    within = shaved(figures, count, high_ms + 0.5)
    assert not within.is_refuted
    assert solved(figures, count, high_ms + 0.5, (within.earliest, within.latest)).answer == "found"
    below = shaved(figures, count, high_ms - 0.5)
    assert (
        below.is_refuted or solved(figures, count, high_ms - 0.5, (below.earliest, below.latest)).answer == "infeasible"
    )


def test_forwards_that_take_no_time_are_not_cut() -> None:
    figures = TIGHT.copy()
    figures[:, 0] = 0.0
    shaving = Shaving(4, figures, 10_000.0)
    assert shaving.is_done
    assert not shaving.is_refuted


def test_cuts_refute_what_windows_leave() -> None:
    assert not refutes(16, TIGHT, 17_985.0)
    assert shaved(TIGHT, 16, 17_985.0).is_refuted
