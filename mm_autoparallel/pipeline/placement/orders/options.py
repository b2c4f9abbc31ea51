"""Options: every way to fill a stage, as rows of figures: what it holds, in which modes, its backwards split or whole.

A stage may split its backwards into input and weight gradients or run them whole. Whole costs no more and keeps nothing
between the two, but hands its gradient on later; where splitting costs nothing more either, and needs no more memory,
split rows alone are listed, for they can do what whole ones do. Bounds use relaxed rows, whose backwards may be both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
from mm_autoparallel.pipeline.placement.patterns.intervals import Intervals, count_pairs, list_intervals
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
#: So many pairs of a begin and an end, and rows, are listed at once: some ten MB.
PAIRS_AT_ONCE, ROWS_AT_ONCE = 200_000, 100_000
#: What a mix adds, by names of `Segments`.
ADDED = ("extra_forward_ms", "extra_backward_ms", "saved_bytes", "restored_bytes", "host_bytes")
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
    overflow = np.full((num_stages, size, size), np.inf)
    most_load_ms = most_ms * (1.0 + ROUNDING_FRACTION) / segments.problem.num_microbatches
    parts, num_rows = [], 0
    mixes = Mixes(segments)
    for stages in _divide(count_pairs(segments).tolist(), PAIRS_AT_ONCE):
        intervals = list_intervals(segments, stages, most_load_ms)
        keys = mixes.keys_of(intervals, should_stop)
        num_mixes = np.bincount(intervals.stage, mixes.size[keys], num_stages)[stages].astype(np.int64)
        if num_mixes.max() > MAX_ROWS:
            raise TooManyPatterns
        for near in (stages[each.start : each.stop] for each in _divide(num_mixes.tolist(), ROWS_AT_ONCE)):
            chosen = (intervals.stage >= near.start) & (intervals.stage < near.stop)
            part = _rows_of(
                segments, intervals.select(chosen), mixes, keys[chosen], overflow, most_load_ms, only_bounds
            )
            num_rows += len(part["stage"])
            if num_rows > MAX_ROWS or should_stop():
                raise TooManyPatterns
            parts.append(part)
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    stretches = joined["stage"], joined["begin"], joined["end"]
    new = np.flatnonzero(np.any([np.diff(each, prepend=-1) != 0 for each in stretches], axis=0))
    first, count = (np.zeros((num_stages, size, size), dtype=np.int32) for _ in range(2))
    places = tuple(each[new] for each in stretches)
    first[places], count[places] = new, np.diff(np.append(new, num_rows))
    return Options(segments=segments, first=first, count=count, overflow_bytes=overflow, **joined)


def _divide(sizes: Sequence[int], at_once: int) -> Iterator[range]:
    """Consecutive places, as many as come to at most so much in sum, or one."""
    begin, total = 0, 0
    for place, size in enumerate(sizes):
        if place > begin and total + size > at_once:
            yield range(begin, place)
            begin, total = place, 0
        total += size
    yield range(begin, len(sizes))


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
    host. Listed once for stretches with the same layers of each group: those of one key."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.before = [tuple(of) for of in segments.before[:, segments.start].T.tolist()]
        self._adds = np.array([getattr(segments, name) for name in ADDED])
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._filled: list[tuple[Ints, Floats]] = []

    def fill(self, begin: int, end: int) -> tuple[Ints, Floats]:
        """Raises TooManyPatterns."""
        return self._filled[self._key_of(begin, end)]

    def keys_of(self, intervals: Intervals, should_stop: Callable[[], bool]) -> Ints:
        """[n] the key of each interval, whose mixes are listed. Raises TooManyPatterns, on should_stop too."""
        size = len(self.before)
        spans, at = np.unique(intervals.begin * size + intervals.end, return_inverse=True)
        keys = np.zeros(len(spans), dtype=np.int64)
        for i, (begin, end) in enumerate(divmod(span, size) for span in spans.tolist()):
            if should_stop():
                raise TooManyPatterns
            keys[i] = self._key_of(begin, end)
        return keys[at]

    @property
    def size(self) -> Ints:
        """[keys] how many mixes each has."""
        return np.array([len(counts) for counts, _ in self._filled], dtype=np.int64)

    def of_each(self, keys: Ints) -> tuple[Ints, Ints, Floats]:
        """All mixes of all stretches of these keys: which stretch each is of, its layers in each lane, what it adds."""
        size = self.size
        counts = np.concatenate([np.zeros((0, self.segments.num_lanes), np.int64), *(each for each, _ in self._filled)])
        sums = np.concatenate([np.zeros((0, len(ADDED))), *(each for _, each in self._filled)])
        at = np.repeat(np.arange(len(keys)), size[keys])
        before = np.cumsum(size[keys]) - size[keys]
        rows = np.arange(len(at)) + ((np.cumsum(size) - size)[keys] - before)[at]
        return at, counts[rows], sums[rows]

    def _key_of(self, begin: int, end: int) -> int:
        low, high = span = self.before[begin], self.before[end]
        if span not in self._known:
            counts, sums = np.zeros((1, 0), dtype=np.int64), np.zeros((1, len(ADDED)))
            for g in range(len(self.segments.groups)):
                more, adds = self._of_group(g, low[g], high[g])
                if len(counts) * len(more) > MAX_MIXES:
                    raise TooManyPatterns
                left, right = np.repeat(np.arange(len(counts)), len(more)), np.tile(np.arange(len(more)), len(counts))
                counts, sums = np.concatenate([counts[left], more[right]], axis=1), sums[left] + adds[right]
            self._known[span] = len(self._filled)
            self._filled.append((counts, sums))
        return self._known[span]

    def _of_group(self, group: int, low: int, high: int) -> tuple[Ints, Floats]:
        lanes = range(int(self.segments.lane_offset[group]), int(self.segments.lane_offset[group + 1]))
        ends = low + _list_ends(high - low, len(lanes))
        sums = np.zeros((len(ends), len(ADDED)))
        for place, lane in enumerate(lanes):
            of_lane = self._adds[:, lane]
            sums += (of_lane[:, ends[:, place + 1]] - of_lane[:, ends[:, place]]).T
        return np.diff(ends, axis=1), sums


@lru_cache(maxsize=1_000)
def _list_ends(num_layers: int, num_lanes: int) -> Ints:
    """[n, lanes + 1] where the layers of each lane of a group end, behind where the first begins: at 0. Raises
    TooManyPatterns."""
    if comb(num_layers + num_lanes, num_lanes) > MAX_MIXES:
        raise TooManyPatterns
    ends = np.array(list(combinations_with_replacement(range(num_layers + 1), num_lanes)), dtype=np.int64)
    return np.concatenate([np.zeros((len(ends), 1), np.int64), ends.reshape(len(ends), num_lanes)], axis=1)


def _rows_of(
    segments: Segments,
    intervals: Intervals,
    mixes: Mixes,
    keys: Ints,
    overflow: Floats,
    most_load_ms: float,
    only_bounds: bool,
) -> dict[str, NDArray[np.generic]]:
    """The columns of `Options` for intervals of these keys; writes overflow [P, N + 1, N + 1]."""
    problem, chain = segments.problem, segments.problem.chain
    weights, extras, pending = (
        np.concatenate([[0.0], np.cumsum(np.array(of)[segments.flat])])
        for of in (
            [block.backward_weight_ms for block in chain],
            [block.split_extra_ms for block in chain],
            [block.pending_bytes for block in chain],
        )
    )
    a, b = segments.start[intervals.begin], segments.start[intervals.end]
    at, lanes, added = mixes.of_each(keys)
    stage = intervals.stage[at]
    factor, link_ms = np.array(problem.time_factors)[stage], np.array(list_host_links(problem))[stage]
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
    relaxed[:, TAIL_MS] = np.array(problem.stage_tail_ms)[stage] + intervals.tail_ms[at]
    relaxed[:, KEPT] = intervals.activation_bytes[at] - added[:, 2]
    fixed_bytes = np.array(problem.stage_static_bytes)[intervals.stage] + intervals.static_bytes
    limit_bytes = allowed_bytes(problem)[stage]
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
    np.minimum.at(overflow, (stage, intervals.begin[at], intervals.end[at]), np.maximum(exceeds, 0.0))
    fits = (exceeds <= 0.0) & (relaxed[:, MOST_IN_FLIGHT] >= 1)
    fits &= relaxed[:, [FORWARD_MS, INPUT_MS, WEIGHT_MS]].sum(axis=1) <= most_load_ms
    buys = (split[:, PENDING] > split[:, KEPT]) | (split[:, INPUT_MS] + split[:, WEIGHT_MS] > whole[:, INPUT_MS])
    is_split = fits & (split[:, PENDING] <= split[:, ROOM])
    is_whole = fits & buys & ~is_unsplit
    kept = np.flatnonzero(fits & (is_split | is_whole))
    kept = kept if only_bounds else _keep_best(at, relaxed, split, whole, kept)
    return {
        "stage": stage[kept],
        "begin": intervals.begin[at[kept]],
        "end": intervals.end[at[kept]],
        "lanes": lanes[kept],
        "relaxed": relaxed[kept],
        "split": split[kept],
        "whole": whole[kept],
        "is_split": is_split[kept],
        "is_whole": is_whole[kept],
    }


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
