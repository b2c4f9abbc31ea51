"""Which candidates to profile so that the profiles tell most about all of them.

What a profile measures (the figures of the profile table) changes smoothly with the division: its logarithm is taken as
a quadratic in the logarithms of tp, ep and cp, which decide sizes and exchanges of a layer, and as linear in that of
pp; dp follows from these. First every value of every dimension that occurs is covered, by the fewest candidates that a
greedy cover needs. Then candidates are added one at a time where the figures predicted from the others would be least
certain, which makes the determinant of the information matrix grow most, and exchanged as long as that grows further
(D-optimal design; Fedorov, Theory of Optimal Experiments, 1972). Candidates that were profiled already count as chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Sizes = tuple[int, int, int, int, int]
"""dp, tp, pp, ep, cp of a candidate."""

_RIDGE = 1e-6
"""Keeps the information matrix regular while few are chosen, and where a dimension has one value alone."""

_LEAST_GAIN = 1e-9
"""Exchanges that gain less are rounding."""


def choose_to_profile(candidates: Sequence[Sizes], number: int, profiled: Sequence[Sizes] = ()) -> list[int]:
    """Indices of `number` of the candidates (all of them, where there are no more), ascending, beside `profiled`."""
    free = [index for index, sizes in enumerate(candidates) if sizes not in set(profiled)]
    if len(free) <= number:
        return free
    rows = _features([*candidates, *profiled])
    known = rows[len(candidates) :].T @ rows[len(candidates) :] + _RIDGE * np.eye(rows.shape[1])
    chosen = _cover(candidates, free, profiled)[:number]
    fixed = set(chosen)
    while len(chosen) < number:
        information = known + rows[chosen].T @ rows[chosen]
        left = [index for index in free if index not in chosen]
        chosen.append(left[int(np.argmax(_uncertainty(information, rows[left])))])
    _exchange(rows, known, chosen, fixed, free)
    return sorted(chosen)


def _features(candidates: Sequence[Sizes]) -> Floats:
    """[candidates, features], centred and scaled so that the ridge weighs on all alike."""
    logs = np.log2(np.array(candidates, dtype=np.float64))
    quadratic = logs[:, [1, 3, 4]]
    columns = [quadratic[:, i] * quadratic[:, j] for i, j in combinations_with_replacement(range(3), 2)]
    features = np.column_stack([quadratic, logs[:, 2], *columns])
    centred = features - features.mean(axis=0)
    scale = centred.std(axis=0)
    scaled: Floats = np.column_stack([np.ones(len(logs)), centred / np.where(scale > 0, scale, 1.0)])
    return scaled


def _cover(candidates: Sequence[Sizes], free: Sequence[int], profiled: Sequence[Sizes]) -> list[int]:
    """Few of the free candidates that, with those profiled, hold each value of each dimension."""
    missing = {(d, size) for sizes in candidates for d, size in enumerate(sizes)}
    missing -= {(d, size) for sizes in profiled for d, size in enumerate(sizes)}
    chosen: list[int] = []
    while missing:
        best = max(free, key=lambda index: len(missing & set(enumerate(candidates[index]))))
        gained = missing & set(enumerate(candidates[best]))
        if not gained:
            break
        chosen.append(best)
        missing -= gained
    return chosen


def _uncertainty(information: Floats, rows: Floats) -> Floats:
    """[rows] variance of what is predicted there, in units of that of a measurement."""
    variance: Floats = np.einsum("ij,ji->i", rows, np.linalg.solve(information, rows.T))
    return variance


def _exchange(rows: Floats, known: Floats, chosen: list[int], fixed: set[int], free: Sequence[int]) -> None:
    """Swap chosen candidates that cover nothing by themselves for others, the best swap first, while it gains."""
    best = _log_determinant(known, rows[chosen])
    gain = math.inf
    while gain > _LEAST_GAIN:
        swaps = [
            (_log_determinant(known, rows[[*chosen[:i], *chosen[i + 1 :], j]]), i, j)
            for i, index in enumerate(chosen)
            if index not in fixed
            for j in free
            if j not in chosen
        ]
        if not swaps:
            break
        value, i, j = max(swaps)
        gain = value - best
        if gain > _LEAST_GAIN:
            chosen[i], best = j, value


def _log_determinant(known: Floats, rows: Floats) -> float:
    return float(np.linalg.slogdet(known + rows.T @ rows)[1])
