"""The time of an operator between others of its family that were timed: never outside what was measured.

Operators that only move bytes lie on one axis, and between two neighbours time is linear in bytes. Those with FLOPs lie
in the plane of FLOPs and bytes: inside the convex hull of what was measured the nearest ones, by the ratios of both,
tell the time that a FLOP takes; a nearer one has more of a say. (One size alone that changes makes a line there, which
is its own hull: logarithms would bend it.)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from statistics import median

Point = tuple[int, int, float]
"""FLOPs, bytes, µs."""

NUM_NEIGHBOURS = 4
"""Assumed."""

_TOLERANCE = 1e-9


def regress_us(points: Sequence[Point], flops: int, moved_bytes: int) -> float | None:
    """The time of `flops` and `moved_bytes` from `points` of one family; None outside their hull."""
    if flops == moved_bytes == 0:
        return None  # nobody knows what it does
    if flops == 0:
        return _between_us([(moved, time_us) for done, moved, time_us in points if done == 0], moved_bytes)
    scale_bytes = moved_bytes or 1
    placed = [((done / flops, moved / scale_bytes), time_us / done) for done, moved, time_us in points if done > 0]
    if not _is_inside([place for place, _ in placed], (1.0, moved_bytes / scale_bytes)):
        return None
    nearest = sorted((math.hypot(*(math.log(ratio or 1e-9) for ratio in place)), rate) for place, rate in placed)
    same = [rate for distance, rate in nearest if distance <= _TOLERANCE]
    if same:
        return flops * median(same)
    weights = [(1.0 / distance, math.log(rate)) for distance, rate in nearest[:NUM_NEIGHBOURS]]
    return flops * math.exp(sum(weight * rate for weight, rate in weights) / sum(weight for weight, _ in weights))


def _between_us(points: Sequence[tuple[int, float]], moved_bytes: int) -> float | None:
    by_bytes: dict[int, list[float]] = {}
    for moved, time_us in points:
        by_bytes.setdefault(moved, []).append(time_us)
    sizes = sorted(by_bytes)
    index = bisect_left(sizes, moved_bytes)
    if index < len(sizes) and sizes[index] == moved_bytes:
        return median(by_bytes[moved_bytes])
    if index in (0, len(sizes)):
        return None
    below, above = sizes[index - 1], sizes[index]
    part = (moved_bytes - below) / (above - below)
    return (1 - part) * median(by_bytes[below]) + part * median(by_bytes[above])


def _is_inside(places: Sequence[tuple[float, float]], here: tuple[float, float]) -> bool:
    """Whether `here` lies in the convex hull of `places` (Andrew's monotone chain)."""
    ordered = sorted(set(places))
    if len(ordered) < 2:
        return bool(ordered) and math.dist(ordered[0], here) <= _TOLERANCE
    hull = _half_hull(ordered)[:-1] + _half_hull(ordered[::-1])[:-1]
    within = all(low - _TOLERANCE <= at <= high + _TOLERANCE for low, at, high in _box(ordered, here))
    turns = (_turn(first, second, here) for first, second in zip(hull, hull[1:] + hull[:1], strict=True))
    return within and all(turn >= -_TOLERANCE for turn in turns)


def _box(places: Sequence[tuple[float, float]], here: tuple[float, float]) -> list[tuple[float, float, float]]:
    axes = list(zip(*places, strict=True))
    return [(min(axis), at, max(axis)) for axis, at in zip(axes, here, strict=True)]


def _half_hull(ordered: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    hull: list[tuple[float, float]] = []
    for place in ordered:
        while len(hull) > 1 and _turn(hull[-2], hull[-1], place) <= 0:
            hull.pop()
        hull.append(place)
    return hull


def _turn(first: tuple[float, float], second: tuple[float, float], third: tuple[float, float]) -> float:
    """Above 0 where the way from `first` over `second` to `third` turns left."""
    along, across = (second[0] - first[0], second[1] - first[1]), (third[0] - first[0], third[1] - first[1])
    return along[0] * across[1] - along[1] * across[0]
