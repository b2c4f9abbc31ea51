"""Place layers and find the order of every stage: local search for both, and the proof of how far they are from best.

Rounds of growing work. In each, one thread searches while this one lists and refutes placements, and asks CP-SAT about
those that are left. What a round finds does not depend on which thread is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.aiming import Aiming
from mm_autoparallel.pipeline.placement.orders.bounds import bound_rows, bound_stages, least_step
from mm_autoparallel.pipeline.placement.orders.closing import CLAIM_FRACTION, Asked, Closing, Part
from mm_autoparallel.pipeline.placement.orders.figures import NUM_KINDS, WEIGHT_MS
from mm_autoparallel.pipeline.placement.orders.leaf import Leaf
from mm_autoparallel.pipeline.placement.orders.local import NEAR_FACTOR, Found, Ruled, Run, count_moves
from mm_autoparallel.pipeline.placement.orders.mixed_leaf import MixedLeaf
from mm_autoparallel.pipeline.placement.orders.options import Options
from mm_autoparallel.pipeline.placement.orders.parting import part_backwards
from mm_autoparallel.pipeline.placement.orders.periods import Periods
from mm_autoparallel.pipeline.placement.orders.roomy import rows_with_room
from mm_autoparallel.pipeline.placement.orders.starts import NUM_STARTS, find_starts
from mm_autoparallel.pipeline.placement.orders.table import read_placement, write_word
from mm_autoparallel.pipeline.placement.orders.windows import Windows
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.step import simulate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.int8]

#: Gaps that are proven one after another: what a result calls proven, what it calls optimal, and what solvers can tell;
#: before them two that take less, where a round looks at few placements.
GAPS, WIDE_GAPS, FEW = (1e-3, OPTIMAL_GAP_FRACTION, 2e-7), (1e-2, 5e-3), 100
#: Warmth of the start of a run in parts of a stage's mean load; runs of a first round.
WARMTHS, FIRST_RUNS = (0.03, 0.1), 6
#: Where modes buy room, one of both first runs has rows that hold so many times what is in flight where nothing waits,
#: by turns. Assumed.
ROOMS = (1.4, 1.2)
#: Rules are looked for more often where what the first of them make takes such a part of what pairs do. Assumed.
LEAD_PART = 0.999
#: How much warmer runs begin that look for rules, and runs from the best words, of which so many differ. Assumed.
RULES_WARMTH, POLISH_WARMTH, POLISH_TURNS = 2.0, 0.3, 4
#: Steady parts are looked for where so many times as many micro-batches as stages pass. Assumed.
REPEATED = 3
#: Periods that one run asks for at most; placements that a round looks at.
PERIODS, LISTED = 8, 2_000
#: Of so many placements that a round looks at one part is divided, and one has its bound raised.
DIVIDED, REFINED = 4, 20
#: Runs of local search beside CP-SAT, for each second of its deterministic time: where its model is strong, so many at
#: most, and else.
STRONG_RUNS_PER_EFFORT, STRONG_RUNS, RUNS_PER_EFFORT = 4, 10, 24
#: Where its model is strong and left the next placement open once, CP-SAT runs in both threads, but for every one of so
#: many rounds.
TURNS, SEEDS = 3, 1_000_000
#: How much longer runs are whose boundaries stay, by turns; 0: they move.
FOCUS = (0, 0, 4)
#: Of so many open placements the boundaries of every run stay.
FEW_OPEN, FOCUSED = 4, 2


class OrderSearch:
    """One call of `place` on a problem with a free order. lower_ms: a bound that is known. listed_ms: the options are
    all of which a step below it can be made. seed: of the last run of local search."""

    def __init__(
        self,
        problem: Problem,
        options: Options,
        lower_ms: float,
        should_stop: Callable[[], bool],
        on_better: Callable[[float, Placement], None],
        cutoff_ms: float,
        gap_fraction: float,
        listed_ms: float,
    ) -> None:
        self.problem, self.options, self.should_stop, self.on_better = problem, options, should_stop, on_better
        self._listed_ms = listed_ms
        self.bounds = bound_stages(options)
        self.upper_ms, self.gap_fraction = cutoff_ms, gap_fraction
        self.lower_ms = lower_ms
        self.best: Found | None = None
        self._was_best: Found | None = None
        self._ruled: list[Ruled | None] = [None, None]
        self._rules_lead = self._periods_lead = False
        self.placement: Placement | None = None
        self.num_leaves = 0
        self._rows_left = np.arange(len(options.stage))
        self.reason = ""
        self._starts = find_starts(options, self.bounds)
        self._periods = Periods(self._starts.least_work_ms)
        self._can_repeat = problem.num_microbatches >= REPEATED * problem.num_stages
        self.table, self._has_rules = self._starts.table, self._starts.is_tight
        self._load_ms = 1.0
        self._num_listed = max(4, int(LISTED * 8 * 48**2 / (problem.num_stages * (3 * problem.num_microbatches) ** 2)))
        self.seed = 0
        self._windows, self._aiming = Windows(), Aiming()

    def search(self) -> None:
        """The first runs of local search, from placements of the least bounds."""
        self._leave_rows_out()
        if self.lower_ms >= self.upper_ms * (1.0 - self.gap_fraction):
            return
        aim_round = FIRST_RUNS - 1 if self.best is None else 0
        with ThreadPoolExecutor(1) as threads:
            starts = self._starts.first(self.should_stop)
            if not starts or self._is_near():
                return
            loads = self.table.figures[self._starts.rows(starts[0])][:, :NUM_KINDS].sum(axis=1)
            self._load_ms = max(1e-9, float(loads.mean()))
            for round_number in range(FIRST_RUNS):
                if self.should_stop() or self._is_near():
                    return
                is_aimed = round_number == aim_round and self._aiming.can(self.best)
                is_repeated = not is_aimed and self._can_repeat and (self._has_rules or round_number % 3 == 1)
                beside = self._period_task() if is_repeated else self._first_task(starts, round_number, 1)
                beside = self._aim if is_aimed else beside
                can_polish = self._periods_lead and self.best is not None  # what leads may not fit after all
                first_task = self._polish if can_polish else partial(self._first_task, starts, side=0)
                other = threads.submit(first_task(round_number))
                found = beside()
                self._shorten()
                first = other.result()
                if self._has_rules and found is not None and first.step_ms < LEAD_PART * found.step_ms:
                    self._rules_lead = not is_repeated
                elif self._has_rules and found is not None and found.step_ms < LEAD_PART * first.step_ms:
                    self._periods_lead = is_repeated
                for best in (first, found):
                    self._offer(best)

    def _leave_rows_out(self) -> None:
        """Of rows, what no step below the best can be made of, or below what is of interest; and what that bounds."""
        most_ms = min(self.upper_ms, self._listed_ms)
        if np.isfinite(most_ms):
            rows, _ = bound_rows(self.options, self._rows_left, most_ms)
            least_ms = least_step(self.options, rows, self.lower_ms, most_ms) if len(rows) else most_ms
            self._rows_left, self.lower_ms = rows, max(self.lower_ms, least_ms * (1.0 - CLAIM_FRACTION))

    @property
    def _target_ms(self) -> float:
        """A step that is good enough."""
        return self.lower_ms / (1.0 - self.gap_fraction)

    def _is_near(self) -> bool:
        """Whether the best step is good enough, or nearly optimal."""
        return self.placement is not None and self.upper_ms <= max(
            self._target_ms, self.lower_ms * (1.0 + OPTIMAL_GAP_FRACTION)
        )

    def adopt(self, placement: Placement) -> None:
        """Begin with a placement that is known, if it fits, is near the cutoff and made of ways that are listed."""
        step_ms = self._play(placement) if placement.orders else np.inf
        if step_ms >= NEAR_FACTOR * self.upper_ms:
            return
        self._take(placement, step_ms)
        known = read_placement(self.options, self.table, placement)
        if known is None:
            return
        boundaries, rows, words = known
        self.best = self._was_best = Found(step_ms, boundaries, rows, words)
        if self._can_repeat:
            self._periods.know(words, self._starts.times(words, rows), step_ms)

    def prove(self) -> None:
        """Search and prove until done or told to stop."""
        with ThreadPoolExecutor(1) as threads:
            gaps = (*WIDE_GAPS, *GAPS) if self._num_listed < FEW else GAPS
            for gap_fraction in (*(gap for gap in gaps if gap > self.gap_fraction), max(self.gap_fraction, GAPS[-1])):
                if not self._prove(threads, gap_fraction):
                    return

    def _task(self, starts: list[Ints], number: int, focus: int = 0) -> Callable[[], Found]:
        """A run of local search from one of the starts, to be called in any thread. focus: 0 moves boundaries too; else
        they stay, and the run is so many times as long."""
        turn = number // 2  # each start with either warm-up
        boundaries, num_stages = starts[turn % len(starts)].copy(), self.problem.num_stages
        rows = self._starts.rows(boundaries, turn % 2 == 0)
        ahead = np.arange(num_stages, 0, -1)
        warmups = ahead if number % 2 else 2 * ahead - 1
        run = self._run(turn + number // (2 * len(starts)), max(1, focus), focus == 0)
        return lambda: run.from_pairs(boundaries, rows, warmups)

    def _first_task(self, starts: list[Ints], number: int, side: int) -> Callable[[], Found]:
        """One of both runs of a first round: of either warm-up; where modes buy room, of rules and of pairs; where
        memory binds, of rules, and of pairs unless rules find more."""
        if not self._has_rules:
            at = starts[number % len(starts)].copy()
            if side or self._starts.is_steady[self._starts.rows(at)].all():
                return self._task(starts, 2 * number + side)
            period_ms = self.lower_ms / (self.problem.num_microbatches * ROOMS[number % len(ROOMS)])
            rows = rows_with_room(self.table, self.bounds.row_ms, at, period_ms)
            run = self._run(number, 1, False, RULES_WARMTH)
            return lambda: run.from_place(at, rows)[0]
        return self._rules_task(starts, number, side) if not side or self._rules_lead else self._task(starts, number)

    def _period_task(self) -> Callable[[], Found | None]:
        """A run that begins with a steady part, if one is found. One at a time."""
        runs = [self._run(self._periods.turn, 1, False, POLISH_WARMTH) for _ in range(PERIODS)]
        return lambda: self._periods.look(runs, self._rows_below, self.lower_ms, self.upper_ms, self.should_stop)

    def _rows_below(self, step_ms: float) -> NDArray[np.bool_]:
        """[R'] which rows of the table a step below may be made of."""
        able = np.zeros(len(self.options.stage), np.bool_)
        able[bound_rows(self.options, self._rows_left, step_ms)[0]] = True
        return able[self.table.option]

    def _rules_task(self, starts: list[Ints], number: int, side: int = 0) -> Callable[[], Found]:
        """A run that begins with the best rules of its side, or in every other turn with none at one of the starts. One
        at a time of each side: it notes the best rules."""
        boundaries = starts[number // 2 % len(starts)].copy()
        rows = self._starts.rows(boundaries, (number // 2 + side) % 2 == 0)
        run, best = self._run(number, 1, True, RULES_WARMTH), self._ruled[side]

        def search() -> Found:
            found, ruled = run.from_place(boundaries, rows) if best is None or number % 2 == 0 else run.from_rules(best)
            if best is None or ruled.step_ms < best.step_ms:
                self._ruled[side] = ruled
            return found

        return search

    def _run(self, turn: int, times: float, may_move: bool, warmth: float = 1.0) -> Run:
        """What is common to the next run, which is so many times as long as others, and begins so warm."""
        self.seed += 1
        count = self.problem.num_microbatches
        num_moves = count_moves(self.problem.num_stages * NUM_KINDS * count)
        warm_ms = WARMTHS[turn % len(WARMTHS)] * warmth * self._load_ms
        return Run(self.table, count, int(num_moves * times), warm_ms, self.seed, self._target_ms, may_move)

    def _polish(self, number: int) -> Callable[[], Found]:
        """A run of local search from the best words: at other placements, with boundaries that move, and that stay."""
        assert self.best is not None
        best, turn = self.best.copy(), number % POLISH_TURNS
        run = self._run(number // POLISH_TURNS, 2, turn == 1, 1.0 if turn == 1 else POLISH_WARMTH)
        if turn % 2 == 0:
            return lambda: run.leap(best, self._rows_below(best.step_ms))
        return lambda: run.end_anew(best) if self._periods_lead and turn == 3 else run.go_on(best)

    def _aim(self) -> Found | None:
        """Ask CP-SAT for a step well below the best, at the same placement."""
        if (best := self.best) is None:
            return None
        _, row_ms = bound_rows(self.options, self.table.option[best.rows], np.inf)
        lower_ms, figures = max(self.lower_ms, float(row_ms.max())), self.table.figures[best.rows]
        return self._aiming.improve(best, figures, lower_ms, self.should_stop, self.seed)

    def _offer(self, found: Found | None) -> None:
        """Go on from what is better than the best words, if the simulator agrees that it fits."""
        most_ms = np.inf if self.best is None else self.best.step_ms
        if found is None or found.step_ms >= most_ms:
            return
        placement = self._placement(found)
        step_ms = self._play(placement)
        if step_ms < most_ms:
            self.best = replace(found, step_ms=step_ms)
            self._take(placement, step_ms)

    def _shorten(self) -> None:
        """Try windows of the best words, where they are what they were a round before."""
        if self.best is not None and self.best is self._was_best:
            figures = self.table.figures[self.best.rows]
            self._offer(self._windows.improve(self.best, figures, self.should_stop))
        self._was_best = self.best

    def _part_best(self) -> None:
        """Split more backwards of the best words, once."""
        if self.best is None or self.best.is_parted:
            return
        stages = [s for s, row in enumerate(self.best.rows) if self.table.is_whole[row]]

        def play(placement: Placement) -> float:
            return np.inf if self.should_stop() else self._play(placement)

        self._take(*part_backwards(self._placement(self.best), self.best.step_ms, stages, play))
        self.best.is_parted = True

    def _play(self, placement: Placement) -> float:
        """Its step; infinite where it does not fit."""
        timeline = simulate(self.problem, placement)
        misfits = find_misfits(self.problem, timeline.peak_memory_bytes, timeline.peak_host_bytes)
        return np.inf if misfits else timeline.step_ms

    def _take(self, placement: Placement, step_ms: float) -> bool:
        if step_ms >= self.upper_ms:
            return False
        self.upper_ms, self.placement = step_ms, placement
        self.on_better(step_ms, placement)
        return True

    def _placement(self, found: Found) -> Placement:
        """The placement with its orders as texts."""
        lanes = [self.options.lanes[option].tolist() for option in self.table.option[found.rows]]
        held = self.options.segments.placement(found.boundaries.tolist(), lanes)
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
                goal_ms = self.upper_ms * (1.0 - gap_fraction) / (1.0 - CLAIM_FRACTION)
            if closing is None:
                self._leave_rows_out()
                if self.lower_ms >= goal_ms * (1.0 - 1e-9):
                    return True
                closing = Closing(self.options, self._rows_left, goal_ms)
            elif goal_ms < closing.goal_ms:
                closing.lower_goal(goal_ms)
            hard = closing.choose_hard(self.should_stop) if closing.is_strong and number % TURNS else None
            beside: Future[Asked] | None = None
            other: Future[list[Found | None]] | None = None
            if hard is not None:
                seed = self.num_leaves + SEEDS
                beside = threads.submit(closing.ask(hard, self.should_stop, seed, hard.failures))
            else:
                part = closing.choose()
                effort_s = part.effort_s if part is not None else 0.0
                strong_runs = min(STRONG_RUNS, STRONG_RUNS_PER_EFFORT * effort_s)
                num_runs = 4 + int(strong_runs if closing.is_strong else RUNS_PER_EFFORT * effort_s)
                other = threads.submit(self._search, closing.starts(NUM_STARTS), number, num_runs)
            closing.list_on(self._num_listed, self.should_stop)
            closing.refine(max(2, self._num_listed // REFINED), self.should_stop)
            for _ in range(max(8, self._num_listed // DIVIDED)):
                if not closing.divide(self.should_stop):
                    break
            num_asked, found = closing.solve_on(self.should_stop, self.num_leaves, hard)
            self._shorten()
            for best in other.result() if other is not None else ():
                self._offer(best)
            self._part_best()
            self.num_leaves += num_asked
            for answered in (found, beside.result() if beside is not None else None):
                if answered is not None:
                    asked, leaf, leaf_goal_ms = answered
                    is_real = leaf.answer == "found" and self._offer_leaf(*answered)
                    closing.take(asked, leaf, leaf_goal_ms, is_real)
            number += 1
            self.lower_ms = max(self.lower_ms, min(closing.lower_ms, self.upper_ms))
            if closing.is_done:
                return True
            if closing.is_stuck:
                self.reason = "what is left differs from the best by less than solvers can tell"
                return False
        return False

    def _search(self, starts: list[Ints], number: int, num_runs: int) -> list[Found | None]:
        """So many runs of local search: from the best words and from placements that are open, in turn; where few are
        open, on these alone."""
        starts = [of for of in starts if self._starts.has_rows(of)] or self._starts.first(self.should_stop)
        is_few = len(starts) <= FEW_OPEN
        can_polish = self.best is not None and not (is_few and all(np.any(of != self.best.boundaries) for of in starts))
        found: list[Found | None] = [self._aim() if can_polish else None]
        for run in range(num_runs):
            if self.should_stop():
                break
            turn = (number + run) // 2 if can_polish else number + run
            if can_polish and (number + run) % 2 == 0:
                found.append(self._polish(turn)())
            elif self._periods_lead or (self._can_repeat and turn % 6 == 4):
                found.append(self._period_task()())
            elif self._has_rules and (turn % 3 == 1 or (self._rules_lead and turn % 2)):
                found.append(self._rules_task(starts, turn // 3, int(turn % 3 != 1))())
            else:
                found.append(self._task(starts, turn, FOCUSED if is_few else FOCUS[turn % 3])())
        return found

    def _offer_leaf(self, part: Part, leaf: Leaf | MixedLeaf, goal_ms: float) -> bool:
        """Take what CP-SAT found; whether it fits, and is below the goal as it seemed."""
        at = np.array(part.boundaries, dtype=np.int64)
        if isinstance(leaf, MixedLeaf):
            lanes = [self.options.lanes[option].tolist() for option in part.rows]
            placement = replace(self.options.segments.placement(at.tolist(), lanes), orders=leaf.orders)
            found = None
        else:
            assert leaf.words is not None
            rows = np.array([int(np.flatnonzero(self.table.option == option)[0]) for option in part.rows])
            found = Found(np.inf, at, rows, leaf.words)
            placement = self._placement(found)
        step_ms = self._play(placement)
        if self._take(placement, step_ms) and found is not None:
            self.best = replace(found, step_ms=step_ms)
        return step_ms < goal_ms
