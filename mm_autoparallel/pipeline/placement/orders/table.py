"""Table: the rows that local search chooses from, and the text of a word that it found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.bounds import Bounds
from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD,
    INPUT,
    KEPT,
    MOST_IN_FLIGHT,
    PENDING,
    ROOM,
    WEIGHT,
    WEIGHT_MS,
    Figures,
)
from mm_autoparallel.pipeline.placement.orders.options import Options
from mm_autoparallel.pipeline.problem import Placement

Ints = NDArray[np.int64]
Words = NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Table:
    """What local search chooses from: rows of options, split or whole, that are part of some placement.

    figures: [R', NUM_FIGURES]. option, is_whole: [R']. first, count: [P, N + 1, N + 1]. Rows of a stretch are in order
    of their bounds.
    """

    figures: Figures
    option: Ints
    is_whole: NDArray[np.bool_]
    first: NDArray[np.int32]
    count: NDArray[np.int32]


def build_table(options: Options, bounds: Bounds) -> Table:
    """The rows that lie on some way through all stages."""
    able = np.isfinite(bounds.row_ms)
    chosen = [np.flatnonzero(able & options.is_split), np.flatnonzero(able & options.is_whole)]
    option = np.concatenate(chosen)
    is_whole = np.repeat([False, True], [len(of) for of in chosen])
    order = np.lexsort(
        (is_whole, option, bounds.row_ms[option], options.end[option], options.begin[option], options.stage[option])
    )
    option, is_whole = option[order], is_whole[order]
    figures = np.where(is_whole[:, None], options.whole[option], options.split[option])
    first, count = np.full_like(options.first, len(option)), np.zeros_like(options.count)
    place = options.stage[option], options.begin[option], options.end[option]
    np.add.at(count, place, 1)
    np.minimum.at(first, place, np.arange(len(option)))
    return Table(np.ascontiguousarray(figures), option, is_whole, first, count)


def hold_pipelines(options: Options, table: Table) -> NDArray[np.bool_]:
    """[R'] whether a row has room for as many micro-batches as its stage and those after it are, and for one of them
    whose weight gradient waits: then no stage before it waits for memory.
    """
    problem, figures = options.segments.problem, table.figures
    ahead = np.minimum(problem.num_stages - options.stage[table.option], problem.num_microbatches)
    pending = np.where(table.is_whole, figures[:, KEPT], figures[:, PENDING])
    needed = (ahead - 1) * figures[:, KEPT] + np.maximum(figures[:, KEPT], pending)
    return (needed <= figures[:, ROOM]) & (figures[:, MOST_IN_FLIGHT] >= ahead)


def write_word(word: Words, is_whole: bool) -> str:
    """A stage's order as text; whole: its backwards are whole, and weight gradients are part of them."""
    ran = [0, 0, 0]
    texts = []
    for letter in word.tolist():
        if letter != WEIGHT or not is_whole:
            texts.append(f"{ran[letter]}{'B' if is_whole and letter == INPUT else 'FIW'[letter]}0")
        ran[letter] += 1
    return " ".join(texts)


def read_word(text: str) -> tuple[Words, bool] | None:
    """The word [3M] of a stage's order, and whether its backwards are whole; None where some are and some are not."""
    letters = [action[-2] for action in text.split()]
    is_whole = "B" in letters
    if is_whole and ("I" in letters or "W" in letters):
        return None
    kinds = {"F": [FORWARD], "B": [INPUT, WEIGHT], "I": [INPUT], "W": [WEIGHT]}
    return np.array([kind for letter in letters for kind in kinds[letter]], dtype=np.int8), is_whole


def read_placement(options: Options, table: Table, placement: Placement) -> tuple[Ints, Ints, Words] | None:
    """Boundaries in segments [P + 1], rows of the table [P] and words [P, 3M] of a placement with orders; None where a
    row is not there, or a stage has whole backwards and split ones."""
    ends, lanes = options.segments.boundaries(placement)
    words, rows = [], []
    for s, text in enumerate(placement.orders):
        found = read_word(text)
        first, count = (int(of[s, ends[s], ends[s + 1]]) for of in (table.first, table.count))
        mine = slice(first, first + count)
        is_same = np.all(options.lanes[table.option[mine]] == lanes[s], axis=1)
        if found is not None:
            is_same &= (table.is_whole[mine] == found[1]) | (table.figures[mine, WEIGHT_MS] == 0.0)
        if found is None or not is_same.any():
            return None
        words.append(found[0])
        rows.append(first + int(np.argmax(is_same)))
    return np.array(ends, dtype=np.int64), np.array(rows, dtype=np.int64), np.array(words)
