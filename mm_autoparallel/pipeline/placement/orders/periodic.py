"""Placements whose steady part repeats: timetables of all stages, from the last to the first, for a period that is
asked for. Boundaries and modes are chosen on the way.

Where memory binds, a step of many micro-batches is as long as its period, and what is found here for a period that no
stage's work exceeds is hard to find by moves of single letters. Beams of timetables, those first whose micro-batches
are in flight for the least time.
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
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.timetable import (
    SAME,
    count_spare,
    draw_timetable,
    fits_timetable,
    write_timetable,
)
from mm_autoparallel.pipeline.placement.orders.words import Words, fits_word
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.int32]

#: Timetables of a stage that begins at one segment which go on; how many are drawn for each way to fill the stage
#: before, and after how many that fit no more are; what part of them takes the nearest times. Assumed.
WIDTH, TRIES, ENOUGH, GREEDY_PART, GREED = 8, 24, 4, 1 / 3, 0.7


@kernel
def _work(figures: Floats) -> float:
    return float(figures[FORWARD_MS] + figures[INPUT_MS] + figures[WEIGHT_MS])


@kernel
def _reach(table: Floats, first: Rows, count: Rows, most_ms: float) -> NDArray[np.bool_]:
    """[P + 1, N + 1] whether the first s stages can hold the first n segments with no more work than most_ms each."""
    num_stages, num_segments = first.shape[0], first.shape[1] - 1
    can = np.zeros((num_stages + 1, num_segments + 1), np.bool_)
    can[0, 0] = True
    for s in range(num_stages):
        for begin in range(num_segments):
            for end in range(begin + 1 if can[s, begin] else num_segments + 1, num_segments + 1):
                for row in range(first[s, begin, end], first[s, begin, end] + count[s, begin, end]):
                    can[s + 1, end] |= _work(table[row]) <= most_ms
    return can


@kernel
def _is_same(forwards: Floats, inputs: Floats, other_forwards: Floats, other_inputs: Floats, near_ms: float) -> bool:
    """Whether two timetables differ by a shift alone."""
    shift_ms = other_forwards[0] - forwards[0]
    for j in range(forwards.shape[0]):
        if abs(other_forwards[j] - forwards[j] - shift_ms) > near_ms:
            return False
        if abs(other_inputs[j] - inputs[j] - shift_ms) > near_ms:
            return False
    return True


@kernel
def find_periodic(
    table: Floats,
    first: Rows,
    count: Rows,
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

    table: [R, NUM_FIGURES]; first, count: [P, N + 1, N + 1] its rows of each stretch. effort: so many times as many
    timetables are drawn and kept.
    """
    np.random.seed(seed)
    num_stages, num_segments = first.shape[0], first.shape[1] - 1
    whole_ms, width, enough = together * period_ms, WIDTH * effort, ENOUGH * effort
    can = _reach(table, first, count, period_ms * (1.0 + SAME))
    kept = (num_stages + 1, num_segments + 1, width)
    forwards, inputs = np.empty((*kept, together)), np.empty((*kept, together))
    next_end, next_one, next_row = np.zeros(kept, np.int64), np.zeros(kept, np.int64), np.zeros(kept, np.int64)
    num_kept = np.zeros((num_stages + 1, num_segments + 1), np.int64)
    num_kept[num_stages, num_segments] = 1
    most = num_segments * width * enough
    drawn_forwards, drawn_inputs, in_flight_ms = np.empty((most, together)), np.empty((most, together)), np.empty(most)
    drawn = np.empty((most, 3), np.int64)
    latest, earliest = np.empty(together), np.empty(together)
    for s in range(num_stages - 1, -1, -1):
        for begin in range(num_segments):
            if not can[s, begin]:
                continue
            n = 0
            for end in range(begin + 1, num_segments + 1):
                first_row, num_rows = first[s, begin, end], count[s, begin, end]
                if num_rows == 0 or num_kept[s + 1, end] == 0:
                    continue
                of = table[first_row : first_row + num_rows]
                quickest = np.argsort(of[:, FORWARD_MS] + of[:, INPUT_MS])
                for one in range(num_kept[s + 1, end]):
                    for row in quickest:  # the first that fits: others recompute more
                        figures, num_fit = of[row], 0
                        if _work(figures) > period_ms * (1.0 + SAME):
                            continue
                        for turn in range(TRIES * effort):
                            if s == num_stages - 1:
                                spread = np.random.random()
                                for j in range(together):
                                    latest[j] = j * (spread * figures[FORWARD_MS] + (1.0 - spread) * period_ms)
                                    earliest[j] = latest[j] + figures[FORWARD_MS]
                            else:
                                handed_ms = table[next_row[s + 1, end, one], INPUT_MS] + figures[HOP_BACKWARD_MS]
                                for j in range(together):
                                    latest[j] = forwards[s + 1, end, one, j] - figures[HOP_FORWARD_MS]
                                    latest[j] -= figures[FORWARD_MS]
                                    earliest[j] = inputs[s + 1, end, one, j] + handed_ms
                            greed = 1.0 if turn < GREEDY_PART * TRIES * effort else GREED
                            to = drawn_forwards[n], drawn_inputs[n]
                            if not draw_timetable(whole_ms, latest, earliest, figures, greed, *to):
                                continue
                            if not fits_timetable(whole_ms, *to, figures):
                                continue
                            drawn[n, 0], drawn[n, 1], drawn[n, 2] = end, one, first_row + row
                            in_flight_ms[n] = (drawn_inputs[n] - drawn_forwards[n]).sum()
                            n += 1
                            num_fit += 1
                            if num_fit == enough:
                                break
                        if num_fit > 0:
                            break
            k = 0
            for x in np.argsort(in_flight_ms[:n]):
                if k == width:
                    break
                is_new = True
                for y in range(k):
                    is_new &= not _is_same(
                        drawn_forwards[x], drawn_inputs[x], forwards[s, begin, y], inputs[s, begin, y], SAME * whole_ms
                    )
                if is_new:
                    forwards[s, begin, k], inputs[s, begin, k] = drawn_forwards[x], drawn_inputs[x]
                    next_end[s, begin, k], next_one[s, begin, k], next_row[s, begin, k] = drawn[x]
                    k += 1
            num_kept[s, begin] = k
    if num_kept[0, 0] == 0:
        return False
    begin = one = 0
    boundaries[0] = 0
    for s in range(num_stages):
        rows[s] = next_row[s, begin, one]
        timetables[0, s], timetables[1, s] = forwards[s, begin, one], inputs[s, begin, one]
        begin, one = next_end[s, begin, one], next_one[s, begin, one]
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
