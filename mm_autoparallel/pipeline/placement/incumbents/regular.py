"""First placements for several chunks: layers of the main kind spread evenly, from some virtual stage on.

With several chunks the step depends on how regular the row of virtual stages is, and on where the layers before the
main kind (an encoder's) end; local search rarely moves that place. So each of them is one start: what stands in front
is spread over the virtual stages before, and stages share out the others by their load, and each among its chunks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.segments import Segments

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def regular_starts(segments: Segments) -> Iterator[Ints]:
    """Boundaries [K + 1] in segments; windows and limits of layers may not allow them."""
    problem, at, work_ms = segments.problem, segments.start, segments.forward_ms + segments.backward_ms
    num_virtual, factors = problem.num_virtual_stages, problem.time_factors
    loads_ms = [block.count * (block.forward_ms + block.backward_ms) * block.layer for block in problem.chain]
    main = np.flatnonzero(segments.flat == int(np.argmax(loads_ms)))
    mains = np.unique(np.searchsorted(at, main, side="right") - 1)  # segments with a layer of the main kind
    each_ms = float(work_ms[at[mains[-1] + 1]] - work_ms[at[mains[0]]]) / len(mains)
    in_front = min(int(segments.layers[at[mains[0]]]), num_virtual - 1)
    for first, is_shared in product(range(max(0, num_virtual - len(mains)), in_front + 1), (False, True)):
        begins = _spread(work_ms[at[: mains[0] + 1]], first, each_ms if is_shared else np.inf)
        load_ms = np.full(num_virtual, each_ms)
        load_ms[:first] = 0.0
        load_ms[: first + 1] += np.diff(work_ms[at[[*begins, mains[0]]]])
        load_ms[-1] += work_ms[-1] - work_ms[at[mains[-1] + 1]]
        stages = [[k for k in of if k >= first] for of in problem.virtual_stages]
        of_stages = [load_ms[list(of)].sum() * f for of, f in zip(problem.virtual_stages, factors, strict=True)]
        room = [each_ms * f if able else np.inf for able, f in zip(stages, factors, strict=True)]
        counts = _share_out(of_stages, room, len(mains) - (num_virtual - first))
        for order in (1, -1):  # of chunks with equal loads the first take more, or the last
            held = np.zeros(num_virtual, np.int64)
            for able, number in zip(stages, counts, strict=True):
                if able:
                    held[able[::order]] = _share_out(load_ms[able[::order]].tolist(), [each_ms] * len(able), number)
            ends = np.cumsum(held[first:] + 1)
            yield np.array([*begins, *mains[ends[:-1]], segments.num_segments])


def _spread(front_ms: Floats, first: int, beside_ms: float) -> Ints:
    """[first + 1] where virtual stages begin among the segments in front, of work front_ms up to each, so that all have
    about as much of it, and one each at least; but the last has beside_ms of other work: of what is in front the rest.
    """
    num_segments, last_ms = len(front_ms) - 1, 0.0
    if first and np.isfinite(beside_ms):
        last_ms = max(0.0, (front_ms[-1] + beside_ms) / (first + 1) - beside_ms)
    even = np.searchsorted(front_ms, (front_ms[-1] - last_ms) * np.arange(first + 1) / max(first, 1))
    if not last_ms:
        even[-1] = num_segments if first else 0
    k = np.arange(first + 1)
    even[0] = 0
    ahead: Ints = np.minimum(np.maximum.accumulate(even - k) + k, num_segments - (first - k))
    return ahead


def _share_out(load_ms: list[float], each_ms: list[float], number: int) -> list[int]:
    """How many of so many equal layers each takes: one after another goes where it ends first, of equals the first."""
    counts = [0] * len(load_ms)
    ends = [(load + each, i) for i, (load, each) in enumerate(zip(load_ms, each_ms, strict=True))]
    heapq.heapify(ends)
    for _ in range(number):
        end_ms, i = ends[0]
        counts[i] += 1
        heapq.heapreplace(ends, (end_ms + each_ms[i], i))
    return counts
