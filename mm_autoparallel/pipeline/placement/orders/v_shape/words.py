"""Words of a V: the order of every stage as letters, played, checked against memory, and made by list scheduling.

A letter is chunk · 3 + kind, and stands for the next micro-batch of that kind: int8 [P, 6 · M]. Taking micro-batches in
order loses nothing where they are equal, whatever the number of chunks (explanation/placement).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT,
    KEPT,
    NUM_KINDS,
    PENDING,
    TAIL_MS,
    WEIGHT,
)
from mm_autoparallel.pipeline.placement.orders.v_shape.bounds import HOST_LIMIT, STAGE_TAIL_MS, room_of
from mm_autoparallel.pipeline.placement.orders.v_shape.pieces import HOST_STATIC, ON_HOST
from mm_autoparallel.pipeline.placement.orders.words import run_words
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.int8]

NUM_LETTERS = 2 * NUM_KINDS


@kernel
def rooms_of(figures: Floats, stages: Floats, rooms: Floats) -> bool:
    """Overwrite rooms [P, 2] with the bytes for micro-batches on the device and the host; whether one at a time fits.

    figures: [K, NUM_FIGURES] of the piece that each virtual stage holds. stages: as `stage_figures`.
    """
    num_stages = stages.shape[0]
    fit = True
    for s in range(num_stages):
        a, z = figures[s], figures[2 * num_stages - 1 - s]
        rooms[s, 0] = room_of(a, z, stages[s])
        rooms[s, 1] = stages[s, HOST_LIMIT] - a[HOST_STATIC] - z[HOST_STATIC]
        fit = fit and a[KEPT] + max(z[KEPT], z[PENDING]) <= rooms[s, 0] and a[PENDING] <= rooms[s, 0]
        fit = fit and a[ON_HOST] + z[ON_HOST] <= rooms[s, 1]
    return fit


@kernel
def fits_word(word: Words, a: Floats, z: Floats, room: float, host_room: float) -> bool:
    """Whether a stage with pieces a and z has room for its word, each of whose letters follows what it needs of its
    own chunk."""
    flight, pending = np.zeros(2, np.int64), np.zeros(2, np.int64)
    for letter in word:
        chunk, kind = letter // NUM_KINDS, letter % NUM_KINDS
        if kind == FORWARD:
            flight[chunk] += 1
        elif kind == INPUT:
            flight[chunk] -= 1
            pending[chunk] += 1
        else:
            pending[chunk] -= 1
        if flight[chunk] < 0 or pending[chunk] < 0:
            return False
        held = flight[0] * a[KEPT] + pending[0] * a[PENDING] + flight[1] * z[KEPT] + pending[1] * z[PENDING]
        if held > room or flight[0] * a[ON_HOST] + flight[1] * z[ON_HOST] > host_room:
            return False
    return True


@kernel
def play_words(words: Words, figures: Floats, stages: Floats, starts: Floats, position: Ints) -> tuple[float, int]:
    """The step in ms and the stage that ends it; infinite and -1 where the words wait for one another.

    Overwrites starts [P, 6M] and position [K, 3, M], where in its word each action stands.
    """
    num_stages = words.shape[0]
    free = np.empty(num_stages)
    if not run_words(words, figures, starts, position, free):
        return np.inf, -1
    step, last = -1.0, 0
    for s in range(num_stages):
        end = free[s] + stages[s, STAGE_TAIL_MS] + figures[s, TAIL_MS] + figures[2 * num_stages - 1 - s, TAIL_MS]
        if end > step:
            step, last = end, s
    return step, last


@kernel
def make_words(
    figures: Floats, rooms: Floats, stages: Floats, quotas: Ints, patience: Floats, first: Ints, words: Words
) -> float:
    """List scheduling: the step of the words that it overwrites [P, 6M]; infinite where stages wait for ever.

    Of all stages the one that can begin first goes on. It takes what can begin first, in the order of `first`; a weight
    gradient where it would wait for at least patience [P] of its length, or where memory asks for it. quotas: [P, 2]
    micro-batches of each chunk that may be in flight. first: [P] how forwards and gradients go that can begin at once:
    0 gradients before forwards, 1 forwards before gradients; chunk 1 before chunk 0.
    """
    num_stages, length = words.shape
    num_virtual, count = 2 * num_stages, length // NUM_LETTERS
    ends = np.full((2, num_virtual, count), np.inf)
    ran, free, written = (
        np.zeros((num_virtual, NUM_KINDS), np.int64),
        np.zeros(num_stages),
        np.zeros(num_stages, np.int64),
    )
    choice, begins = np.full(num_stages, -2, np.int64), np.full(num_stages, np.inf)
    stale = np.ones(num_stages, np.bool_)
    for _ in range(num_stages * length):
        best = -1
        for s in range(num_stages):
            if stale[s]:
                stale[s] = False
                choice[s], begins[s] = _choose(s, figures, rooms, quotas, patience[s], first[s], ran, ends, free[s])
            if choice[s] >= 0 and (best < 0 or begins[s] < begins[best]):
                best = s
        if best < 0:
            return np.inf
        s, letter = best, choice[best]
        kind = letter % NUM_KINDS
        k = s if letter < NUM_KINDS else num_virtual - 1 - s
        m = ran[k, kind]
        words[s, written[s]] = letter
        written[s] += 1
        free[s] = begins[s] + figures[k, kind]
        if kind != WEIGHT:
            ends[kind, k, m] = free[s]
        ran[k, kind] = m + 1
        stale[s] = True
        for other in (k - 1, k + 1):
            if 0 <= other < num_virtual:
                stale[other if other < num_stages else num_virtual - 1 - other] = True
    step = 0.0
    for s in range(num_stages):
        step = max(
            step, free[s] + stages[s, STAGE_TAIL_MS] + figures[s, TAIL_MS] + figures[num_virtual - 1 - s, TAIL_MS]
        )
    return step


@kernel
def _choose(
    s: int,
    figures: Floats,
    rooms: Floats,
    quotas: Ints,
    patience: float,
    first: int,
    ran: Ints,
    ends: Floats,
    free: float,
) -> tuple[int, float]:
    """The letter with which a stage goes on and when that begins; -1 where it can with none that is known."""
    num_virtual, count = ran.shape[0], ends.shape[2]
    virtual = (s, num_virtual - 1 - s)
    held, on_host = 0.0, 0.0
    for k in virtual:
        held += (ran[k, FORWARD] - ran[k, INPUT]) * figures[k, KEPT]
        held += (ran[k, INPUT] - ran[k, WEIGHT]) * figures[k, PENDING]
        on_host += (ran[k, FORWARD] - ran[k, INPUT]) * figures[k, ON_HOST]
    weight = -1  # of both chunks the weight gradient that keeps more
    for chunk in (1, 0):
        k = virtual[chunk]
        if ran[k, WEIGHT] < ran[k, INPUT] and (weight < 0 or figures[k, PENDING] > figures[virtual[1], PENDING]):
            weight = chunk * NUM_KINDS + WEIGHT
    best, begin, blocked = -1, np.inf, False
    for turn in range(4):
        chunk = 1 - turn % 2
        kind = FORWARD if (turn < 2) == (first == 1) else INPUT
        k, other = virtual[chunk], virtual[1 - chunk]
        m = ran[k, kind]
        if m >= count:
            continue
        ready = 0.0
        if kind == FORWARD:
            if ran[k, FORWARD] - ran[k, INPUT] >= quotas[s, chunk]:
                continue
            if k > 0:
                ready = ends[FORWARD, k - 1, m] + figures[k - 1, HOP_FORWARD_MS]
            more = figures[k, KEPT]
            if chunk == 0 and ran[other, FORWARD] == ran[other, INPUT]:  # that what it waits for has room
                more += figures[other, KEPT]
            fits_host = on_host + figures[k, ON_HOST] <= rooms[s, 1]
        else:
            if ran[k, FORWARD] <= m:
                continue
            if k < num_virtual - 1:
                ready = ends[INPUT, k + 1, m] + figures[k, HOP_BACKWARD_MS]
            more = figures[k, PENDING] - figures[k, KEPT]
            fits_host = True
        if ready == np.inf or not fits_host:
            continue
        if held + more > rooms[s, 0] and more > 0.0:
            blocked = True
            continue
        if max(ready, free) < begin:
            best, begin = chunk * NUM_KINDS + kind, max(ready, free)
    if weight >= 0:
        k = virtual[weight // NUM_KINDS]
        if best < 0 or (blocked and begin > free) or begin - free >= patience * figures[k, WEIGHT]:
            return weight, free
    return best, begin
