"""Compile the kernels of this room before any clock runs, where this machine never did; free orders alone need them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import NUM_FIGURES, NUM_KINDS
from mm_autoparallel.pipeline.placement.orders.justify import justify_words
from mm_autoparallel.pipeline.placement.orders.periodic import find_periodic, write_periodic
from mm_autoparallel.pipeline.placement.orders.propagate import refutes
from mm_autoparallel.pipeline.placement.orders.rules import NUM_RULES, begin_rules, end_words, search_rules
from mm_autoparallel.pipeline.placement.orders.search import anneal_words, search_pairs
from mm_autoparallel.pipeline.placement.orders.shaving import Shaving
from mm_autoparallel.pipeline.placement.orders.slimming import find_peak, hold_at_most, play_actions
from mm_autoparallel.pipeline.placement.orders.words import stretch_words
from mm_autoparallel.pipeline.simulate.rooms import compile_rooms

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def compile_orders() -> None:
    """Compile them, or wait for a process that does; standard error says why."""
    compile_rooms(ORDERS)


def _compile_search() -> None:
    table, first, count = _small()
    boundaries, rows, warmups = np.array([0, 1, 2]), np.array([0, 1]), np.array([1, 1])
    words = np.zeros((2, NUM_KINDS), dtype=np.int8)
    place = table, first, count, boundaries, rows
    search_pairs(*place, warmups, words, 1, 1.0, 0, 0.0, True)
    rules = np.empty((2, NUM_RULES))
    begin_rules(1, rules)
    search_rules(*place, rules, words, 1, 1.0, 0, 0.0, True)
    end_words(table, words, 1, 1, 1.0, 0, 0.0)
    anneal_words(*place, words, 1, 1.0, 0, 0.0, True)
    justify_words(words, table)


def _compile_proofs() -> None:
    """And what makes timetables and slims them."""
    table, first, count = _small()
    boundaries, rows = np.array([0, 1, 2]), np.array([0, 1])
    words = np.zeros((2, NUM_KINDS), dtype=np.int8)
    timetables = np.zeros((2, 2, 1))
    find_periodic(table, first, count, np.ones(len(table), np.bool_), 1, 3.0, 1, 0, boundaries, rows, timetables)
    write_periodic(table, 3.0, timetables, 0.0, words)
    stretch_words(words, 0, 1, np.zeros((2, 2 * NUM_KINDS), dtype=np.int8))
    refutes(1, table, 1.0)
    Shaving(1, table, 10.0).go_on()
    actions, alone = np.zeros((1, 2), dtype=np.int8), np.ones(1)
    play_actions(actions, np.array([2]), np.ones((1, 4)), np.ones((2, 0)), alone)
    find_peak(actions[0], 1.0, 1.0)
    hold_at_most(actions[0], 1.0, 1.0, 1.0, True, actions[0].copy())


def _small() -> tuple[Floats, Ints, Ints]:
    """Figures, first ways and their counts: two stages of one segment each, for one micro-batch."""
    first, count = np.zeros((2, 3, 3), dtype=np.int32), np.zeros((2, 3, 3), dtype=np.int32)
    for stage in range(2):
        first[stage, stage, stage + 1], count[stage, stage, stage + 1] = stage, 1
    return np.ones((2, NUM_FIGURES)), first, count


ORDERS = (_compile_search, _compile_proofs)
"""Rooms whose kernels free orders of one chunk a stage run."""
