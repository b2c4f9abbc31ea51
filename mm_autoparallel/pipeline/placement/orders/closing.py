"""Closing: placements that can still win, refuted one after another until none is left below a goal.

They are listed in order of their bound, refuted by it (`bounds`) or by time windows (`propagate`) where these suffice,
divided where stages have several ways to run what they hold, refuted by cuts (`shaving`), and solved by CP-SAT (`leaf`)
where nothing else helps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.bounds import bound_rows, join_rows, list_placements
from mm_autoparallel.pipeline.placement.orders.figures import (
    MOST_HELD,
    MOST_IN_FLIGHT,
    MOST_PENDING,
    NUM_KINDS,
    ROOM,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.leaf import Leaf, has_literals, solve_leaf
from mm_autoparallel.pipeline.placement.orders.mixed_leaf import MixedLeaf, solve_mixed_leaf
from mm_autoparallel.pipeline.placement.orders.options import Options
from mm_autoparallel.pipeline.placement.orders.propagate import count_visits, refutes
from mm_autoparallel.pipeline.placement.orders.shaving import Shaving

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: How close to the goal, or to its bound, a part's own bound is found, and the first effort of CP-SAT on one.
CLOSE_FRACTION, FIRST_EFFORT_S = 2e-4, 0.05
#: How many times as much effort the next try has, where CP-SAT's model is strong (`leaf.has_literals`) and else.
STRONG_FACTOR, FACTOR = 10.0, 2.0
#: CP-SAT's deterministic time in a round, and what a model costs beside it: about what local search takes meanwhile.
ROUND_EFFORT_S, MODEL_EFFORT_S = 0.1, 0.005
#: Where another thread asks it of a part, it is asked of others here for such a part of that one's effort.
BESIDE_PART = 0.5
#: Cuts of a part before CP-SAT is asked of it, unless a round takes less than so many of them; and what one takes in
#: CP-SAT's deterministic time for each of `count_visits`.
CUTS, FEW_CUTS, CUT_EFFORT_S = 100, 10, 2.5e-8
#: Cuts of a part for each goal that is tried where CP-SAT left it open so many times.
CUTS_OF_GOAL, HARD_FAILURES = 40, 2
#: Columns of which a relaxed stage has the largest of its rows; of all others the least.
_LARGEST = [ROOM, MOST_IN_FLIGHT, MOST_HELD, MOST_PENDING]
#: What arithmetic may have lost: bounds are claimed so much lower.
CLAIM_FRACTION = 1e-9
#: By how much a goal is lowered, in parts of it, where what CP-SAT finds reaches it by rounding alone: first, how many
#: times as much from try to try, and at most.
FIRST_SLACK, SLACK_FACTOR, MOST_SLACK = 1e-7, 3.0, 1e-5


@dataclass(order=True)
class Part:
    """Placements of the same boundaries [P + 1], each stage in one of the rows [.] that are its own, in order.

    failures: tries of CP-SAT that left the goal open. is_refined: the bound is the most that windows refute. shaving:
    windows of its actions below the goal, or a higher one, after cuts. mixed: relaxed figures are too good for it.
    slack_fraction: by how much the goal is lowered for it. stuck: nothing here can decide it.
    """

    bound_ms: float
    number: int
    boundaries: tuple[int, ...] = field(compare=False)
    rows: Ints = field(compare=False)
    effort_s: float = field(compare=False, default=FIRST_EFFORT_S)
    failures: int = field(compare=False, default=0)
    is_refined: bool = field(compare=False, default=False)
    shaving: Shaving | None = field(compare=False, default=None)
    mixed: bool = field(compare=False, default=False)
    slack_fraction: float = field(compare=False, default=0.0)
    stuck: bool = field(compare=False, default=False)

    @property
    def is_single(self) -> bool:
        """Whether every stage has one row."""
        return len(self.rows) == len(self.boundaries) - 1

    @property
    def is_hard(self) -> bool:
        """Whether CP-SAT left it open with its first effort."""
        return self.effort_s > FIRST_EFFORT_S


#: A part, CP-SAT's answer, and the goal that it was asked of.
Asked = tuple[Part, Leaf | MixedLeaf, float]


class Closing:
    """The search for a proof that no step is below goal_ms."""

    def __init__(self, options: Options, rows: Ints, goal_ms: float) -> None:
        """rows: those of which a step below the goal can be made."""
        self.options, self.goal_ms = options, goal_ms
        rows, ms = bound_rows(options, rows, goal_ms)
        row_ms = np.full(len(options.stage), np.inf)
        row_ms[rows] = ms
        bounds = join_rows(options, row_ms)
        self._able = np.isfinite(row_ms)
        self._listing: Iterator[tuple[float, tuple[int, ...]]] = list_placements(bounds, goal_ms)
        self._next_ms, self._listed_all = bounds.least_ms, False
        self.open: list[Part] = []
        self._number = 0
        self.num_refuted = 0
        problem = options.segments.problem
        self.is_strong = has_literals(problem.num_stages, problem.num_microbatches)

    @property
    def lower_ms(self) -> float:
        """A bound on every placement and order."""
        waiting = [self.goal_ms] if self._listed_all else [min(self._next_ms, self.goal_ms)]
        waiting.extend(part.bound_ms for part in self.open)
        return min(waiting) * (1.0 - CLAIM_FRACTION)

    @property
    def is_done(self) -> bool:
        """Whether no placement is below the goal."""
        return self._listed_all and not self.open

    def lower_goal(self, goal_ms: float) -> None:
        """Go on with a goal that is not above the one so far."""
        self.goal_ms = goal_ms
        self.open = [part for part in self.open if part.bound_ms < goal_ms]
        for part in self.open:  # what was left open above may be refuted here
            part.failures, part.slack_fraction, part.stuck, part.shaving = 0, 0.0, False, None
        heapq.heapify(self.open)

    def list_on(self, num_placements: int, should_stop: Callable[[], bool]) -> None:
        """Look at so many more placements: drop those that windows refute, keep the others open."""
        for _ in range(num_placements):
            if self._listed_all or should_stop():
                return
            found = next(self._listing, None)
            if found is None or found[0] >= self.goal_ms:
                self._listed_all = True
                return
            self._next_ms, boundaries = found
            spans = [self._rows(*stretch) for stretch in zip(count(), boundaries, boundaries[1:], strict=False)]
            self._keep(boundaries, np.concatenate(spans), self._next_ms)

    def _rows(self, stage: int, begin: int, end: int) -> Ints:
        first, num_rows = int(self.options.first[stage, begin, end]), int(self.options.count[stage, begin, end])
        return first + np.flatnonzero(self._able[first : first + num_rows])

    def _figures(self, rows: Ints) -> Floats:
        """[P, NUM_FIGURES] the least that any of the rows of each stage asks for."""
        of, starts = self.options.relaxed[rows], self._starts(rows)
        least: Floats = np.minimum.reduceat(of, starts)
        least[:, _LARGEST] = np.maximum.reduceat(of[:, _LARGEST], starts)
        return least

    def _starts(self, rows: Ints) -> Ints:
        """[P] where the rows of each stage start."""
        return np.searchsorted(self.options.stage[rows], np.arange(self.options.segments.problem.num_stages))

    def _keep(self, boundaries: tuple[int, ...], rows: Ints, bound_ms: float) -> None:
        """Keep a part open unless its rows' bounds or windows refute it."""
        rows, row_ms = bound_rows(self.options, rows, self.goal_ms)
        if len(rows):
            num_microbatches = self.options.segments.problem.num_microbatches
            bound_ms = max(bound_ms, float(np.minimum.reduceat(row_ms, self._starts(rows)).max()))
            if not refutes(num_microbatches, self._figures(rows), self.goal_ms):
                self._number += 1
                heapq.heappush(self.open, Part(bound_ms, self._number, boundaries, rows))
                return
        self.num_refuted += 1

    @property
    def is_stuck(self) -> bool:
        """Whether all that is left open can be decided by nothing here."""
        return self._listed_all and all(part.is_single and part.stuck for part in self.open)

    def starts(self, most: int) -> list[NDArray[np.int64]]:
        """Boundaries of the open parts of the least bounds."""
        return [np.array(part.boundaries, dtype=np.int64) for part in heapq.nsmallest(most, self.open)]

    def refine(self, num_parts: int, should_stop: Callable[[], bool]) -> None:
        """Raise the least bounds, of so many parts, to what windows refute."""
        num_microbatches = self.options.segments.problem.num_microbatches
        for _ in range(num_parts):
            if not self.open or self.open[0].is_refined or should_stop():
                return
            part = heapq.heappop(self.open)
            close_ms = max(0.05 * (self.goal_ms - part.bound_ms), CLOSE_FRACTION * self.goal_ms)
            figures, high_ms = self._figures(part.rows), self.goal_ms
            while high_ms - part.bound_ms > close_ms and not should_stop():
                middle_ms = 0.5 * (part.bound_ms + high_ms)
                if refutes(num_microbatches, figures, middle_ms):
                    part.bound_ms = middle_ms
                else:
                    high_ms = middle_ms
            part.is_refined = True
            heapq.heappush(self.open, part)

    def divide(self, should_stop: Callable[[], bool]) -> bool:
        """Halve the rows of one stage of a part that has several, of the least bound; whether there was one."""
        part = min((part for part in self.open if not part.is_single), default=None)
        if part is None or should_stop():
            return False
        self.open.remove(part)
        heapq.heapify(self.open)
        starts = np.append(self._starts(part.rows), len(part.rows))
        stage = int(np.argmax(np.diff(starts)))
        first, end = starts[stage : stage + 2].tolist()
        middle = (first + end) // 2
        for out in (slice(middle, end), slice(first, middle)):
            self._keep(part.boundaries, np.delete(part.rows, out), part.bound_ms)
        return True

    def choose(self, other_than: Part | None = None) -> Part | None:
        """The next part for CP-SAT: of the least bound among those that were tried least."""
        able = [part for part in self.open if part.is_single and not part.stuck and part is not other_than]
        return min(able, key=lambda part: (part.effort_s, part.bound_ms)) if able else None

    def choose_hard(self, should_stop: Callable[[], bool]) -> Part | None:
        """The next part if CP-SAT left it open with its first effort, and cuts do too."""
        while (part := self.choose()) is not None and part.is_hard:
            self.cut(part, should_stop)
            if part in self.open:
                return part
        return None

    def _goal_of(self, part: Part) -> float:
        return self.goal_ms * (1.0 - part.slack_fraction)

    def goal_of(self, part: Part, num_tries: int) -> float:
        """What CP-SAT is asked of a part: the goal, or, in every other try after one without an answer, a lower one."""
        is_close = part.slack_fraction > 0.0 or self.goal_ms - part.bound_ms < CLOSE_FRACTION * self.goal_ms
        if is_close or num_tries % 2 == 0:
            return self._goal_of(part)
        return 0.3 * part.bound_ms + 0.7 * self.goal_ms

    def ask(self, part: Part, should_stop: Callable[[], bool], seed: int, num_tries: int) -> Callable[[], Asked]:
        """CP-SAT on a part as it is now, to be called in any thread; of what it answers `take` is to be told."""
        num_microbatches, goal_ms = self.options.segments.problem.num_microbatches, self.goal_of(part, num_tries)
        effort = part.effort_s, should_stop, seed
        if not part.mixed:
            figures = self._figures(part.rows)
            windows = None if part.shaving is None else (part.shaving.earliest, part.shaving.latest)
            return lambda: (part, solve_leaf(figures, num_microbatches, goal_ms, *effort, windows), goal_ms)
        rows = part.rows
        split, whole = self.options.split[rows], self.options.whole[rows]
        may_split = self.options.is_split[rows] & (split[:, WEIGHT_MS] > 0.0)
        return lambda: (part, solve_mixed_leaf(split, whole, may_split, num_microbatches, goal_ms, *effort), goal_ms)

    def solve_on(
        self, should_stop: Callable[[], bool], seed: int, asked: Part | None = None
    ) -> tuple[int, Asked | None]:
        """Cut the windows of one part after the other, and ask CP-SAT of what cuts leave, for a round or until it finds
        something; how many it was asked of, and what it found, of which `take` is to be told. asked: what another
        thread asks it of meanwhile; where no other part is left, it is asked of that one with another seed and goal.
        """
        spent_s, num_asked = 0.0, 0
        most_s = ROUND_EFFORT_S if asked is None else max(ROUND_EFFORT_S, BESIDE_PART * asked.effort_s)
        while spent_s < most_s and not should_stop():
            part, num_tries = self.choose(asked), 0
            if part is None:
                part, num_tries = asked, 1
            if part is None or part not in self.open:
                break
            spent_s += self.cut(part, should_stop)
            if part not in self.open:
                continue
            answered = self.ask(part, should_stop, seed + num_asked, part.failures + num_tries)()
            _, leaf, goal_ms = answered
            num_asked, spent_s = num_asked + 1, spent_s + leaf.spent_s + MODEL_EFFORT_S
            if leaf.answer == "found":
                return num_asked, answered
            self.take(part, leaf, goal_ms, is_real=False)
            if part.failures == HARD_FAILURES:
                spent_s += self._raise_bound(part, should_stop)
            if part is asked:
                break
        return num_asked, None

    def cut(self, part: Part, should_stop: Callable[[], bool]) -> float:
        """Cut the windows of a part below the goal, once, which may refute it; the effort."""
        if part.shaving is not None:
            return 0.0
        part.shaving, effort_s = self._shave(part, self.goal_ms, CUTS, should_stop)
        if part.shaving.is_refuted:
            self.take(part, Leaf("infeasible"), self.goal_ms, is_real=False)
        return effort_s

    def _shave(
        self, part: Part, goal_ms: float, most_cuts: int, should_stop: Callable[[], bool]
    ) -> tuple[Shaving, float]:
        """Windows of a part below a goal, and the effort of them."""
        figures, num_microbatches = self._figures(part.rows), self.options.segments.problem.num_microbatches
        shaving, num_cuts = Shaving(num_microbatches, figures, goal_ms), 1
        effort_s = CUT_EFFORT_S * count_visits(len(figures), NUM_KINDS * num_microbatches)
        most_cuts = min(most_cuts, int(ROUND_EFFORT_S / effort_s))
        while FEW_CUTS <= most_cuts > num_cuts and not shaving.is_done and not should_stop():
            num_cuts += shaving.go_on()
        return shaving, effort_s * num_cuts

    def _raise_bound(self, part: Part, should_stop: Callable[[], bool]) -> float:
        """Raise a part's bound to what cuts refute; the effort."""
        high_ms, spent_s = self.goal_ms, 0.0
        while high_ms - part.bound_ms > CLOSE_FRACTION * self.goal_ms and not should_stop():
            middle_ms = 0.5 * (part.bound_ms + high_ms)
            shaving, effort_s = self._shave(part, middle_ms, CUTS_OF_GOAL, should_stop)
            spent_s += effort_s
            if shaving.is_refuted:
                part.bound_ms = middle_ms
            else:
                high_ms = middle_ms
        heapq.heapify(self.open)
        return spent_s

    def take(self, part: Part, leaf: Leaf | MixedLeaf, goal_ms: float, is_real: bool) -> None:
        """Note an answer. is_real: orders that were found fit and are below the goal."""
        if part not in self.open:
            return
        if leaf.answer == "infeasible":
            part.bound_ms = max(part.bound_ms, goal_ms)
            if part.bound_ms >= self.goal_ms:
                self.open.remove(part)
            else:  # of a lower goal: between both is what rounding hides, or the next try
                part.stuck = part.bound_ms >= self._goal_of(part)
                part.failures += 1
        elif leaf.answer == "unknown":
            part.failures += 1
            if leaf.spent_s >= 0.5 * part.effort_s:  # and not of the effort before, which another thread had
                part.effort_s *= STRONG_FACTOR if self.is_strong else FACTOR
        elif not is_real and not (part.mixed or self.options.is_exact):
            part.mixed = True
        elif not is_real and (isinstance(leaf, MixedLeaf) or self.options.is_exact) and goal_ms <= self._goal_of(part):
            part.slack_fraction = max(FIRST_SLACK, part.slack_fraction * SLACK_FACTOR)
            part.stuck = part.slack_fraction > MOST_SLACK
        heapq.heapify(self.open)
