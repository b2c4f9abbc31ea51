"""Words that rules make, and words that are made to fit: they fit, and take the step that is said."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD,
    FORWARD_MS,
    INPUT,
    INPUT_MS,
    KEPT,
    MOST_HELD,
    MOST_IN_FLIGHT,
    MOST_PENDING,
    NUM_FIGURES,
    NUM_KINDS,
    PENDING,
    ROOM,
    TAIL_MS,
    WEIGHT,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.propagate import refutes
from mm_autoparallel.pipeline.placement.orders.roomy import rows_with_room
from mm_autoparallel.pipeline.placement.orders.rules import NUM_RULES, begin_rules, make_words, search_rules
from mm_autoparallel.pipeline.placement.orders.table import Table
from mm_autoparallel.pipeline.placement.orders.words import fit_pairs, fit_word, fits_word, play_words

Floats = NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    compile_orders()


def draw_figures(rng: np.random.Generator, num_stages: int, num_microbatches: int) -> Floats:
    """[P, NUM_FIGURES] of stages of which some keep more after their input gradients, and some have no weight's."""
    figures = np.zeros((num_stages, NUM_FIGURES))
    figures[:, : TAIL_MS + 1] = rng.uniform(0.1, 5.0, (num_stages, TAIL_MS + 1))
    figures[rng.random(num_stages) < 0.2, 2] = 0.0
    figures[:, KEPT] = rng.uniform(1.0, 3.0, num_stages)
    figures[:, PENDING] = figures[:, KEPT] * rng.choice([0.3, 1.0, 2.0], num_stages)
    figures[:, ROOM] = np.maximum(figures[:, KEPT], figures[:, PENDING]) * rng.uniform(1.0, 5.0, num_stages)
    figures[:, MOST_IN_FLIGHT] = np.clip(figures[:, ROOM] // figures[:, KEPT], 1, num_microbatches)
    figures[:, MOST_PENDING] = np.clip(figures[:, ROOM] // figures[:, PENDING], 1, num_microbatches)
    least = np.minimum(figures[:, KEPT], figures[:, PENDING])
    figures[:, MOST_HELD] = np.clip(figures[:, ROOM] // least, 1, num_microbatches)
    return figures


@pytest.mark.parametrize("seed", range(60))
def test_words_of_rules_fit_and_take_what_is_said(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_stages, count = int(rng.integers(1, 6)), int(rng.integers(1, 12))
    figures = draw_figures(rng, num_stages, count)
    table = (
        figures,
        np.zeros((num_stages, num_stages + 1, num_stages + 1), np.int32),
        np.zeros((num_stages, num_stages + 1, num_stages + 1), np.int32),
    )
    for stage in range(num_stages):
        table[1][stage, stage, stage + 1], table[2][stage, stage, stage + 1] = stage, 1
    boundaries, rows = np.arange(num_stages + 1), np.arange(num_stages)
    rules, words = np.empty((num_stages, NUM_RULES)), np.zeros((num_stages, NUM_KINDS * count), np.int8)
    begin_rules(count, rules)
    first_ms = make_words(figures, rules, words.copy())
    step_ms = search_rules(*table, boundaries, rows, rules, words, 200, 1.0, seed, 0.0, True)
    assert np.isfinite(first_ms)  # what is begun never keeps a stage from going on
    assert step_ms <= first_ms
    for stage in range(num_stages):
        assert fits_word(words[stage], figures[stage])
        assert [int((words[stage] == kind).sum()) for kind in range(NUM_KINDS)] == [count] * NUM_KINDS
    starts, position = np.empty((num_stages, NUM_KINDS * count)), np.empty((num_stages, NUM_KINDS, count), np.int64)
    assert play_words(words, figures, starts, position)[0] == pytest.approx(step_ms, rel=1e-12)
    assert make_words(figures, rules, words.copy()) == pytest.approx(step_ms, rel=1e-12)
    assert not refutes(count, figures, step_ms * (1.0 + 1e-6))  # windows know of no bound above it


@pytest.mark.parametrize("seed", range(200))
def test_a_word_is_changed_so_that_it_fits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 12))
    figures = draw_figures(rng, 1, count)[0]
    left, word = np.array([count, 0, 0]), np.zeros(NUM_KINDS * count, np.int8)
    for place in range(len(word)):  # any word whose actions follow what they need
        kind = rng.choice(np.flatnonzero(left))
        word[place] = kind
        left[kind] -= 1
        if kind != WEIGHT:
            left[kind + 1] += 1
    was, spare = word.copy(), np.empty_like(word)
    has_changed = fit_word(word, figures, spare)
    if not has_changed:
        assert np.array_equal(word, was)
        assert not fits_word(was, figures)
        return
    assert fits_word(word, figures)
    assert [int((word == kind).sum()) for kind in range(NUM_KINDS)] == [count] * NUM_KINDS
    if fits_word(was, figures):
        assert np.array_equal(word, was)
    pairs, most = was[was != WEIGHT], int(rng.integers(1, count + 1))
    assert fit_pairs(pairs, most, spare)
    in_flight = np.cumsum(np.where(pairs == FORWARD, 1, -1))
    assert in_flight.min() >= 0
    assert in_flight.max() <= most
    assert int((pairs == INPUT).sum()) == count


def test_what_exceeds_the_room_waits_or_comes_after_weight_gradients() -> None:
    figures = np.zeros(NUM_FIGURES)
    figures[[KEPT, PENDING, ROOM, MOST_IN_FLIGHT]] = 2.0, 1.0, 4.0, 2.0
    word = np.array([FORWARD, FORWARD, FORWARD, INPUT, INPUT, INPUT, WEIGHT, WEIGHT, WEIGHT], np.int8)
    assert fit_word(word, figures, np.empty_like(word))
    assert word.tolist() == [FORWARD, FORWARD, INPUT, WEIGHT, FORWARD, INPUT, INPUT, WEIGHT, WEIGHT]


@pytest.mark.parametrize(
    ("period_ms", "chosen"),
    [
        (6.0, [0, 2]),  # the first stage's micro-batches are held for 4 + 2 ms, one period
        (3.0, [0, 2]),  # for two
        (2.5, [1, 2]),  # for three, of which its first row holds two
        (1.0, [1, 3]),  # for six, and for four on the last stage: more than any row holds
    ],
)
def test_rows_have_room_for_what_is_in_flight(period_ms: float, chosen: list[int]) -> None:
    figures = np.zeros((4, NUM_FIGURES))  # two rows a stage: of least bound, and one that holds more
    figures[:, [FORWARD_MS, INPUT_MS, WEIGHT_MS]] = 1.0, 1.0, 2.0
    figures[:, MOST_IN_FLIGHT] = figures[:, MOST_HELD] = 2.0, 5.0, 2.0, 3.0
    first, count = (np.zeros((2, 3, 3), np.int32) for _ in range(2))
    for stage in range(2):
        first[stage, stage, stage + 1], count[stage, stage, stage + 1] = 2 * stage, 2
    table = Table(figures, np.arange(4), np.zeros(4, np.bool_), first, count)
    rows = rows_with_room(table, np.array([10.0, 11.0, 10.0, 11.0]), np.arange(3), period_ms)
    assert rows.tolist() == chosen
