"""One machine: what windows of actions that run one at a time say of each other, in O(n log n) (Vilím 2004, 2007).

Actions lie in the leaves of a binary tree in order of their earliest starts. A node knows how long those below it take,
and when they end at the earliest: as late as any of them that start late can, or those of its right child after all of
its left one. A second pair of figures counts one grey action beside them, that which makes the end latest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.simulate.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NOTHING = -1e300
#: Columns of a node: how long its actions take and their earliest end, and both with one grey action.
TIME, END, GREY_TIME, GREY_END = 0, 1, 2, 3


@kernel
def _put(nodes: Floats, grey: Ints, leaf: int, start: float, duration: float, kind: int) -> None:
    """Make a leaf an action of kind 1, a grey one of kind 2, or nothing, and renew the nodes above it. grey: [., 2] of
    each node the leaves that its grey figures are of."""
    at = leaf
    nodes[at, TIME], nodes[at, END] = 0.0, NOTHING
    nodes[at, GREY_TIME], nodes[at, GREY_END] = 0.0, NOTHING
    grey[at, 0] = grey[at, 1] = -1
    if kind == 1:
        nodes[at, TIME] = nodes[at, GREY_TIME] = duration
        nodes[at, END] = nodes[at, GREY_END] = start + duration
    elif kind == 2:
        nodes[at, GREY_TIME], nodes[at, GREY_END] = duration, start + duration
        grey[at, 0] = grey[at, 1] = leaf
    while at > 1:
        at //= 2
        left, right = 2 * at, 2 * at + 1
        nodes[at, TIME] = nodes[left, TIME] + nodes[right, TIME]
        nodes[at, END] = max(nodes[right, END], nodes[left, END] + nodes[right, TIME])
        of_left, of_right = nodes[left, GREY_TIME] + nodes[right, TIME], nodes[left, TIME] + nodes[right, GREY_TIME]
        if of_left >= of_right:
            nodes[at, GREY_TIME], grey[at, 0] = of_left, grey[left, 0]
        else:
            nodes[at, GREY_TIME], grey[at, 0] = of_right, grey[right, 0]
        nodes[at, GREY_END], grey[at, 1] = nodes[right, GREY_END], grey[right, 1]
        if nodes[left, END] + nodes[right, GREY_TIME] > nodes[at, GREY_END]:
            nodes[at, GREY_END], grey[at, 1] = nodes[left, END] + nodes[right, GREY_TIME], grey[right, 0]
        if nodes[left, GREY_END] + nodes[right, TIME] > nodes[at, GREY_END]:
            nodes[at, GREY_END], grey[at, 1] = nodes[left, GREY_END] + nodes[right, TIME], grey[left, 1]


@kernel
def raise_starts(starts: Floats, ends: Floats, durations: Floats, slack: float) -> tuple[bool, bool]:
    """Raise earliest starts [n] by precedences that windows show; whether one moved, and whether some actions cannot
    all end by the latest of their ends [n].

    Two actions that cannot run in one order run in the other: detectable precedences. An action that cannot end, with
    others, by the latest end of these runs after them all: edge finding (Carlier and Pinson 1994).
    """
    n = starts.shape[0]
    size = 1
    while size < n:
        size *= 2
    nodes, grey = np.zeros((2 * size, 4)), np.full((2 * size, 2), -1)
    nodes[:, END] = nodes[:, GREY_END] = NOTHING
    leaves, by_start, by_end = np.empty(n, np.int64), np.argsort(starts), np.argsort(ends)
    for place in range(n):
        leaves[by_start[place]] = size + place
    for x in by_end:
        if durations[x] > 0.0:
            _put(nodes, grey, leaves[x], starts[x], durations[x], 1)
            if nodes[1, END] > ends[x] + slack:
                return False, True
    raised = starts.copy()
    for place in range(n - 1, -1, -1):  # all actions are in the tree; the last ends go grey, one after the other
        x = by_end[place]
        while nodes[1, GREY_END] > ends[x] + slack:
            after = by_start[grey[1, 1] - size]
            raised[after] = max(raised[after], nodes[1, END])
            _put(nodes, grey, leaves[after], 0.0, 0.0, 0)
        if durations[x] > 0.0:
            _put(nodes, grey, leaves[x], starts[x], durations[x], 2)
    nodes[:], grey[:] = 0.0, -1
    nodes[:, END] = nodes[:, GREY_END] = NOTHING
    by_last, by_first_end = np.argsort(ends - durations), np.argsort(starts + durations)
    placed = 0
    for y in by_first_end:
        while placed < n and starts[y] + durations[y] > ends[by_last[placed]] - durations[by_last[placed]] + slack:
            x = by_last[placed]
            if durations[x] > 0.0:
                _put(nodes, grey, leaves[x], starts[x], durations[x], 1)
            placed += 1
        is_in = durations[y] > 0.0 and starts[y] + durations[y] > ends[y] - durations[y] + slack
        if is_in:
            _put(nodes, grey, leaves[y], 0.0, 0.0, 0)
        raised[y] = max(raised[y], nodes[1, END])
        if is_in:
            _put(nodes, grey, leaves[y], starts[y], durations[y], 1)
    moved = False
    for y in range(n):
        if raised[y] > starts[y] + slack:
            starts[y], moved = raised[y], True
    return moved, False
