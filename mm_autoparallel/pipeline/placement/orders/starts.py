"""Starts: the placements that local search of free orders begins with, and the rows that their stages begin in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.bounds import Bounds, join_rows, list_placements
from mm_autoparallel.pipeline.placement.orders.figures import NUM_KINDS
from mm_autoparallel.pipeline.placement.orders.options import Options
from mm_autoparallel.pipeline.placement.orders.table import Table, build_table, hold_pipelines
from mm_autoparallel.pipeline.placement.orders.words import Words, play_words

Ints = NDArray[np.int64]

#: Placements that a search begins with.
NUM_STARTS = 12
#: Memory binds where the least bound of placements whose stages never wait for it is so many times that of all.
#: Assumed.
TIGHT_FACTOR = 1.01


@dataclass(frozen=True, eq=False)
class Starts:
    """is_steady: [R'] rows of the table that hold as many micro-batches as stages follow. steady_bounds: of these.
    least_work_ms: of one micro-batch in the fullest stage, where that is least."""

    table: Table
    bounds: Bounds
    is_steady: NDArray[np.bool_]
    steady_bounds: Bounds
    least_work_ms: float

    @property
    def is_tight(self) -> bool:
        """Whether memory makes stages wait in the placements of the least bounds."""
        return self.steady_bounds.least_ms > TIGHT_FACTOR * self.bounds.least_ms

    def first(self, should_stop: Callable[[], bool]) -> list[Ints]:
        """Boundaries of the placements of the least bounds that local search can begin with, those in turn whose stages
        hold as many micro-batches as stages follow.
        """
        starts: list[Ints] = []
        listings = [list_placements(bounds, np.inf) for bounds in (self.steady_bounds, self.bounds)]
        while listings and len(starts) < NUM_STARTS and not should_stop():
            listing = listings.pop(0)
            for _, boundaries in listing:
                if self.has_rows(boundaries):
                    starts.append(np.array(boundaries, dtype=np.int64))
                    listings.append(listing)
                    break
        return starts

    def has_rows(self, boundaries: Sequence[int] | Ints) -> bool:
        """Whether the table has rows for what every stage holds."""
        return all(self.table.count[s, boundaries[s], boundaries[s + 1]] for s in range(len(boundaries) - 1))

    def times(self, words: Words, rows: Ints) -> NDArray[np.float64]:
        """[P, 3M] when the letters of words begin whose stages have these rows."""
        starts_ms = np.empty(words.shape)
        position = np.empty((len(words), NUM_KINDS, words.shape[1] // NUM_KINDS), np.int64)
        play_words(words, self.table.figures[rows], starts_ms, position)
        return starts_ms

    def rows(self, boundaries: Ints, steady: bool = False) -> Ints:
        """The table's row of least bound of each stage. steady: of those that hold as many micro-batches as stages
        follow, where there are such.
        """
        rows = []
        for s in range(len(boundaries) - 1):
            stretch = s, boundaries[s], boundaries[s + 1]
            first, count = int(self.table.first[stretch]), int(self.table.count[stretch])
            of = self.bounds.row_ms[self.table.option[first : first + count]]
            held = self.is_steady[first : first + count]
            of = np.where(held, of, np.inf) if steady and held.any() else of
            rows.append(first + int(np.argmin(of)))
        return np.array(rows, dtype=np.int64)


def find_starts(options: Options, bounds: Bounds) -> Starts:
    """The starts of a problem with these options."""
    table = build_table(options, bounds)
    is_steady = hold_pipelines(options, table)
    steady_ms = np.full_like(bounds.row_ms, np.inf)
    held = table.option[is_steady]
    steady_ms[held] = bounds.row_ms[held]
    work_ms = np.full_like(bounds.row_ms, np.inf)
    np.minimum.at(work_ms, table.option, table.figures[:, :NUM_KINDS].sum(axis=1))
    return Starts(table, bounds, is_steady, join_rows(options, steady_ms), join_rows(options, work_ms).least_ms)
