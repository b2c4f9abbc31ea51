"""Rules: words made by list scheduling, and local search over what it goes by, over placement and modes together.

A word of thousands of letters has few that matter alone. Rules say how full each stage may be and what it waits for, in
the steady part and in the last micro-batches, which end the step; words follow from them. Local search over whole words
(`search`) then goes on from there.
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
#: What patience and waits are drawn from, and how many may be last at most.
PARTS, MOST_LAST = np.array([0.0, 0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0]), 30
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
def make_words(figures: Floats, rules: Floats, words: Words) -> float:
    """The step of the words [P, 3M] that rules make, which it overwrites; infinite where stages wait for ever.

    Of all stages the one that can begin first goes on: with a gradient of inputs, else a forward, else, where it would
    wait for long, a gradient of weights. No action is begun before what it needs is known, nor where it does not fit.
    """
    num_stages, length = words.shape
    count = length // NUM_KINDS
    ends = np.full((2, num_stages, count + 1), np.inf)
    ran, free = np.zeros((num_stages, NUM_KINDS), np.int64), np.zeros(num_stages)
    choice, begins = np.zeros(num_stages, np.int64), np.zeros(num_stages)
    low, high = 0, num_stages
    for _ in range(num_stages * length):
        for s in range(low, high):
            forward_ms = input_ms = np.inf
            m = ran[s, FORWARD]
            if m < count:
                forward_ms = 0.0 if s == 0 else ends[FORWARD, s - 1, m] + figures[s - 1, HOP_FORWARD_MS]
            m = ran[s, INPUT]
            if m < ran[s, FORWARD]:
                input_ms = 0.0 if s == num_stages - 1 else ends[INPUT, s + 1, m] + figures[s, HOP_BACKWARD_MS]
            choice[s], begins[s] = _choose(s, count, figures, rules, ran, forward_ms, input_ms, free[s])
        s = 0
        for other in range(1, num_stages):
            if begins[other] < begins[s]:
                s = other
        if begins[s] == np.inf:
            return np.inf
        kind = choice[s]
        m = ran[s, kind]
        words[s, ran[s, FORWARD] + ran[s, INPUT] + ran[s, WEIGHT]] = kind
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
            if not change_place(at, at_rows, first, count, 1):
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
