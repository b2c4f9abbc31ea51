"""Every placement of a problem that has few: for what no solver limits, so that each is looked at by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from math import comb, prod

from mm_autoparallel.pipeline.placement.segments import Segments, cut_into_segments
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule

#: So many are looked at in about a second. Assumed.
MOST = 4_000


def list_placements(problem: Problem, most: int = MOST) -> list[Placement] | None:
    """All placements that the chain allows, whether they fit or not; None where there are more than `most`.

    A way to cut the chain leaves to each virtual stage, of each group of n layers with m modes, (n + m over m) choices.
    """
    if problem.encoders or find_schedule(problem.schedule, problem.num_chunks).given_by == "placement":
        return None  # each in many orders
    segments = cut_into_segments(problem)
    cuts, count = [], 0
    for boundaries in _cuts(segments):
        count += prod(comb(n + m, m) for stage in _held(segments, boundaries) for n, m in stage)
        if count > most:
            return None
        cuts.append(boundaries)
    return [
        segments.placement(list(boundaries), [[n for row in rows for n in row] for rows in chosen])
        for boundaries in cuts
        for chosen in product(*(list(product(*(_counts(n, m) for n, m in of))) for of in _held(segments, boundaries)))
    ]


def _cuts(segments: Segments) -> Iterator[tuple[int, ...]]:
    """Boundaries [K + 1] within their windows, with a layer in each virtual stage and no more than it may hold."""
    num_virtual = segments.problem.num_virtual_stages
    layers = segments.layers[segments.start]
    most_layers = segments.problem.max_layers_per_chunk or int(layers[-1])

    def grow(cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        k = len(cut)
        last = k == num_virtual
        for end in (
            (segments.num_segments,)
            if last
            else range(max(cut[-1] + 1, int(segments.first[k])), int(segments.last[k]) + 1)
        ):
            held = layers[end] - layers[cut[-1]]
            if held > most_layers:
                return
            if held >= 1:
                yield from [(*cut, end)] if last else grow((*cut, end))

    yield from grow((0,))


def _held(segments: Segments, boundaries: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Of each virtual stage and group, its layers that have modes, and how many modes those have."""
    num_modes = [int(b - a) for a, b in pairwise(segments.lane_offset)]
    at = [segments.before[:, segments.start[segment]] for segment in boundaries]
    return [[(int(n), m) for n, m in zip(after - before, num_modes, strict=True)] for before, after in pairwise(at)]


def _counts(num_layers: int, num_modes: int) -> Iterator[list[int]]:
    """All counts in each mode that sum to num_layers at most."""
    if num_modes == 0:
        yield []
        return
    for first in range(num_layers + 1):
        yield from ([first, *rest] for rest in _counts(num_layers - first, num_modes - 1))
