"""Leaves: what CP-SAT says of one placement, with a literal for the order of two actions and without, is true."""

from __future__ import annotations

import numpy as np
import pytest
import word_search
from numpy.typing import NDArray
from test_order_rules import draw_figures

from mm_autoparallel.pipeline.placement.orders import leaf
from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT_MS,
    KEPT,
    MOST_HELD,
    MOST_IN_FLIGHT,
    MOST_PENDING,
    NUM_KINDS,
    PENDING,
    ROOM,
    TAIL_MS,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.leaf import solve_leaf
from mm_autoparallel.pipeline.placement.orders.shaving import Shaving
from mm_autoparallel.pipeline.placement.orders.words import play_words

Floats = NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    compile_orders()


def least_step(figures: Floats, count: int) -> float:
    """The least step over all words, by another hand."""
    moments = np.arange(count + 1)
    held = figures[:, KEPT, None, None] * moments[:, None] + figures[:, PENDING, None, None] * moments
    forward, gradient, weight = (figures[:, column] for column in (FORWARD_MS, INPUT_MS, WEIGHT_MS))
    hops = (np.append(figures[:-1, column], 0.0) for column in (HOP_FORWARD_MS, HOP_BACKWARD_MS))
    allowed = held <= figures[:, ROOM, None, None]
    times = forward, gradient, gradient + weight, weight, *hops, figures[:, TAIL_MS]
    return float(word_search.best_order(count, *times, allowed, np.inf)[0])


def draw_whole(rng: np.random.Generator, num_stages: int, count: int) -> Floats:
    """Figures of whole times, so that the least step is a whole number; no split backward keeps more than a whole."""
    figures = draw_figures(rng, num_stages, count)
    figures[:, : TAIL_MS + 1] = np.ceil(figures[:, : TAIL_MS + 1])
    figures[:, WEIGHT_MS] = np.maximum(figures[:, WEIGHT_MS], 1.0)
    of = figures[:, PENDING] > figures[:, KEPT]
    figures[of, PENDING] = figures[of, KEPT]
    figures[of, MOST_HELD] = figures[of, MOST_PENDING] = figures[of, MOST_IN_FLIGHT]
    return figures


@pytest.mark.parametrize("are_literals", [True, False])
@pytest.mark.parametrize("seed", range(16))
def test_every_step_from_the_least_on_is_found(seed: int, are_literals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    num_stages, count = int(rng.integers(2, 4)), int(rng.integers(2, 6))
    figures = draw_whole(rng, num_stages, count)
    least_ms = least_step(figures, count)
    monkeypatch.setattr(leaf, "MOST_ACTIONS", 1_000 if are_literals else 0)
    for goal_ms, expected in ((least_ms - 0.5, "infeasible"), (least_ms + 0.5, "found")):
        shaving = Shaving(count, figures, goal_ms)
        windows = (shaving.earliest, shaving.latest) if expected == "found" else None  # a window may be empty below
        for within in (None, windows):
            answer = solve_leaf(figures, count, goal_ms, 5.0, lambda: False, 0, within)
            assert answer.answer == expected
            if answer.words is not None:
                starts = np.empty(answer.words.shape)
                position = np.empty((num_stages, NUM_KINDS, count), np.int64)
                assert play_words(answer.words, figures, starts, position)[0] == pytest.approx(least_ms)
