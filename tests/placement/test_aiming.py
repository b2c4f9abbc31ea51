"""Aiming: orders that CP-SAT finds below a goal fit, take as long as they say, and reach what is least."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from test_leaf import draw_whole, least_step
from test_windows import draw_words, fits

from mm_autoparallel.pipeline.placement.orders import aiming
from mm_autoparallel.pipeline.placement.orders.aiming import MOST_TURNS, PARTS, Aiming
from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.leaf import MOST_ACTIONS, Leaf
from mm_autoparallel.pipeline.placement.orders.local import Found
from mm_autoparallel.pipeline.placement.orders.words import step_of

Floats = NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    compile_orders()


def never() -> bool:
    return False


def drawn(seed: int) -> tuple[Found, Floats]:
    """Words that fit stages that are drawn, and may be poor."""
    rng = np.random.default_rng(seed)
    num_stages, count = int(rng.integers(2, 4)), int(rng.integers(2, 6))
    figures = draw_whole(rng, num_stages, count)
    words = draw_words(rng, figures, count)
    return Found(step_of(words, figures), np.arange(num_stages + 1), np.arange(num_stages), words), figures


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_fits_and_little_is_left_of_small_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first goal halves what is between a step and its bound, and so on."""
    monkeypatch.setattr(aiming, "EFFORT_S", 2e-4)
    best, figures = drawn(seed)
    aims, least_ms, first_ms = Aiming(), least_step(figures, best.words.shape[1] // 3), best.step_ms
    for turn in range(60):
        if not aims.can(best):
            break
        found = aims.improve(best, figures, 0.5 * least_ms, never, turn)
        if found is not None:
            assert fits(found.words, figures)
            assert found.step_ms == pytest.approx(step_of(found.words, figures), rel=1e-12)
            assert np.array_equal(found.rows, best.rows)
            if found.step_ms < best.step_ms:
                best = found
    assert not aims.can(best)
    assert best.step_ms >= least_ms * (1.0 - 1e-9)
    assert best.step_ms - least_ms <= 0.05 * (first_ms - least_ms) + 0.02 * least_ms


def test_goals_come_closer_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is found they come closer to the best step, and twice around is all; a better step begins anew, and
    what no order is below is known of these rows alone."""
    best, figures = drawn(3)
    goals, answers = [], iter(["unknown"] * (MOST_TURNS * len(PARTS)) + ["infeasible"] + ["unknown"] * 20)

    def solve(of: Floats, count: int, goal_ms: float, *_: object) -> Leaf:
        goals.append(goal_ms)
        return Leaf(next(answers))  # type: ignore[arg-type]

    monkeypatch.setattr(aiming, "solve_leaf", solve)
    aims, low_ms = Aiming(), 0.5 * best.step_ms
    while aims.can(best):
        assert aims.improve(best, figures, low_ms, never, 0) is None
    assert goals == pytest.approx([low_ms + part * (best.step_ms - low_ms) for part in PARTS] * MOST_TURNS)
    assert aims.improve(best, figures, low_ms, never, 0) is None
    assert len(goals) == MOST_TURNS * len(PARTS)
    better = Found(0.99 * best.step_ms, best.boundaries, best.rows, best.words)
    for _ in range(2):
        assert aims.improve(better, figures, low_ms, never, 0) is None
    first, second = goals[-2:]
    assert first == pytest.approx(0.5 * (low_ms + better.step_ms))  # of which the answer is that there is none
    assert second == pytest.approx(first + PARTS[1] * (better.step_ms - first))
    other = Found(better.step_ms, best.boundaries, best.rows + 1, best.words)
    assert aims.improve(other, figures, low_ms, never, 0) is None
    assert goals[-1] == pytest.approx(0.5 * (low_ms + better.step_ms))


def test_long_orders_are_not_asked_for() -> None:
    count = MOST_ACTIONS // 6 + 1
    words = np.zeros((2, 3 * count), np.int8)
    assert not Aiming().can(Found(1.0, np.arange(3), np.arange(2), words))
    assert not Aiming().can(None)
