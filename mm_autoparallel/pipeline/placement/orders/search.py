"""Local search over placement and order together: simulated annealing of words, boundaries and modes.

First words of forwards and input gradients, into which weight gradients are filled by rule, then whole words, whose
letters move along the longest path (the neighbourhood of job-shop search, Nowicki and Smutnicki 1996).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import FORWARD, INPUT, MOST_IN_FLIGHT, NUM_KINDS, WEIGHT
from mm_autoparallel.pipeline.placement.orders.words import (
    Words,
    alternate,
    fill_weights,
    fit_pairs,
    fit_word,
    fits_word,
    move_letter,
    play_words,
    step_of,
)
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Waits of a stage that are worth a weight gradient, in parts of its length.
PATIENCE = np.array([0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
#: Parts of a run that look for warm-ups alone; and what of the moves shift a boundary or change modes, or patience.
WARMUP_PART, PLACE_PART, PATIENCE_PART = 0.25, 0.1, 0.06
#: Letters move so far at most in words of pairs, and in whole words where they do not follow the longest path.
FAR, NEAR = 6, 4
#: Rows of a stretch are drawn by this power of a number between 0 and 1: those of lesser bounds come first. Assumed.
EARLY_POWER = 3.0
#: What part of changes of placement shift boundaries, and what part of these several at once, which moves layers from a
#: stage to one far away. Assumed.
SHIFT_PART, TOGETHER_PART = 0.7, 0.4


@kernel
def draw_below(n: int) -> int:
    """A whole number from 0 to n - 1, at random; numba's randint may answer n where n is 1."""
    return int(np.random.random() * n)


@kernel
def draw_early(n: int) -> int:
    """The same, earlier ones more often."""
    return int(n * np.random.random() ** EARLY_POWER)


@kernel
def _most_alike(table: Floats, row: int, first: int, count: int) -> int:
    """Of count rows from first on, that of which actions take what those of `row` do, as near as there is one."""
    best, least_ms = first, np.inf
    for other in range(first, first + count):
        apart_ms = np.abs(table[other, :NUM_KINDS] - table[row, :NUM_KINDS]).sum()
        if apart_ms < least_ms:
            best, least_ms = other, apart_ms
    return best


@kernel
def change_place(
    table: Floats,
    boundaries: Ints,
    rows: Ints,
    first: NDArray[np.int32],
    count: NDArray[np.int32],
    radius: int,
) -> bool:
    """Shift a boundary, or several next to one another together, by up to radius, or choose other modes of one stage;
    whether there was such a change.

    boundaries [P + 1], rows [P]: changed in place. first, count: [P, N + 1, N + 1] rows of each stretch of segments.
    """
    num_stages = rows.shape[0]
    if num_stages > 1 and np.random.random() < SHIFT_PART:
        k = 1 + draw_below(num_stages - 1)
        last = k + draw_below(num_stages - k) if np.random.random() < TOGETHER_PART else k
        shift = (1 + draw_below(radius)) * (1 if np.random.random() < 0.5 else -1)
        for s in range(k - 1, last + 1):  # stages k - 1 and last change their size
            begin = boundaries[s] + (shift if s >= k else 0)
            end = boundaries[s + 1] + (shift if s < last else 0)
            if begin >= end or end >= first.shape[2] or begin < 0 or count[s, begin, end] == 0:
                return False
        boundaries[k : last + 1] += shift
        for s in range(k - 1, last + 1):
            begin, end = boundaries[s], boundaries[s + 1]
            if s in (k - 1, last):
                rows[s] = first[s, begin, end] + draw_early(count[s, begin, end])
            else:
                rows[s] = _most_alike(table, rows[s], first[s, begin, end], count[s, begin, end])
        return True
    s = draw_below(num_stages)
    begin, end = boundaries[s], boundaries[s + 1]
    if count[s, begin, end] < 2:
        return False
    rows[s] = first[s, begin, end] + draw_early(count[s, begin, end])
    return True


@kernel
def _fit_words(words: Words, figures: Floats, rows: Ints, old_rows: Ints, spare: Words) -> bool:
    """Change the words of stages whose rows changed so that they fit; whether all do. spare: [3M], overwritten."""
    for s in range(len(rows)):
        if rows[s] != old_rows[s] and not (fits_word(words[s], figures[s]) or fit_word(words[s], figures[s], spare)):
            return False
    return True


@kernel
def leap(
    table: Floats,
    first: NDArray[np.int32],
    count: NDArray[np.int32],
    able: NDArray[np.bool_],
    boundaries: Ints,
    rows: Ints,
    words: Words,
    seed: int,
) -> bool:
    """Change the placement of words [P, 3M] once or twice, to rows that are able, and fit the words to it; whether they
    fit and do not wait for one another. Overwrites boundaries [P + 1], rows [P] and words.

    table: [R, NUM_FIGURES]; first, count: [P, N + 1, N + 1] its rows of each stretch of segments; able: [R].
    """
    np.random.seed(seed)
    old_rows, figures = rows.copy(), np.empty((len(rows), table.shape[1]))
    for _ in range(1 + draw_below(2)):
        if not change_place(table, boundaries, rows, first, count, 1):
            return False
    gather(table, rows, figures)
    for s in range(len(rows)):
        if rows[s] != old_rows[s] and not able[rows[s]]:
            return False
    fits = _fit_words(words, figures, rows, old_rows, np.empty(words.shape[1], np.int8))
    return fits and bool(np.isfinite(step_of(words, figures)))


@kernel
def gather(table: Floats, rows: Ints, figures: Floats) -> None:
    """Overwrite figures [K, NUM_FIGURES] with these rows of the table."""
    for s in range(rows.shape[0]):
        figures[s] = table[rows[s]]


@kernel
def search_pairs(
    table: Floats,
    first: NDArray[np.int32],
    count: NDArray[np.int32],
    boundaries: Ints,
    rows: Ints,
    warmups: Ints,
    words: Words,
    num_moves: int,
    warm_ms: float,
    seed: int,
    target_ms: float,
    may_move: bool,
) -> float:
    """The best step of words of pairs; boundaries, rows and words are overwritten with what takes it.

    table: [R, NUM_FIGURES]. warmups: [P] forwards before the first input gradient, to begin with. may_move: whether
    boundaries and modes may change. Ends early at target_ms.
    """
    np.random.seed(seed)
    num_stages, num_microbatches = rows.shape[0], words.shape[1] // NUM_KINDS
    length = 2 * num_microbatches
    figures, pairs = np.empty((num_stages, table.shape[1])), np.empty((num_stages, length), np.int8)
    patience, lead, trial = np.ones(num_stages), warmups.copy(), words.copy()
    at, at_rows, spare = boundaries.copy(), rows.copy(), np.empty(length, np.int8)
    gather(table, at_rows, figures)
    for s in range(num_stages):
        lead[s] = max(1, min(lead[s], num_microbatches, int(figures[s, MOST_IN_FLIGHT])))
        alternate(pairs, s, lead[s])
    step = fill_weights(pairs, patience, figures, trial)
    if not np.isfinite(step):  # one micro-batch at a time always fits
        lead[:] = 1
        for s in range(num_stages):
            alternate(pairs, s, 1)
        step = fill_weights(pairs, patience, figures, trial)
    best = step
    words[:] = trial
    old_pairs, old_patience, old_lead = pairs.copy(), patience.copy(), lead.copy()
    old_at, old_rows = at.copy(), at_rows.copy()
    num_warm = int(WARMUP_PART * num_moves)
    for move in range(num_moves):
        if best <= target_ms:
            break
        part = move / num_warm if move < num_warm else (move - num_warm) / (num_moves - num_warm)
        heat_ms = warm_ms * 0.1**part * (2.0 if move < num_warm else 1.0)
        old_pairs[:], old_patience[:], old_lead[:], old_at[:], old_rows[:] = pairs, patience, lead, at, at_rows
        dice = np.random.random()
        if may_move and dice < PLACE_PART:
            if not change_place(table, at, at_rows, first, count, 1):
                continue
            gather(table, at_rows, figures)
            for s in range(num_stages):
                if at_rows[s] != old_rows[s]:
                    fit_pairs(pairs[s], figures[s, MOST_IN_FLIGHT], spare)
        elif dice < PLACE_PART + PATIENCE_PART:
            if np.random.random() < 0.8:
                patience[draw_below(num_stages)] = PATIENCE[draw_below(len(PATIENCE))]
            else:
                patience[:] = PATIENCE[draw_below(len(PATIENCE))]
        elif move < num_warm:
            s, other = draw_below(num_stages), draw_below(num_stages)
            most = min(num_microbatches, int(figures[s, MOST_IN_FLIGHT]))
            lead[s] = max(1, min(most, lead[s] + draw_below(5) - 2))
            alternate(pairs, s, lead[s])
            if np.random.random() < 0.4:
                most = min(num_microbatches, int(figures[other, MOST_IN_FLIGHT]))
                lead[other] = max(1, min(most, lead[other] + draw_below(3) - 1))
                alternate(pairs, other, lead[other])
        else:
            s, source = draw_below(num_stages), draw_below(length)
            target = min(length - 1, max(0, source + draw_below(2 * FAR + 1) - FAR))
            if pairs[s, source] == pairs[s, target]:
                continue
            move_letter(pairs[s], source, target)
            if not fit_pairs(pairs[s], figures[s, MOST_IN_FLIGHT], spare):
                pairs[s] = old_pairs[s]
                continue
        new = fill_weights(pairs, patience, figures, trial)
        if new <= step or np.random.random() < np.exp((step - new) / heat_ms):
            step = new
            if step < best:
                best = step
                words[:], boundaries[:], rows[:] = trial, at, at_rows
        else:
            pairs[:], patience[:], lead[:], at[:], at_rows[:] = old_pairs, old_patience, old_lead, old_at, old_rows
            gather(table, at_rows, figures)
    return best


@kernel
def _trace(
    words: Words, figures: Floats, starts: Floats, position: Ints, last: int, stages: Ints, places: Ints, slack: float
) -> int:
    """Write the longest path, from its end, as stage and place in its word; how long it is."""
    num_stages, length = words.shape
    s, h, n = last, length - 1, 0
    while True:
        stages[n], places[n] = s, h
        n += 1
        begin = starts[s, h]
        if h > 0 and starts[s, h - 1] + figures[s, words[s, h - 1]] >= begin - slack:
            h -= 1
            continue
        kind = words[s, h]
        if begin <= slack or kind == WEIGHT:
            return n
        m = 0
        for x in range(h):
            if words[s, x] == kind:
                m += 1
        s += -1 if kind == FORWARD else 1
        if s < 0 or s >= num_stages:
            return n
        h = position[s, FORWARD if kind == FORWARD else INPUT, m]


@kernel
def draw_move(num_stages: int, length: int, num_on_path: int, stages: Ints, places: Ints) -> tuple[int, int, int]:
    """A stage and the places from and to which a letter of its word moves: mostly along the path that
    ends the step, else near."""
    if np.random.random() >= 0.9:
        s, source = draw_below(num_stages), draw_below(length)
        return s, source, min(length - 1, max(0, source + draw_below(2 * NEAR + 1) - NEAR))
    c = draw_below(num_on_path)
    s, source = stages[c], places[c]
    low, high = c, c  # the stretch of the path on this stage without a wait
    while high + 1 < num_on_path and stages[high + 1] == s and places[high + 1] == places[high] - 1:
        high += 1
    while low > 0 and stages[low - 1] == s and places[low - 1] == places[low] + 1:
        low -= 1
    begin, end = places[high], places[low]
    if np.random.random() < 0.3:
        begin, end = max(0, begin - 1), min(length - 1, end + 1)
    target = begin + draw_below(end - begin + 1)
    if np.random.random() < 0.5:
        target = min(length - 1, max(0, source + draw_below(7) - 3))
    return s, source, target


@kernel
def anneal_words(
    table: Floats,
    first: NDArray[np.int32],
    count: NDArray[np.int32],
    boundaries: Ints,
    rows: Ints,
    words: Words,
    num_moves: int,
    warm_ms: float,
    seed: int,
    target_ms: float,
    may_move: bool,
) -> float:
    """The best step of whole words near `words`; boundaries, rows and words are overwritten with what takes it."""
    np.random.seed(seed)
    num_stages, length = words.shape
    figures = np.empty((num_stages, table.shape[1]))
    gather(table, rows, figures)
    starts, position = np.empty((num_stages, length)), np.empty((num_stages, NUM_KINDS, length // NUM_KINDS), np.int64)
    stages, places = np.empty(num_stages * length, np.int64), np.empty(num_stages * length, np.int64)
    now, at, at_rows = words.copy(), boundaries.copy(), rows.copy()
    old, old_at, old_rows, spare = words.copy(), at.copy(), at_rows.copy(), np.empty(length, np.int8)
    step, last = play_words(now, figures, starts, position)
    best, slack, num_on_path = step, 1e-12 * step, 0
    if not np.isfinite(step):
        return step
    for move in range(num_moves):
        if best <= target_ms:
            break
        heat_ms = warm_ms * 0.1 ** (move / num_moves)
        s, source, target = -1, 0, 0
        if num_on_path == 0:  # of the words as they are, before anything else is played
            num_on_path = _trace(now, figures, starts, position, last, stages, places, slack)
        if may_move and np.random.random() < PLACE_PART:
            old_at[:], old_rows[:] = at, at_rows
            if not change_place(table, at, at_rows, first, count, 1):
                continue
            gather(table, at_rows, figures)
            old[:] = now
            if not _fit_words(now, figures, at_rows, old_rows, spare):
                now[:], at[:], at_rows[:] = old, old_at, old_rows
                gather(table, at_rows, figures)
                continue
        else:
            s, source, target = draw_move(num_stages, length, num_on_path, stages, places)
            if now[s, source] == now[s, target]:
                continue
            old[s] = now[s]
            move_letter(now[s], source, target)
            if not fits_word(now[s], figures[s]) and not fit_word(now[s], figures[s], spare):
                now[s] = old[s]
                continue
        new, new_last = play_words(now, figures, starts, position)
        if new <= step or np.random.random() < np.exp((step - new) / heat_ms):
            step, last, num_on_path = new, new_last, 0
            if step < best:
                best = step
                words[:], boundaries[:], rows[:] = now, at, at_rows
        elif s >= 0:
            now[s] = old[s]
        else:
            now[:], at[:], at_rows[:] = old, old_at, old_rows
            gather(table, at_rows, figures)
    return best
