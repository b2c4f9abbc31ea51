"""Justifying: all actions as late as a step allows, then all as early as they may, each in the first wait of its stage
that it fits (double justification; Valls, Ballestín and Quintanilla 2005).

Moves of single letters change a word in one place. Here actions pass others all over the step at once, by the order of
their ends and then of their starts, and no step grows. What a stage's memory has room for is said by which micro-batch
waits for which; where that is not all, words are made to fit afterwards.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT,
    MOST_HELD,
    MOST_IN_FLIGHT,
    MOST_PENDING,
    NUM_KINDS,
    TAIL_MS,
    WEIGHT,
)
from mm_autoparallel.pipeline.placement.orders.words import Words, fit_word, fits_word, play_words, step_of
from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: How many actions one waits for at most, and how many wait for it: the next of its kind, those of its micro-batch here
#: and on the next stage, and those whose memory it takes.
MOST_LINKS = 4
#: Times that differ by less, in parts of them, are one.
SAME = 1e-12
#: Both ways are gone so often at most; mostly once is enough.
MOST_TURNS = 10


@kernel
def justify_words(words: Words, figures: Floats) -> float:
    """The step of words [P, 3M], which are overwritten with justified ones where these fit; it does not grow. figures:
    [P, NUM_FIGURES] of their stages."""
    num_stages, count, step_ms = words.shape[0], words.shape[1] // NUM_KINDS, step_of(words, figures)
    lengths, needs, lags = list_actions(count, figures)
    behind, lags_behind = turn_round(needs, lags)
    tails, zeros = figures[:, TAIL_MS].copy(), np.zeros(num_stages)
    trial, spare = words.copy(), words[0].copy()
    for _ in range(MOST_TURNS):
        early = list_starts(trial, figures)
        late = schedule(lengths, -early - lengths, tails, behind, lags_behind, needs, True)  # from the end of the step
        early = schedule(lengths, -late - lengths, zeros, needs, lags, behind, True)
        write_words(lengths, early, trial)
        for s in range(num_stages):
            if not fits_word(trial[s], figures[s]) and not fit_word(trial[s], figures[s], spare):
                return step_ms
        new_ms = step_of(trial, figures)
        if new_ms > step_ms:
            break
        words[:], is_same = trial, new_ms >= step_ms * (1.0 - SAME)
        step_ms = new_ms
        if is_same:
            break
    return step_ms


@kernel
def list_starts(words: Words, figures: Floats) -> Floats:
    """[3PM] when actions begin, by stage, kind and micro-batch, where stages run these words [P, 3M]."""
    num_stages, length = words.shape
    starts, position = np.empty((num_stages, length)), np.empty((num_stages, NUM_KINDS, length // NUM_KINDS), np.int64)
    play_words(words, figures, starts, position)
    listed = np.empty(num_stages * length)
    for s in range(num_stages):
        for action, place in enumerate(position[s].ravel()):
            listed[s * length + action] = starts[s, place]
    return listed


@kernel
def list_actions(num_microbatches: int, figures: Floats) -> tuple[Floats, Ints, Floats]:
    """How long actions take, [3PM]; [3PM, MOST_LINKS] what they begin after the ends of, -1 for nothing, and how much
    later at least."""
    num_stages, count = figures.shape[0], num_microbatches
    lengths = np.repeat(figures[:, :NUM_KINDS].copy().ravel(), count)
    needs, lags = np.full((len(lengths), MOST_LINKS), -1), np.zeros((len(lengths), MOST_LINKS))
    for s in range(num_stages):
        at = NUM_KINDS * count * s
        forward, backward, weight = at + FORWARD * count, at + INPUT * count, at + WEIGHT * count
        for m in range(count):
            if m > 0:
                for first in (forward, backward, weight):
                    _link(needs, lags, first + m, first + m - 1, 0.0)
            if s > 0:
                _link(needs, lags, forward + m, forward + m - NUM_KINDS * count, figures[s - 1, HOP_FORWARD_MS])
            if s < num_stages - 1:
                _link(needs, lags, backward + m, backward + m + NUM_KINDS * count, figures[s, HOP_BACKWARD_MS])
            _link(needs, lags, backward + m, forward + m, 0.0)
            _link(needs, lags, weight + m, backward + m, 0.0)
            for most, later, before in (
                (figures[s, MOST_IN_FLIGHT], forward, backward),
                (figures[s, MOST_HELD], forward, weight),
                (figures[s, MOST_PENDING], backward, weight),
            ):
                if m >= most:
                    _link(needs, lags, later + m, before + m - int(most), 0.0)
    return lengths, needs, lags


@kernel
def _link(links: Ints, lags: Floats, task: int, other: int, lag_ms: float) -> None:
    x = 0
    while links[task, x] >= 0:
        x += 1
    links[task, x], lags[task, x] = other, lag_ms


@kernel
def turn_round(needs: Ints, lags: Floats) -> tuple[Ints, Floats]:
    """The same seen from behind: who waits for an action."""
    behind, lags_behind = np.full_like(needs, -1), np.zeros_like(lags)
    for task in range(needs.shape[0]):
        for x in range(MOST_LINKS):
            if needs[task, x] >= 0:
                _link(behind, lags_behind, needs[task, x], task, lags[task, x])
    return behind, lags_behind


@kernel
def schedule(
    lengths: Floats, keys: Floats, firsts: Floats, needs: Ints, lags: Floats, behind: Ints, may_pass: bool
) -> Floats:
    """[3PM] the earliest start of each action, taken by keys once what it needs is there. firsts: [P] when stages
    begin. What is there stays; may_pass: a later action may go before it, where its stage waits that long."""
    num_stages, num_tasks = firsts.shape[0], lengths.shape[0]
    per_stage, starts = num_tasks // num_stages, np.empty(num_tasks)
    begins, ends = np.empty((num_stages, per_stage)), np.empty((num_stages, per_stage))
    num_there, missing = np.zeros(num_stages, np.int64), np.zeros(num_tasks, np.int64)
    ready = [(0.0, 0) for _ in range(0)]
    for task in range(num_tasks):
        for x in range(MOST_LINKS):
            missing[task] += 1 if needs[task, x] >= 0 else 0
        if missing[task] == 0:
            heapq.heappush(ready, (keys[task], task))
    while len(ready) > 0:
        task = heapq.heappop(ready)[1]
        s = task // per_stage
        at = firsts[s]
        for x in range(MOST_LINKS):
            need = needs[task, x]
            if need >= 0:
                at = max(at, starts[need] + lengths[need] + lags[task, x])
        same, place = SAME * max(1.0, at), num_there[s]
        while may_pass and place > 0 and ends[s, place - 1] > at + same:
            place -= 1
        if not may_pass and place > 0 and lengths[task] > 0.0:
            at = max(at, ends[s, place - 1])
        while place < num_there[s] and begins[s, place] < at + lengths[task] - same:
            at = max(at, ends[s, place])
            place += 1
        starts[task] = at
        if lengths[task] > 0.0:
            for x in range(num_there[s], place, -1):
                begins[s, x], ends[s, x] = begins[s, x - 1], ends[s, x - 1]
            begins[s, place], ends[s, place] = at, at + lengths[task]
            num_there[s] += 1
        for x in range(MOST_LINKS):
            other = behind[task, x]
            if other >= 0:
                missing[other] -= 1
                if missing[other] == 0:
                    heapq.heappush(ready, (keys[other], other))
    return starts


@kernel
def write_words(lengths: Floats, starts: Floats, words: Words) -> None:
    """Overwrite words [P, 3M] with the order of these starts; of actions that start together, those of no length come
    first."""
    num_stages, length = words.shape
    count = length // NUM_KINDS
    for s in range(num_stages):
        mine = starts[s * length : (s + 1) * length]
        in_turn = np.argsort(lengths[s * length : (s + 1) * length] > 0.0, kind="mergesort")
        in_turn = in_turn[np.argsort(mine[in_turn], kind="mergesort")]
        for x in range(length):
            words[s, x] = in_turn[x] // count
