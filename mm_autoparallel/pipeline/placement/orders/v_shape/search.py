"""Local search over placement and order of a V: annealing of rules for list scheduling, then of words.

The counterpart of `orders/search` for two chunks a stage: a word has six letters, and what fits a stage is a matter of
both its pieces.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import FORWARD, INPUT, NUM_KINDS, WEIGHT
from mm_autoparallel.pipeline.placement.orders.search import (
    PATIENCE,
    PLACE_PART,
    change_place,
    draw_below,
    draw_move,
    gather,
)
from mm_autoparallel.pipeline.placement.orders.v_shape.words import (
    NUM_LETTERS,
    Words,
    fits_word,
    make_words,
    play_words,
    rooms_of,
)
from mm_autoparallel.pipeline.placement.orders.words import move_letter
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@kernel
def search_rules(
    table: Floats,
    first: NDArray[np.int32],
    count: NDArray[np.int32],
    stages: Floats,
    boundaries: Ints,
    rows: Ints,
    words: Words,
    num_moves: int,
    warm_ms: float,
    seed: int,
    target_ms: float,
    may_move: bool,
) -> float:
    """The best step of words that rules make; boundaries [K + 1], rows [K] and words [P, 6M] are overwritten with what
    takes it. table: [R, NUM_FIGURES]; first, count: [K, N + 1, N + 1] its rows of each stretch of segments."""
    np.random.seed(seed)
    num_stages, num_virtual = stages.shape[0], rows.shape[0]
    num_microbatches = words.shape[1] // NUM_LETTERS
    figures, rooms = np.empty((num_virtual, table.shape[1])), np.empty((num_stages, 2))
    at, at_rows, trial = boundaries.copy(), rows.copy(), words.copy()
    gather(table, at_rows, figures)
    if not rooms_of(figures, stages, rooms):
        return np.inf
    quotas, patience = np.empty((num_stages, 2), np.int64), np.ones(num_stages)
    ahead = np.zeros(num_stages, np.int64)
    for s in range(num_stages):
        quotas[s, 0] = min(num_microbatches, max(1, 2 * num_stages - s))
        quotas[s, 1] = min(num_microbatches, s + 1)
    step = make_words(figures, rooms, stages, quotas, patience, ahead, trial)
    if not np.isfinite(step):  # one micro-batch at a time
        quotas[:] = 1
        step = make_words(figures, rooms, stages, quotas, patience, ahead, trial)
    best = step
    words[:] = trial
    old_quotas, old_patience, old_ahead = quotas.copy(), patience.copy(), ahead.copy()
    old_at, old_rows = at.copy(), at_rows.copy()
    for move in range(num_moves):
        if best <= target_ms:
            break
        heat_ms = 2.0 * warm_ms * 0.05 ** (move / num_moves)
        old_quotas[:], old_patience[:], old_ahead[:], old_at[:], old_rows[:] = quotas, patience, ahead, at, at_rows
        dice = np.random.random()
        if may_move and dice < 0.4:
            if not change_place(table, at, at_rows, first, count, 2):
                continue
            gather(table, at_rows, figures)
            if not rooms_of(figures, stages, rooms):
                at[:], at_rows[:] = old_at, old_rows
                gather(table, at_rows, figures)
                rooms_of(figures, stages, rooms)
                continue
        elif dice < 0.5:
            patience[draw_below(num_stages)] = PATIENCE[draw_below(len(PATIENCE))]
        elif dice < 0.55:
            patience[:] = PATIENCE[draw_below(len(PATIENCE))]
        elif dice < 0.65:
            s = draw_below(num_stages)
            ahead[s] = 1 - ahead[s]
        else:
            for _ in range(1 + draw_below(2)):
                s, chunk = draw_below(num_stages), draw_below(2)
                quotas[s, chunk] = max(1, min(num_microbatches, quotas[s, chunk] + draw_below(5) - 2))
        new = make_words(figures, rooms, stages, quotas, patience, ahead, trial)
        if new <= step or np.random.random() < np.exp((step - new) / heat_ms):
            step = new
            if step < best:
                best = step
                words[:], boundaries[:], rows[:] = trial, at, at_rows
        else:
            quotas[:], patience[:], ahead[:] = old_quotas, old_patience, old_ahead
            at[:], at_rows[:] = old_at, old_rows
            gather(table, at_rows, figures)
            rooms_of(figures, stages, rooms)
    return best


@kernel
def _trace(
    words: Words, figures: Floats, starts: Floats, position: Ints, last: int, stages: Ints, places: Ints, slack: float
) -> int:
    """Write the longest path, from its end, as stage and place in its word; how long it is."""
    num_stages, length = words.shape
    num_virtual = 2 * num_stages
    s, h, n = last, length - 1, 0
    while True:
        stages[n], places[n] = s, h
        n += 1
        begin = starts[s, h]
        if h > 0:
            before = words[s, h - 1]
            k = s if before < NUM_KINDS else num_virtual - 1 - s
            if starts[s, h - 1] + figures[k, before % NUM_KINDS] >= begin - slack:
                h -= 1
                continue
        letter = words[s, h]
        kind = letter % NUM_KINDS
        if begin <= slack or kind == WEIGHT:
            return n
        m = 0
        for x in range(h):
            if words[s, x] == letter:
                m += 1
        k = (s if letter < NUM_KINDS else num_virtual - 1 - s) + (-1 if kind == FORWARD else 1)
        if k < 0 or k >= num_virtual:
            return n
        s = k if k < num_stages else num_virtual - 1 - k
        h = position[k, FORWARD if kind == FORWARD else INPUT, m]


@kernel
def anneal_words(
    table: Floats,
    first: NDArray[np.int32],
    count: NDArray[np.int32],
    stages: Floats,
    boundaries: Ints,
    rows: Ints,
    words: Words,
    num_moves: int,
    warm_ms: float,
    seed: int,
    target_ms: float,
    may_move: bool,
) -> float:
    """The best step of words near `words`; boundaries, rows and words are overwritten with what takes it."""
    np.random.seed(seed)
    num_stages, length = words.shape
    num_virtual = rows.shape[0]
    figures, rooms = np.empty((num_virtual, table.shape[1])), np.empty((num_stages, 2))
    gather(table, rows, figures)
    rooms_of(figures, stages, rooms)
    starts = np.empty((num_stages, length))
    position = np.empty((num_virtual, NUM_KINDS, length // NUM_LETTERS), np.int64)
    on_path, places = np.empty(num_stages * length, np.int64), np.empty(num_stages * length, np.int64)
    now, at, at_rows = words.copy(), boundaries.copy(), rows.copy()
    old, old_at, old_rows = np.empty(length, np.int8), at.copy(), at_rows.copy()
    step, last = play_words(now, figures, stages, starts, position)
    best, slack, num_on_path = step, 1e-12 * step, 0
    if not np.isfinite(step):
        return step
    for move in range(num_moves):
        if best <= target_ms:
            break
        heat_ms = warm_ms * 0.1 ** (move / num_moves)
        s, source, target = -1, 0, 0
        if may_move and np.random.random() < PLACE_PART:
            old_at[:], old_rows[:] = at, at_rows
            if not change_place(table, at, at_rows, first, count, 1):
                continue
            gather(table, at_rows, figures)
            fit = rooms_of(figures, stages, rooms)
            for x in range(num_stages):
                other = num_virtual - 1 - x
                if fit and (at_rows[x] != old_rows[x] or at_rows[other] != old_rows[other]):
                    fit = fits_word(now[x], figures[x], figures[other], rooms[x, 0], rooms[x, 1])
            if not fit:
                at[:], at_rows[:] = old_at, old_rows
                gather(table, at_rows, figures)
                rooms_of(figures, stages, rooms)
                continue
        else:
            if num_on_path == 0:
                num_on_path = _trace(now, figures, starts, position, last, on_path, places, slack)
            s, source, target = draw_move(num_stages, length, num_on_path, on_path, places)
            if now[s, source] == now[s, target]:
                continue
            old[:] = now[s]
            move_letter(now[s], source, target)
            if not fits_word(now[s], figures[s], figures[num_virtual - 1 - s], rooms[s, 0], rooms[s, 1]):
                now[s] = old
                continue
        new, new_last = play_words(now, figures, stages, starts, position)
        if new <= step or np.random.random() < np.exp((step - new) / heat_ms):
            step, last, num_on_path = new, new_last, 0
            if step < best:
                best = step
                words[:], boundaries[:], rows[:] = now, at, at_rows
        elif s >= 0:
            now[s] = old
        else:
            at[:], at_rows[:] = old_at, old_rows
            gather(table, at_rows, figures)
            rooms_of(figures, stages, rooms)
    return best
