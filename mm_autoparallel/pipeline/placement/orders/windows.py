"""Windows: the begin or the end of a step made shorter by CP-SAT, which finds anew when its actions run.

Where many micro-batches pass, local search soon finds a good steady part, but changes both ends, hundreds of actions
each, one letter at a time. The begin is the end of the same step played backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD,
    INPUT,
    KEPT,
    NUM_KINDS,
    PENDING,
    ROOM,
    TAIL_MS,
    WEIGHT,
)
from mm_autoparallel.pipeline.placement.orders.justify import (
    justify_words,
    list_actions,
    list_starts,
    schedule,
    turn_round,
    write_words,
)
from mm_autoparallel.pipeline.placement.orders.leaf import run_solver
from mm_autoparallel.pipeline.placement.orders.local import Found
from mm_autoparallel.pipeline.placement.orders.words import Words, fits_word

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Actions of a first window, for each pair of stages; how many times as many the next has where none is shorter; and
#: at most. Assumed.
FIRST_ACTIONS, GROWTH, MOST_ACTIONS = 1.0, 1.5, 2_000
#: The solver's deterministic seconds for each action of a window; for all windows of a round, but for the last of them;
#: and what a model costs beside it. Assumed.
EFFORT_S_PER_ACTION, ROUND_EFFORT_S, MODEL_EFFORT_S = 1e-3, 0.2, 0.02
#: Units of time of a step, and of a stage's room; what fits by rounding alone is left out in the end.
STEP_UNITS, ROOM_UNITS = 2**24, 2**24


@dataclass
class Windows:
    """Which windows of the best words are looked at next. num_actions: of that of the end and of that of the begin; 0
    where no more is hoped for."""

    words: Words | None = None
    num_actions: list[int] = field(default_factory=list)
    turn: int = 0

    def improve(self, found: Found, figures: Floats, should_stop: Callable[[], bool]) -> Found | None:
        """What is shorter in the next windows of what was found, on stages with figures [P, NUM_FIGURES]."""
        if self.words is None or not np.array_equal(found.words, self.words):
            self.num_actions = [int(FIRST_ACTIONS * len(found.words) ** 2)] * 2
        best, spent_s, most = found, 0.0, min(MOST_ACTIONS, found.words.size)
        while any(self.num_actions) and spent_s < ROUND_EFFORT_S and not should_stop():
            self.turn += 1
            side = self.turn % 2 if self.num_actions[self.turn % 2] else 1 - self.turn % 2
            window = _Window.of(best, figures, side == 1, min(most, self.num_actions[side]))
            better = window.solve(best, figures, should_stop, self.turn)
            spent_s += MODEL_EFFORT_S + window.spent_s
            if window.is_best and self.num_actions[side] < most:
                self.num_actions[side] = int(GROWTH * self.num_actions[side])
            elif better is None:
                self.num_actions[side] = 0
            best = better or best
        self.words = best.words.copy()
        return best if best is not found else None


class _Window:
    """The model: the last actions of a step, at least so many, begin anew, as early as lets the step be shortest.

    lengths, starts: [3PM] of all actions, in whole units; needs, lags: what they begin after; tails: [P] what follows.
    is_best: it is known that none is shorter than what was found; spent_s: of the solver's deterministic time.
    """

    is_backwards = is_best = False
    spent_s = 0.0

    @classmethod
    def of(cls, found: Found, figures: Floats, is_begin: bool, num_actions: int) -> _Window:
        """That of the end of what was found, or of its begin, of so many actions at least."""
        whole = figures.copy()  # in whole units
        whole[:, : TAIL_MS + 1] = np.rint(figures[:, : TAIL_MS + 1] * (STEP_UNITS / found.step_ms))
        lengths, needs, lags = list_actions(found.words.shape[1] // NUM_KINDS, whole)
        early, tails = list_starts(found.words, whole), whole[:, TAIL_MS].copy()
        if is_begin:
            behind, lags_behind = turn_round(needs, lags)
            late = schedule(lengths, -early - lengths, tails, behind, lags_behind, needs, False)
            window = cls(whole, lengths, late, behind, lags_behind, np.zeros_like(tails), num_actions)
        else:
            window = cls(whole, lengths, early, needs, lags, tails, num_actions)
        window.is_backwards = is_begin
        window._limit_memory()
        return window

    def __init__(
        self, figures: Floats, lengths: Floats, starts: Floats, needs: Ints, lags: Floats, tails: Floats, num_last: int
    ) -> None:
        self.figures, self.lengths, self.starts = figures, lengths, starts
        self.model = cp_model.CpModel()
        stage, ends = np.arange(len(starts)) // (len(starts) // len(figures)), starts + lengths
        is_last = starts >= np.partition(starts, -num_last)[-num_last]
        free, end = np.zeros(len(figures)), int(np.max(ends + tails[stage]))
        np.maximum.at(free, stage[~is_last], ends[~is_last])
        self.gain = self.model.new_int_var(0, end, "")
        self.begin: dict[int, cp_model.IntVar] = {}
        for action in np.flatnonzero(is_last).tolist():
            after = int(lengths[action] + tails[stage[action]])
            is_fixed = (needs[action] >= 0) & ~is_last[needs[action]]
            low = np.max(ends[needs[action]] + lags[action], where=is_fixed, initial=free[stage[action]])
            variable = self.begin[action] = self.model.new_int_var(int(low), end - after, "")
            self.model.add(variable + after <= end - self.gain)
            self.model.add_hint(variable, int(starts[action]))
        for action, variable in self.begin.items():
            for need, lag in zip(needs[action].tolist(), lags[action].tolist(), strict=True):
                if need in self.begin:
                    self.model.add(variable >= self.begin[need] + int(lengths[need] + lag))
        for s in range(len(figures)):
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(variable, int(lengths[action]), "")
                for action, variable in self.begin.items()
                if stage[action] == s and lengths[action]
            )
        self.model.add_hint(self.gain, 0)
        self.model.maximize(self.gain)

    def _limit_memory(self) -> None:
        """Where bytes kept for the input gradient and for the weight gradient differ, say what all hold together."""
        count = len(self.starts) // (NUM_KINDS * len(self.figures))
        for s, of in enumerate(self.figures):
            if of[KEPT] == of[PENDING] or of[ROOM] <= 0.0:
                continue
            intervals, demands = [], []
            for m in range(count):
                forward, backward, weight = ((NUM_KINDS * s + kind) * count + m for kind in (FORWARD, INPUT, WEIGHT))
                if (forward if self.is_backwards else weight) not in self.begin:
                    continue  # that is over before
                if self.is_backwards:
                    times = self._end(forward), self._begin(backward), self._begin(weight)
                else:
                    times = self._begin(forward), self._end(backward), self._end(weight)
                for x, size_bytes in enumerate((of[KEPT], of[PENDING])):
                    first, last = (times[x + 1], times[x]) if self.is_backwards else (times[x], times[x + 1])
                    length = self.model.new_int_var(0, 2 * STEP_UNITS, "")
                    intervals.append(self.model.new_interval_var(first, length, last, ""))
                    demands.append(round(size_bytes / of[ROOM] * ROOM_UNITS))
            self.model.add_cumulative(intervals, demands, ROOM_UNITS)

    def _begin(self, action: int) -> cp_model.LinearExprT:
        return self.begin.get(action, int(self.starts[action]))

    def _end(self, action: int) -> cp_model.LinearExprT:
        return self._begin(action) + int(self.lengths[action])

    def solve(self, found: Found, figures: Floats, should_stop: Callable[[], bool], seed: int) -> Found | None:
        """What is shorter than what was found, if the solver finds it."""
        effort_s = EFFORT_S_PER_ACTION * len(self.begin)
        solver, answer = run_solver(self.model, effort_s, should_stop, seed, is_lean=True)
        self.spent_s = solver.response_proto.deterministic_time
        self.is_best = solver.response_proto.status == cp_model.OPTIMAL
        if answer != "found" or solver.value(self.gain) == 0:
            return None
        starts, words = self.starts.copy(), found.words.copy()
        for action, variable in self.begin.items():
            starts[action] = solver.value(variable)
        write_words(self.lengths, -starts - self.lengths if self.is_backwards else starts, words)
        if not all(fits_word(word, of) for word, of in zip(words, figures, strict=True)):
            return None
        step_ms = justify_words(words, figures)  # what may run earlier gives the next windows room
        return replace(found, step_ms=step_ms, words=words) if step_ms < found.step_ms else None
