"""Bounds for pipelines of several chunks a stage: how many layers of the main kind each stage takes.

Which of its chunks holds a layer is left open, and `options` knows what so many cost at least. What stands before the
main kind in the chain may fill virtual stages alone, and from the first layer of the main kind on each holds one: every
place for that layer is bounded by itself, and the least counts. The other blocks may lie anywhere, but their time has
to find room somewhere.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mm_autoparallel.pipeline.placement.bounds.bound import (
    ANY_STEP_MS,
    Bound,
    Look,
    least_step,
    overfull,
    overfull_host,
)
from mm_autoparallel.pipeline.placement.bounds.chunk_counts import Counts, Mixture, Place, divide
from mm_autoparallel.pipeline.placement.bounds.main_kind import least_excess, main_kind
from mm_autoparallel.pipeline.placement.bounds.settled_counts import settle_places
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.loads import microbatch_classes

#: The bytes that do not fit are told this closely; the lower end counts.
EXCESS_PRECISION_FRACTION = 1e-9
#: Counts are settled where mixtures end at this share of what is enough or above: they add some hundredths (assumed).
NEAR_FRACTION = 0.92


def bound_many_chunks(
    problem: Problem,
    segments: Segments,
    least_scale: float,
    floor_ms: float,
    sharpen: bool,
    look: Look,
    enough_ms: float | None = None,
) -> Bound:
    """The bound of a problem with several chunks a stage, at least `floor_ms`.

    segments: of the problem with every micro-batch the mean of its own. least_scale: the least factor of a block's
    times on any micro-batch, relative to that mean. sharpen: bound every place of the first layer of the main kind by
    itself, and use mixtures of paths as well. enough_ms: then settle the counts of layers on each stage too, up to that
    step; None: do not. Raises what `look` does.
    """
    if all(block.pinned for block in problem.chain):
        return Bound(floor_ms)
    chain = divide(problem, segments)
    of = main_kind(problem, problem.chain[chain.main], chain.num_layers, chain.pinned)
    excess_bytes = float(least_excess(of))
    if excess_bytes > 0.0:
        return overfull(problem, excess_bytes, None, exact=False)
    counts = Counts(problem, segments, chain, of, least_scale)
    if not any(counts.can_hold(place, 0.0) for place in chain.places):
        return overfull(problem, _find_excess(counts), None, exact=False)
    if not of.is_still.all() and not counts.has_room(None, ANY_STEP_MS):
        roomy = of._replace(moved_bytes=np.zeros_like(of.moved_bytes), is_still=np.ones_like(of.is_still))
        unlimited = replace(problem, host_limit_bytes=())
        if Counts(unlimited, segments, chain, roomy, least_scale).has_room(None, ANY_STEP_MS):
            return overfull_host(problem)
    bound = least_step(floor_ms, lambda step_ms: counts.has_room(None, step_ms), look)
    if enough_ms is not None and microbatch_classes(problem)[0]:
        enough_ms = None
    has_mixtures = sharpen and not (problem.splits or problem.pairs)  # mixtures know whole backwards, one at a time
    return _sharpen(counts, bound, look, enough_ms) if has_mixtures else bound


def _find_excess(counts: Counts) -> float:
    """By how many bytes some stage exceeds its limit in every placement, at least."""
    low, high = 0.0, 1.0
    while not any(counts.can_hold(place, high) for place in counts.chain.places):
        low, high = high, 2.0 * high
    while high - low > EXCESS_PRECISION_FRACTION * high:
        middle = 0.5 * (low + high)
        if any(counts.can_hold(place, middle) for place in counts.chain.places):
            high = middle
        else:
            low = middle
    return low


def _sharpen(counts: Counts, bound: Bound, look: Look, enough_ms: float | None) -> Bound:
    """The least bound of all places; the one that has it gets a mixture of its own, until it has had that. Then, with
    enough_ms not far above, of all counts that stages can have."""
    mixtures: dict[int, Mixture | None] = {}
    places = [p for p in counts.chain.places if counts.can_hold(p, 0.0) and counts.has_room(p, ANY_STEP_MS)]
    known_ms: dict[Place, float] = dict.fromkeys(places, bound.step_ms)
    best_ms, at = np.inf, next(iter(places), None)
    while places:
        begin = counts.begin_of(at)
        if begin in mixtures:
            break
        mixtures[begin] = counts.mix(begin)
        best_ms = np.inf
        for place in [at, *(other for other in places if other != at)]:
            mixture = mixtures.get(counts.begin_of(place)) or mixtures.get(0)
            is_possible = counts.condition(place, mixture)
            if is_possible(min(best_ms, ANY_STEP_MS)):
                best_ms, at = least_step(bound.step_ms, is_possible, look).step_ms, place
            known_ms[place] = max(known_ms[place], best_ms)
        if np.isinf(best_ms):
            return bound
    if places and enough_ms is not None and best_ms >= NEAR_FRACTION * enough_ms:
        best_ms = settle_places(counts, filter(None, mixtures.values()), known_ms, enough_ms, look)
    return replace(bound, step_ms=max(bound.step_ms, best_ms)) if places else bound
