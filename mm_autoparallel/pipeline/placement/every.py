"""Every placement of a problem that has few: for what no solver limits, so that each is looked at by itself.

Where its order is known, what a stage costs and holds is a matter of that stage alone, given what its layers are and in
which modes they run. So what is of no interest is left out stage by stage, and of many placements few remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, islice, pairwise, product
from math import comb, prod

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.laid_out import relaxed
from mm_autoparallel.pipeline.placement.bounds.one_chunk import count_in_order
from mm_autoparallel.pipeline.placement.segments import Segments, cut_into_segments
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: So many are looked at in about a second. Stretches of segments may be so many; ways to fill stages so many times as
#: many as placements, of which such a part is looked at one after another. Assumed.
MOST, MOST_STRETCHES, WAYS, LOOKED_PART = 4_000, 2_000_000, 4, 0.5
#: Of a step: what the rounding of its sums may have added to it.
ROUNDING_FRACTION = 1e-11

#: How many layers run in each lane.
Lanes = tuple[int, ...]
#: Given any placement: [P] whether what each stage holds there may be part of one that is wanted.
MayHold = Callable[[Placement], NDArray[np.bool_]]


def list_placements(
    problem: Problem,
    most: int = MOST,
    most_ms: float = math.inf,
    may_hold: MayHold | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Placement] | None:
    """All placements that the chain allows, whether they fit or not; None where there are more than `most`, and on
    should_stop.

    Those whose step is above most_ms may be left out, and those with a stage that holds what it may not: with one chunk
    a stage. Neither ways to cut the chain nor ways to fill stages may be too many then.
    """
    segments = cut_into_segments(problem)
    num_stretches = problem.num_virtual_stages * (segments.num_segments + 1) ** 2
    if not has_known_order(problem) or num_stretches > MOST_STRETCHES:
        return None
    cuts = list(islice(_cuts(segments, most_ms), most + 1))
    if len(cuts) > most:
        return None
    ways = _Ways(segments, most_ms)
    if may_hold is not None and not ways.keep(cuts, most, may_hold, should_stop):
        return None
    counts = [ways.count(cut) for cut in cuts]
    if sum(counts) > most:
        return None
    return [
        segments.placement(list(cut), [list(lanes) for lanes in chosen])
        for cut in compress(cuts, counts)
        for chosen in product(*(ways.of(stage, *stretch) for stage, stretch in enumerate(pairwise(cut))))
    ]


def has_known_order(problem: Problem) -> bool:
    """Whether a placement has one order."""
    return not problem.encoders and find_schedule(problem.schedule, problem.num_chunks).given_by != "placement"


def steps_with(
    problem: Problem, stages: Ints | int, forward_ms: Floats, backward_ms: Floats, more_ms: Floats | float = 0.0
) -> Floats:
    """What a step takes at least with one chunk a stage, by what one of `stages` takes of a micro-batch, more_ms of it
    for modes; 0 where that tells nothing. All of one shape, or broadcast to one.

    A stage does all its work. Where its order is a rule and micro-batches go in order, one passes all stages, but for
    the way back through those before this one, until its first backward ended; until then it ran no more forwards than
    its warm-up; and its last backward goes that way back.
    """
    if problem.num_chunks > 1 or problem.pairs or any(block.microbatch_scale for block in problem.chain):
        return np.zeros_like(forward_ms)
    _, num_warmup, _ = count_in_order(problem.schedule, problem.num_stages, problem.num_microbatches)
    tail_ms, ahead = np.array(problem.stage_tail_ms)[stages], num_warmup[stages]
    least_ms: Floats = problem.num_microbatches * (forward_ms + backward_ms) + tail_ms
    if not problem.splits:
        is_known = np.isfinite(ahead)
        rest_ms = (problem.num_microbatches - 1) * (forward_ms + backward_ms)
        blocks_ms = sum(block.count * (block.forward_ms + block.backward_ms) for block in relaxed(problem).chain)
        all_ms = min(problem.time_factors) * blocks_ms + more_ms
        through_ms = all_ms + rest_ms - np.where(is_known, ahead, 0.0) * forward_ms
        least_ms = np.maximum(least_ms, np.where(is_known, through_ms, 0.0))
    return least_ms * (1.0 - ROUNDING_FRACTION)


def _list_holdable(segments: Segments, most_ms: float) -> NDArray[np.bool_]:
    """[K, N + 1, N + 1] which stretches a virtual stage may hold, by begin and end: within its windows, with a layer
    and no more than it may have, and in a step of at most most_ms."""
    problem, at = segments.problem, segments.start
    layers = segments.layers[at] - segments.layers[at][:, None]
    windows = np.arange(len(at)) >= segments.first[:, None], np.arange(len(at)) <= segments.last[:, None]
    is_there = windows[0] & windows[1]
    holdable = is_there[:-1, :, None] & is_there[1:, None, :] & (layers >= 1)
    if problem.max_layers_per_chunk is not None:
        holdable &= layers <= problem.max_layers_per_chunk
    if problem.num_chunks > 1:
        return holdable
    factors = np.array(problem.time_factors)[:, None, None]
    forward_ms, backward_ms = (
        np.maximum(factors * (of[at] - of[at][:, None]), 0.0) for of in (segments.forward_ms, segments.backward_ms)
    )
    stages = np.arange(problem.num_stages)[:, None, None]
    within: NDArray[np.bool_] = steps_with(problem, stages, forward_ms, backward_ms) <= most_ms
    return holdable & within


def _cuts(segments: Segments, most_ms: float) -> Iterator[tuple[int, ...]]:
    """Boundaries [K + 1] of stretches that virtual stages may hold."""
    holdable = _list_holdable(segments, most_ms)
    leads = np.zeros((len(holdable) + 1, segments.num_segments + 1), np.bool_)  # whether the rest can be held
    leads[-1, -1] = True
    for k in range(len(holdable) - 1, -1, -1):
        leads[k] = (holdable[k] & leads[k + 1]).any(axis=1)

    def grow(cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        k = len(cut) - 1
        if k == len(holdable):
            yield cut
            return
        for end in np.flatnonzero(holdable[k, cut[-1]] & leads[k + 1]).tolist():
            yield from grow((*cut, end))

    yield from grow((0,))


class _Ways:
    """The ways in which the layers of a stretch of segments may run, and those of them that a stage may hold."""

    def __init__(self, segments: Segments, most_ms: float) -> None:
        self._segments, self._most_ms = segments, most_ms
        self._kept: dict[tuple[int, int, int], list[Lanes]] = {}

    def of(self, stage: int, begin: int, end: int) -> list[Lanes]:
        """What is kept of `keep`, if that was called; else all of them."""
        known = self._kept.get((stage, begin, end))
        return self._all(begin, end) if known is None else known

    def count(self, cut: tuple[int, ...]) -> int:
        """Placements of one way to cut the chain."""
        return prod(
            self._count_all(*stretch) if (known := self._kept.get((stage, *stretch))) is None else len(known)
            for stage, stretch in enumerate(pairwise(cut))
        )

    def keep(
        self, cuts: Sequence[tuple[int, ...]], most: int, may_hold: MayHold, should_stop: Callable[[], bool]
    ) -> bool:
        """Keep what stages may hold, but for ways to cut the chain that have none; False where that is too much to be
        looked at, and on should_stop."""
        stretches = {(stage, *stretch) for cut in cuts for stage, stretch in enumerate(pairwise(cut))}
        if sum(self._count_all(begin, end) for _, begin, end in stretches) > WAYS * most:
            return False
        num_left = int(LOOKED_PART * most)
        for cut in cuts:
            for _ in self._look(cut, may_hold):
                num_left -= 1
                if num_left < 0 or should_stop():
                    return False
        return True

    def _look(self, cut: tuple[int, ...], may_hold: MayHold) -> Iterator[None]:
        """Look at what the stages of one way to cut the chain may hold, until one of them may hold nothing. Yields
        before each look, at one way of each stage."""
        stretches = [(stage, *stretch) for stage, stretch in enumerate(pairwise(cut))]
        new = [stage for stage, stretch in enumerate(stretches) if stretch not in self._kept]
        ways = [
            self._short(*stretch) if stage in new else self._all(*stretch[1:])[:1]
            for stage, stretch in enumerate(stretches)
        ]
        kept: list[list[Lanes]] = [[] for _ in stretches]
        for n in range(max([len(ways[stage]) for stage in new], default=0) + 1):
            self._kept |= {stretches[stage]: kept[stage] for stage in new if len(ways[stage]) == n}
            known = [self._kept.get(stretch) for stretch in stretches]
            if [] in known or None not in known:
                return
            yield
            lanes = [list(of_stage[n % len(of_stage)]) for of_stage in ways]
            verdicts = may_hold(self._segments.placement(list(cut), lanes))
            for stage in new:
                if n < len(ways[stage]) and verdicts[stage]:
                    kept[stage].append(ways[stage][n])

    def _short(self, stage: int, begin: int, end: int) -> list[Lanes]:
        """All that a stage may run in a step of at most most_ms."""
        segments, ways = self._segments, self._all(begin, end)
        at, lanes = segments.start[[begin, end]], np.array(ways).reshape(len(ways), segments.num_lanes)
        extra_ms = np.zeros((2, len(ways)))
        for before, offsets in zip(segments.before, pairwise(segments.lane_offset), strict=True):
            layer = np.full(len(ways), before[at[0]])
            for lane in range(*offsets):
                behind = layer + lanes[:, lane]
                for extra, of in zip(extra_ms, (segments.extra_forward_ms, segments.extra_backward_ms), strict=True):
                    extra += of[lane, behind] - of[lane, layer]
                layer = behind
        base_ms = np.diff([segments.forward_ms[at], segments.backward_ms[at]])
        forward_ms, backward_ms = segments.problem.time_factors[stage] * (base_ms + extra_ms)
        more_ms = segments.problem.time_factors[stage] * extra_ms.sum(axis=0)
        steps_ms = steps_with(segments.problem, stage, forward_ms, backward_ms, more_ms)
        return [way for way, is_short in zip(ways, steps_ms <= self._most_ms, strict=True) if is_short]

    def _all(self, begin: int, end: int) -> list[Lanes]:
        counts = product(*(_counts(n, m) for n, m in self._held(begin, end)))
        return [tuple(n for row in rows for n in row) for rows in counts]

    def _count_all(self, begin: int, end: int) -> int:
        """A group of n layers with m modes has (n + m over m) ways."""
        return prod(comb(n + m, m) for n, m in self._held(begin, end))

    def _held(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Of each group, how many of its layers that have modes are there, and how many modes those have."""
        segments = self._segments
        before, after = (segments.before[:, segments.start[at]] for at in (begin, end))
        num_modes = [int(b - a) for a, b in pairwise(segments.lane_offset)]
        return [(int(n), m) for n, m in zip(after - before, num_modes, strict=True)]


def _counts(num_layers: int, num_modes: int) -> Iterator[list[int]]:
    """All counts in each mode that sum to num_layers at most."""
    if num_modes == 0:
        yield []
        return
    for first in range(num_layers + 1):
        yield from ([first, *rest] for rest in _counts(num_layers - first, num_modes - 1))
