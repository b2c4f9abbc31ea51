"""What moves to the host for nothing stays on its device.

Bytes that move behind compute cost no time, so solvers do not mind them; a host has other things to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from mm_autoparallel.problem import Placement, Problem
from mm_autoparallel.simulate.loads import Loads, allowed_bytes, peak_bytes, sum_loads


def end_idle_offload(problem: Problem, placement: Placement) -> Placement:
    """`placement` with fewer layers in modes that move bytes, as far as stages have room for what those then keep.

    No pass takes longer, so the step does not either. `placement` itself where nothing moves.
    """
    groups = dict.fromkeys(block.group for block in problem.chain if any(mode.host_bytes for mode in block.modes))
    for k, group in product(range(problem.num_virtual_stages), groups):
        able = [e for e, block in enumerate(problem.chain) if block.group == group and block.modes]
        for m in range(len(problem.chain[able[0]].modes)):
            if any(problem.chain[e].modes[m].host_bytes for e in able):
                placement = _reduce(problem, placement, k, able, m)
    return placement


def _reduce(problem: Problem, placement: Placement, k: int, able: Sequence[int], m: int) -> Placement:
    """With the fewest layers of a group in its mode `m` on virtual stage `k`; able: its blocks that have modes."""
    totals = [sum(counts) for counts in zip(*(placement.modes[k][e] for e in able), strict=True)]
    low, high, best = 0, totals[m], placement
    if not high:
        return placement
    before = sum_loads(problem, placement)
    while low < high:
        middle = (low + high) // 2
        found = _fill(placement, k, able, [*totals[:m], middle, *totals[m + 1 :]])
        if _is_as_good(problem, before, sum_loads(problem, found), k):
            high, best = middle, found
        else:
            low = middle + 1
    return best


def _fill(placement: Placement, k: int, able: Sequence[int], totals: Sequence[int]) -> Placement:
    """The group's layers in its modes in order, so many in each."""
    row, left = list(placement.modes[k]), list(totals)
    for e in able:
        held, counts = placement.layers[k][e], []
        for m, total in enumerate(left):
            taken = min(total, held)
            counts.append(taken)
            left[m] -= taken
            held -= taken
        row[e] = tuple(counts)
    return Placement(placement.layers, (*placement.modes[:k], tuple(row), *placement.modes[k + 1 :]))


def _is_as_good(problem: Problem, before: Loads, after: Loads, k: int) -> bool:
    no_longer = np.all(after.forward_ms[k] <= before.forward_ms[k]) and np.all(
        after.backward_ms[k] <= before.backward_ms[k]
    )
    return bool(no_longer and np.all(peak_bytes(problem, after) <= allowed_bytes(problem)))
