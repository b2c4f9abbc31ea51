"""Mode choices: how many layers of a chunk run in which mode, as short lists of choices that no other beats.

Where each group has one mode and it costs backward time alone, a chunk has one choice for each group, its rows the
counts from 0 on: each further row is slower and (if that helps) keeps less. Otherwise a chunk has a single choice over
all lanes, with those rows only that no other undercuts in forward time, backward time and memory at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import list_host_links
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Rows looked at for one chunk, and comparisons of rows for one stage (some tenths of a second), beyond which the tree
#: hands over to the solver.
MAX_ROWS, MAX_COMPARISONS = 20_000, 100_000_000
#: Far above the rounding of sums, far below what matters.
ROUNDING_FRACTION = 1e-9
#: Signs that make less of each of a lane's five sums better: all but what is saved.
_LESS_IS_BETTER = np.array([1.0, 1.0, -1.0, 1.0, 1.0])


class TooManyPatterns(Exception):
    """The stage could hold more than is listed; another method must take over."""


@dataclass(frozen=True, eq=False)
class ModeChoices:
    """W choices of each of I chunks; of each choice one row is chosen, and what the rows say adds up over a chunk's
    choices.

    first, size: [I, W] the rows of each choice, the first of least time. forward_ms, backward_ms, saved_bytes,
    restored_bytes, host_bytes: [rows] what they add to the chunk's times, save of each micro-batch in flight, restore
    once, and keep on the host of each micro-batch in flight (zeros where nothing limits that).
    counts: [rows, L] layers in each lane. is_ordered: each further row of a choice adds no less to any time than those
    before it.
    """

    first: Ints
    size: Ints
    forward_ms: Floats
    backward_ms: Floats
    saved_bytes: Floats
    restored_bytes: Floats
    host_bytes: Floats
    counts: Ints
    is_ordered: bool


def list_mode_choices(
    segments: Segments,
    stage: int,
    begin: Ints,
    end: Ints,
    used: Ints,
    forward_ms: Floats,
    backward_ms: Floats,
    max_load_ms: float,
    host_room_bytes: Floats,
) -> ModeChoices:
    """Mode choices of chunks of `stage` that hold segments begin to end [I], `used` of each run [I, R], and take
    forward_ms and backward_ms [I] without modes. host_room_bytes: [I] what may lie on the host of one micro-batch at
    most.

    Rows that alone make a chunk take more than max_load_ms, or fill its host, are left out. Raises TooManyPatterns.
    """
    low, high = (segments.before[:, segments.start[at]].T.copy() for at in (begin, end))
    if segments.is_plain:
        return _count_layers(segments, stage, low, high)
    _, alike, which = np.unique(used, axis=0, return_index=True, return_inverse=True)
    loads_ms, rooms = (forward_ms[alike], backward_ms[alike]), host_room_bytes[alike]
    mixed = _mix_lanes(segments, stage, low[alike], high[alike], *loads_ms, rooms, max_load_ms)
    return replace(mixed, first=mixed.first[which.ravel()], size=mixed.size[which.ravel()])


def _count_layers(segments: Segments, stage: int, low: Ints, high: Ints) -> ModeChoices:
    """One choice for each group: how many of its layers are in its only lane. low, high: [I, G] layers of the
    groups."""
    factor = segments.problem.time_factors[stage]
    first, tables, counts = np.zeros_like(low), [], []
    num_rows = 0
    for g in range(len(segments.groups)):
        begins, which = np.unique(low[:, g], return_inverse=True)
        ends = begins.copy()
        np.maximum.at(ends, which.ravel(), high[:, g])
        sizes = ends + 1 - begins
        first[:, g] = (num_rows + np.cumsum(sizes) - sizes)[which.ravel()]
        for at, most in zip(begins.tolist(), (ends + 1).tolist(), strict=True):
            tables.append(
                np.stack(
                    [
                        (segments.extra_backward_ms[g, at:most] - segments.extra_backward_ms[g, at]) * factor,
                        segments.saved_bytes[g, at:most] - segments.saved_bytes[g, at],
                        segments.restored_bytes[g, at:most] - segments.restored_bytes[g, at],
                    ]
                )
            )
            rows = np.zeros((most - at, segments.num_lanes), dtype=np.int64)
            rows[:, g] = np.arange(most - at)
            counts.append(rows)
            num_rows += most - at
    backward_ms, saved_bytes, restored_bytes = np.concatenate([np.zeros((3, 0)), *tables], axis=1)
    return ModeChoices(
        first=first,
        size=high - low + 1,
        forward_ms=np.zeros(num_rows),
        backward_ms=backward_ms,
        saved_bytes=saved_bytes,
        restored_bytes=restored_bytes,
        host_bytes=np.zeros(num_rows),
        counts=np.concatenate([np.zeros((0, segments.num_lanes), dtype=np.int64), *counts]),
        is_ordered=True,
    )


def _mix_lanes(
    segments: Segments,
    stage: int,
    low: Ints,
    high: Ints,
    forward_ms: Floats,
    backward_ms: Floats,
    host_room_bytes: Floats,
    max_load_ms: float,
) -> ModeChoices:
    """One choice for each chunk, over all lanes. low, high: [I, G] layers of the groups."""
    factor, link = segments.problem.time_factors[stage], list_host_links(segments.problem)[stage]
    limited = segments.limits_host
    budget = _Budget()
    groups = [_Group(segments, g, budget) for g in range(len(segments.groups))]
    sizes, tables, all_counts = [], [], []
    for i in range(len(low)):
        counts, sums = np.zeros((1, 0), dtype=np.int64), np.zeros((1, 5))
        for group in groups:
            more, adds = group.fill(int(low[i, group.number]), int(high[i, group.number]))
            if len(counts) * len(more) > MAX_ROWS:
                raise TooManyPatterns
            left, right = (axis.ravel() for axis in np.indices((len(counts), len(more))))
            counts, sums = np.concatenate([counts[left], more[right]], axis=1), sums[left] + adds[right]
            if len(groups) > 1:
                kept = budget.keep(sums * _LESS_IS_BETTER)
                counts, sums = counts[kept], sums[kept]
        extra_forward_ms, extra_backward_ms, saved_bytes, restored_bytes, host_bytes = sums.T
        host_ms = link * host_bytes
        rows = np.stack(
            [
                np.maximum(factor * extra_forward_ms, host_ms - forward_ms[i]),
                np.maximum(factor * extra_backward_ms, host_ms - backward_ms[i]),
                -saved_bytes,
                restored_bytes,
                *([host_bytes] if limited else []),
            ],
            axis=1,
        )
        load_ms = forward_ms[i] + backward_ms[i] + rows[:, 0] + rows[:, 1]
        is_within = load_ms <= max_load_ms * (1.0 + ROUNDING_FRACTION)  # the row of no mode always is
        if limited:
            is_within &= host_bytes <= host_room_bytes[i]
        within = np.flatnonzero(is_within)
        columns = 5 if limited and segments.problem.num_chunks > 1 else 4  # with one chunk the host is decided
        kept = within[budget.keep(rows[within, :columns])]
        kept = kept[np.argsort(rows[kept, 0] + rows[kept, 1], kind="stable")]
        sizes.append(len(kept))
        tables.append(rows[kept])
        all_counts.append(counts[kept])
    table = np.concatenate([np.zeros((0, 4 + limited)), *tables])
    return ModeChoices(
        first=np.cumsum([0, *sizes])[:-1, None],
        size=np.array(sizes, dtype=np.int64)[:, None],
        forward_ms=table[:, 0].copy(),
        backward_ms=table[:, 1].copy(),
        saved_bytes=-table[:, 2],
        restored_bytes=table[:, 3].copy(),
        host_bytes=table[:, 4].copy() if limited else np.zeros(len(table)),
        counts=np.concatenate([np.zeros((0, segments.num_lanes), dtype=np.int64), *all_counts]),
        is_ordered=False,
    )


class _Budget:
    """How many comparisons of rows are left for a stage."""

    def __init__(self) -> None:
        self.num_left = MAX_COMPARISONS

    def keep(self, values: Floats) -> Ints:
        """See `undominated_rows`. Raises TooManyPatterns once the budget is spent."""
        kept, self.num_left = undominated_rows(values, self.num_left)
        if self.num_left < 0:
            raise TooManyPatterns
        return kept


class _Group:
    """The layers of one group, and what of them can run in which lane: listed once for equal stretches."""

    def __init__(self, segments: Segments, number: int, budget: _Budget) -> None:
        self.number = number
        self.budget = budget
        num_layers = int(segments.before[number, -1])
        lanes = slice(segments.lane_offset[number], segments.lane_offset[number + 1])
        self.sums = np.stack(
            [
                of[lanes, : num_layers + 1]
                for of in (
                    segments.extra_forward_ms,
                    segments.extra_backward_ms,
                    segments.saved_bytes,
                    segments.restored_bytes,
                    segments.host_bytes,
                )
            ],
            axis=2,
        )  # [lanes, layers + 1, 5]
        members = [block for block in segments.problem.chain if block.modes and block.group == segments.groups[number]]
        kinds: dict[object, int] = {}
        of_block = [kinds.setdefault((block.modes, block.activation_bytes), len(kinds)) for block in members]
        self.kind = np.repeat(of_block, [block.count for block in members])  # equal for layers that change alike
        self.known: dict[bytes, tuple[Ints, Floats]] = {}

    def fill(self, low: int, high: int) -> tuple[Ints, Floats]:
        """[n, lanes] counts and [n, 5] their sums, of the group's layers low to high, without those others undercut."""
        key = self.kind[low:high].tobytes()
        if key not in self.known:
            num_lanes, num_layers = len(self.sums), high - low
            if comb(num_layers + num_lanes, num_lanes) > MAX_ROWS:
                raise TooManyPatterns
            ends = _rising(num_layers, num_lanes) + low  # where each lane's stretch ends
            ends = np.concatenate([np.full((len(ends), 1), low), ends], axis=1)
            sums = np.zeros((len(ends), 5))
            for lane, of_lane in enumerate(self.sums):
                sums += of_lane[ends[:, lane + 1]] - of_lane[ends[:, lane]]
            kept = self.budget.keep(sums * _LESS_IS_BETTER)
            self.known[key] = np.diff(ends, axis=1)[kept], sums[kept]
        return self.known[key]


def _rising(most: int, length: int) -> Ints:
    """[., length] all sequences of whole numbers from 0 to most that never fall."""
    rows = np.zeros((1, 0), dtype=np.int64)
    for _ in range(length):
        least = rows[:, -1] if rows.shape[1] else np.zeros(1, dtype=np.int64)
        times = most + 1 - least
        start = np.cumsum(times) - times
        further = np.arange(times.sum()) - np.repeat(start - least, times)
        rows = np.concatenate([np.repeat(rows, times, axis=0), further[:, None]], axis=1)
    return rows


def undominated_rows(values: Floats, most_comparisons: int = MAX_COMPARISONS) -> tuple[Ints, int]:
    """Indices, rising, of the rows of `values` [n, C] that no other row equals or undercuts in every column; of equal
    rows the first stays. And how many comparisons are left then: -1 where they did not suffice.
    """
    varying = np.flatnonzero(np.any(values != values[:1], axis=0))
    order = np.lexsort(values.T[::-1])
    if len(varying) <= 3 and len(values) <= most_comparisons:  # the other columns decide nothing
        columns = np.zeros((3, len(values)))
        columns[3 - len(varying) :] = values.T[varying]
        kept, num_left = _front_of_three(columns[1], columns[2], order), most_comparisons - len(values)
    else:
        kept, num_left = _front(np.ascontiguousarray(values), order, most_comparisons)
    rows: Ints = np.sort(kept)
    return rows, num_left


@kernel
def _front_of_three(second: Floats, third: Floats, order: Ints) -> Ints:
    """As `_front`, of three columns, the first of which rises along `order`: a row is undercut where one before it has
    no more in the other two. Of those before the stairs are kept: rising in the second column, falling in the third.
    """
    num_kept, num_stairs = 0, 0
    kept, stairs = np.empty(order.shape[0], dtype=np.int64), np.empty(order.shape[0], dtype=np.int64)
    for at in order:
        low, high = 0, num_stairs  # the stairs that have no more in the second column end at low
        while low < high:
            middle = (low + high) // 2
            if second[stairs[middle]] <= second[at]:
                low = middle + 1
            else:
                high = middle
        if low > 0 and third[stairs[low - 1]] <= third[at]:
            continue
        kept[num_kept] = at
        num_kept += 1
        first = low - 1 if low > 0 and second[stairs[low - 1]] == second[at] else low
        last = low
        while last < num_stairs and third[stairs[last]] >= third[at]:
            last += 1
        num_behind = num_stairs - last  # the row takes the place of stairs first to last
        if first == last:
            for i in range(num_behind):
                stairs[num_stairs - i] = stairs[num_stairs - 1 - i]
        else:
            for i in range(num_behind):
                stairs[first + 1 + i] = stairs[last + i]
        stairs[first] = at
        num_stairs = first + 1 + num_behind
    return kept[:num_kept]


@kernel
def _front(values: Floats, order: Ints, num_left: int) -> tuple[Ints, int]:
    """See `undominated_rows`; order: lexical, so that no row is undercut by one behind it."""
    num_kept, columns = 0, values.shape[1]
    kept = np.empty(order.shape[0], dtype=np.int64)
    for at in order:
        beaten = False
        for i in range(num_kept):
            num_left -= 1
            beaten = True
            for column in range(columns):
                if values[kept[i], column] > values[at, column]:
                    beaten = False
                    break
            if beaten:
                break
        if num_left < 0:
            return kept[:num_kept], -1
        if not beaten:
            kept[num_kept] = at
            num_kept += 1
    return kept[:num_kept], num_left
