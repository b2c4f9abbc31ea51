"""The smallest step over every word of every stage, for equal micro-batches: a depth-first search over what has run.

Words are explored by the moments at which actions start, never backwards in time. A state is how many forwards, input
gradients and weight gradients each stage has run. FIFO loses nothing where micro-batches are equal: the n-th smallest
start of a kind may be called micro-batch n without breaking what waits for what, nor what is kept. Left out is only

- a state that cannot get below what is known: its relaxed critical path, or what a stage still has to run;
- a state reached before with nothing later: machines, and what waits on hops, by then ("now" counts for all of them);
- an action before which the stage's pending weight gradient could run in idle time: that only frees memory;
- an input gradient alone where the whole backward takes no longer: it keeps less and leaves nothing to do.

`plain_words` checks this by enumeration.
"""

from __future__ import annotations

import numpy as np
from numba import njit

FORWARD, WHOLE, INPUT, WEIGHT = 0, 1, 2, 3
POOL = 60_000  # states that are kept to be compared with; more are merely searched again
TABLE = 1 << 15


@njit(cache=True)
def _remaining(count, forward, weight, gradient, whole, there, back, tails, f, g, p, free, ends_f, ends_g):  # type: ignore[no-untyped-def]
    """A step that no continuation of a state gets below; its step where nothing is left. free: of each stage, now
    counted where it has anything left to run."""
    stages = len(forward)
    starts_f = np.empty((stages, count))
    starts_g = np.empty((stages, count))
    for s in range(stages):
        before = free[s]
        for m in range(f[s], count):
            arrival = before
            if s > 0:
                arrival = max(
                    arrival,
                    ends_f[s - 1, m] + there[s - 1]
                    if m < f[s - 1]
                    else starts_f[s - 1, m] + forward[s - 1] + there[s - 1],
                )
            starts_f[s, m] = arrival
            before = arrival + forward[s]
    least = 0.0
    for s in range(stages - 1, -1, -1):
        before = free[s]
        for m in range(g[s], count):
            arrival = before
            if m >= f[s]:
                arrival = max(arrival, starts_f[s, m] + forward[s])
            if s < stages - 1:
                arrival = max(
                    arrival,
                    ends_g[s + 1, m] + back[s] if m < g[s + 1] else starts_g[s + 1, m] + gradient[s + 1] + back[s],
                )
            starts_g[s, m] = arrival
            before = arrival + gradient[s]
        if g[s] < count:
            least = max(least, before - gradient[s] + whole[s] + tails[s])
        first = np.inf
        if p[s] > 0:
            first = free[s]
        if f[s] < count:
            first = min(first, starts_f[s, f[s]])
        if g[s] < count:
            first = min(first, starts_g[s, g[s]])
        if first == np.inf:
            first = free[s]
        load = (count - f[s]) * forward[s] + (count - g[s]) * whole[s] + p[s] * weight[s]
        least = max(least, first + load + tails[s])
    return least


@njit(cache=True)
def best_order(count, forward, gradient, whole, weight, there, back, tails, allowed, upper):  # type: ignore[no-untyped-def]
    """(step, path, expanded): the least step below `upper` (inf where there is none), and what starts in turn,
    [n, 2]: stage and kind. allowed [stage, in flight, pending]: whether memory takes that."""
    stages = len(forward)
    deepest = 3 * stages * count + 1
    f = np.zeros((deepest + 1, stages), np.int64)
    g = np.zeros((deepest + 1, stages), np.int64)
    p = np.zeros((deepest + 1, stages), np.int64)
    free = np.zeros((deepest + 1, stages))
    ends_f = np.zeros((stages, count))  # overwritten in place: each level sets what it starts, and reads what is set
    ends_g = np.zeros((stages, count))
    now = np.zeros(deepest + 1)
    options = np.empty((deepest + 1, 4 * stages))  # starts of candidates; inf: none
    path = np.zeros((deepest + 1, 2), np.int64)
    best_path = np.zeros((0, 2), np.int64)
    width = stages + 2 * (stages - 1) * count
    heads = np.full(TABLE, -1, np.int64)
    following = np.empty(POOL, np.int64)
    codes = np.empty(POOL, np.int64)
    vectors = np.empty((POOL, width))
    vector = np.empty(width)
    stored, expanded = 0, 0
    base = count + 1
    best = upper
    found = np.inf
    level = 0
    entering = True
    while level >= 0:
        if entering:
            entering = False
            options[level, :] = np.inf
            expanded += 1
            done = True
            for s in range(stages):
                if g[level, s] < count or p[level, s] > 0:
                    done = False
                    free[level, s] = max(free[level, s], now[level])
            least = _remaining(
                count,
                forward,
                weight,
                gradient,
                whole,
                there,
                back,
                tails,
                f[level],
                g[level],
                p[level],
                free[level],
                ends_f,
                ends_g,
            )
            if least < best - 1e-13 * abs(best) or (least < best and best == np.inf):
                if done:
                    best = found = least
                    best_path = path[:level].copy()
                else:
                    code = 0
                    length = 0
                    for s in range(stages):
                        code = ((code * base + f[level, s]) * base + g[level, s]) * base + p[level, s]
                        vector[length] = free[level, s]
                        length += 1
                        if s > 0:
                            for m in range(f[level, s], f[level, s - 1]):
                                vector[length] = max(ends_f[s - 1, m] + there[s - 1], free[level, s])
                                length += 1
                        if s < stages - 1:
                            for m in range(g[level, s], g[level, s + 1]):
                                vector[length] = max(ends_g[s + 1, m] + back[s], free[level, s])
                                length += 1
                    slot = (code * 2654435761) % TABLE
                    at = heads[slot]
                    known = False
                    while at >= 0 and not known:
                        if codes[at] == code:
                            known = True
                            for i in range(length):
                                if vectors[at, i] > vector[i]:
                                    known = False
                                    break
                        at = following[at]
                    if not known:
                        if stored < POOL:
                            codes[stored] = code
                            following[stored] = heads[slot]
                            vectors[stored, :length] = vector[:length]
                            heads[slot] = stored
                            stored += 1
                        for s in range(stages):
                            flight = f[level, s] - g[level, s]
                            pending = p[level, s]
                            if (
                                f[level, s] < count
                                and allowed[s, flight + 1, pending]
                                and (s == 0 or f[level, s - 1] > f[level, s])
                            ):
                                m = f[level, s]
                                arrival = ends_f[s - 1, m] + there[s - 1] if s > 0 else 0.0
                                options[level, 4 * s + FORWARD] = max(free[level, s], arrival)
                            if flight > 0 and (s == stages - 1 or g[level, s + 1] > g[level, s]):
                                m = g[level, s]
                                arrival = ends_g[s + 1, m] + back[s] if s < stages - 1 else 0.0
                                start = max(free[level, s], arrival)
                                options[level, 4 * s + WHOLE] = start
                                if whole[s] > gradient[s] and allowed[s, flight - 1, pending + 1]:
                                    options[level, 4 * s + INPUT] = start
                            if pending > 0:
                                options[level, 4 * s + WEIGHT] = free[level, s]
                                for kind in range(3):
                                    if options[level, 4 * s + kind] >= free[level, s] + weight[s]:
                                        options[level, 4 * s + kind] = np.inf
        choice = -1
        start = np.inf
        for i in range(4 * stages):  # the earliest first: the first dive is a list schedule, gradients before forwards
            rank = options[level, i]
            if rank < start or (rank == start and rank < np.inf and i % 4 == INPUT):
                start = rank
                choice = i
        if choice < 0:
            level -= 1
            continue
        options[level, choice] = np.inf
        s, kind = choice // 4, choice % 4
        path[level, 0] = s
        path[level, 1] = kind
        level += 1
        f[level] = f[level - 1]
        g[level] = g[level - 1]
        p[level] = p[level - 1]
        free[level] = free[level - 1]
        now[level] = start
        if kind == FORWARD:
            ends_f[s, f[level, s]] = free[level, s] = start + forward[s]
            f[level, s] += 1
        elif kind == WEIGHT:
            free[level, s] = start + weight[s]
            p[level, s] -= 1
        else:
            ends_g[s, g[level, s]] = free[level, s] = start + (gradient[s] if kind == INPUT else whole[s])
            g[level, s] += 1
            p[level, s] += kind == INPUT
        entering = True
    return found, best_path, expanded
