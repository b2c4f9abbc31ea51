"""Local search: simulated annealing over boundaries and modes, for good placements before any proof.

Only placements that fit are kept; while there is none, the search shrinks the overflow. Seeded and counted in moves, so
a run repeats exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from mm_autoparallel.pipeline.placement.incumbents.moves import copy_state, lawful, propose
from mm_autoparallel.pipeline.placement.incumbents.regular import regular_starts
from mm_autoparallel.pipeline.placement.incumbents.repair import repair
from mm_autoparallel.pipeline.placement.incumbents.sums import (
    Ints,
    State,
    Sums,
    balanced_boundaries,
    collect_sums,
    empty_state,
)
from mm_autoparallel.pipeline.placement.patterns.tree_bounds import PlayedGraph, played, step_bounds
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.engine import virtual_at
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.stage_times import wide_layout

#: Temperatures as fractions of the current step, from first to last move; the first ones take turns.
#: Measured on 18 problems of 4 to 16 stages with 2 to 4 chunks, 500 moves for each virtual stage: from 0.3 % to 0.01 %
#: ends 0.29 % above the best known step on average, from 1 % 0.46 and from 0.1 % 0.45; but from 1 % some problems are
#: solved that never are from 0.3.
HOT_FRACTIONS, COLD_FRACTION = (3e-3, 1e-2), 1e-4
#: Share of moves that are two at once: some better placements are two moves away, both of them uphill alone.
DOUBLE_MOVE_FRACTION = 0.3
#: Cost in ms from which on it only ranks overflows.
NOTHING_FITS = 1e30
#: So many of the best starts take turns. Measured on 16 problems: the best of four runs of 300 moves for each virtual
#: stage ends 0.28, 0.26, 0.34 and 0.68 % above the best known step with 1, 2, 4 and 8.
NUM_STARTS = 2


@kernel
def cost_of(sums: Sums, state: State, short: PlayedGraph, full: PlayedGraph, worst_ms: float) -> float:
    """Step in ms, or NOTHING_FITS and more, the more overflow, where memory does not fit; infinite where the load
    alone passes worst_ms."""
    overflow = 0.0
    for s in range(sums.num_stages):
        overflow += state.overflow_bytes[s]
    if overflow > 0:
        return NOTHING_FITS * (1.0 + overflow)
    num_virtual = sums.num_stages * sums.num_chunks
    at = wide_layout(sums.num_durations, num_virtual, sums.num_stages)
    for s in range(sums.num_stages if sums.pairs.shape[0] == 0 else 0):  # a pair may take less than its two apart
        load = 0.0
        for c in range(sums.num_chunks):
            k = virtual_at(c, s, sums.num_stages, sums.v_shaped)
            load += state.times_ms[at.forward + k] + state.times_ms[at.backward + k]
        if load * sums.num_microbatches > worst_ms:
            return np.inf
    low, high = step_bounds(short, state.times_ms, num_virtual)
    if low > worst_ms:
        return np.inf
    if high - low <= 1e-12 * high:
        return low
    return step_bounds(full, state.times_ms, num_virtual)[0]


@kernel
def anneal(
    sums: Sums,
    state: State,
    trial: State,
    best: State,
    short: PlayedGraph,
    full: PlayedGraph,
    seed: int,
    num_moves: int,
    first_temperature: float,
    cooling: float,
    best_ms: float,
) -> float:
    """num_moves moves from `state`, the temperature (a fraction of the step) falling by `cooling` each.

    Leaves the best placement seen in `best` and returns its cost, or best_ms if none is better.
    """
    np.random.seed(seed)
    touched = np.zeros(sums.num_stages, dtype=np.bool_)
    for s in range(sums.num_stages):
        repair(sums, state, s)
    current = cost_of(sums, state, short, full, np.inf)
    if current < best_ms:
        best_ms = current
        copy_state(state, best)
    temperature = first_temperature
    for _ in range(num_moves):
        temperature *= cooling
        copy_state(state, trial)
        for s in range(touched.shape[0]):
            touched[s] = False
        if not propose(sums, trial, touched):
            continue
        if np.random.random() < DOUBLE_MOVE_FRACTION and not propose(sums, trial, touched):
            continue
        for s in range(sums.num_stages):
            if touched[s]:
                repair(sums, trial, s)
        margin = -np.log(np.random.random()) * temperature
        worst = np.inf if current >= NOTHING_FITS else current * (1.0 + margin)
        cost = cost_of(sums, trial, short, full, worst)
        if cost <= worst and (current < NOTHING_FITS or cost <= current):
            copy_state(trial, state)
            current = cost
            if cost < best_ms:
                best_ms = cost
                copy_state(state, best)
    return best_ms


class Annealer:
    """A local search that goes on in slices. `best_ms` is NOTHING_FITS or more while nothing that fits has been
    found."""

    def __init__(self, segments: Segments, short: TaskGraph, full: TaskGraph, seed: int) -> None:
        self.segments = segments
        self.sums = collect_sums(segments, full)
        self.short, self.full = played(short), played(full)
        self.state, self.trial, self.best = (empty_state(segments, full.num_durations) for _ in range(3))
        self.best_ms = np.inf
        self.seed = seed * 1_000_000  # each slice takes the next one
        self._num_runs = seed

    @cached_property
    def _starts(self) -> list[Ints]:
        """Boundaries to begin with, the best first."""
        starts = [balanced_boundaries(self.segments)]
        if self.sums.num_chunks > 1:
            starts += (each for each in regular_starts(self.segments) if lawful(self.sums, each))
        different = {each.tobytes(): each for each in starts}
        return sorted(different.values(), key=self._cost)[:NUM_STARTS]

    def _cost(self, boundaries: Ints) -> float:
        """Of a start, with the modes that its memory asks for; as `cost_of` has it."""
        self._begin_at(boundaries)
        return float(
            anneal(self.sums, self.state, self.trial, self.trial, self.short, self.full, 0, 0, 0.0, 1.0, np.inf)
        )

    def _begin_at(self, boundaries: Ints) -> None:
        self.state.boundary[:] = boundaries
        self.state.lanes[:] = 0

    def run(self, num_moves: int, restart: bool, should_stop: Callable[[], bool]) -> None:
        """num_moves more moves, from one of the best starts (restart) or from the best placement; updates best_ms."""
        turn, which_hot = divmod(self._num_runs, len(HOT_FRACTIONS))
        hot_fraction, self._num_runs = HOT_FRACTIONS[which_hot], self._num_runs + 1
        if restart or not np.isfinite(self.best_ms):
            self._begin_at(self._starts[turn % len(self._starts)])
        else:
            copy_state(self.best, self.state)
        cooling = (COLD_FRACTION / hot_fraction) ** (1.0 / num_moves)
        some = max(100, 40_000_000 // len(self.short.stage))  # moves between two looks at should_stop
        for done in range(0, num_moves, some):
            if should_stop():
                return
            self.seed += 1
            temperature = hot_fraction * cooling**done
            moves = min(some, num_moves - done)
            self.best_ms = float(
                anneal(
                    self.sums,
                    self.state,
                    self.trial,
                    self.best,
                    self.short,
                    self.full,
                    self.seed,
                    moves,
                    temperature,
                    cooling,
                    self.best_ms,
                )
            )

    def adopt(self, placement: Placement, step_ms: float) -> None:
        """Make `placement`, whose step is known, the best, to go on from."""
        self.best_ms = step_ms
        boundaries, lanes = self.segments.boundaries(placement)
        self.best.boundary[:] = boundaries
        self.best.lanes[:] = np.array(lanes, dtype=np.int64).reshape(self.best.lanes.shape)

    def best_boundaries(self) -> tuple[list[int], list[list[int]]]:
        """Segment boundaries [K + 1] and counts of lanes [K][L] of the best placement."""
        return self.best.boundary.tolist(), self.best.lanes.tolist()
