"""Runs of local search: from words of pairs, from rules, from timetables or from the best words, followed by moves of
letters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import NUM_KINDS
from mm_autoparallel.pipeline.placement.orders.justify import justify_words
from mm_autoparallel.pipeline.placement.orders.periodic import find_periodic, write_periodic
from mm_autoparallel.pipeline.placement.orders.rules import NUM_RULES, begin_rules, end_words, search_rules
from mm_autoparallel.pipeline.placement.orders.search import anneal_words, leap, search_pairs
from mm_autoparallel.pipeline.placement.orders.table import Table
from mm_autoparallel.pipeline.placement.orders.timetable import SAME
from mm_autoparallel.pipeline.placement.orders.words import step_of, stretch_words

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.int8]
Rules = NDArray[np.float64]
"""Columns of several units, see `rules`."""

#: Moves of one run at most, for each action, and times actions: half a second or so.
MOVES, MOVES_PER_ACTION, ROUND_ACTIONS = 30_000, 80, 60_000_000
#: Words of pairs tried, where many are, in parts of a run's moves, and few at least; words that rules make, which take
#: ten times as long, and the moves of letters that follow them. Assumed.
PAIRS_PART, FEW_PAIRS, RULES_PART, AFTER_RULES_PART = 3, 10_000, 7, 4
#: Forwards that run ahead of a steady part, for each stage behind; numbers of last micro-batches tried with each of
#: them and with the best, which goes on where it is that near; ends tried then, in parts of a run's moves. Assumed.
AHEAD, FEW_LASTS, LASTS, NEAR_FACTOR, ENDS_PART = (0.0, 0.2, 0.4, 0.7, 1.0, 1.5), 7, 28, 1.01, 8
#: How many micro-batches a step has whose ends are looked for, in stages, where these are such a part of all or less.
#: Assumed.
SHORT_STAGES, SHORT_PART = 3, 0.7
#: Placements near a known one that a run tries, each in such a part of its moves, and as many more that may not fit.
#: Assumed.
LEAPS, MOST_LEAPS = 10, 100


def count_moves(num_actions: int) -> int:
    """Of a run over so many actions."""
    return max(1, min(MOVES, MOVES_PER_ACTION * num_actions, ROUND_ACTIONS // num_actions))


@dataclass(eq=False)
class Found:
    """Words [P, 3M] that a run found, and their step, with boundaries in segments [P + 1] and table rows [P].

    is_parted: it was tried to split more of its backwards.
    """

    step_ms: float
    boundaries: Ints
    rows: Ints
    words: Words
    is_parted: bool = False

    def copy(self) -> Found:
        """One that may be changed."""
        return Found(self.step_ms, self.boundaries.copy(), self.rows.copy(), self.words.copy())


@dataclass(eq=False)
class Ruled:
    """Rules [P, NUM_RULES], and the step of the words that they make of these boundaries and rows."""

    step_ms: float
    boundaries: Ints
    rows: Ints
    rules: Rules


@dataclass(frozen=True, eq=False)
class Run:
    """What every run has: the rows to choose from, M micro-batches, so many moves, the warmth of its start, a seed, the
    step that is good enough, and whether boundaries and modes may change."""

    table: Table
    num_microbatches: int
    num_moves: int
    warm_ms: float
    seed: int
    target_ms: float
    may_move: bool

    def from_pairs(self, boundaries: Ints, rows: Ints, warmups: Ints) -> Found:
        """Begin with so many forwards of each stage, [P], and pairs in turn. Overwrites boundaries and rows."""
        words = self._words(len(rows))
        num_moves = max(self.num_moves // PAIRS_PART, min(self.num_moves, FEW_PAIRS))
        step_ms = search_pairs(
            *self._rows, boundaries, rows, warmups, words, num_moves, self.warm_ms, self.seed, self.target_ms,
            self.may_move,
        )  # fmt: skip
        return self.go_on(Found(step_ms, boundaries, rows, words))

    def from_place(self, boundaries: Ints, rows: Ints) -> tuple[Found, Ruled]:
        """Begin with rules of no waits. Overwrites boundaries and rows."""
        rules = np.empty((len(rows), NUM_RULES))
        begin_rules(self.num_microbatches, rules)
        return self.from_rules(Ruled(np.inf, boundaries, rows, rules))

    def from_rules(self, ruled: Ruled) -> tuple[Found, Ruled]:
        """Begin with rules that are known; the best words, and the best rules."""
        boundaries, rows, rules = ruled.boundaries.copy(), ruled.rows.copy(), ruled.rules.copy()
        words = self._words(len(rows))
        step_ms = search_rules(
            *self._rows, boundaries, rows, rules, words, max(1, self.num_moves // RULES_PART), self.warm_ms, self.seed,
            self.target_ms, self.may_move,
        )  # fmt: skip
        best = Ruled(step_ms, boundaries.copy(), rows.copy(), rules)
        return self.go_on(Found(step_ms, boundaries, rows, words), AFTER_RULES_PART), best

    def from_period(
        self, together: int, period_ms: float, effort: int, most_ms: float, able: NDArray[np.bool_]
    ) -> Found | None:
        """Begin with stages in which so many micro-batches together pass once every period_ms each, made of rows [R']
        that are able; None where none are found. Goes on from steps that are near most_ms or below it."""
        num_stages = self.table.first.shape[0]
        boundaries, rows = np.zeros(num_stages + 1, np.int64), np.zeros(num_stages, np.int64)
        timetables = np.zeros((2, num_stages, together))
        able = able & (self.table.figures[:, :NUM_KINDS].sum(axis=1) <= period_ms * (1.0 + SAME))
        if not find_periodic(*self._rows, able, together, period_ms, effort, self.seed, boundaries, rows, timetables):
            return None
        short, figures = self._shortened(together), self.table.figures[rows]
        missing_ms = (self.num_microbatches - short.num_microbatches) * period_ms
        words = short._words(num_stages)
        steady = words.copy()
        best = Found(np.inf, boundaries, rows, words)
        for ahead in AHEAD:
            if write_periodic(figures, period_ms, timetables, ahead, words):
                ended = words.copy()
                step_ms = end_words(figures, ended, FEW_LASTS, 0, self.warm_ms, self.seed, 0.0)
                if step_ms < best.step_ms:
                    best, steady = Found(step_ms, boundaries, rows, ended), words.copy()
        if best.step_ms + missing_ms > NEAR_FACTOR * most_ms:
            return self._stretched(best, together)
        found = self._stretched(short.end_anew(replace(best, words=steady)), together)
        if short is self:
            return found
        return self.go_on(found if np.isfinite(found.step_ms) else self._stretched(best, together))

    def _shortened(self, together: int) -> Run:
        """A run of few micro-batches, whose moves take less time, so that there are more of them; ends at no step."""
        count = SHORT_STAGES * self.table.first.shape[0]
        count += (self.num_microbatches - count) % together
        if SHORT_PART * self.num_microbatches < count:
            return self
        num_moves = min(MOVES, self.num_moves * self.num_microbatches // count)
        return replace(self, num_microbatches=count, num_moves=num_moves, target_ms=0.0)

    def _stretched(self, found: Found, together: int) -> Found:
        """Words of few micro-batches made as many as there are, by repeating what passes in the middle, where that
        takes least; infinite where nothing there can be repeated."""
        count, num_stages = found.words.shape[1] // NUM_KINDS, len(found.words)
        if count == self.num_microbatches:
            return found
        words, figures = self._words(num_stages), self.table.figures[found.rows]
        best = Found(np.inf, found.boundaries, found.rows, words)
        for first in range(count // 4, 3 * count // 4):
            if stretch_words(found.words, first, together, words):
                step_ms = step_of(words, figures)
                if step_ms < best.step_ms:
                    best.step_ms, best.words = step_ms, words.copy()
        return best

    def end_anew(self, found: Found) -> Found:
        """Look for rules that end words which are known, overwritten with the best, and move letters of these."""
        figures, num_moves = self.table.figures[found.rows], max(1, self.num_moves // ENDS_PART)
        found.step_ms = end_words(figures, found.words, LASTS, num_moves, self.warm_ms, self.seed, self.target_ms)
        return self.go_on(found)

    def go_on(self, found: Found, part: int = 1) -> Found:
        """Justify words that are known, and move letters of them; they are overwritten with the best. part: of the
        run's moves."""
        if np.isfinite(found.step_ms):
            self._justify(found)
            found.step_ms = anneal_words(
                *self._rows, found.boundaries, found.rows, found.words, max(1, self.num_moves // part),
                self.warm_ms, self.seed, self.target_ms, self.may_move,
            )  # fmt: skip
            self._justify(found)
        return found

    def leap(self, found: Found, able: NDArray[np.bool_]) -> Found:
        """Try placements near that of words that are known, each with moves of letters from these, made of rows [R']
        that are able; always from the best, which is given back."""
        tried = 0
        for turn in range(MOST_LEAPS):
            near = found.copy()
            if not leap(*self._rows, able, near.boundaries, near.rows, near.words, MOST_LEAPS * self.seed + turn):
                continue
            near.step_ms = step_of(near.words, self.table.figures[near.rows])
            replace(self, seed=self.seed + turn).go_on(near, LEAPS)
            found = near if near.step_ms < found.step_ms else found
            tried += 1
            if tried == LEAPS:
                break
        return found

    def _justify(self, found: Found) -> None:
        found.step_ms = justify_words(found.words, self.table.figures[found.rows])

    @property
    def _rows(self) -> tuple[Floats, NDArray[np.int32], NDArray[np.int32]]:
        return self.table.figures, self.table.first, self.table.count

    def _words(self, num_stages: int) -> Words:
        return np.zeros((num_stages, NUM_KINDS * self.num_microbatches), np.int8)
