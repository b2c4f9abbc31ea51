"""Placements near one that is known: layers move from a stage to any other, and words fit what comes of it."""

from __future__ import annotations

import numpy as np
import pytest
from test_order_rules import draw_figures

from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.figures import FORWARD, INPUT, NUM_KINDS, WEIGHT
from mm_autoparallel.pipeline.placement.orders.local import Found, Run
from mm_autoparallel.pipeline.placement.orders.search import leap
from mm_autoparallel.pipeline.placement.orders.table import Table
from mm_autoparallel.pipeline.placement.orders.words import fits_word, step_of

NUM_STAGES, NUM_SEGMENTS, COUNT, WAYS = 4, 9, 6, 3


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_orders()


def draw_table(seed: int) -> Table:
    """Several ways to fill each stage with each stretch of segments, but for stretches that are too long."""
    rng = np.random.default_rng(seed)
    first, count = np.zeros((2, NUM_STAGES, NUM_SEGMENTS + 1, NUM_SEGMENTS + 1), np.int32)
    figures = []
    for stage in range(NUM_STAGES):
        for begin in range(NUM_SEGMENTS):
            for end in range(begin + 1, min(NUM_SEGMENTS, begin + 5) + 1):
                first[stage, begin, end], count[stage, begin, end] = len(figures), WAYS
                ways = draw_figures(rng, WAYS, COUNT)
                ways[:, :NUM_KINDS] *= end - begin
                figures += list(ways)
    return Table(np.array(figures), np.arange(len(figures)), np.zeros(len(figures), np.bool_), first, count)


def begin_with(table: Table, boundaries: list[int]) -> Found:
    """One micro-batch after another, which fits everywhere."""
    rows = np.array([table.first[s, boundaries[s], boundaries[s + 1]] for s in range(NUM_STAGES)], np.int64)
    words = np.tile(np.array([FORWARD, INPUT, WEIGHT], np.int8), (NUM_STAGES, COUNT))
    return Found(step_of(words, table.figures[rows]), np.array(boundaries), rows, words)


def is_of(found: Found, table: Table) -> bool:
    """Whether its rows are ways to hold its stretches, and its words fit them and take its step."""
    ends = found.boundaries.tolist()
    firsts = [int(table.first[s, ends[s], ends[s + 1]]) for s in range(NUM_STAGES)]
    figures = table.figures[found.rows]
    return (
        ends[0] == 0
        and ends[-1] == NUM_SEGMENTS
        and all(first <= row < first + WAYS for first, row in zip(firsts, found.rows, strict=True))
        and all(fits_word(word, of) for word, of in zip(found.words, figures, strict=True))
        and found.step_ms == step_of(found.words, figures)
    )


@pytest.mark.parametrize("seed", range(12))
def test_leaps_fit_and_move_layers_from_any_stage_to_any(seed: int) -> None:
    table, able = draw_table(seed), np.ones(10_000, np.bool_)
    known = begin_with(table, [0, 2, 4, 6, NUM_SEGMENTS])
    moved = set()
    for turn in range(400):
        near = known.copy()
        if not leap(table.figures, table.first, table.count, able, near.boundaries, near.rows, near.words, turn):
            continue
        near.step_ms = step_of(near.words, table.figures[near.rows])
        assert is_of(near, table)
        sizes = np.diff(near.boundaries) - np.diff(known.boundaries)
        if np.abs(sizes).sum() == 2:
            moved.add((int(np.argmin(sizes)), int(np.argmax(sizes))))
    assert len(moved) == NUM_STAGES * (NUM_STAGES - 1)
    assert np.array_equal(known.words, begin_with(table, known.boundaries.tolist()).words)  # it stays as it was


def test_stages_between_both_ends_of_a_move_keep_their_ways() -> None:
    """The ways to hold equal stretches differ here in what they take alone."""
    table, able = draw_table(0), np.ones(10_000, np.bool_)
    takes = np.random.default_rng(1).uniform(1.0, 2.0, (WAYS, NUM_KINDS))
    table.figures[:, :NUM_KINDS] = takes[np.arange(len(table.figures)) % WAYS]
    known = begin_with(table, [0, 2, 4, 6, NUM_SEGMENTS])
    known.rows += [0, 1, 2, 0]
    seen = 0
    for turn in range(400):
        near = known.copy()
        leap(table.figures, table.first, table.count, able, near.boundaries, near.rows, near.words, turn)
        if (near.boundaries - known.boundaries).tolist() in ([0, 1, 1, 1, 0], [0, -1, -1, -1, 0]):
            seen += bool(np.array_equal(near.rows[1:3] % WAYS, known.rows[1:3] % WAYS))
    assert seen > 5


def test_rows_that_are_not_able_are_left_out() -> None:
    table = draw_table(3)
    known = begin_with(table, [0, 2, 4, 6, NUM_SEGMENTS])
    able = np.zeros(len(table.figures), np.bool_)
    for turn in range(100):
        near = known.copy()
        if leap(table.figures, table.first, table.count, able, near.boundaries, near.rows, near.words, turn):
            assert np.array_equal(near.rows, known.rows)  # it came back to where it was


@pytest.mark.parametrize("seed", range(8))
def test_a_run_gives_the_best_of_what_it_tried(seed: int) -> None:
    table = draw_table(seed)
    known = begin_with(table, [0, 2, 4, 6, NUM_SEGMENTS])
    run = Run(table, COUNT, 2_000, 1.0, seed, 0.0, False)
    found = run.leap(known, np.ones(len(table.figures), np.bool_))
    assert found.step_ms < known.step_ms
    assert is_of(found, table)
