"""Bounds of a step whatever the order, stage by stage, and the placements that can still win.

For one way to fill stage s, with M micro-batches: `head` is the least pass forward before it, `turn` the least from the
end of its forward to the begin of its input gradient, `back` the least from the end of its last input gradient to the
end of the step upstream. It cannot run more than A forwards before its first input gradient, nor have more than Q
micro-batches begin their input gradients before the weight gradient of the first of them, nor more than S wait for
theirs when the last input gradient is handed on. Forwards reach it one every u at most, the longest forward up to it,
and no more of them are in flight than in any stage before; it hands input gradients on one every v at most, the longest
up to it. So with c + 1 forwards before its first input gradient, and input gradients after its last forward, it idles:
    begin = max(turn, c u) - c f                  end = max(turn + rest, c v + back) - c i
with the c < A that makes it least and rest = max(w + tail, back), which follows its last input gradient. T is at least
    head + begin + M (f + i + w) + tail                   all of its work
    head + begin + M (f + i) + (M - Q) w + rest
    head + begin + M (f + i) + (M - S) w + back           what is handed on last has less behind it on its own stage
    head + M (f + i) + (M - n) w + end                    of what runs before its last forward n at most are held then
    head + begin + M (f + i) + (M - n) w + end            where M > A
    head + M (kept (f + turn + i) + pending · w) / room + filling     Little's law: bytes times how long they are held,
                                                          and memory fills and empties no faster than actions follow
    head + r (f + turn + i + w) + (M - 1 - r n) (f + i + w) + f + turn + i + rest         r = ⌈M / n⌉ - 1 rounds, and
    head + r (f + turn + i) + (M - 1 - r A) (f + i) + f + turn + i + rest                 r = ⌈M / A⌉ - 1
Each takes the least of other stages, so the least over placements of the largest over stages is a shortest path of the
min-max kind, and the placements below a step can be listed in order of it. Rows whose bound reaches a step are part of
none below it. Without them the least of the others is more, so further rows reach it; where none is left, nothing is
below.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

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
    PENDING,
    ROOM,
    TAIL_MS,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.options import Options

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: How close the largest step is found that rows refute, in parts of it.
CLOSE_FRACTION = 1e-4
#: Of a bound: what the rounding of its sums may have added to it.
ROUNDING_FRACTION = 1e-11


@dataclass(frozen=True, eq=False)
class Bounds:
    """row_ms: [R] of each row of the options. stretch_ms: [P, N + 1, N + 1] the least of each stretch's rows.
    rest_ms: [P + 1, N + 1] the least of what stages from s on, beginning at a segment, must take."""

    row_ms: Floats
    stretch_ms: Floats
    rest_ms: Floats

    @property
    def least_ms(self) -> float:
        """A bound on every placement and order; infinite where no placement fits."""
        return float(self.rest_ms[0, 0])


def bound_stages(options: Options) -> Bounds:
    """The bounds of all rows, from sums along the least ways to fill the other stages."""
    return join_rows(options, _bound_each(options, np.arange(len(options.stage))))


def least_step(options: Options, rows: Ints, low_ms: float, high_ms: float) -> float:
    """A step from low_ms to high_ms that no placement of these rows is below, low_ms being one."""
    while high_ms - low_ms > CLOSE_FRACTION * high_ms:
        middle_ms = 0.5 * (low_ms + high_ms)
        left, _ = bound_rows(options, rows, middle_ms)
        if len(left):
            high_ms, rows = middle_ms, left
        else:
            low_ms = middle_ms
    return low_ms


def bound_rows(options: Options, rows: Ints, most_ms: float) -> tuple[Ints, Floats]:
    """Of `rows`, those that may be part of a step below most_ms made of these rows alone, and their bounds."""
    while True:
        row_ms = _bound_each(options, rows)
        is_left = row_ms < most_ms
        if is_left.all():
            return rows, row_ms
        rows = rows[is_left]


def ways(options: Options, rows: Ints) -> tuple[Floats, Floats]:
    """[P + 1, N + 1] what a stage's first forward waits for where it begins at that segment, and what follows its last
    input gradient on the stages before it, if all have these rows; infinite where none lead there."""
    num_stages, size = options.segments.problem.num_stages, options.segments.num_segments + 1
    head, back = (np.full((num_stages + 1, size), np.inf) for _ in range(2))
    head[0, 0] = back[0, 0] = 0.0
    edges = np.searchsorted(options.stage[rows], np.arange(num_stages + 1)).tolist()
    for s, edge in enumerate(pairwise(edges)):
        mine = rows[slice(*edge)]
        first, last, of = options.begin[mine], options.end[mine], options.relaxed[mine].T
        np.minimum.at(head[s + 1], last, head[s, first] + of[FORWARD_MS] + of[HOP_FORWARD_MS])
        later = np.maximum(of[WEIGHT_MS] + of[TAIL_MS], back[s, first])
        np.minimum.at(back[s + 1], last, of[HOP_BACKWARD_MS] + of[INPUT_MS] + later)
    return head, back


def _bound_each(options: Options, rows: Ints) -> Floats:
    """[R] the bounds of these rows where the other stages have these rows too; infinite where they lie on no way."""
    num_stages, size = options.segments.problem.num_stages, options.segments.num_segments + 1
    stage, begin, end, of = options.stage[rows], options.begin[rows], options.end[rows], options.relaxed[rows].T
    edges = np.searchsorted(stage, np.arange(num_stages + 1)).tolist()
    of_stages = [slice(*edge) for edge in pairwise(edges)]
    head, back = ways(options, rows)
    onward, forward_pace, input_pace = (np.full((num_stages + 1, size), np.inf) for _ in range(3))
    in_flight = np.zeros((num_stages + 1, size))
    forward_pace[0, 0], input_pace[0, 0], in_flight[0, 0] = 0.0, 0.0, np.inf
    for s, mine in enumerate(of_stages):
        first, last = begin[mine], end[mine]
        own = of[WEIGHT_MS, mine] + of[TAIL_MS, mine]
        np.minimum.at(forward_pace[s + 1], last, np.maximum(forward_pace[s, first], of[FORWARD_MS, mine]))
        onwards = np.where(own > back[s, first], 0.0, input_pace[s, first])  # what it takes after its own is the most
        np.minimum.at(input_pace[s + 1], last, np.maximum(onwards, of[INPUT_MS, mine]))
        np.maximum.at(in_flight[s + 1], last, np.minimum(in_flight[s, first], of[MOST_IN_FLIGHT, mine]))
    turns = np.zeros(len(rows))
    for s, mine in reversed(list(enumerate(of_stages))):
        if s < num_stages - 1:
            hops = of[HOP_FORWARD_MS, mine] + of[HOP_BACKWARD_MS, mine]
            turns[mine] = hops + onward[s + 1, end[mine]]
        passed = of[FORWARD_MS, mine] + turns[mine] + of[INPUT_MS, mine]
        np.minimum.at(onward[s], begin[mine], passed)
    heads, backs = head[stage, begin], back[stage, begin]
    joins = np.isfinite(heads) & np.isfinite(turns)  # the others lie on no way through all stages
    handed = np.where(options.is_split[rows], options.split[rows, MOST_PENDING], 0.0)
    others = np.array([heads, backs, turns, handed, *(x[stage, begin] for x in (forward_pace, input_pace, in_flight))])
    row_ms = np.full(len(rows), np.inf)
    row_ms[joins] = _largest_bounds(of[:, joins], others[:, joins], options.segments.problem.num_microbatches)
    return row_ms


def join_rows(options: Options, row_ms: Floats) -> Bounds:
    """The bounds of stretches and placements that follow from those of rows, [R]; infinite for rows to be left out."""
    num_stages, size = options.segments.problem.num_stages, options.segments.num_segments + 1
    stretch = np.full((num_stages, size, size), np.inf)
    np.minimum.at(stretch, (options.stage, options.begin, options.end), row_ms)
    rest = np.full((num_stages + 1, size), np.inf)
    rest[num_stages, size - 1] = 0.0
    for s in range(num_stages - 1, -1, -1):
        rest[s] = np.min(np.maximum(stretch[s], rest[s + 1][None, :]), axis=1)
    return Bounds(row_ms, stretch, rest)


def _largest_bounds(of: Floats, others: Floats, num_microbatches: int) -> Floats:
    """[R] the largest of the bounds above. of: [NUM_FIGURES, R]; others: [7, R] head, back, turn, S, the paces of
    forwards and of input gradients upstream, and how many micro-batches can be in flight there."""
    m = float(num_microbatches)
    head, back, turn, handed, forward_pace, input_pace, upstream = others
    forward, backward, weight, tail = of[FORWARD_MS], of[INPUT_MS], of[WEIGHT_MS], of[TAIL_MS]
    most = np.minimum(of[MOST_IN_FLIGHT], upstream)
    forward_pace, input_pace = np.maximum(forward_pace, forward), np.maximum(input_pace, backward)
    begin = head + _idle_ms(turn, 0.0, forward_pace, forward, most)
    done = np.maximum(m - of[MOST_PENDING], 0.0) * weight
    done_when_handed = np.maximum(m - handed, 0.0) * weight
    rest = np.maximum(weight + tail, back)
    both = m * (forward + backward)
    end = np.maximum(m - of[MOST_HELD], 0.0) * weight + _idle_ms(turn + rest, back, input_pace, backward, most)
    once = forward + turn + backward
    held_ms_bytes = m * (of[KEPT] * once + of[PENDING] * weight)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_bytes = np.where(of[ROOM] > 0.0, held_ms_bytes / of[ROOM], 0.0)
    by_bytes = by_bytes + _filling_ms(of, turn, forward_pace, both + m * weight)
    bounds = [
        begin + both + m * weight + tail,
        begin + both + done + rest,
        begin + both + done_when_handed + back,
        np.where(m > most, begin, head) + both + end,
        head + by_bytes + tail,
        head + _rounds_ms(m, of[MOST_HELD], forward, once + weight, forward + backward + weight) + once + rest,
        head + _rounds_ms(m, of[MOST_IN_FLIGHT], forward, once, forward + backward) + once + rest,
    ]
    largest: Floats = np.max(bounds, axis=0) * (1.0 - ROUNDING_FRACTION)
    return largest


def _idle_ms(least_ms: Floats, first_ms: Floats | float, pace_ms: Floats, action_ms: Floats, most: Floats) -> Floats:
    """[R] the least over c < most of max(least_ms, c pace_ms + first_ms) - c action_ms, where pace_ms >= action_ms."""
    with np.errstate(divide="ignore", invalid="ignore"):
        many = np.where(pace_ms > 0.0, np.floor((least_ms - first_ms) / pace_ms), np.inf)
    counts = (np.minimum(count, np.maximum(most - 1.0, 0.0)) for count in (many, many + 1.0))
    idle: Floats = np.min([np.maximum(least_ms, c * pace_ms + first_ms) - c * action_ms for c in counts], axis=0)
    return idle


def _filling_ms(of: Floats, turn: Floats, forward_pace: Floats, all_ms: Floats) -> Floats:
    """[R] what Little's law misses: the parts of memory that are not full yet, or not any more, times how long they
    last. Until its first input gradient a stage holds a micro-batch more every forward_pace at most; and what it holds
    at the end, it must work off. all_ms: the work of the stage."""
    kept, room, backward = of[KEPT], of[ROOM], of[INPUT_MS] + of[WEIGHT_MS]
    with np.errstate(divide="ignore", invalid="ignore"):
        most = room / kept
        until = np.minimum(of[FORWARD_MS] + turn, forward_pace * np.maximum(most - 1.0, 0.0))
        first = until * (1.0 - 1.0 / most) - until**2 / (2.0 * forward_pace * most)
        longest = np.minimum(most * backward, np.where(of[PENDING] > 0.0, room / of[PENDING] * of[WEIGHT_MS], np.inf))
        since = np.maximum(longest - backward, 0.0)  # the action that runs may be over soon
        last = since**2 / (2.0 * longest)
    first = np.where((kept > 0.0) & (room > kept) & (forward_pace > 0.0), first, 0.0)
    return first + np.where((longest > 0.0) & (until + since <= all_ms), last, 0.0)


def _rounds_ms(m: float, at_once: Floats, forward: Floats, turn_round: Floats, work: Floats) -> Floats:
    """[R] from the first forward to the last of m, of which at_once at most are there at a time, for turn_round each.

    The k-th of a round waits for the k-th of the round before, all of which, and the forwards between, the stage works
    off one after another; in the first round it waits for forwards alone.
    """
    most = np.clip(at_once, 1.0, m)
    rounds = np.ceil(m / most) - 1.0
    least: Floats = rounds * turn_round + (m - 1.0 - rounds * most) * np.where(rounds > 0.0, work, forward)
    return least


def list_placements(bounds: Bounds, most_ms: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Boundaries of placements in segments, [P + 1], and their bound, in order of it, below most_ms.

    Of equal bounds the longest beginning goes on first, so a placement is told before all beginnings are made.
    """
    num_stages = len(bounds.stretch_ms)
    waiting: list[tuple[float, int, tuple[int, ...], float]] = [(bounds.least_ms, num_stages, (0,), 0.0)]
    while waiting:
        bound_ms, num_left, boundaries, so_far_ms = heapq.heappop(waiting)
        s = num_stages - num_left
        if bound_ms >= most_ms:
            return
        if num_left == 0:
            yield bound_ms, boundaries
            continue
        own = np.maximum(bounds.stretch_ms[s, boundaries[-1]], so_far_ms)
        whole = np.maximum(own, bounds.rest_ms[s + 1])
        for end in np.flatnonzero(whole < most_ms).tolist():
            heapq.heappush(waiting, (float(whole[end]), num_left - 1, (*boundaries, end), float(own[end])))
