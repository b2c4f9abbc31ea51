"""Options: every way to fill a stage, as rows of figures: what it holds, in which modes, its backwards split or whole.

A stage may split its backwards into input and weight gradients or run them whole. Whole costs no more and keeps nothing
between the two, but hands its gradient on later; where splitting costs nothing more either, and needs no more memory,
split rows alone are listed, for they can do what whole ones do. Bounds use relaxed rows, whose backwards may be both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT_MS,
    KEPT,
    MOST_HELD,
    MOST_IN_FLIGHT,
    MOST_PENDING,
    NUM_FIGURES,
    PENDING,
    ROOM,
    TAIL_MS,
    WEIGHT_MS,
    Figures,
)
from mm_autoparallel.pipeline.placement.patterns.intervals import Intervals, list_intervals
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns, undominated_rows
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import list_host_links
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, allowed_host_bytes
from mm_autoparallel.units import GB

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Index = NDArray[np.int32]

#: Ways to run the layers of one stretch, rows over all stages, and entries of the index of stretches, beyond which
#: nothing is listed: some hundred MB.
MAX_MIXES, MAX_ROWS, MAX_INDEX = 20_000, 3_000_000, 60_000_000
#: What rounding may have taken from a level.
ROUNDING_FRACTION = 1e-9


@dataclass(frozen=True, eq=False)
class Options:
    """Rows of all stages. N segments, P stages, L lanes (see `Segments`).

    begin, end, stage: [R] of each row. lanes: [R, L] layers in each lane. relaxed, split, whole: [R, NUM_FIGURES]; a
    split or whole row of which is_split, is_whole [R] is False is none, for it does not fit or buys nothing.
    first, count: [P, N + 1, N + 1] the rows that hold segments begin to end. overflow_bytes: [P, N + 1, N + 1] by how
    much the least of a stretch exceeds its limit, infinite where a stage cannot hold it.
    """

    segments: Segments
    stage: Ints
    begin: Ints
    end: Ints
    lanes: Ints
    relaxed: Figures
    split: Figures
    whole: Figures
    is_split: NDArray[np.bool_]
    is_whole: NDArray[np.bool_]
    first: Index
    count: Index
    overflow_bytes: Floats

    @property
    def is_exact(self) -> bool:
        """Whether relaxed rows are what stages cost: a bound of theirs can be met."""
        return bool(self.is_split.all()) and not self.is_whole.any() and np.array_equal(self.relaxed, self.split)


def list_options(
    segments: Segments, should_stop: Callable[[], bool], most_ms: float = np.inf, only_bounds: bool = False
) -> Options:
    """Every lawful row of which a step of at most most_ms can be made. Raises TooManyPatterns where they are too many,
    or on should_stop. only_bounds: rows that others undercut are not left out, which takes longer than bounds do.
    """
    num_stages, size = segments.problem.num_stages, segments.num_segments + 1
    if num_stages * size * size > MAX_INDEX:
        raise TooManyPatterns
    first, count = (np.zeros((num_stages, size, size), dtype=np.int32) for _ in range(2))
    overflow = np.full((num_stages, size, size), np.inf)
    parts, num_rows = [], 0
    mixes = Mixes(segments)
    for s in range(num_stages):
        part = _rows_of_stage(segments, s, mixes, overflow[s], should_stop, most_ms, only_bounds)
        begin, end = part["begin"], part["end"]
        new = np.flatnonzero(np.concatenate([[True], (np.diff(begin) != 0) | (np.diff(end) != 0)])[: len(begin)])
        first[s, begin[new], end[new]] = new + num_rows
        count[s, begin[new], end[new]] = np.diff(np.append(new, len(begin)))
        num_rows += len(begin)
        if num_rows > MAX_ROWS:
            raise TooManyPatterns
        parts.append(part)
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Options(segments=segments, first=first, count=count, overflow_bytes=overflow, **joined)


def least_overflow(options: Options) -> tuple[float, str]:
    """By how many bytes the stage that exceeds its limit most does in the placement where that is least, and what to
    say of it; 0 and nothing where a placement fits."""
    least = np.full(options.overflow_bytes.shape[1], np.inf)
    least[-1] = 0.0
    for of_stage in options.overflow_bytes[::-1]:
        least = np.min(np.maximum(of_stage, least[None, :]), axis=1)
    overflow_bytes = float(least[0])
    if overflow_bytes > 0.0:
        return overflow_bytes, explain_excess(overflow_bytes)
    joined = np.zeros(options.count.shape[1], dtype=bool)
    joined[-1] = True
    for of_stage in options.count[::-1]:
        joined = (of_stage > 0) @ joined
    if not joined[0]:
        return 0.0, "host: with one micro-batch at a time every placement still exceeds a host's limit, or a device's"
    return 0.0, ""


def explain_excess(overflow_bytes: float) -> str:
    """What to say where every placement exceeds a limit by that much, or more."""
    return (
        "memory: with one micro-batch at a time on every stage the best placement still exceeds a limit by "
        f"{overflow_bytes / GB:.6g} GB at the least"
    )


class Mixes:
    """Counts of lanes [n, L] that a stretch of a stage may have, and what they add: forward, backward, saved, restored,
    host. Listed once for stretches with the same layers of each group."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Ints, Floats]] = {}
        self.before = [tuple(of) for of in segments.before[:, segments.start].T.tolist()]

    def fill(self, begin: int, end: int) -> tuple[Ints, Floats]:
        """Raises TooManyPatterns."""
        segments = self.segments
        low, high = key = self.before[begin], self.before[end]
        if key not in self.known:
            counts, sums = np.zeros((1, 0), dtype=np.int64), np.zeros((1, 5))
            for g in range(len(segments.groups)):
                more, adds = self._of_group(g, low[g], high[g])
                if len(counts) * len(more) > MAX_MIXES:
                    raise TooManyPatterns
                left, right = (axis.ravel() for axis in np.indices((len(counts), len(more))))
                counts, sums = np.concatenate([counts[left], more[right]], axis=1), sums[left] + adds[right]
            self.known[key] = counts, sums
        return self.known[key]

    def _of_group(self, group: int, low: int, high: int) -> tuple[Ints, Floats]:
        segments, num_layers = self.segments, high - low
        lanes = range(int(segments.lane_offset[group]), int(segments.lane_offset[group + 1]))
        if comb(num_layers + len(lanes), len(lanes)) > MAX_MIXES:
            raise TooManyPatterns
        ends = np.array(list(combinations_with_replacement(range(num_layers + 1), len(lanes))), dtype=np.int64)
        ends = np.concatenate([np.full((len(ends), 1), low), ends.reshape(len(ends), len(lanes)) + low], axis=1)
        sums = np.zeros((len(ends), 5))
        fields = ("extra_forward_ms", "extra_backward_ms", "saved_bytes", "restored_bytes", "host_bytes")
        for place, lane in enumerate(lanes):
            for column, name in enumerate(fields):
                of_lane = getattr(segments, name)[lane]
                sums[:, column] += of_lane[ends[:, place + 1]] - of_lane[ends[:, place]]
        return np.diff(ends, axis=1), sums


def _rows_of_stage(
    segments: Segments,
    stage: int,
    mixes: Mixes,
    overflow: Floats,
    should_stop: Callable[[], bool],
    most_ms: float,
    only_bounds: bool,
) -> dict[str, NDArray[np.generic]]:
    """The columns of `Options` for one stage; writes overflow [N + 1, N + 1]. Raises TooManyPatterns."""
    problem, chain = segments.problem, segments.problem.chain
    most_load_ms = most_ms * (1.0 + ROUNDING_FRACTION) / problem.num_microbatches
    intervals = list_intervals(segments, stage, most_load_ms)
    weights, extras, pending = (
        np.concatenate([[0.0], np.cumsum(np.array(of)[segments.flat])])
        for of in (
            [block.backward_weight_ms for block in chain],
            [block.split_extra_ms for block in chain],
            [block.pending_bytes for block in chain],
        )
    )
    a, b = segments.start[intervals.begin], segments.start[intervals.end]
    at, lanes, added = _fill_each(intervals, mixes, should_stop)
    factor, link_ms = problem.time_factors[stage], list_host_links(problem)[stage]
    weight_ms, extra_ms = factor * (weights[b] - weights[a])[at], factor * (extras[b] - extras[a])[at]
    host_ms = link_ms * added[:, 4]
    input_ms = intervals.backward_ms[at] + factor * added[:, 1]  # whole so far
    relaxed = np.zeros((len(at), NUM_FIGURES))
    relaxed[:, FORWARD_MS] = np.maximum(intervals.forward_ms[at] + factor * added[:, 0], host_ms)
    relaxed[:, WEIGHT_MS] = weight_ms
    relaxed[:, HOP_FORWARD_MS], relaxed[:, HOP_BACKWARD_MS] = (
        intervals.hop_forward_ms[at],
        intervals.hop_backward_ms[at],
    )
    relaxed[:, TAIL_MS] = problem.stage_tail_ms[stage] + intervals.tail_ms[at]
    relaxed[:, KEPT] = intervals.activation_bytes[at] - added[:, 2]
    fixed_bytes = problem.stage_static_bytes[stage] + intervals.static_bytes
    limit_bytes = float(allowed_bytes(problem)[stage])
    work_bytes = (fixed_bytes + intervals.transient_bytes)[at] + added[:, 3]
    relaxed[:, ROOM] = limit_bytes - work_bytes
    step_bytes = fixed_bytes + intervals.step_bytes
    step_bytes = (step_bytes + np.minimum(intervals.step_once_bytes, intervals.step_shard_bytes))[at]
    host_room = allowed_host_bytes(problem)[stage] - intervals.host_static_bytes[at]
    whole, split = relaxed.copy(), relaxed
    relaxed = relaxed.copy()
    whole[:, INPUT_MS], whole[:, WEIGHT_MS] = np.maximum(input_ms, host_ms), 0.0
    split[:, INPUT_MS], split[:, WEIGHT_MS] = np.maximum(input_ms - weight_ms, host_ms), weight_ms + extra_ms
    split[:, PENDING] = (pending[b] - pending[a])[at]
    is_unsplit = weight_ms == 0.0  # nothing is left to be done later, and nothing kept for it
    split[is_unsplit, PENDING] = 0.0
    relaxed[:, INPUT_MS] = np.minimum(split[:, INPUT_MS], whole[:, INPUT_MS])
    # what a whole backward takes more of the link than of the device is in no weight gradient
    relaxed[:, WEIGHT_MS] = np.minimum(weight_ms, whole[:, INPUT_MS] - relaxed[:, INPUT_MS])
    relaxed[:, PENDING] = np.minimum(split[:, PENDING], relaxed[:, KEPT])
    for rows in (relaxed, split, whole):
        _limit(rows, problem.num_microbatches, added[:, 4], host_room)
    # before an input gradient begins, those that wait for their weights' alone were split, and keep what these keep
    relaxed[:, MOST_PENDING] = np.minimum(relaxed[:, MOST_PENDING], split[:, MOST_PENDING] + 1.0)
    exceeds = np.maximum(work_bytes + relaxed[:, KEPT], step_bytes) - limit_bytes
    np.minimum.at(overflow, (intervals.begin[at], intervals.end[at]), np.maximum(exceeds, 0.0))
    fits = (exceeds <= 0.0) & (relaxed[:, MOST_IN_FLIGHT] >= 1)
    fits &= relaxed[:, [FORWARD_MS, INPUT_MS, WEIGHT_MS]].sum(axis=1) <= most_load_ms
    buys = (split[:, PENDING] > split[:, KEPT]) | (split[:, INPUT_MS] + split[:, WEIGHT_MS] > whole[:, INPUT_MS])
    is_split = fits & (split[:, PENDING] <= split[:, ROOM])
    is_whole = fits & buys & ~is_unsplit
    kept = np.flatnonzero(fits & (is_split | is_whole))
    kept = kept if only_bounds else _keep_best(at, relaxed, split, whole, kept)
    return {
        "stage": np.full(len(kept), stage),
        "begin": intervals.begin[at[kept]],
        "end": intervals.end[at[kept]],
        "lanes": lanes[kept],
        "relaxed": relaxed[kept],
        "split": split[kept],
        "whole": whole[kept],
        "is_split": is_split[kept],
        "is_whole": is_whole[kept],
    }


def _fill_each(intervals: Intervals, mixes: Mixes, should_stop: Callable[[], bool]) -> tuple[Ints, Ints, Floats]:
    """Of all intervals: which each row is of, its layers in each lane, and what they add. Raises TooManyPatterns."""
    of_interval, num_rows = [np.zeros(0, dtype=np.int64)], 0
    counts, sums = [np.zeros((0, mixes.segments.num_lanes), dtype=np.int64)], [np.zeros((0, 5))]
    for i, (begin, end) in enumerate(zip(intervals.begin.tolist(), intervals.end.tolist(), strict=True)):
        more, adds = mixes.fill(begin, end)
        num_rows += len(more)
        if num_rows > MAX_ROWS or should_stop():
            raise TooManyPatterns
        of_interval.append(np.full(len(more), i))
        counts.append(more)
        sums.append(adds)
    return np.concatenate(of_interval), np.concatenate(counts), np.concatenate(sums)


def _limit(rows: Floats, num_microbatches: int, host_bytes: Floats, host_room: Floats) -> None:
    """Write how many micro-batches bytes allow."""
    room = rows[:, ROOM]
    by_host = _ratio(host_room, host_bytes)
    rows[:, MOST_IN_FLIGHT] = np.minimum(_ratio(room, rows[:, KEPT]), by_host)
    rows[:, MOST_PENDING] = _ratio(room, rows[:, PENDING])
    rows[:, MOST_HELD] = _ratio(room, np.minimum(rows[:, KEPT], rows[:, PENDING]))
    columns = [MOST_IN_FLIGHT, MOST_PENDING, MOST_HELD]
    rows[:, columns] = np.clip(rows[:, columns], 0, num_microbatches)


def _ratio(room: Floats, each: Floats) -> Floats:
    """How often each goes into the room, as whole numbers; infinite where it is nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.floor(room / each * (1.0 + 1e-12))
    return np.where(each <= 0.0, np.where(room >= 0.0, np.inf, 0.0), times)


def _keep_best(at: Ints, relaxed: Floats, split: Floats, whole: Floats, rows: Ints) -> Ints:
    """Those of `rows` that no other of the same stretch undercuts in every figure, in order of stretch and time."""
    ends = np.flatnonzero(np.diff(at[rows])) + 1
    if len(rows) == len(ends) + 1:  # one of each
        return rows
    kept = []
    figures = np.concatenate(
        [
            relaxed[:, [FORWARD_MS, INPUT_MS, KEPT, PENDING]],
            split[:, [INPUT_MS, WEIGHT_MS, PENDING]],
            whole[:, [INPUT_MS]],
            -relaxed[:, [ROOM, MOST_IN_FLIGHT]],
        ],
        axis=1,
    )
    for members in np.split(rows, ends) if len(rows) else ():
        best = members if len(members) == 1 else members[undominated_rows(figures[members])[0]]
        kept.append(best[np.argsort(relaxed[best, FORWARD_MS] + relaxed[best, INPUT_MS], kind="stable")])
    return np.concatenate([np.zeros(0, dtype=np.int64), *kept])
