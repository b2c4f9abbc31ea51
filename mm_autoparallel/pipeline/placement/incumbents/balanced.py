"""A first placement for one chunk: the least bottleneck that is possible, and the least total time under it.

With one chunk the step is close to micro-batches · slowest stage + one pass through all stages. For each load that the
slowest stage may have, from the least possible up, a shortest path over positions gives the least total time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.patterns.layout_patterns import list_light_patterns
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import StagePatterns, list_patterns
from mm_autoparallel.pipeline.placement.patterns.tree import boundaries_of
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.simulate.compiled import kernel
from mm_autoparallel.pipeline.simulate.graph import TaskGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Largest load considered at first, relative to perfect balance; doubled while nothing fits.
FIRST_LOAD_FACTOR = 1.35
#: How many different loads of the slowest stage are tried.
MAX_CAPS = 24

_NO_INTS = np.zeros(0, dtype=np.int64)


@kernel
def least_total(
    offsets: Ints, begin: Ints, end: Ints, load_ms: Floats, cap_ms: float, num_segments: int
) -> tuple[float, Ints]:
    """Pattern of each stage on the path of least total load with no load above cap_ms; infinite where there is none."""
    num_stages = offsets.shape[0] - 1
    least = np.full((num_stages + 1, num_segments + 1), np.inf)
    through = np.full((num_stages + 1, num_segments + 1), -1, dtype=np.int64)
    least[0, 0] = 0.0
    for s in range(num_stages):
        for p in range(offsets[s], offsets[s + 1]):
            total = least[s, begin[p]] + load_ms[p]
            if load_ms[p] <= cap_ms and total < least[s + 1, end[p]]:
                least[s + 1, end[p]] = total
                through[s + 1, end[p]] = p
    chosen = np.full(num_stages, -1, dtype=np.int64)
    at = num_segments
    for s in range(num_stages, 0, -1):
        if through[s, at] < 0:
            return np.inf, chosen
        chosen[s - 1] = through[s, at]
        at = begin[chosen[s - 1]]
    return least[num_stages, num_segments], chosen


def balanced_starts(
    segments: Segments,
    graph: TaskGraph,
    offer: Callable[[Placement], float],
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Offer the placements of least total time for rising loads of the slowest stage; `offer` returns the best step
    so far. should_stop: looked at between stages, and between placements that are offered.
    """
    problem = segments.problem
    list_of_stage = list_light_patterns if segments.has_layouts else list_patterns
    speed = sum(1.0 / factor for factor in problem.time_factors)
    average_ms = float(segments.forward_ms[-1] + segments.backward_ms[-1]) / speed  # all stages take as long
    patterns: list[StagePatterns] = []
    offsets, begin, end, load_ms = np.zeros(1, dtype=np.int64), _NO_INTS, _NO_INTS, np.zeros(0)
    factor, total_ms = FIRST_LOAD_FACTOR, np.inf
    while not np.isfinite(total_ms):
        patterns = []
        for stage in range(problem.num_stages):
            if should_stop():
                return
            try:
                patterns.append(list_of_stage(segments, graph, stage, factor * average_ms))
            except TooManyPatterns:
                return
        offsets = np.cumsum([0, *(len(p) for p in patterns)])
        begin, end = (np.concatenate([getattr(p, f)[:, 0] for p in patterns]) for f in ("begin", "end"))
        load_ms = np.concatenate([p.times_ms[:, 0] + p.times_ms[:, 1] for p in patterns])
        total_ms, _ = least_total(offsets, begin, end, load_ms, np.inf, segments.num_segments)
        if factor > 2 * problem.num_stages:
            return  # nothing fits; `least_overflow` tells why
        factor *= 2
    caps = np.unique(load_ms)
    low, high = 0, len(caps) - 1  # bisect for the least load that can be
    while low < high:
        middle = (low + high) // 2
        if np.isfinite(least_total(offsets, begin, end, load_ms, caps[middle], segments.num_segments)[0]):
            high = middle
        else:
            low = middle + 1
    for cap_ms in caps[low : low + MAX_CAPS]:
        if should_stop():
            return
        _, chosen = least_total(offsets, begin, end, load_ms, cap_ms, segments.num_segments)
        best = [(p, int(chosen[s] - offsets[s])) for s, p in enumerate(patterns)]
        step_ms = offer(segments.placement(*boundaries_of(segments, best)))
        if problem.num_microbatches * cap_ms >= step_ms:
            return
