"""Place layers and find the order of every stage: local search for both, and the proof of how far they are from best.

Rounds of growing work. In each, one thread searches while this one lists and refutes placements, and asks CP-SAT about
those that are left. What a round finds does not depend on which thread is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.placement.infeasible import explain_windows
from mm_autoparallel.pipeline.placement.orders.bounds import bound_stages, list_placements
from mm_autoparallel.pipeline.placement.orders.closing import Closing, Part
from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.placement.orders.figures import NUM_KINDS, WEIGHT_MS
from mm_autoparallel.pipeline.placement.orders.leaf import Leaf
from mm_autoparallel.pipeline.placement.orders.levels import options_below
from mm_autoparallel.pipeline.placement.orders.mixed_leaf import MixedLeaf
from mm_autoparallel.pipeline.placement.orders.options import Options
from mm_autoparallel.pipeline.placement.orders.search import anneal_words, search_pairs
from mm_autoparallel.pipeline.placement.orders.table import build_table, write_word
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION, PlacementResult, infeasible_result
from mm_autoparallel.pipeline.placement.segments import cut_into_units
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import find_misfits, microbatch_classes
from mm_autoparallel.pipeline.simulate.step import simulate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.int8]

#: Gaps that are proven one after another: what a result calls proven, what it calls optimal, and what solvers can tell.
GAPS = (1e-3, OPTIMAL_GAP_FRACTION, 2e-7)
#: Moves of one run of each kind of search at most, and for each action; warmth of its start in parts of a stage's mean
#: load; runs of a first round.
MOVES, MOVES_PER_ACTION, WARMTHS, FIRST_RUNS = 30_000, 80, (0.03, 0.1), 6
#: Placements that a search begins with, those that a round looks at, and parts that it divides.
NUM_STARTS, LISTED, DIVIDED = 12, 2_000, 500
#: Of the placements that a round looks at one in so many has its bound raised.
REFINED = 20
#: Runs of local search beside CP-SAT, for each second of its deterministic time.
RUNS_PER_EFFORT = 24
#: How much longer runs are whose boundaries stay, by turns; 0: they move.
FOCUS = (0, 0, 4)
#: Ways to fill a stage are listed first for steps below this many times the bound. Assumed.
NEAR_FACTOR = 1.25
#: Moves in all, times actions, that one task of a round makes: half a second or so.
ROUND_ACTIONS = 60_000_000


@dataclass(eq=False)
class _Best:
    """The best step, with boundaries in units [P + 1], table rows [P] and words [P, 3M]."""

    step_ms: float
    boundaries: Ints
    rows: Ints
    words: Words


class OrderSearch:
    """One call of `place` on a problem with a free order. lower_ms: a bound that is known."""

    def __init__(
        self,
        problem: Problem,
        options: Options,
        lower_ms: float,
        should_stop: Callable[[], bool],
        on_better: Callable[[float, Placement], None],
        cutoff_ms: float,
        gap_fraction: float,
    ) -> None:
        self.problem, self.options, self.should_stop, self.on_better = problem, options, should_stop, on_better
        self.bounds = bound_stages(options)
        self.upper_ms, self.gap_fraction = cutoff_ms, gap_fraction
        self.lower_ms = lower_ms
        self.best: _Best | None = None
        self.placement: Placement | None = None
        self.num_leaves = 0
        self.reason = ""
        self.table = build_table(options, self.bounds)
        self._load_ms = 1.0
        self._num_listed = max(4, int(LISTED * 8 * 48**2 / (problem.num_stages * (3 * problem.num_microbatches) ** 2)))
        self._seed = 0

    def search(self) -> None:
        """The first runs of local search, from placements of the least bounds."""
        with ThreadPoolExecutor(1) as threads:
            starts = self._first_starts()
            if not starts:
                return
            loads = self.table.figures[self._rows(starts[0])][:, :NUM_KINDS].sum(axis=1)
            self._load_ms = max(1e-9, float(loads.mean()))
            for round_number in range(FIRST_RUNS):
                if self.should_stop():
                    return
                tasks = [self._task(starts, 2 * round_number + side) for side in range(2)]
                other = threads.submit(tasks[0])
                found = [tasks[1](), other.result()]
                for best in found[::-1]:
                    self._offer(best)
                if self.best is not None and self.best.step_ms <= self.lower_ms * (1.0 + OPTIMAL_GAP_FRACTION):
                    break

    def prove(self) -> None:
        """Search and prove until done or told to stop."""
        with ThreadPoolExecutor(1) as threads:
            for gap_fraction in (*(gap for gap in GAPS if gap > self.gap_fraction), max(self.gap_fraction, GAPS[-1])):
                if not self._prove(threads, gap_fraction):
                    return

    def _first_starts(self) -> list[Ints]:
        """Boundaries of the placements of the least bounds that local search can begin with."""
        starts: list[Ints] = []
        for _, boundaries in list_placements(self.bounds, np.inf):
            if self._has_rows(boundaries):
                starts.append(np.array(boundaries, dtype=np.int64))
            if len(starts) == NUM_STARTS or self.should_stop():
                break
        return starts

    def _has_rows(self, boundaries: Sequence[int] | Ints) -> bool:
        """Whether the table has rows for what every stage holds."""
        return all(self.table.count[s, boundaries[s], boundaries[s + 1]] for s in range(self.problem.num_stages))

    def _rows(self, boundaries: Ints) -> Ints:
        """The table's row of least bound of each stage."""
        rows = []
        for s in range(self.problem.num_stages):
            stretch = s, boundaries[s], boundaries[s + 1]
            first, count = int(self.table.first[stretch]), int(self.table.count[stretch])
            of = self.bounds.row_ms[self.table.option[first : first + count]]
            rows.append(first + int(np.argmin(of)))
        return np.array(rows, dtype=np.int64)

    def _task(self, starts: list[Ints], number: int, focus: int = 0) -> Callable[[], _Best]:
        """A run of local search from one of the starts, to be called in any thread. focus: 0 moves boundaries too; else
        they stay, and the run is so many times as long."""
        boundaries, num_stages = starts[number % len(starts)].copy(), self.problem.num_stages
        count, rows = self.problem.num_microbatches, self._rows(boundaries)
        self._seed += 1
        turn = number // len(starts) + number
        seed, warm_ms = self._seed, WARMTHS[turn % len(WARMTHS)] * self._load_ms
        table, target_ms = self.table, self.lower_ms
        ahead = np.arange(num_stages, 0, -1)
        warmups = ahead if number % 2 else 2 * ahead - 1
        words = np.zeros((num_stages, NUM_KINDS * count), np.int8)
        moves = self._num_moves(words.size) * max(1, focus)
        of_table = table.figures, table.first, table.count

        def search() -> _Best:
            place = boundaries, rows
            step_ms = search_pairs(
                *of_table,
                *place,
                warmups,
                words,
                max(moves // 3, min(moves, 10_000)),
                warm_ms,
                seed,
                target_ms,
                focus == 0,
            )
            if np.isfinite(step_ms):
                step_ms = anneal_words(*of_table, *place, words, moves, warm_ms, seed, target_ms, focus == 0)
            return _Best(step_ms, boundaries, rows, words)

        return search

    def _num_moves(self, num_actions: int) -> int:
        """Of a run over so many actions."""
        return max(1, min(MOVES, MOVES_PER_ACTION * num_actions, ROUND_ACTIONS // num_actions))

    def _polish(self, number: int) -> Callable[[], _Best]:
        """A run of local search from the best words."""
        assert self.best is not None
        best = _Best(self.best.step_ms, self.best.boundaries.copy(), self.best.rows.copy(), self.best.words.copy())
        self._seed += 1
        seed, target_ms, table = self._seed, self.lower_ms, self.table
        warm_ms = WARMTHS[number % len(WARMTHS)] * 0.3 * self._load_ms
        moves = 2 * self._num_moves(best.words.size)

        def search() -> _Best:
            best.step_ms = anneal_words(
                table.figures, table.first, table.count, best.boundaries, best.rows, best.words, moves, warm_ms, seed,
                target_ms, number % 2 == 0,
            )  # fmt: skip
            return best

        return search

    def _offer(self, found: _Best) -> bool:
        """Take what is better, if the simulator agrees that it fits; whether it was taken."""
        if not np.isfinite(found.step_ms) or found.step_ms >= self.upper_ms:
            return False
        if not self.offer(self._placement(found)):
            return False
        self.best = replace(found, step_ms=self.upper_ms)
        return True

    def offer(self, placement: Placement) -> bool:
        """Take a placement with its orders where it fits and is faster than the best; whether it was taken."""
        timeline = simulate(self.problem, placement)
        misfits = find_misfits(self.problem, timeline.peak_memory_bytes, timeline.peak_host_bytes)
        if misfits or timeline.step_ms >= self.upper_ms:
            return False
        self.upper_ms, self.placement = timeline.step_ms, placement
        self.on_better(timeline.step_ms, placement)
        return True

    def _placement(self, found: _Best) -> Placement:
        """The placement with its orders as texts."""
        lanes = [self.options.lanes[option].tolist() for option in self.table.option[found.rows]]
        held = self.options.units.placement(found.boundaries.tolist(), lanes)
        texts = []
        for s, word in enumerate(found.words):
            row = int(found.rows[s])
            is_whole = bool(self.table.is_whole[row]) or self.table.figures[row, WEIGHT_MS] == 0.0
            texts.append(write_word(word, is_whole))
        return replace(held, orders=tuple(texts))

    def _prove(self, threads: ThreadPoolExecutor, gap_fraction: float) -> bool:
        """Rounds until no step below the best, but for the gap, is left; whether that is so."""
        closing: Closing | None = None
        number = 0
        while not self.should_stop():
            if self.best is None and not np.isfinite(self.upper_ms):
                goal_ms = self.lower_ms * 2.0
            else:
                goal_ms = self.upper_ms * (1.0 - gap_fraction)
            if closing is None:
                if self.lower_ms >= goal_ms * (1.0 - 1e-9):
                    return True
                closing = Closing(self.options, self.bounds, goal_ms)
            elif goal_ms < closing.goal_ms:
                closing.lower_goal(goal_ms)
            part = closing.choose()
            effort_s = part.effort_s if part is not None else 0.0
            other = threads.submit(
                self._search, closing.starts(NUM_STARTS), number, 4 + int(effort_s * RUNS_PER_EFFORT)
            )
            closing.list_on(self._num_listed, self.should_stop)
            closing.refine(max(2, self._num_listed // REFINED), self.should_stop)
            for _ in range(DIVIDED):
                if not closing.divide(self.should_stop):
                    break
            leaf_goal_ms = closing.goal_of(part) if part is not None else 0.0
            leaf = closing.solve(part, leaf_goal_ms, self.should_stop, number) if part is not None else None
            for best in other.result():
                self._offer(best)
            if part is not None and leaf is not None:
                self.num_leaves += 1
                is_real = leaf.answer == "found" and self._offer_leaf(part, leaf, leaf_goal_ms)
                closing.take(part, leaf.answer, leaf_goal_ms, is_real)
            number += 1
            self.lower_ms = max(self.lower_ms, min(closing.lower_ms, self.upper_ms))
            if closing.is_done:
                return True
            if closing.is_stuck:
                self.reason = "what is left differs from the best by less than solvers can tell"
                return False
        return False

    def _search(self, starts: list[Ints], number: int, num_runs: int) -> list[_Best]:
        """So many runs of local search: from the best words and from placements that are open, in turn."""
        starts = [of for of in starts if self._has_rows(of)] or self._first_starts()
        found = []
        for run in range(num_runs):
            if self.should_stop():
                break
            turn = number + run
            if self.best is not None and turn % 3 == 0:
                found.append(self._polish(turn // 3)())
            else:
                found.append(self._task(starts, turn, FOCUS[turn % 3])())
        return found

    def _offer_leaf(self, part: Part, leaf: Leaf | MixedLeaf, goal_ms: float) -> bool:
        """Take what CP-SAT found; whether it fits, and is below the goal as it seemed."""
        at = np.array(part.boundaries, dtype=np.int64)
        if isinstance(leaf, MixedLeaf):
            lanes = [self.options.lanes[option].tolist() for option in part.low]
            placement = replace(self.options.units.placement(at.tolist(), lanes), orders=leaf.orders)
            found = None
        else:
            assert leaf.words is not None
            rows = np.array([int(np.flatnonzero(self.table.option == option)[0]) for option in part.low])
            found = _Best(np.inf, at, rows, leaf.words)
            placement = self._placement(found)
        timeline = simulate(self.problem, placement)
        fits = not find_misfits(self.problem, timeline.peak_memory_bytes, timeline.peak_host_bytes)
        if self.offer(placement) and found is not None:
            self.best = replace(found, step_ms=self.upper_ms)
        return fits and timeline.step_ms < goal_ms


def place_orders(
    problem: Problem,
    time_limit_s: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_better: Callable[[float, Placement], None] = lambda *_: None,
    cutoff_ms: float = np.inf,
    gap_fraction: float = 0.0,
    hint: Placement | None = None,
    latest_cutoff_ms: Callable[[], float] = lambda: np.inf,
) -> PlacementResult:
    """As `place`, of a problem whose order is free."""
    compile_orders()
    began = time.monotonic()
    deadline = began + time_limit_s if time_limit_s is not None else np.inf
    units = cut_into_units(problem)
    if units.has_layouts:
        raise JobError("schedule free takes one layout a layer; leave the layouts of modes out, or name a schedule")
    if microbatch_classes(problem)[0]:
        raise JobError("schedule free takes equal micro-batches; leave microbatch_scale out, or name a schedule")

    def stop() -> bool:
        return time.monotonic() > deadline or should_stop()

    def stop_search() -> bool:
        search.upper_ms = min(search.upper_ms, latest_cutoff_ms())
        return stop()

    if problem.pair_overlap_fraction:
        raise JobError("schedule free pairs no forward with a backward; leave pair_overlap_fraction out")
    reason = explain_windows(units)
    if reason:
        return replace(infeasible_result(reason), solve_s=time.monotonic() - began)
    bound = bound_step(problem, should_stop=stop)
    if bound.reason:
        return replace(infeasible_result(bound.reason, bound.overflow_bytes), solve_s=time.monotonic() - began)
    search: OrderSearch | None = None
    # most ways to fill a stage are part of no good step: what is far above the bound is listed where no step is near it
    most_ms = min(cutoff_ms, NEAR_FACTOR * bound.step_ms)
    try:
        while True:
            options = options_below(units, most_ms, stop)
            if options is not None:
                search = OrderSearch(problem, options, bound.step_ms, stop_search, on_better, cutoff_ms, gap_fraction)
                if hint is not None and hint.orders:
                    search.offer(hint)
                search.search()
                hint = search.placement
            upper_ms = cutoff_ms if search is None else search.upper_ms
            if upper_ms <= most_ms or stop():
                break
            most_ms = upper_ms
    except TooManyPatterns:
        if search is None or search.placement is None:
            reason = "" if stop() else "the ways to fill a stage are too many to be listed"
            solve_s = time.monotonic() - began
            return PlacementResult("unknown", None, None, np.inf, bound.step_ms, solve_s, reason=reason)
    else:
        if search is None:
            solve_s = time.monotonic() - began
            return PlacementResult("dominated", None, None, np.inf, cutoff_ms, solve_s, proof="orders")
        search.prove()
    return replace(_result(search), solve_s=time.monotonic() - began)


def _result(search: OrderSearch) -> PlacementResult:
    lower_ms = search.lower_ms
    shown = PlacementResult(
        "unknown", None, None, np.inf, lower_ms, 0.0, num_bounds=search.num_leaves, reason=search.reason, proof="orders"
    )
    if search.placement is None:
        is_dominated = np.isfinite(search.upper_ms) and lower_ms >= search.upper_ms * (
            1.0 - max(search.gap_fraction, OPTIMAL_GAP_FRACTION)
        )
        return replace(shown, status="dominated") if is_dominated else shown
    timeline = simulate(search.problem, search.placement)
    is_optimal = lower_ms >= timeline.step_ms * (1.0 - OPTIMAL_GAP_FRACTION)
    return replace(
        shown,
        status="optimal" if is_optimal else "feasible",
        placement=search.placement,
        timeline=timeline,
        step_ms=timeline.step_ms,
        lower_bound_ms=min(lower_ms, timeline.step_ms),
    )
