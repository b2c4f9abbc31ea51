"""Rules: words made by list scheduling, and local search over what it goes by, over placement and modes together.

A word of thousands of letters has few that matter alone. Rules say how full each stage may be and what it waits for, in
the steady part and in the last micro-batches, which end the step; words follow from them. Where the steady part is
known (`periodic`), rules make what comes after it. Local search over whole words (`search`) then goes on from there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD,
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT,
    KEPT,
    MOST_IN_FLIGHT,
    NUM_KINDS,
    PENDING,
    ROOM,
    TAIL_MS,
    WEIGHT,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.placement.orders.search import change_place, draw_below, gather
from mm_autoparallel.pipeline.placement.orders.words import Words
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Columns of rules, a row for each stage. QUOTA: micro-batches that may be in flight. LAST: how many of the last
#: forwards are left when the second of each of the following holds. PATIENCE: what part of a weight gradient's time
#: another action may be awaited in its place. WAIT: what part of a forward's time a gradient may, before the forward.
QUOTA, LAST, PATIENCE, WAIT, NUM_RULES = 0, 1, 2, 4, 6
#: What patience and waits are drawn from, and how many may be last at most. After a steady part that is known, how many
#: times as many as stages, patience then, and by how many a move changes them.
PARTS, MOST_LAST = np.array([0.0, 0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0]), 30
MOST_LAST_STAGES, LAST_PATIENCE, LAST_CHANGE = 3.5, 0.5, 4
#: What of the moves shift a boundary or change modes; a second change in one move; warmth at the end, of that at first.
PLACE_PART, SECOND_PART, COOLED = 0.15, 0.4, 0.03


@kernel
def begin_rules(num_microbatches: int, rules: Floats) -> None:
    """Overwrite rules [P, NUM_RULES] with those of no waits, and quotas that bytes alone limit."""
    rules[:] = 0.0
    rules[:, QUOTA] = num_microbatches
    rules[:, LAST] = 12.0


@kernel
def _choose(
    s: int, count: int, figures: Floats, rules: Floats, ran: Ints, forward_ms: float, input_ms: float, free: float
) -> tuple[int, float]:
    """The letter with which a stage goes on, which its neighbours have made ready at these times, and when that begins;
    -1 where nothing is known to become ready."""
    num_forward, num_input, num_weight = ran[s, FORWARD], ran[s, INPUT], ran[s, WEIGHT]
    in_flight, pending = num_forward - num_input, num_input - num_weight
    kept, later, room = figures[s, KEPT], figures[s, PENDING], figures[s, ROOM]
    has_room = (in_flight + 1) * kept + pending * later <= room and in_flight * kept + later <= room  # its gradient too
    if in_flight + 1 > min(rules[s, QUOTA], figures[s, MOST_IN_FLIGHT]) or not has_room:
        forward_ms = np.inf
    if (in_flight - 1) * kept + (pending + 1) * later > room:
        input_ms = np.inf
    forward_ms, input_ms = max(forward_ms, free), max(input_ms, free)
    is_last = 1 if count - num_forward <= rules[s, LAST] else 0
    if input_ms > free and forward_ms <= free:
        if input_ms - free > rules[s, WAIT + is_last] * figures[s, FORWARD_MS]:
            return FORWARD, free
        return INPUT, input_ms
    first = min(forward_ms, input_ms)
    if pending > 0 and first - free > rules[s, PATIENCE + is_last] * figures[s, WEIGHT_MS]:
        return WEIGHT, free
    if first == np.inf:
        return (WEIGHT, free) if pending > 0 else (-1, np.inf)
    return (INPUT, input_ms) if input_ms <= forward_ms else (FORWARD, forward_ms)


@kernel
def _play_fixed(words: Words, fixed: Ints, figures: Floats, ends: Floats, ran: Ints, free: Floats) -> None:
    """Play the first letters, [P] so many, of words as far as they do not wait for others. Changes ends [2, P, M + 1],
    ran [P, 3] and free [P]."""
    num_stages, is_moving = words.shape[0], True
    while is_moving:
        is_moving = False
        for x in range(2 * num_stages):
            s = x if x < num_stages else 2 * num_stages - 1 - x
            at = ran[s].sum()
            while at < fixed[s]:
                kind = words[s, at]
                m, ready_ms = ran[s, kind], 0.0
                if kind == FORWARD and s > 0:
                    ready_ms = ends[FORWARD, s - 1, m] + figures[s - 1, HOP_FORWARD_MS]
                elif kind == INPUT and s < num_stages - 1:
                    ready_ms = ends[INPUT, s + 1, m] + figures[s, HOP_BACKWARD_MS]
                if ready_ms == np.inf:
                    break
                free[s] = max(free[s], ready_ms) + figures[s, kind]
                if kind != WEIGHT:
                    ends[kind, s, m] = free[s]
                ran[s, kind] += 1
                at += 1
                is_moving = True


@kernel
def make_words(figures: Floats, rules: Floats, words: Words) -> float:
    """The step of the words [P, 3M] that rules make, which it overwrites; infinite where stages wait for ever.

    Of all stages the one that can begin first goes on: with a gradient of inputs, else a forward, else, where it would
    wait for long, a gradient of weights. No action is begun before what it needs is known, nor where it does not fit.
    """
    num_stages = words.shape[0]
    ends = np.full((2, num_stages, words.shape[1] // NUM_KINDS + 1), np.inf)
    ran, free = np.zeros((num_stages, NUM_KINDS), np.int64), np.zeros(num_stages)
    return _go_on(figures, rules, np.zeros(num_stages, np.int64), ends, ran, free, words)


@kernel
def _go_on(figures: Floats, rules: Floats, fixed: Ints, ends: Floats, ran: Ints, free: Floats, words: Words) -> float:
    """The same after some actions, ran [P, 3] of each kind, that ended at ends [2, P, M + 1], infinite for others, and
    left stages free [P]. The first letters of words, fixed [P] so many, stay. Changes all but figures and rules."""
    num_stages, length = words.shape
    count = length // NUM_KINDS
    choice, begins = np.zeros(num_stages, np.int64), np.zeros(num_stages)
    _play_fixed(words, fixed, figures, ends, ran, free)
    low, high = 0, num_stages
    for _ in range(num_stages * length - ran.sum()):
        for s in range(low, high):
            forward_ms = input_ms = np.inf
            m = ran[s, FORWARD]
            if m < count:
                forward_ms = 0.0 if s == 0 else ends[FORWARD, s - 1, m] + figures[s - 1, HOP_FORWARD_MS]
            m = ran[s, INPUT]
            if m < ran[s, FORWARD]:
                input_ms = 0.0 if s == num_stages - 1 else ends[INPUT, s + 1, m] + figures[s, HOP_BACKWARD_MS]
            at = ran[s].sum()
            if at < fixed[s]:
                choice[s] = words[s, at]
                ready_ms = forward_ms if choice[s] == FORWARD else input_ms if choice[s] == INPUT else 0.0
                begins[s] = max(free[s], ready_ms)
            else:
                choice[s], begins[s] = _choose(s, count, figures, rules, ran, forward_ms, input_ms, free[s])
        s = 0
        for other in range(1, num_stages):
            if begins[other] < begins[s]:
                s = other
        if begins[s] == np.inf:
            return np.inf
        kind = choice[s]
        m = ran[s, kind]
        words[s, ran[s].sum()] = kind
        free[s] = begins[s] + figures[s, kind]
        if kind != WEIGHT:
            ends[kind, s, m] = free[s]
        ran[s, kind] = m + 1
        low, high = s, s + 1  # and who waited for it
        if kind == FORWARD and high < num_stages and ran[high, FORWARD] == m:
            high += 1
        elif kind == INPUT and low > 0 and ran[low - 1, INPUT] == m:
            low -= 1
    step = 0.0
    for s in range(num_stages):
        step = max(step, free[s] + figures[s, TAIL_MS])
    return step


@kernel
def _fix(words: Words, rules: Floats, fixed: Ints) -> None:
    """Overwrite fixed [P] with how many letters of words [P, 3M] come before the last forwards."""
    for s in range(words.shape[0]):
        left, fixed[s] = words.shape[1] // NUM_KINDS, 0
        while left > rules[s, LAST]:
            left -= 1 if words[s, fixed[s]] == FORWARD else 0
            fixed[s] += 1


@kernel
def end_words(
    figures: Floats, words: Words, num_lasts: int, num_moves: int, warm_ms: float, seed: int, target_ms: float
) -> float:
    """The best step of words [P, 3M], as they are or going on by rules where few forwards are left; words are
    overwritten with what takes it. num_lasts: how many are left, that is tried first, as many of each stage."""
    np.random.seed(seed)
    num_stages, count = words.shape[0], words.shape[1] // NUM_KINDS
    steady, trial, fixed = words.copy(), words.copy(), np.zeros(num_stages, np.int64)
    rules = np.empty((num_stages, NUM_RULES))
    begin_rules(count, rules)
    rules[:, PATIENCE + 1] = LAST_PATIENCE
    rules[:, LAST] = min(count, int(MOST_LAST_STAGES * num_stages))
    _fix(steady, rules, fixed)
    ends = np.full((2, num_stages, count + 1), np.inf)
    ran, free = np.zeros((num_stages, NUM_KINDS), np.int64), np.zeros(num_stages)
    _play_fixed(steady, fixed, figures, ends, ran, free)  # what comes before all that is tried
    fixed[:] = words.shape[1]
    best = step = _go_on(figures, rules, fixed, ends.copy(), ran.copy(), free.copy(), trial)
    now, old = rules.copy(), rules.copy()
    for move in range(num_lasts + num_moves):
        if best <= target_ms:
            break
        is_first = move < num_lasts
        if is_first:  # as many of each stage
            now[:, LAST] = np.floor(rules[0, LAST] * move / num_lasts)
        else:
            for _ in range(2 if np.random.random() < SECOND_PART else 1):
                _change_end(now, rules[0, LAST])
        _fix(steady, now, fixed)
        trial[:] = steady
        new = _go_on(figures, now, fixed, ends.copy(), ran.copy(), free.copy(), trial)
        heat_ms = 0.0 if is_first else warm_ms * COOLED ** ((move - num_lasts) / num_moves)
        if new <= step or (heat_ms > 0.0 and np.random.random() < np.exp((step - new) / heat_ms)):
            step = new
            old[:] = now
            if step < best:
                best = step
                words[:] = trial
        else:
            now[:] = old
    return best


@kernel
def _change_end(rules: Floats, most_last: float) -> None:
    """Change one rule of the last micro-batches, of one stage or of several neighbours."""
    num_stages = rules.shape[0]
    s, dice = draw_below(num_stages), np.random.random()
    if dice < 0.3:
        rules[s, PATIENCE + 1] = PARTS[draw_below(len(PARTS))]
    elif dice < 0.5:
        rules[s, WAIT + 1] = PARTS[draw_below(len(PARTS))]
    else:
        change = draw_below(2 * LAST_CHANGE + 1) - LAST_CHANGE
        for k in range(s, s + 1 if dice < 0.9 else s + 1 + draw_below(num_stages - s)):
            rules[k, LAST] = min(most_last, max(0.0, rules[k, LAST] + change))


@kernel
def _change(rules: Floats, count: int) -> None:
    """Change one rule of one stage."""
    num_stages = rules.shape[0]
    s, dice, when = draw_below(num_stages), np.random.random(), draw_below(2)
    if dice < 0.4:
        rules[s, PATIENCE + when] = PARTS[draw_below(len(PARTS))]
    elif dice < 0.7:
        rules[s, WAIT + when] = PARTS[draw_below(len(PARTS))]
    elif dice < 0.85:
        rules[s, LAST] = 1.0 + draw_below(MOST_LAST)
    elif dice < 0.95:
        rules[s, QUOTA] = min(count, max(1, num_stages - s + draw_below(5) - 2))
    else:
        rules[s, QUOTA] = count


@kernel
def search_rules(
    table: Floats,
    first: NDArray[np.int32],
    count: NDArray[np.int32],
    boundaries: Ints,
    rows: Ints,
    rules: Floats,
    words: Words,
    num_moves: int,
    warm_ms: float,
    seed: int,
    target_ms: float,
    may_move: bool,
) -> float:
    """The best step of words that rules make; boundaries [P + 1], rows [P], rules [P, NUM_RULES] and words [P, 3M] are
    overwritten with what takes it. table: [R, NUM_FIGURES]; first, count: [P, N + 1, N + 1] its rows of each stretch.
    rules: to begin with. may_move: whether boundaries and modes may change. Ends early at target_ms.
    """
    np.random.seed(seed)
    num_stages, num_microbatches = rows.shape[0], words.shape[1] // NUM_KINDS
    figures, trial = np.empty((num_stages, table.shape[1])), words.copy()
    at, at_rows, now = boundaries.copy(), rows.copy(), rules.copy()
    gather(table, at_rows, figures)
    step = make_words(figures, now, trial)
    if not np.isfinite(step):  # one micro-batch at a time always fits
        now[:, QUOTA] = 1.0
        step = make_words(figures, now, trial)
    best = step
    words[:], rules[:] = trial, now
    old, old_at, old_rows = now.copy(), at.copy(), at_rows.copy()
    for move in range(num_moves):
        if best <= target_ms:
            break
        heat_ms = warm_ms * COOLED ** (move / num_moves)
        old[:], old_at[:], old_rows[:] = now, at, at_rows
        if may_move and np.random.random() < PLACE_PART:
            if not change_place(table, at, at_rows, first, count, 1):
                continue
            gather(table, at_rows, figures)
        else:
            _change(now, num_microbatches)
            if np.random.random() < SECOND_PART:
                _change(now, num_microbatches)
        new = make_words(figures, now, trial)
        if new <= step or np.random.random() < np.exp((step - new) / heat_ms):
            step = new
            if step < best:
                best = step
                words[:], boundaries[:], rows[:], rules[:] = trial, at, at_rows, now
        else:
            now[:], at[:], at_rows[:] = old, old_at, old_rows
            gather(table, at_rows, figures)
    return best
