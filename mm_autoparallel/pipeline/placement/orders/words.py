"""Words: the order of every stage as letters, played, filled with weight gradients, and checked against memory.

Micro-batches are taken in order by each kind of action, so a stage's order is a word over forward, input gradient and
weight gradient, each as often as there are micro-batches: int8 [P, 3 · M].
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
    MOST_IN_FLIGHT,
    NUM_KINDS,
    PENDING,
    ROOM,
    TAIL_MS,
    WEIGHT,
    WEIGHT_MS,
)
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.int8]


@kernel
def run_words(words: Words, figures: Floats, starts: Floats, position: Ints, free: Floats) -> bool:
    """Play words, with one chunk a stage or with two there and back; False where they wait for one another.

    A letter is chunk * 3 + kind, virtual stage k is on stage k or K - 1 - k. Overwrites starts [P, ...] of the letters,
    position [K, 3, M], where in its word each action stands, and free [P], when each stage has run its word.
    """
    num_stages, length = words.shape
    num_virtual = figures.shape[0]
    ends = np.empty((2, num_virtual, position.shape[2]))
    at = np.zeros(num_stages, np.int64)
    ran = np.zeros((num_virtual, NUM_KINDS), np.int64)
    free[:] = 0.0
    left, downwards = num_stages * length, True
    while left > 0:
        before = left
        for x in range(num_stages):
            s = x if downwards else num_stages - 1 - x
            time = free[s]
            while at[s] < length:
                kind, k = words[s, at[s]], s
                if kind >= NUM_KINDS:
                    kind, k = kind - NUM_KINDS, num_virtual - 1 - s
                m = ran[k, kind]
                ready = 0.0
                if kind == FORWARD and k > 0:
                    if ran[k - 1, FORWARD] <= m:
                        break
                    ready = ends[FORWARD, k - 1, m] + figures[k - 1, HOP_FORWARD_MS]
                elif kind == INPUT and k < num_virtual - 1:
                    if ran[k + 1, INPUT] <= m:
                        break
                    ready = ends[INPUT, k + 1, m] + figures[k, HOP_BACKWARD_MS]
                time = max(time, ready)
                starts[s, at[s]] = time
                position[k, kind, m] = at[s]
                time += figures[k, kind]
                if kind != WEIGHT:
                    ends[kind, k, m] = time
                ran[k, kind] = m + 1
                at[s] += 1
                left -= 1
            free[s] = time
        downwards = not downwards
        if left == before:
            return False
    return True


@kernel
def play_words(words: Words, figures: Floats, starts: Floats, position: Ints) -> tuple[float, int]:
    """The step in ms and the stage that ends it; infinite and -1 where the words wait for one another.

    Overwrites starts [P, 3M] and position [P, 3, M], where in its word each action stands.
    """
    free = np.empty(words.shape[0])
    if not run_words(words, figures, starts, position, free):
        return np.inf, -1
    step, last = -1.0, 0
    for s in range(words.shape[0]):
        if free[s] + figures[s, TAIL_MS] > step:
            step, last = free[s] + figures[s, TAIL_MS], s
    return step, last


@kernel
def step_of(words: Words, figures: Floats) -> float:
    """The step in ms of words [P, 3M]; infinite where they wait for one another."""
    position = np.empty((words.shape[0], NUM_KINDS, words.shape[1] // NUM_KINDS), np.int64)
    return play_words(words, figures, np.empty(words.shape), position)[0]


@kernel
def fits_word(word: Words, figures: Floats) -> bool:
    """Whether a stage with figures [NUM_FIGURES] has room for its word [3M], each of whose actions follows what it
    needs on this stage."""
    in_flight, pending = 0, 0
    for letter in word:
        if letter == FORWARD:
            in_flight += 1
        elif letter == INPUT:
            in_flight -= 1
            pending += 1
        else:
            pending -= 1
        if in_flight < 0 or pending < 0 or in_flight > figures[MOST_IN_FLIGHT]:
            return False
        if in_flight * figures[KEPT] + pending * figures[PENDING] > figures[ROOM]:
            return False
    return True


@kernel
def fit_word(word: Words, figures: Floats, spare: Words) -> bool:
    """Change a word [3M] so that it fits a stage with figures [NUM_FIGURES]; whether it now does. Where not, it stays.

    Forwards that exceed the room wait; weight gradients that can run come before what would exceed it. spare: [3M],
    overwritten.
    """
    kept, later, room, most = figures[KEPT], figures[PENDING], figures[ROOM], figures[MOST_IN_FLIGHT]
    in_flight, pending, delayed, owed, n = 0, 0, 0, 0, 0
    for letter in word:
        if letter == FORWARD:
            delayed += 1
        elif letter == WEIGHT:
            if owed > 0:
                owed -= 1
                continue
            if pending == 0:
                return False
            pending -= 1
            spare[n] = WEIGHT
            n += 1
        else:
            if in_flight == 0:
                return False
            while (in_flight - 1) * kept + (pending + 1) * later > room:
                if pending == 0:
                    return False
                pending -= 1
                owed += 1
                spare[n] = WEIGHT
                n += 1
            in_flight -= 1
            pending += 1
            spare[n] = INPUT
            n += 1
        while delayed > 0 and in_flight < most:
            while pending > 0 and (in_flight + 1) * kept + pending * later > room:
                pending -= 1
                owed += 1
                spare[n] = WEIGHT
                n += 1
            if (in_flight + 1) * kept + pending * later > room:
                break
            in_flight += 1
            delayed -= 1
            spare[n] = FORWARD
            n += 1
    if delayed > 0 or n < len(word):
        return False
    word[:] = spare[:n]
    return True


@kernel
def fit_pairs(pairs: Words, most: float, spare: Words) -> bool:
    """The same of a stage's word of pairs [2M], of which at most so many may be in flight. spare: [2M] or longer."""
    in_flight, delayed, n = 0, 0, 0
    for letter in pairs:
        if letter == FORWARD:
            delayed += 1
        else:
            if in_flight == 0:
                return False
            in_flight -= 1
            spare[n] = INPUT
            n += 1
        while delayed > 0 and in_flight < most:
            in_flight += 1
            delayed -= 1
            spare[n] = FORWARD
            n += 1
    if delayed > 0:
        return False
    pairs[:] = spare[:n]
    return True


@kernel
def fill_weights(pairs: Words, patience: Floats, figures: Floats, words: Words) -> float:
    """Complete words of forwards and input gradients, pairs [P, 2M], with weight gradients; the step in ms, infinite
    where they deadlock or do not fit.

    A weight gradient goes where memory asks for it, and into each wait of its stage that is at least patience [P] of
    its length. Overwrites words [P, 3M].
    """
    num_stages, length = pairs.shape
    num_microbatches = length // 2
    ends = np.empty((2, num_stages, num_microbatches))
    at, written, free = np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64), np.zeros(num_stages)
    ran = np.zeros((num_stages, NUM_KINDS), np.int64)
    left, downwards = num_stages * length, True
    while left > 0:
        before = left
        for x in range(num_stages):
            s = x if downwards else num_stages - 1 - x
            time, weight_ms = free[s], figures[s, WEIGHT_MS]
            while at[s] < length:
                kind = pairs[s, at[s]]
                m = ran[s, kind]
                ready, in_flight = 0.0, ran[s, FORWARD] - ran[s, INPUT]
                if kind == FORWARD:
                    in_flight += 1
                    if s > 0:
                        if ran[s - 1, FORWARD] <= m:
                            break
                        ready = ends[FORWARD, s - 1, m] + figures[s - 1, HOP_FORWARD_MS]
                else:
                    in_flight -= 1
                    if s < num_stages - 1:
                        if ran[s + 1, INPUT] <= m:
                            break
                        ready = ends[INPUT, s + 1, m] + figures[s, HOP_BACKWARD_MS]
                if in_flight < 0 or in_flight > figures[s, MOST_IN_FLIGHT]:
                    return np.inf
                while ran[s, WEIGHT] < ran[s, INPUT]:
                    pending = ran[s, INPUT] - ran[s, WEIGHT] + (1 if kind == INPUT else 0)
                    held = in_flight * figures[s, KEPT] + pending * figures[s, PENDING]
                    if held <= figures[s, ROOM] and ready - time < patience[s] * weight_ms:
                        break
                    words[s, written[s]] = WEIGHT
                    written[s] += 1
                    time += weight_ms
                    ran[s, WEIGHT] += 1
                pending = ran[s, INPUT] - ran[s, WEIGHT] + (1 if kind == INPUT else 0)
                if in_flight * figures[s, KEPT] + pending * figures[s, PENDING] > figures[s, ROOM]:
                    return np.inf
                words[s, written[s]] = kind
                written[s] += 1
                time = max(time, ready) + figures[s, kind]
                ends[kind, s, m] = time
                ran[s, kind] = m + 1
                at[s] += 1
                left -= 1
            free[s] = time
        downwards = not downwards
        if left == before:
            return np.inf
    step = 0.0
    for s in range(num_stages):
        while ran[s, WEIGHT] < num_microbatches:
            words[s, written[s]] = WEIGHT
            written[s] += 1
            free[s] += figures[s, WEIGHT_MS]
            ran[s, WEIGHT] += 1
        step = max(step, free[s] + figures[s, TAIL_MS])
    return step


@kernel
def alternate(pairs: Words, stage: int, warmup: int) -> None:
    """Write a stage's word of pairs: so many forwards, then input gradients and forwards in turn."""
    num_microbatches = pairs.shape[1] // 2
    first = min(warmup, num_microbatches)
    pairs[stage, :first] = FORWARD
    at = first
    for m in range(num_microbatches):
        pairs[stage, at] = INPUT
        at += 1
        if first + m < num_microbatches:
            pairs[stage, at] = FORWARD
            at += 1


@kernel
def move_letter(word: Words, source: int, target: int) -> None:
    """Take the letter at source out and put it in at target."""
    letter = word[source]
    if target > source:
        for x in range(source, target):
            word[x] = word[x + 1]
    else:
        for x in range(source, target, -1):
            word[x] = word[x - 1]
    word[target] = letter


@kernel
def stretch_words(words: Words, first: int, together: int, longer: Words) -> bool:
    """Overwrite longer [P, 3M] with words [P, 3N] of fewer micro-batches whose middle is repeated: from each stage's
    forward `first` to its K-th after that. Whether all actions are there as often, and fit if those of words do."""
    num_times = (longer.shape[1] - words.shape[1]) // (NUM_KINDS * together)
    if words.shape[1] + num_times * NUM_KINDS * together != longer.shape[1]:
        return False
    for s in range(words.shape[0]):
        begin = forwards = 0
        while forwards < first or words[s, begin] != FORWARD:
            forwards += 1 if words[s, begin] == FORWARD else 0
            begin += 1
        end = begin + NUM_KINDS * together
        ran = np.zeros(NUM_KINDS, np.int64)
        for letter in words[s, begin:end]:
            ran[letter] += 1
        if ran.min() < together:
            return False
        longer[s, :begin] = words[s, :begin]
        for time in range(num_times):
            at = begin + time * (end - begin)
            longer[s, at : at + end - begin] = words[s, begin:end]
        longer[s, begin + num_times * (end - begin) :] = words[s, begin:]
    return True
