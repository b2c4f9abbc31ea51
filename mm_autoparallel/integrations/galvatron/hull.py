"""The lower convex hull of what strategies cost over their memory: the answer of a fractional knapsack."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

_Pair = tuple[float, float]


class Hull:
    """Of points of MiB and cost."""

    def __init__(self, points: Sequence[_Pair]) -> None:
        hull: list[_Pair] = []
        lowest = math.inf
        for mib, cost in sorted(points):
            if cost >= lowest:
                continue
            lowest = cost
            while len(hull) > 1 and _is_above(hull[-2], hull[-1], (mib, cost)):
                hull.pop()
            hull.append((mib, cost))
        self.mib = [mib for mib, _ in hull]
        self.cost = [cost for _, cost in hull]

    def least(self, count: int, room_mib: float) -> float:
        """The least cost of `count` layers, parts of layers allowed; infinite where none fits."""
        if not count:
            return 0.0
        mean = room_mib / count
        if mean >= self.mib[-1]:
            return count * self.cost[-1]
        place = bisect.bisect_right(self.mib, mean) - 1
        if place < 0:
            return math.inf
        share = (mean - self.mib[place]) / (self.mib[place + 1] - self.mib[place])
        return count * (self.cost[place] + share * (self.cost[place + 1] - self.cost[place]))

    def split(self, count: int, room_mib: float) -> list[tuple[float, float]]:
        """The mix of the least cost: MiB of its strategies, and how many layers of each."""
        mean = room_mib / count
        if mean >= self.mib[-1]:
            return [(self.mib[-1], float(count))]
        place = bisect.bisect_right(self.mib, mean) - 1
        share = (mean - self.mib[place]) / (self.mib[place + 1] - self.mib[place])
        return [(self.mib[place], count * (1 - share)), (self.mib[place + 1], count * share)]


def _is_above(one: _Pair, middle: _Pair, other: _Pair) -> bool:
    return (middle[1] - one[1]) * (other[0] - one[0]) >= (other[1] - one[1]) * (middle[0] - one[0])
