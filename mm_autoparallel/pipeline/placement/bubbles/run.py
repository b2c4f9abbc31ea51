"""Place a decoder's layers and order the work of its encoders beside it, with a bound on all other ways.

The decoder is placed first, by itself, and its bound raised by what encoders need before and after it, and by all ways
to cut its chain with them: that bounds every placement. Then words are built, improved and, where they do not reach the
bound, looked for by CP-SAT.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.encoders import EncodedProblem, check_encoders
from mm_autoparallel.pipeline.placement.bounds.bound import Stopped
from mm_autoparallel.pipeline.placement.bounds.cuts import Cuts
from mm_autoparallel.pipeline.placement.bubbles.bounds import bound_all, decoder_beside, lead_ms, list_cuts
from mm_autoparallel.pipeline.placement.bubbles.compiling import compile_words
from mm_autoparallel.pipeline.placement.bubbles.construct import construct
from mm_autoparallel.pipeline.placement.bubbles.search import MOVES_PER_TASK, RUNS, Search
from mm_autoparallel.pipeline.placement.bubbles.starts import list_starts
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.placement.result import PlacementResult, Status, infeasible_result
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.encoders.play import Player, Words
from mm_autoparallel.pipeline.simulate.encoders.tasks import Tasks, decoder_on_devices, list_tasks
from mm_autoparallel.pipeline.simulate.step import simulate

Floats = NDArray[np.float64]

#: Of the time that is left, what the decoder alone may take.
DECODER_FRACTION = 0.5
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


def place_encoded(
    problem: EncodedProblem,
    time_limit_s: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_better: Callable[[float], None] = lambda _: None,
    cutoff_ms: float = np.inf,
    gap_fraction: float = 0.0,
) -> EncodedResult:
    """The fastest order of `problem` that fits its devices, with a bound on all others.

    time_limit_s: wall time after which the best so far is returned: until then rounds of growing effort go on, unless
    it is proven; without one the first is the last. cutoff_ms: where nothing is below it, it ends with no order;
    gap_fraction: it may end this close to the best. Raises JobError where the problem contradicts itself.
    """
    check_encoders(problem)
    compile_words()
    began = time.monotonic()
    deadline = began + time_limit_s if time_limit_s is not None else np.inf

    def stop() -> bool:
        return time.monotonic() > deadline or should_stop()

    decoder = decoder_beside(problem)
    reason = _explain_own(problem)
    if reason:
        return EncodedResult(problem, "infeasible", infeasible_result(reason), np.inf, np.inf, 0.0, reason=reason)
    limit_s = None if time_limit_s is None else DECODER_FRACTION * time_limit_s
    room_ms = max(0.0, cutoff_ms - lead_ms(problem))
    found = place(decoder, limit_s, should_stop, cutoff_ms=room_ms, gap_fraction=gap_fraction)
    cuts, lower_ms = _bound(problem, bound_all(problem, found.lower_bound_ms), stop)
    search = Search(problem, lower_ms, stop, on_better, gap_fraction)
    search.close(decoder, found, None, by_lanes=False)
    if found.placement is not None and search.lower_ms < cutoff_ms * (1.0 - gap_fraction):
        starts = [found.placement]
        if cuts is not None and not search.is_free:
            starts += list_starts(cut_into_segments(decoder), cuts, lower_ms)
        _look_at(search, decoder, starts, found.lower_bound_ms, 0)
        for reserve in _reserves(search, decoder, found.placement):
            other = place(reserve, _left_s(deadline), should_stop, gap_fraction=RESERVE_GAP_FRACTION)
            if other.placement is not None:
                search.look(other.placement, found.lower_bound_ms if search.is_free else other.step_ms)
        for number in count():
            if number:
                _look_at(search, decoder, starts, found.lower_bound_ms, number)
            search.climb(decoder, found.lower_bound_ms, number)
            search.close(decoder, found, None)
            search.solve(number)
            search.close(decoder, found, number)
            is_enough = search.is_done or search.lower_ms >= cutoff_ms * (1.0 - gap_fraction)
            if is_enough or time_limit_s is None or stop():
                break
    return replace(_result(problem, found, search), solve_s=time.monotonic() - began)


def _explain_own(problem: EncodedProblem) -> str:
    """Which encoder's own devices hold less than one of its passes needs, if any does."""
    for encoder in problem.encoders:
        needed = [held + kept for held, kept in zip(encoder.static_bytes, encoder.activation_bytes, strict=True)]
        own = any(device >= problem.decoder.num_stages for pipeline in encoder.pipelines for device in pipeline)
        if own and encoder.run != "cached" and max(needed) > encoder.limit_bytes:
            return (
                f'memory: a device of encoder "{encoder.name}" needs {max(needed):,.0f} bytes for one pass, and its '
                f"limit is {encoder.limit_bytes:,.0f}"
            )
    return ""


def _look_at(search: Search, decoder: Problem, starts: list[Placement], decoder_ms: float, number: int) -> None:
    """Order the work of each placement, with twice the effort of the round before. decoder_ms: no order of the decoder
    alone takes less."""
    for start in starts:
        if search.is_done or search.should_stop():
            return
        alone_ms = decoder_ms if search.is_free else simulate(decoder, start).step_ms
        search.look(start, alone_ms, RUNS * 2**number, MOVES_PER_TASK * 2**number)


def _bound(problem: EncodedProblem, known_ms: float, should_stop: Callable[[], bool]) -> tuple[Cuts | None, float]:
    """The ways to cut the decoder's chain, and a step of at least known_ms that no placement and order goes below."""

    def look() -> None:
        if should_stop():
            raise Stopped

    cuts = None
    try:
        cuts = list_cuts(problem, look)
        return cuts, known_ms if cuts is None else cuts.bound(known_ms, look)
    except Stopped:
        return cuts, known_ms


def _left_s(deadline: float) -> float | None:
    left_s = DECODER_FRACTION * (deadline - time.monotonic())
    return None if np.isinf(deadline) else max(0.0, left_s)


def _reserves(search: Search, decoder: Problem, placement: Placement) -> Iterator[Problem]:
    """The decoder with room for passes of encoders in flight, where memory keeps them from what they would take: for as
    many as they would have in flight, and for fewer where that gives no order at all."""
    if search.is_done or not any(any(encoder.activation_bytes) for encoder in search.problem.encoders):
        return
    free = Player(list_tasks(search.problem, placement), is_limited=False)
    step_ms, words = construct(free, search.lower_ms, RUNS, search.should_stop)
    if words is None or step_ms >= search.step_ms:
        return
    kept = np.array([free.encoders_bytes(words, stage) for stage in range(decoder.num_stages)])
    alone = decoder_on_devices(search.problem)
    for part in (1.0, 0.75, 0.5, 0.35, 0.25, 0.15):
        before = search.step_ms
        static = np.maximum(decoder.stage_static_bytes, np.array(alone.stage_static_bytes) + part * kept)
        yield replace(decoder, stage_static_bytes=tuple(static.tolist()))
        if search.should_stop() or (np.isfinite(search.step_ms) and search.step_ms >= before):
            return


def _result(problem: EncodedProblem, found: PlacementResult, search: Search) -> EncodedResult:
    player, words = search.player, search.words
    if player is None or words is None:
        none_fits = found.status == "infeasible" or np.isinf(search.lower_ms)
        status: Status = "infeasible" if none_fits else "unknown"
        reason = found.reason
        if found.status == "infeasible" and any(any(each.activation_bytes) for each in problem.encoders):
            reason += "; what a pass of each encoder keeps beside a full stage is counted"
        if found.placement is not None and none_fits:
            reason = "memory: the decoder fits, and beside it no order of its encoders' work does, wherever layers lie"
        elif found.placement is not None and not search.should_stop():
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
