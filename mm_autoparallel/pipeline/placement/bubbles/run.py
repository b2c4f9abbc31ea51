"""Place a decoder's layers and order the work of its encoders beside it, with a bound on all other ways.

The decoder is placed first, by itself, and its bound raised by what encoders need before and after it: that bounds
every placement. Then words are built, improved and, where they do not reach the bound, looked for by CP-SAT.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.encoders import EncodedProblem, check_encoders
from mm_autoparallel.pipeline.placement.bubbles.bounds import bound_all, bound_placed, read_ms
from mm_autoparallel.pipeline.placement.bubbles.compiling import compile_words
from mm_autoparallel.pipeline.placement.bubbles.construct import construct
from mm_autoparallel.pipeline.placement.bubbles.improve import anneal
from mm_autoparallel.pipeline.placement.bubbles.play import Player, Words, words_by_starts
from mm_autoparallel.pipeline.placement.bubbles.solver import solve_words
from mm_autoparallel.pipeline.placement.bubbles.tasks import Tasks, decoder_on_devices, list_tasks
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION, PlacementResult, Status
from mm_autoparallel.pipeline.placement.segments import Units, cut_into_units
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.step import simulate

Floats = NDArray[np.float64]

#: Runs of list scheduling, moves of annealing for each task, and the solver's deterministic seconds, round by round.
RUNS, MOVES_PER_TASK, EFFORTS_S = 40, 20, (1.0, 4.0, 16.0, 64.0)
#: Of the time that is left, what the decoder alone may take.
DECODER_FRACTION = 0.5
#: Runs of list scheduling for each placement beside the first one.
CLIMB_RUNS = 5
#: How close to the best a decoder is placed that leaves room for encoders.
RESERVE_GAP_FRACTION = 1e-3


@dataclass(frozen=True, eq=False)
class EncodedResult:
    """What is known of a decoder with encoders.

    status, reason: as PlacementResult has them. decoder: of the decoder alone, beside what encoders hold. step_ms,
    tasks, words, starts_ms [n], peak_bytes [devices]: of the best; none where none was found. lower_bound_ms: of all
    placements and orders, micro-batches dealt as the encoders' pipelines say. placed_bound_ms: of all orders with
    this placement.
    """

    problem: EncodedProblem
    status: Status
    decoder: PlacementResult
    step_ms: float
    lower_bound_ms: float
    solve_s: float
    placement: Placement | None = None
    placed_bound_ms: float = 0.0
    tasks: Tasks | None = None
    words: Words | None = None
    starts_ms: tuple[float, ...] = ()
    peak_bytes: tuple[float, ...] = ()
    reason: str = ""

    @property
    def gap_fraction(self) -> float:
        """How far the bound is below the step, 0 to 1."""
        return max(0.0, 1.0 - self.lower_bound_ms / self.step_ms) if np.isfinite(self.step_ms) else 1.0


class _Search:
    """The best order so far, over the placements that were looked at."""

    def __init__(
        self,
        problem: EncodedProblem,
        lower_ms: float,
        should_stop: Callable[[], bool],
        on_better: Callable[[float], None],
    ) -> None:
        self.problem, self.lower_ms, self.should_stop, self.on_better = problem, lower_ms, should_stop, on_better
        self.is_free = find_schedule(problem.decoder.schedule, problem.decoder.num_chunks).given_by == "placement"
        self.least_ms = read_ms(problem)
        self.step_ms = np.inf
        self.player: Player | None = None
        self.words: Words | None = None
        self.placed_bound_ms = 0.0
        self.seed = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be found or shown."""
        return self.step_ms <= self.lower_ms * (1.0 + OPTIMAL_GAP_FRACTION)

    def look(
        self, placement: Placement, decoder_ms: float, num_runs: int = RUNS, num_moves: int = MOVES_PER_TASK
    ) -> None:
        """Order one placement's work. decoder_ms: what the decoder alone takes there at least."""
        tasks = list_tasks(self.problem, placement)
        bound_ms = max(self.lower_ms, bound_placed(tasks, decoder_ms))
        if bound_ms >= self.step_ms:
            return
        player = Player(tasks)
        step_ms, words = construct(player, bound_ms, num_runs, self.should_stop, self.seed)
        if words is None:
            return
        if self.is_free:
            player, words = self._with_moves(placement, player, words)
        self.seed += 1
        if step_ms > bound_ms * (1.0 + OPTIMAL_GAP_FRACTION) and num_moves:
            moves = num_moves * tasks.num_tasks
            step_ms, words = anneal(player, words, moves, bound_ms, self.should_stop, self.seed)
        if max(step_ms, self.least_ms) < self.step_ms:
            self.placed_bound_ms = bound_ms
            self._take(player, words, step_ms)

    def _with_moves(self, placement: Placement, player: Player, words: Words) -> tuple[Player, Words]:
        """The same words where the decoder's forwards and backwards may change places."""
        player.step_ms(words)
        starts = (player.ends_ms - player.tasks.length_ms).tolist()
        tasks = list_tasks(self.problem, placement, moves_decoder=True)
        return Player(tasks), words_by_starts(tasks, starts)

    def _take(self, player: Player, words: Words, step_ms: float) -> None:
        self.player, self.words, self.step_ms = player, words, max(step_ms, self.least_ms)
        self.on_better(self.step_ms)

    def climb(self, decoder: Problem, lower_bound_ms: float) -> None:
        """Move one boundary between stages after another, as long as that gives a shorter step."""
        units = cut_into_units(decoder)
        improved = not units.has_layouts
        while improved and self.player is not None:
            before_ms = self.step_ms
            for other in _neighbours(units, self.player.tasks.placement):
                if self.is_done or self.should_stop():
                    return
                alone_ms = lower_bound_ms if self.is_free else simulate(decoder, other).step_ms
                self.look(other, alone_ms, CLIMB_RUNS, 0)
                if self.step_ms < before_ms:
                    break
            improved = self.step_ms < before_ms

    def solve(self) -> None:
        """Let CP-SAT look for better orders of the best placement, and show how far they can get."""
        for effort_s in EFFORTS_S:
            if self.player is None or self.should_stop() or self.placed_bound_ms >= self.step_ms:
                return
            solved = solve_words(self.player, self.step_ms, self.placed_bound_ms, effort_s, self.should_stop)
            self.placed_bound_ms = max(self.placed_bound_ms, solved.lower_bound_ms)
            if solved.words is not None:
                self._take(self.player, solved.words, self.player.step_ms(solved.words))


def place_encoded(
    problem: EncodedProblem,
    time_limit_s: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_better: Callable[[float], None] = lambda _: None,
) -> EncodedResult:
    """The fastest order of `problem` that fits its devices, with a bound on all others.

    time_limit_s: wall time after which the best so far is returned; without one the search ends where it is proven, or
    where its largest effort has not closed the gap. Raises JobError where the problem contradicts itself.
    """
    check_encoders(problem)
    compile_words()
    began = time.monotonic()
    deadline = began + time_limit_s if time_limit_s is not None else np.inf

    def stop() -> bool:
        return time.monotonic() > deadline or should_stop()

    decoder = decoder_on_devices(problem)
    found = place(decoder, None if time_limit_s is None else DECODER_FRACTION * time_limit_s, should_stop)
    lower_ms = bound_all(problem, found.lower_bound_ms)
    search = _Search(problem, lower_ms, stop, on_better)
    if found.placement is not None:
        search.look(found.placement, found.lower_bound_ms if search.is_free else found.step_ms)
        for reserve in _reserves(search, decoder, found.placement):
            other = place(reserve, _left_s(deadline), should_stop, gap_fraction=RESERVE_GAP_FRACTION)
            if other.placement is not None:
                search.look(other.placement, found.lower_bound_ms if search.is_free else other.step_ms)
        search.climb(decoder, found.lower_bound_ms)
        search.solve()
        if _is_only(decoder):
            search.lower_ms = max(search.lower_ms, min(search.placed_bound_ms, search.step_ms))
    return replace(_result(problem, found, search), solve_s=time.monotonic() - began)


def _neighbours(units: Units, placement: Placement) -> Iterator[Placement]:
    """The placements with one boundary between stages one unit further on or back."""
    boundaries, lanes = units.boundaries(placement)
    for k, by in ((k, by) for k in range(1, len(boundaries) - 1) for by in (-1, 1)):
        moved = [*boundaries[:k], boundaries[k] + by, *boundaries[k + 1 :]]
        if units.first[k] <= moved[k] <= units.last[k] and moved[k - 1] < moved[k] < moved[k + 1]:
            other = replace(units.placement(moved, lanes), orders=placement.orders)
            if _is_lawful(units.problem, other):
                yield other


def _is_lawful(decoder: Problem, placement: Placement) -> bool:
    """Whether stages hold layers, and no more of them run in modes than they hold."""
    try:
        check_placement(decoder, placement)
    except PlanError:
        return False
    return True


def _left_s(deadline: float) -> float | None:
    left_s = DECODER_FRACTION * (deadline - time.monotonic())
    return None if np.isinf(deadline) else max(0.0, left_s)


def _is_only(decoder: Problem) -> bool:
    """Whether the decoder can be placed in one way alone."""
    units = cut_into_units(decoder)
    return units.num_lanes == 0 and bool(np.array_equal(units.first, units.last))


def _reserves(search: _Search, decoder: Problem, placement: Placement) -> Iterator[Problem]:
    """The decoder with room for passes of encoders in flight, where memory keeps them from what they would take: for as
    many as they would have in flight, and for fewer where that gives no order at all."""
    tasks = list_tasks(search.problem, placement)
    free = Player(replace(tasks, limit_bytes=np.full(tasks.num_lanes, np.inf)), is_limited=False)
    target_ms = min(search.step_ms, search.lower_ms)
    step_ms, words = construct(free, target_ms, RUNS, search.should_stop)
    if words is None or step_ms >= search.step_ms or search.is_done:
        return
    kept = np.array([free.encoders_bytes(words, stage) for stage in range(decoder.num_stages)])
    for part in (1.0, 0.75, 0.5, 0.35, 0.25, 0.15):
        before = search.step_ms
        static = np.array(decoder.stage_static_bytes) + part * kept
        yield replace(decoder, stage_static_bytes=tuple(static.tolist()))
        if search.should_stop() or (np.isfinite(search.step_ms) and search.step_ms >= before):
            return


def _result(problem: EncodedProblem, found: PlacementResult, search: _Search) -> EncodedResult:
    player, words = search.player, search.words
    if player is None or words is None:
        status: Status = "infeasible" if found.status == "infeasible" else "unknown"
        reason = found.reason
        if found.placement is not None and not search.should_stop():
            reason = (
                "the decoder fits, and no order was found in which what encoders keep fits beside it; that none is "
                "there is not shown: give devices more memory, or passes fewer micro-batches"
            )
        return EncodedResult(problem, status, found, np.inf, search.lower_ms, 0.0, reason=reason)
    player.step_ms(words)
    tasks = player.tasks
    lower_ms = min(search.lower_ms, search.step_ms)
    return EncodedResult(
        problem,
        "optimal" if search.is_done else "feasible",
        found,
        search.step_ms,
        lower_ms,
        0.0,
        tasks.placement,
        min(max(lower_ms, search.placed_bound_ms), search.step_ms),
        tasks,
        words,
        tuple((player.ends_ms - tasks.length_ms).tolist()),
        tuple(player.peak_bytes(words, device) for device in range(problem.num_devices)),
    )
