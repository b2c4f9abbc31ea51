"""Justified words and windows: they fit, are no longer than before, and the best where a window has all actions."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from test_leaf import draw_whole, least_step
from test_order_rules import draw_figures

from mm_autoparallel.pipeline.placement.orders import windows
from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.figures import (
    MOST_IN_FLIGHT,
    NUM_FIGURES,
    NUM_KINDS,
    ROOM,
    TAIL_MS,
)
from mm_autoparallel.pipeline.placement.orders.justify import (
    justify_words,
    list_actions,
    list_starts,
    schedule,
    turn_round,
)
from mm_autoparallel.pipeline.placement.orders.local import Found
from mm_autoparallel.pipeline.placement.orders.rules import (
    LAST,
    NUM_RULES,
    PARTS,
    PATIENCE,
    WAIT,
    begin_rules,
    make_words,
)
from mm_autoparallel.pipeline.placement.orders.windows import Windows
from mm_autoparallel.pipeline.placement.orders.words import fits_word, step_of

Floats = NDArray[np.float64]
Words = NDArray[np.int8]


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    compile_orders()


def draw_words(rng: np.random.Generator, figures: Floats, count: int) -> Words:
    """Words that fit, made by rules that are drawn."""
    rules = np.empty((len(figures), NUM_RULES))
    begin_rules(count, rules)
    rules[:, LAST] = rng.integers(1, count + 1, len(figures))
    rules[:, PATIENCE : PATIENCE + 2] = rng.choice(PARTS, (len(figures), 2))
    rules[:, WAIT : WAIT + 2] = rng.choice(PARTS, (len(figures), 2))
    words = np.zeros((len(figures), NUM_KINDS * count), np.int8)
    assert np.isfinite(make_words(figures, rules, words))
    return words


def fits(words: Words, figures: Floats) -> bool:
    as_often = all(np.all(np.bincount(word, minlength=NUM_KINDS) * NUM_KINDS == len(word)) for word in words)
    return as_often and all(fits_word(word, of) for word, of in zip(words, figures, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_justified_words_fit_and_take_no_longer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_stages, count = int(rng.integers(1, 6)), int(rng.integers(1, 30))
    figures = draw_figures(rng, num_stages, count)
    words = draw_words(rng, figures, count)
    before_ms = step_of(words, figures)
    step_ms = justify_words(words, figures)
    assert step_ms == step_of(words, figures) <= before_ms
    assert fits(words, figures)


@pytest.mark.parametrize("seed", range(20))
def test_from_the_end_all_run_as_late_as_their_order_lets_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_stages, count = int(rng.integers(1, 6)), int(rng.integers(1, 20))
    figures = draw_figures(rng, num_stages, count)
    words = draw_words(rng, figures, count)
    lengths, needs, lags = list_actions(count, figures)
    behind, lags_behind = turn_round(needs, lags)
    early, step_ms = list_starts(words, figures), step_of(words, figures)
    tails = figures[:, TAIL_MS].copy()
    late = step_ms - lengths - schedule(lengths, -early - lengths, tails, behind, lags_behind, needs, False)
    assert np.all(late >= early - 1e-9 * step_ms)
    for starts in (early, late):
        for action, need in zip(*np.nonzero(needs >= 0), strict=True):
            before = needs[action, need]
            assert starts[action] >= starts[before] + lengths[before] + lags[action, need] - 1e-9 * step_ms
        for of in np.split(np.arange(len(starts)), num_stages):
            of = of[lengths[of] > 0.0]
            of = of[np.argsort(starts[of])]
            assert np.all(np.diff(starts[of]) >= lengths[of][:-1] - 1e-9 * step_ms)


def test_what_waits_is_moved_into_a_gap() -> None:
    """The last stage waits for each forward, and has put off all its weight gradients."""
    figures, count = np.zeros((2, NUM_FIGURES)), 10
    figures[:, :NUM_KINDS] = [[3.0, 3.0, 0.0], [1.0, 1.0, 1.0]]
    figures[:, ROOM] = figures[:, MOST_IN_FLIGHT:] = count
    words = np.array([[0, 0, *[1, 2, 0] * 8, 1, 2, 1, 2], [*[0, 1] * 10, *[2] * 10]], np.int8)
    put_off_ms = step_of(words, figures)
    assert justify_words(words, figures) < put_off_ms - 5.0


@pytest.mark.parametrize("seed", range(24))
def test_a_window_of_all_actions_finds_the_least_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    num_stages, count = int(rng.integers(2, 4)), int(rng.integers(2, 6))
    figures = draw_whole(rng, num_stages, count)
    words = draw_words(rng, figures, count)
    found = Found(step_of(words, figures), np.zeros(0, np.int64), np.zeros(0, np.int64), words)
    least_ms = least_step(figures, count)
    monkeypatch.setattr(windows, "FIRST_ACTIONS", words.size)
    better = Windows(turn=seed % 2).improve(found, figures, lambda: False)
    if better is None:
        assert found.step_ms == pytest.approx(least_ms)
    else:
        assert better.step_ms == step_of(better.words, figures) == pytest.approx(least_ms)
        assert fits(better.words, figures)


@pytest.mark.parametrize("seed", range(6))
def test_windows_grow_until_nothing_is_shorter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_stages, count = int(rng.integers(2, 5)), int(rng.integers(8, 16))
    figures = draw_figures(rng, num_stages, count)
    words = draw_words(rng, figures, count)
    first = best = Found(step_of(words, figures), np.zeros(0, np.int64), np.zeros(0, np.int64), words)
    looked, num_rounds = Windows(), 0
    while any(looked.num_actions) or looked.words is None:
        better = looked.improve(best, figures, lambda: False)
        if better is not None:
            assert better.step_ms == step_of(better.words, figures) < best.step_ms
            assert fits(better.words, figures)
            best = better
        num_rounds += 1
        assert num_rounds < 200
    assert looked.improve(best, figures, lambda: False) is None
    assert np.array_equal(first.words, words)  # what was found stays as it was
