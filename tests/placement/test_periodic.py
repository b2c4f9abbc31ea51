"""Steady parts that repeat: they fit, keep to their period however long they run, and end well."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from test_order_rules import draw_figures

from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.figures import (
    KEPT,
    MOST_IN_FLIGHT,
    NUM_FIGURES,
    NUM_KINDS,
    PENDING,
    ROOM,
)
from mm_autoparallel.pipeline.placement.orders.local import Found
from mm_autoparallel.pipeline.placement.orders.periodic import find_periodic, write_periodic
from mm_autoparallel.pipeline.placement.orders.periods import BESIDE, BEYOND, MOST_FACTOR, NEAR, TOGETHER, Periods
from mm_autoparallel.pipeline.placement.orders.rules import end_words
from mm_autoparallel.pipeline.placement.orders.words import fits_word, step_of, stretch_words

Floats = NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def compiled_orders() -> None:
    compile_orders()


def draw_table(
    rng: np.random.Generator, num_stages: int, num_segments: int
) -> tuple[Floats, NDArray[np.int32], NDArray[np.int32]]:
    """Rows of every stretch that leaves the other stages one segment each: one or two, of twice the segments' work."""
    size = num_segments + 1
    first, count = np.zeros((num_stages, size, size), np.int32), np.zeros((num_stages, size, size), np.int32)
    rows: list[Floats] = []
    for stage in range(num_stages):
        for begin in range(stage, num_segments - num_stages + stage + 1):
            for end in range(begin + 1, num_segments - num_stages + stage + 2):
                first[stage, begin, end], count[stage, begin, end] = len(rows), rng.integers(1, 3)
                for _ in range(count[stage, begin, end]):
                    figures = draw_figures(rng, 1, 1000)[0]
                    figures[:NUM_KINDS] *= end - begin
                    rows.append(figures)
    return np.array(rows), first, count


def passing(table: Floats, period_ms: float) -> NDArray[np.bool_]:
    """[R] rows whose work passes in a period."""
    able: NDArray[np.bool_] = table[:, :NUM_KINDS].sum(axis=1) <= period_ms
    return able


@pytest.mark.parametrize("seed", range(40))
def test_a_period_is_kept_however_long_it_runs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_stages, together = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    num_segments = num_stages + int(rng.integers(0, 4))
    table, first, count = draw_table(rng, num_stages, num_segments)
    boundaries, rows = np.zeros(num_stages + 1, np.int64), np.zeros(num_stages, np.int64)
    timetables, ahead = np.zeros((2, num_stages, together)), float(rng.choice([0.0, 0.5, 2.0]))
    period_ms, steps = float(table[:, :NUM_KINDS].sum(axis=1).min()), []
    num_microbatches = 10 * num_stages * together
    allowed = np.arange(len(table)) % 2 == seed % 2
    allowed[first[count > 0]] = True  # one row of each stretch
    while len(steps) < 2:
        words = np.zeros((num_stages, NUM_KINDS * num_microbatches * (1 + len(steps))), np.int8)
        able = passing(table, period_ms) & allowed
        if not find_periodic(table, first, count, able, together, period_ms, 1, seed, boundaries, rows, timetables):
            period_ms *= 1.1
            continue
        assert able[rows].all()
        figures = table[rows]
        assert write_periodic(figures, period_ms, timetables, ahead, words)
        assert boundaries[0] == 0
        assert boundaries[-1] == num_segments
        for stage in range(num_stages):
            begin, end = boundaries[stage], boundaries[stage + 1]
            assert 0 <= rows[stage] - first[stage, begin, end] < count[stage, begin, end]
            assert fits_word(words[stage], figures[stage])
            assert np.all(np.bincount(words[stage], minlength=NUM_KINDS) * NUM_KINDS == len(words[stage]))
        steps.append(step_of(words, figures))
    assert steps[1] - steps[0] <= num_microbatches * period_ms * (1.0 + 1e-6)
    ended = words.copy()
    step_ms = end_words(figures, ended, 5, 50, 1.0, seed, 0.0)
    assert step_ms == pytest.approx(step_of(ended, figures), rel=1e-12)
    assert step_ms <= steps[1]
    assert all(fits_word(word, row) for word, row in zip(ended, figures, strict=True))


def test_two_micro_batches_together_need_less_memory_than_one() -> None:
    """Where each action takes as long, a forward and the gradient that comes back to it meet on every other stage; two
    micro-batches together pass one another."""
    num_stages, num_microbatches = 16, 40
    figures = np.zeros((num_stages, NUM_FIGURES))
    figures[:, :NUM_KINDS] = figures[:, [KEPT, PENDING]] = 1.0
    figures[:, MOST_IN_FLIGHT:] = num_microbatches
    first, count = np.zeros((2, num_stages, num_stages + 1, num_stages + 1), np.int32)
    for stage in range(num_stages):
        first[stage, stage, stage + 1], count[stage, stage, stage + 1] = stage, 1
    place = np.zeros(num_stages + 1, np.int64), np.zeros(num_stages, np.int64)
    words, rooms = np.zeros((num_stages, NUM_KINDS * num_microbatches), np.int8), []
    for together in (1, 2):
        room, timetables = 1.0, np.zeros((2, num_stages, together))
        while True:
            figures[:, ROOM] = room
            able = passing(figures, 3.0)
            if find_periodic(figures, first, count, able, together, 3.0, 2, 0, *place, timetables):
                break
            room += 1.0
        rooms.append(room)
        assert write_periodic(figures, 3.0, timetables, 0.0, words)
        assert step_of(words, figures) <= 3.0 * num_microbatches + 4.0 * num_stages
    assert rooms[1] < rooms[0] == num_stages


def test_periods_are_halved_between_what_is_found_and_what_is_not() -> None:
    periods, least_ms, asked_ms = Periods(100.0), 105.3, []
    for _ in range(80):
        asked = periods.next()
        period_ms, _ = asked.next()
        asked_ms.append(period_ms)
        asked.take(period_ms, 10.0 * period_ms if period_ms >= least_ms else np.inf)
    assert min(asked_ms) == 100.0 * (1.0 + BESIDE)
    best = min(periods.asked.values(), key=lambda asked: asked.step_ms)
    assert least_ms <= best.found_ms <= least_ms * (1.0 + NEAR)  # or it is found beyond
    assert least_ms < np.mean(asked_ms[-20:]) < least_ms * 1.02


def test_rows_of_shorter_steps_are_tried_before_all() -> None:
    """Once a period is known: first those of a step between the bound and the best, then all below the best."""

    class OfRows:
        num_microbatches = 10

        def from_period(self, *asked: object) -> Found | None:
            rows.append(int(np.count_nonzero(asked[-1])))
            return None if rows[-1] < 20 else Found(1010.0, *(np.zeros(0),) * 3)

    def rows_below(step_ms: float) -> NDArray[np.bool_]:
        return np.arange(20) < step_ms - 1000.0

    rows: list[int] = []
    periods = Periods(100.0)
    for _ in range(2):
        found = periods.look([OfRows()], rows_below, 1000.0, 1020.0, lambda: False)
        assert found is not None
    assert rows[0] == rows[2] == 20  # of the first period, and at last
    assert 0 <= rows[1] < 20


def test_periods_grow_as_far_as_the_best_step_leaves() -> None:
    """Where nothing is found they grow twice as fast each time, but not beyond what can still win."""
    asked_ms = []

    class Nothing:
        num_microbatches = 10

        def from_period(self, together: int, period_ms: float, *_: object) -> Found | None:
            asked_ms.append(period_ms)
            return None

    periods, most_ms = Periods(100.0), 1100.0
    found = periods.look([Nothing()] * 50, lambda _: np.ones(1, np.bool_), 1000.0, most_ms, lambda: False)
    assert found is None
    longest_ms = MOST_FACTOR * most_ms / 10
    assert longest_ms / (1.0 + NEAR) ** 2 < max(asked_ms) < longest_ms
    assert len(asked_ms) < 20 * len(TOGETHER)


def test_a_period_that_is_known_is_asked_for_first() -> None:
    word = np.array([0, 0] + [0, 1, 2, 0, 1, 2, 0, 1, 2] * 20 + [1, 2, 1, 2], np.int8)
    words = np.stack([word, word])
    starts_ms = np.arange(2.0 * words.size).reshape(2, -1)
    periods = Periods(2.5)
    periods.know(words, starts_ms[:, : len(word)], 500.0)
    asked = [periods.next(), periods.next()]
    assert sorted(of.together for of in asked) == [1, 3]  # another one beside what is known
    for of in asked:
        period_ms, _ = of.next()
        assert period_ms == pytest.approx(3.0, rel=2 * NEAR + BEYOND)  # three letters, one after another
    periods = Periods(2.5)
    periods.know(np.random.default_rng(0).permuted(words, axis=1), starts_ms[:, : len(word)], 500.0)
    assert not periods.asked  # no period


@pytest.mark.parametrize("seed", range(20))
def test_words_that_repeat_their_middle_are_those_of_more_micro_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_stages, together = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    table, first, count = draw_table(rng, num_stages, num_stages)
    boundaries, rows = np.zeros(num_stages + 1, np.int64), np.zeros(num_stages, np.int64)
    timetables, period_ms = np.zeros((2, num_stages, together)), float(table[:, :NUM_KINDS].sum(axis=1).max())
    able = passing(table, period_ms)
    while not find_periodic(table, first, count, able, together, period_ms, 1, seed, boundaries, rows, timetables):
        period_ms *= 1.1
    num_microbatches, figures = 12 * num_stages * together, table[rows]
    words = np.zeros((num_stages, NUM_KINDS * num_microbatches), np.int8)
    longer = np.zeros((num_stages, NUM_KINDS * (num_microbatches + 5 * together)), np.int8)
    assert write_periodic(figures, period_ms, timetables, 0.0, words)
    assert stretch_words(words, num_microbatches // 2, together, longer)
    written = np.zeros_like(longer)
    assert write_periodic(figures, period_ms, timetables, 0.0, written)
    assert np.array_equal(longer, written)
    assert not stretch_words(words, 0, together, np.zeros((num_stages, words.shape[1] + 1), np.int8))
