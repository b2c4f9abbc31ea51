"""The search over orders: one placement after another, words built and improved, bounds by CP-SAT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.placement.bubbles.bounds import bound_placed, read_ms
from mm_autoparallel.pipeline.placement.bubbles.construct import construct
from mm_autoparallel.pipeline.placement.bubbles.improve import anneal
from mm_autoparallel.pipeline.placement.bubbles.lanes import bound_lanes
from mm_autoparallel.pipeline.placement.bubbles.solver import solve_words
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION, PlacementResult
from mm_autoparallel.pipeline.placement.segments import Segments, cut_into_segments
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.encoders.play import Player, Words, words_by_starts
from mm_autoparallel.pipeline.simulate.encoders.tasks import list_tasks
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.loads import find_misfits, overfull_hosts, peak_host_bytes
from mm_autoparallel.pipeline.simulate.step import simulate

#: Runs of list scheduling, moves of annealing for each task, and the solver's deterministic seconds, in a first round.
#: Of the next ones each has twice as many, and the solver four times as long.
RUNS, MOVES_PER_TASK, EFFORTS_S = 40, 20, (1.0, 4.0, 16.0, 64.0)
#: Runs of list scheduling for each placement beside the first one.
CLIMB_RUNS = 5
#: Placements whose orders are bounded one by one at most, and the solver's effort for each.
LISTED, CLOSING_EFFORTS_S = 100, (1.0, 4.0)


class Search:
    """The best order so far, over the placements that were looked at."""

    def __init__(
        self,
        problem: EncodedProblem,
        lower_ms: float,
        should_stop: Callable[[], bool],
        on_better: Callable[[float], None],
        gap_fraction: float = 0.0,
    ) -> None:
        self.gap_fraction = max(gap_fraction, OPTIMAL_GAP_FRACTION)
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
        return self.step_ms <= self.lower_ms * (1.0 + self.gap_fraction)

    def look(
        self, placement: Placement, decoder_ms: float, num_runs: int = RUNS, num_moves: int = MOVES_PER_TASK
    ) -> None:
        """Order one placement's work. decoder_ms: what the decoder alone takes there at least."""
        tasks = list_tasks(self.problem, placement)
        decoder = self.problem.decoder
        if overfull_hosts(decoder, peak_host_bytes(decoder, tasks.loads, tasks.graph)):
            return
        bound_ms = max(self.lower_ms, bound_placed(tasks, decoder_ms))
        if bound_ms >= self.step_ms:
            return
        player = Player(tasks)
        enough_ms = bound_ms * (1.0 + self.gap_fraction)
        step_ms, words = construct(player, enough_ms, num_runs, self.should_stop, self.seed)
        if words is None:
            return
        if self.is_free:
            player, words = self._with_moves(placement, player, words)
        self.seed += 1
        if step_ms > bound_ms * (1.0 + self.gap_fraction) and num_moves:
            moves = num_moves * (tasks.num_tasks if decoder.num_chunks == 1 else 8 * int(sum(tasks.owner >= 0)))
            step_ms, words = anneal(player, words, moves, enough_ms, self.should_stop, self.seed)
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

    def climb(self, decoder: Problem, lower_bound_ms: float, number: int = 0) -> None:
        """Move one boundary between stages after another, as long as that gives a shorter step. number: the round's."""
        segments = cut_into_segments(decoder)
        improved = not segments.has_layouts
        while improved and self.player is not None:
            before_ms = self.step_ms
            for other in _neighbours(segments, self.player.tasks.placement):
                if self.is_done or self.should_stop():
                    return
                alone_ms = lower_bound_ms if self.is_free else simulate(decoder, other).step_ms
                self.look(other, alone_ms, CLIMB_RUNS * 2**number, 0)
                if self.step_ms < before_ms:
                    break
            improved = self.step_ms < before_ms

    def close(self, decoder: Problem, found: PlacementResult, number: int | None, by_lanes: bool = True) -> None:
        """Where ways to cut the chain are few, bound the orders of each: what none goes below is the bound of all.

        number: the round's, of CP-SAT's effort; None: by lanes alone, or not even by these. Layers in modes take no
        less time than without and may need less memory, so a cut is then bounded without modes, memory aside.
        """
        segments = cut_into_segments(decoder)
        boundaries = _list_boundaries(segments)
        if self.is_done or not boundaries or found.placement is None:
            return
        least_ms = np.inf
        for each in boundaries:
            if self.should_stop():
                return
            placement = replace(
                segments.placement(each, [[0] * segments.num_lanes for _ in each[1:]]), orders=found.placement.orders
            )
            if not _is_lawful(decoder, placement):
                continue
            timeline = simulate(decoder, placement)
            fits = not find_misfits(decoder, timeline.peak_memory_bytes, timeline.peak_host_bytes)
            if fits or self.is_free or segments.num_lanes:
                alone_ms = found.lower_bound_ms if self.is_free else timeline.step_ms
                least_ms = min(
                    least_ms, self._bound_orders(placement, alone_ms, not segments.num_lanes, number, by_lanes)
                )
        self.lower_ms = max(self.lower_ms, min(least_ms, self.step_ms))

    def _bound_orders(
        self, placement: Placement, decoder_ms: float, is_limited: bool, number: int | None, by_lanes: bool
    ) -> float:
        """What no order of this placement goes below; infinite where none fits, or none below the best step.
        is_limited False: whatever memory it needs. number, by_lanes: as `close` has them."""
        tasks = list_tasks(self.problem, placement, moves_decoder=self.is_free)
        bound_ms = max(self.lower_ms, bound_placed(tasks, decoder_ms))
        if is_limited and self.player is not None and self.player.tasks.placement == placement:
            bound_ms = max(bound_ms, self.placed_bound_ms)
        if bound_ms >= self.step_ms:
            return np.inf
        if not by_lanes:
            return bound_ms
        player, bounded = Player(tasks), Player(tasks, is_limited)
        bound_ms = bound_lanes(bounded, bound_ms, self.step_ms, self.should_stop)
        if bound_ms >= self.step_ms * (1.0 - 1e-12):
            return bound_ms
        for effort_s in () if number is None else np.array(CLOSING_EFFORTS_S) * 4.0**number:
            anything_ms = float(tasks.length_ms.sum() + tasks.lag_ms.sum() + tasks.tails_ms.sum()) + 1.0
            goal_ms = min(self.step_ms, anything_ms)
            solved = solve_words(bounded, goal_ms, bound_ms, effort_s, self.should_stop)
            bound_ms = max(bound_ms, solved.lower_bound_ms)
            if solved.words is not None:
                step_ms = player.step_ms(solved.words)
                if player.fits(solved.words) and max(step_ms, self.least_ms) < self.step_ms:
                    self._take(player, solved.words, step_ms)
                    self.placed_bound_ms = bound_ms
            if bound_ms >= goal_ms and solved.words is None:
                return np.inf
            if bound_ms >= self.step_ms * (1.0 - 1e-12) or self.should_stop():
                break
        return bound_ms

    def solve(self, number: int = 0) -> None:
        """Let CP-SAT look for better orders of the best placement, and show how far they can get, as lanes do."""
        if self.player is not None and self.placed_bound_ms < self.step_ms and not self.is_done:
            bound_ms = bound_lanes(self.player, self.placed_bound_ms, self.step_ms, self.should_stop)
            self.placed_bound_ms = min(bound_ms, self.step_ms)
        for effort_s in EFFORTS_S if number == 0 else (EFFORTS_S[-1] * 4.0**number,):
            if self.player is None or self.should_stop() or self.placed_bound_ms >= self.step_ms or self.is_done:
                return
            solved = solve_words(self.player, self.step_ms, self.placed_bound_ms, effort_s, self.should_stop)
            self.placed_bound_ms = max(self.placed_bound_ms, solved.lower_bound_ms)
            if solved.words is not None:
                self._take(self.player, solved.words, self.player.step_ms(solved.words))


def _neighbours(segments: Segments, placement: Placement) -> Iterator[Placement]:
    """The placements with one boundary between stages one segment further on or back."""
    boundaries, lanes = segments.boundaries(placement)
    for k, by in ((k, by) for k in range(1, len(boundaries) - 1) for by in (-1, 1)):
        moved = [*boundaries[:k], boundaries[k] + by, *boundaries[k + 1 :]]
        if segments.first[k] <= moved[k] <= segments.last[k] and moved[k - 1] < moved[k] < moved[k + 1]:
            other = replace(segments.placement(moved, lanes), orders=placement.orders)
            if _is_lawful(segments.problem, other):
                yield other


def _is_lawful(decoder: Problem, placement: Placement) -> bool:
    """Whether stages hold layers, and no more of them run in modes than they hold."""
    try:
        check_placement(decoder, placement)
    except PlanError:
        return False
    return True


def _list_boundaries(segments: Segments) -> list[list[int]]:
    """Those of every placement; none where they are too many, or layers have layouts."""
    found: list[list[int]] = []
    num_virtual = len(segments.first) - 1

    def grow(begun: list[int]) -> None:
        k = len(begun)
        if k == num_virtual:
            found.append([*begun, segments.num_segments])
            return
        for at in range(max(begun[-1] + 1, int(segments.first[k])), int(segments.last[k]) + 1):
            if len(found) <= LISTED:
                grow([*begun, at])

    if not segments.has_layouts:
        grow([0])
    return found if len(found) <= LISTED else []
