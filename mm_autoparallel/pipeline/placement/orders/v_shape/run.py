"""Place layers and find the orders of a V: local search, and the proof of how far what it finds is from best.

Rounds of growing work, as in `orders/run`: local search, then the placements of the least bounds, one after another,
are asked of CP-SAT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.closing import CLAIM_FRACTION, FIRST_SLACK, MOST_SLACK, SLACK_FACTOR
from mm_autoparallel.pipeline.placement.orders.figures import KEPT, NUM_KINDS, PENDING, WEIGHT_MS, Figures
from mm_autoparallel.pipeline.placement.orders.v_shape.leaf import solve_leaf
from mm_autoparallel.pipeline.placement.orders.v_shape.pieces import Pieces
from mm_autoparallel.pipeline.placement.orders.v_shape.search import anneal_words, search_rules
from mm_autoparallel.pipeline.placement.orders.v_shape.space import Chosen, Space
from mm_autoparallel.pipeline.placement.orders.v_shape.texts import named_words, read_word, write_word
from mm_autoparallel.pipeline.placement.orders.v_shape.words import (
    NUM_LETTERS,
    Words,
    fits_word,
    play_words,
    rooms_of,
)
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.step import simulate

Ints = NDArray[np.int64]

#: Gaps that are proven one after another: what a result calls proven, what it calls optimal, what solvers can tell.
GAPS = (1e-3, OPTIMAL_GAP_FRACTION, 2e-7)
#: Moves of a run of rules and of words at most, and for each action; warmth of their starts in parts of a stage's mean
#: load, by turns; pairs of runs before the first proof.
MOVES, MOVES_PER_ACTION, WARMTHS, FIRST_PAIRS = (3_000, 250_000), (8, 350), (0.1, 0.05), 6
#: And in all, times actions, that one run makes, of rules and of words: a second or two of the longest pipelines.
RUN_ACTIONS = (3_000_000, 200_000_000)
#: Placements that local search begins with, and those that are open at once at most.
NUM_STARTS, MOST_OPEN = 12, 24
#: Actions of a step from which on CP-SAT has its turn once in so many (times two) of local search: building a model of
#: them alone takes seconds. Assumed.
MOST_ASKED, SELDOM = 8_000, 16
#: First deterministic time of CP-SAT on a placement.
FIRST_EFFORT_S = 0.1


@dataclass(frozen=True, eq=False)
class Table:
    """What local search chooses from: pieces with split or with whole backwards.

    figures: [R', NUM_FIGURES]. piece, is_whole: [R']. first, count: [K, N + 1, N + 1] the rows of a stretch of
    segments.
    """

    figures: Figures
    piece: Ints
    is_whole: NDArray[np.bool_]
    first: NDArray[np.int32]
    count: NDArray[np.int32]


def build_table(pieces: Pieces) -> Table:
    """Rows of all pieces, in their order; of one that gains by either, split backwards and then whole ones."""
    piece = np.concatenate([np.flatnonzero(pieces.is_split), np.flatnonzero(pieces.is_whole)])
    is_whole = np.arange(len(piece)) >= int(pieces.is_split.sum())
    order = np.lexsort((is_whole, piece))
    piece, is_whole = piece[order], is_whole[order]
    figures = np.where(is_whole[:, None], pieces.whole[piece], pieces.split[piece])
    size = pieces.segments.num_segments + 1
    count = np.zeros((pieces.segments.problem.num_virtual_stages, size, size), dtype=np.int32)
    first = np.full_like(count, len(piece))
    place = pieces.virtual[piece], pieces.begin[piece], pieces.end[piece]
    np.add.at(count, place, 1)
    np.minimum.at(first, place, np.arange(len(piece)))
    return Table(np.ascontiguousarray(figures), piece, is_whole, first, count)


@dataclass(eq=False)
class _Best:
    """Words of local search [P, 6M] and their step, with boundaries in segments [K + 1] and table rows [K]."""

    step_ms: float
    boundaries: Ints
    rows: Ints
    words: Words


@dataclass(eq=False)
class _Leaf:
    """An open placement. slack_fraction: by how much its goal is lowered, for what is found reaches it by rounding
    alone. is_stuck: nothing here can decide it."""

    chosen: Chosen
    bound_ms: float
    effort_s: float = FIRST_EFFORT_S
    slack_fraction: float = 0.0
    is_stuck: bool = False


class VSearch:
    """One call of `place` on a V with a free order. lower_ms: a bound that is known. space: of all placements of which
    a step below space.most_ms can be made."""

    def __init__(
        self,
        problem: Problem,
        space: Space,
        lower_ms: float,
        should_stop: Callable[[], bool],
        on_better: Callable[[float, Placement], None],
        cutoff_ms: float,
        gap_fraction: float,
    ) -> None:
        self.problem, self.space, self.should_stop, self.on_better = problem, space, should_stop, on_better
        self.lower_ms = max(lower_ms, min(space.least_ms, space.most_ms) * (1.0 - CLAIM_FRACTION))
        self.upper_ms, self.gap_fraction = cutoff_ms, gap_fraction
        self.placement: Placement | None = None
        self.reason, self.num_leaves = "", 0
        self._table = build_table(space.pieces)
        self._best: _Best | None = None
        self._seed = 0
        self._open: list[_Leaf] = []
        self._is_overfull = False  # placements are too many to be listed
        self._shown_ms: dict[tuple[int, ...], float] = {}  # bounds of placements, by their rows, that CP-SAT has shown

    @property
    def _target_ms(self) -> float:
        """A step that is good enough."""
        return self.lower_ms / (1.0 - self.gap_fraction)

    @property
    def is_near(self) -> bool:
        """Whether the best step is good enough, or nearly optimal."""
        most_ms = max(self._target_ms, self.lower_ms * (1.0 + GAPS[-1]))
        return self.placement is not None and self.upper_ms <= most_ms

    def search(self) -> None:
        """First runs of local search, from placements of the least bounds and from an even one, under the orders that
        have names before any."""
        starts = self._starts()
        for start in starts:
            self._try_named(*start)
        with ThreadPoolExecutor(1) as threads:
            for pair in range(FIRST_PAIRS if starts else 0):
                if self.should_stop() or self.is_near:
                    return
                self._run_pair(threads, starts, 2 * pair)

    def prove(self) -> None:
        """Search and prove until done or told to stop."""
        gaps = (*(gap for gap in GAPS if gap > self.gap_fraction), max(self.gap_fraction, GAPS[-1]))
        with ThreadPoolExecutor(1) as threads:
            for gap_fraction in gaps:
                if self.is_near or not self._prove(threads, gap_fraction):
                    return

    def _starts(self) -> list[tuple[Ints, Ints]]:
        """Boundaries and table rows: of even work, and of the placements of the least bounds that differ in
        boundaries."""
        problem, segments = self.problem, self.space.pieces.segments
        work = (segments.forward_ms + segments.backward_ms)[segments.start]
        even = np.searchsorted(work, np.linspace(0.0, work[-1], problem.num_virtual_stages + 1))
        even = np.maximum.accumulate(np.clip(even, segments.first, segments.last))
        k = np.arange(problem.num_virtual_stages)
        has_rows = bool(np.all(self._table.count[k, even[:-1], even[1:]]))
        starts = [(even, self._table.first[k, even[:-1], even[1:]].astype(np.int64))] if has_rows else []
        known: set[tuple[int, ...]] = set()
        with suppress(TooManyPatterns):
            for chosen in self.space.list(self.space.most_ms):
                if self.should_stop() or len(known) >= NUM_STARTS:
                    break
                if chosen.boundaries not in known:
                    known.add(chosen.boundaries)
                    starts.append(self._begin(chosen))
        return starts

    def _begin(self, chosen: Chosen) -> tuple[Ints, Ints]:
        """Boundaries and the table rows that fit wherever any do."""
        pieces = np.array(chosen.rows)
        of = self.space.pieces.split[pieces]
        keeps_more = self.space.pieces.is_whole[pieces] & (of[:, PENDING] > of[:, KEPT])
        return np.array(chosen.boundaries, dtype=np.int64), self._split_rows(pieces) + keeps_more

    def _run_pair(self, threads: ThreadPoolExecutor, starts: list[tuple[Ints, Ints]], number: int) -> None:
        """Two runs of local search side by side; what they find does not depend on which is faster."""
        tasks = [self._task(starts[n % len(starts)], n) for n in (number, number + 1)]
        other = threads.submit(tasks[1])
        for found in (tasks[0](), other.result()):
            self._offer(found)

    def _task(self, start: tuple[Ints, Ints], number: int) -> Callable[[], _Best]:
        """A run of local search from boundaries and rows, to be called in any thread; every third begins with the best
        words so far, and of the others every second keeps its boundaries."""
        table, num_actions = self._table, self.problem.num_stages * NUM_LETTERS * self.problem.num_microbatches
        self._seed += 1
        best = self._best
        if best is not None and number % 3 == 2:
            found = _Best(best.step_ms, best.boundaries.copy(), best.rows.copy(), best.words.copy())
        else:
            words = np.zeros((self.problem.num_stages, num_actions // self.problem.num_stages), np.int8)
            found = _Best(np.inf, start[0].copy(), start[1].copy(), words)
        loads = table.figures[found.rows][:, :NUM_KINDS].sum()
        warm_ms = WARMTHS[number % len(WARMTHS)] * max(1e-9, float(loads) / self.problem.num_stages)
        of_rules, of_words = (
            max(1, min(most, each * num_actions, in_all // num_actions))
            for most, each, in_all in zip(MOVES, MOVES_PER_ACTION, RUN_ACTIONS, strict=True)
        )
        place = table.figures, table.first, table.count, self.space.stages, found.boundaries, found.rows, found.words
        seed, target_ms, is_new, may_move = self._seed, self._target_ms, np.isinf(found.step_ms), number % 2 == 1

        def run() -> _Best:
            if is_new:
                found.step_ms = search_rules(*place, of_rules, warm_ms, seed, target_ms, may_move)
            if np.isfinite(found.step_ms):
                warm = warm_ms if is_new else 0.3 * warm_ms
                found.step_ms = anneal_words(*place, of_words, warm, seed, target_ms, may_move)
            return found

        return run

    def _offer(self, found: _Best) -> None:
        """Go on from what is better than the best words, if the simulator agrees that it fits."""
        most_ms = np.inf if self._best is None else self._best.step_ms
        if found.step_ms < most_ms:
            placement = self._placement(found)
            step_ms = self._play(placement)
            if step_ms < most_ms:
                self._best = replace(found, step_ms=step_ms)
                self._take(placement, step_ms)

    def _try_named(self, boundaries: Ints, rows: Ints) -> None:
        """Offer the orders that have names for this placement, where they fit."""
        num_stages, count = self.problem.num_stages, self.problem.num_microbatches
        figures, stages = self._table.figures[rows], self.space.stages
        rooms, starts = np.empty((num_stages, 2)), np.empty((num_stages, NUM_LETTERS * count))
        if self.should_stop() or not rooms_of(figures, stages, rooms):
            return
        position = np.empty((len(rows), NUM_KINDS, count), np.int64)
        for words in named_words(num_stages, count):
            both = ((figures[s], figures[len(rows) - 1 - s], *rooms[s]) for s in range(num_stages))
            if all(fits_word(word, *of_stage) for word, of_stage in zip(words, both, strict=True)):
                step_ms, _ = play_words(words, figures, stages, starts, position)
                self._offer(_Best(step_ms, boundaries.copy(), rows.copy(), words.copy()))

    def adopt(self, placement: Placement) -> None:
        """Begin with a placement and its orders where it fits and is faster than the best; with its words, where its
        pieces are among those that are listed."""
        if not placement.orders:
            return
        step_ms = self._play(placement)
        if not np.isfinite(step_ms):
            return
        self._take(placement, step_ms)
        pieces, table = self.space.pieces, self._table
        ends, lanes = pieces.segments.boundaries(placement)
        found = [read_word(text) for text in placement.orders]
        words, whole = [], np.zeros(self.problem.num_virtual_stages, np.bool_)
        for s, each in enumerate(found):
            if each is None:
                return
            words.append(each[0])
            whole[s], whole[len(whole) - 1 - s] = each[1]
        rows = []
        for k in range(len(whole)):
            first, count = (int(of[k, ends[k], ends[k + 1]]) for of in (table.first, table.count))
            of = table.piece[first : first + count]
            is_same = np.all(pieces.lanes[of] == lanes[k], axis=1)
            is_same &= (table.is_whole[first : first + count] == whole[k]) | (
                table.figures[first : first + count, WEIGHT_MS] == 0.0
            )
            if not is_same.any():
                return
            rows.append(first + int(np.argmax(is_same)))
        at, at_rows = np.array(ends, dtype=np.int64), np.array(rows, dtype=np.int64)
        self._best = _Best(step_ms, at, at_rows, np.array(words))

    def _play(self, placement: Placement) -> float:
        """Its step; infinite where it does not fit."""
        timeline = simulate(self.problem, placement)
        misfits = find_misfits(self.problem, timeline.peak_memory_bytes, timeline.peak_host_bytes)
        return np.inf if misfits else timeline.step_ms

    def _take(self, placement: Placement, step_ms: float) -> None:
        if step_ms < self.upper_ms:
            self.upper_ms, self.placement = step_ms, placement
            self.on_better(step_ms, placement)

    def _placement(self, found: _Best) -> Placement:
        """The placement with its orders as texts."""
        pieces, table = self.space.pieces, self._table
        lanes = [pieces.lanes[piece].tolist() for piece in table.piece[found.rows]]
        held = pieces.segments.placement(found.boundaries.tolist(), lanes)
        is_whole = table.is_whole[found.rows] | (table.figures[found.rows, WEIGHT_MS] == 0.0)
        return replace(
            held,
            orders=tuple(
                write_word(word, (bool(is_whole[s]), bool(is_whole[len(is_whole) - 1 - s])))
                for s, word in enumerate(found.words)
            ),
        )

    def _prove(self, threads: ThreadPoolExecutor, gap_fraction: float) -> bool:
        """Rounds until no step below the best, but for the gap, is left; whether that is so."""
        goal_ms = self._goal_ms(gap_fraction)
        if self.lower_ms >= goal_ms * (1.0 - 1e-9):
            return True
        listing, next_ms = self.space.list(self.space.most_ms), self.space.least_ms
        self._open, number = [], 0
        while not self.should_stop():
            goal_ms = min(goal_ms, self._goal_ms(gap_fraction))
            self._open = [leaf for leaf in self._open if leaf.bound_ms < goal_ms]
            next_ms = self._list_on(listing, next_ms, goal_ms)
            least_ms = min([goal_ms, next_ms, *(leaf.bound_ms for leaf in self._open)])
            self.lower_ms = max(self.lower_ms, min(least_ms * (1.0 - CLAIM_FRACTION), self.upper_ms))
            if least_ms >= goal_ms:
                return True
            able = [leaf for leaf in self._open if not leaf.is_stuck]
            if not able and self._is_overfull:
                self.reason = "the ways to fill a stage are too many to be listed"
                return False
            if not able and next_ms >= goal_ms:
                self.reason = "what is left differs from the best by less than solvers can tell"
                return False
            num_actions = self.problem.num_stages * NUM_LETTERS * self.problem.num_microbatches
            if able and (num_actions <= MOST_ASKED or number % SELDOM == 0):
                self._ask(min(able, key=lambda leaf: (leaf.effort_s, leaf.bound_ms)), goal_ms, number)
            starts = [self._begin(leaf.chosen) for leaf in self._open] or self._starts()
            if starts and not self.should_stop():
                self._run_pair(threads, starts, number)
            number += 2
        return False

    def _goal_ms(self, gap_fraction: float) -> float:
        return min(self.space.most_ms, self.upper_ms * (1.0 - gap_fraction) / (1.0 - CLAIM_FRACTION))

    def _list_on(self, listing: Iterator[Chosen], next_ms: float, goal_ms: float) -> float:
        """Open placements until there are enough; a bound on those that are not listed."""
        while (
            next_ms < goal_ms
            and not self._is_overfull
            and sum(not leaf.is_stuck for leaf in self._open) < MOST_OPEN
            and not self.should_stop()
        ):
            try:
                chosen = next(listing, None)
            except TooManyPatterns:
                self._is_overfull = True
                return next_ms
            if chosen is None:
                return self.space.most_ms
            next_ms = chosen.bound_ms
            bound_ms = max(next_ms, self._shown_ms.get(chosen.rows, 0.0))
            if bound_ms < goal_ms:
                self._open.append(_Leaf(chosen, bound_ms))
        return next_ms

    def _ask(self, leaf: _Leaf, goal_ms: float, seed: int) -> None:
        """CP-SAT on one placement."""
        goal_ms *= 1.0 - leaf.slack_fraction
        rows = np.array(leaf.chosen.rows)
        relaxed = self.space.pieces.relaxed[rows]
        found = solve_leaf(
            relaxed, self.space.stages, self.problem.num_microbatches, goal_ms, leaf.effort_s, self.should_stop, seed
        )
        self.num_leaves += 1
        if found.answer == "infeasible":
            leaf.bound_ms = self._shown_ms[leaf.chosen.rows] = max(leaf.bound_ms, goal_ms)
            leaf.is_stuck = leaf.slack_fraction > 0.0
        elif found.answer == "unknown":
            leaf.effort_s *= 2.0
        elif not self._offer_leaf(leaf, rows, found.words, goal_ms):
            leaf.slack_fraction = max(FIRST_SLACK, leaf.slack_fraction * SLACK_FACTOR)
            leaf.is_stuck = leaf.slack_fraction > MOST_SLACK or not self.space.pieces.is_exact[rows].all()

    def _offer_leaf(self, leaf: _Leaf, rows: Ints, words: Words | None, goal_ms: float) -> bool:
        """Take what CP-SAT found; whether it fits, and is below the goal as it seemed."""
        assert words is not None
        found = _Best(np.inf, np.array(leaf.chosen.boundaries, dtype=np.int64), self._split_rows(rows), words)
        placement = self._placement(found)
        step_ms = self._play(placement)
        if step_ms < self.upper_ms:
            self._best = replace(found, step_ms=step_ms)
            self._take(placement, step_ms)
        return step_ms < goal_ms

    def _split_rows(self, pieces: Ints) -> Ints:
        """Table rows of pieces whose backwards are split."""
        rows: Ints = np.searchsorted(self._table.piece, pieces)
        return rows
