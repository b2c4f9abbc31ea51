"""Placements whose steady part repeats: timetables of all stages, from the last to the first, for a period that is
asked for. Boundaries and modes are chosen on the way.

Where memory binds, a step of many micro-batches is as long as its period, and what is found here for a period that no
stage's work exceeds is hard to find by moves of single letters. A beam search: for each stage and each segment it may
begin at, the timetables whose micro-batches are in flight for the least time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT_MS,
    NUM_KINDS,
)
from mm_autoparallel.pipeline.placement.orders.timetable import (
    SAME,
    count_spare,
    is_same,
    list_timetables,
    write_timetable,
)
from mm_autoparallel.pipeline.placement.orders.words import Words, fits_word
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.int32]
Able = NDArray[np.bool_]

#: Timetables of a stage that begins at one segment which go on; how many of those that each leaves the stage before; by
#: how much the time in flight that they are chosen by is changed at random.
WIDTH, ENOUGH, NOISE = 8, 4, 0.005
#: Waits in parts of a period that a stage's timetables may have in all, the first that some do; nodes that are tried
#: for them, and for those of the last stage. Assumed.
WAITS, NODES, LAST_NODES = np.array([0.02, 0.08, 0.3, 1.0, 4.0]), 3_000, 400_000


@kernel
def _reach(first: Rows, count: Rows, able: Able) -> NDArray[np.bool_]:
    """[P + 1, N + 1] whether the first s stages can hold the first n segments in rows that are able."""
    num_stages, num_segments = first.shape[0], first.shape[1] - 1
    can = np.zeros((num_stages + 1, num_segments + 1), np.bool_)
    can[0, 0] = True
    for s in range(num_stages):
        for begin in range(num_segments):
            for end in range(begin + 1 if can[s, begin] else num_segments + 1, num_segments + 1):
                for row in range(first[s, begin, end], first[s, begin, end] + count[s, begin, end]):
                    can[s + 1, end] |= able[row]
    return can


@kernel
def find_periodic(
    table: Floats,
    first: Rows,
    count: Rows,
    able: Able,
    together: int,
    period_ms: float,
    effort: int,
    seed: int,
    boundaries: Ints,
    rows: Ints,
    timetables: Floats,
) -> bool:
    """Whether stages were found in which micro-batches, so many of them together, pass once every period_ms each.
    Overwrites boundaries [P + 1], rows [P] and timetables [2, P, K], of forwards and of gradients of inputs, with them.

    table: [R, NUM_FIGURES]; first, count: [P, N + 1, N + 1] its rows of each stretch; able: [R] those that may be
    taken, whose work passes in a period. effort: so many times as many timetables are kept.
    """
    np.random.seed(seed)
    num_stages, num_segments = first.shape[0], first.shape[1] - 1
    whole_ms, width, enough = together * period_ms, WIDTH * effort, ENOUGH * effort
    can = _reach(first, count, able)
    kept = (num_stages + 1, num_segments + 1, width)
    forwards, inputs, origin = np.empty((*kept, together)), np.empty((*kept, together)), np.zeros((*kept, 3), np.int64)
    num_kept = np.zeros((num_stages + 1, num_segments + 1), np.int64)
    num_kept[num_stages, num_segments] = 1
    most = max(num_segments * width * enough, width)
    new_forwards, new_inputs, in_flight_ms = np.empty((most, together)), np.empty((most, together)), np.empty(most)
    new_origin, waits_ms = np.empty((most, 3), np.int64), np.empty(width)
    latest, earliest = np.zeros(together), np.zeros(together)
    for s in range(num_stages - 1, -1, -1):
        is_last = s == num_stages - 1
        for begin in range(num_segments):
            n = 0
            for end in range(begin + 1 if can[s, begin] else num_segments + 1, num_segments + 1):
                first_row, num_rows = first[s, begin, end], count[s, begin, end]
                of = table[first_row : first_row + num_rows]
                quickest = np.argsort(of[:, FORWARD_MS] + of[:, INPUT_MS])
                for one in range(num_kept[s + 1, end]):
                    num_found = 0
                    for row in quickest:  # the first that fits: others recompute more
                        figures = of[row]
                        if num_found > 0 or not able[first_row + row]:
                            continue
                        if not is_last:
                            behind = table[origin[s + 1, end, one, 2]]
                            latest[:] = forwards[s + 1, end, one] - figures[HOP_FORWARD_MS] - figures[FORWARD_MS]
                            earliest[:] = inputs[s + 1, end, one] + behind[INPUT_MS] + figures[HOP_BACKWARD_MS]
                        for waits in WAITS[-1:] if is_last else WAITS:
                            num_most = width if is_last else enough
                            num_found = list_timetables(
                                whole_ms, latest, earliest, is_last, figures, waits * whole_ms,
                                LAST_NODES if is_last else NODES, new_forwards[n : n + num_most],
                                new_inputs[n : n + num_most], waits_ms[:num_most],
                            )  # fmt: skip
                            if num_found > 0:
                                break
                        for x in range(n, n + num_found):
                            in_flight_ms[x] = (new_inputs[x] - new_forwards[x]).sum()
                            in_flight_ms[x] *= 1.0 + NOISE * np.random.random()
                            new_origin[x, 0], new_origin[x, 1], new_origin[x, 2] = end, one, first_row + row
                        n += num_found
            k = 0
            for x in np.argsort(in_flight_ms[:n]):
                is_new = k < width
                for y in range(k):
                    is_new &= not is_same(
                        new_forwards[x], new_inputs[x], forwards[s, begin, y], inputs[s, begin, y], SAME * whole_ms
                    )
                if is_new:
                    forwards[s, begin, k], inputs[s, begin, k] = new_forwards[x], new_inputs[x]
                    origin[s, begin, k] = new_origin[x]
                    k += 1
            num_kept[s, begin] = k
    if num_kept[0, 0] == 0:
        return False
    begin = one = 0
    boundaries[0] = 0
    for s in range(num_stages):
        rows[s] = origin[s, begin, one, 2]
        timetables[0, s], timetables[1, s] = forwards[s, begin, one], inputs[s, begin, one]
        begin, one = origin[s, begin, one, 0], origin[s, begin, one, 1]
        boundaries[s + 1] = begin
    return True


@kernel
def write_periodic(figures: Floats, period_ms: float, timetables: Floats, ahead: float, words: Words) -> bool:
    """Overwrite words [P, 3M] with the order of timetables [2, P, K]; whether they fit, as all do whose actions take
    time. ahead: so many forwards more than they have in flight each stage runs first for each stage behind, as far as
    memory allows."""
    num_stages, together = timetables.shape[1:]
    whole_ms, most = together * period_ms, words.shape[1] // NUM_KINDS
    for s in range(num_stages):
        most = min(most, count_spare(whole_ms, timetables[0, s], timetables[1, s], figures[s], most))
        num_ahead = min(most, int(np.round(ahead * (num_stages - 1 - s))))
        write_timetable(whole_ms, timetables[0, s], timetables[1, s], figures[s], num_ahead, words[s])
        if not fits_word(words[s], figures[s]):
            return False
    return True
