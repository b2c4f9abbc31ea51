"""Lower bounds of a strategy: what no placement of its problem can beat, in microseconds to some milliseconds.

Every bound holds for the simulator's own step, because each is the length of a path in the schedule's graph, and of all
paths the step is the longest. With M micro-batches, F, B, L = F + B of a stage for one of them (recompute included),
and what comes before a stage meaning one pass through all stages before it, forth and back, hops included:

    work      Σ over stages of (M·L + tail) ≤ P · step; and the largest block lies on some stage whole. Where stage s
              takes f_s times as long: its share of the work is at most (step − tail) / f_s, so
                  Σ work + Σ tail / f_s ≤ step · Σ 1 / f_s.
              The one bound of orders that a problem gives. A backward takes no less in parts, and two passes that
              overlap take at least their mean.
    stage     first task of stage s: a forward that has come through all stages before; last task: a backward whose
              gradient goes back through them. Between them lie M·L, whatever the order:
                  before + M·L + tail of stage 0,   and   forward before + M·L + tail of s
    turn      one chunk, micro-batches in order, w forwards of s between its first forward and its first backward: the
              first micro-batch's pass goes on through the later stages, in place of those w forwards:
                  before + M·L − w·F + after
              and the mirror image, with the c backwards between the last forward and the last backward: − c·B.
    winding   one chunk, 1F1B: both turns, and rounds through later stages in between (`kept_paths`).
    mixture   the weighted mean of any paths (average_path): with several chunks, the bubble that no lay-out avoids.
    memory    in-flight counts are the schedule's; the cheapest modes that fit a stage are part of its L. Bytes moved
              to the host need F ≥ H and B ≥ H for the link's time H, so H ≤ L / 2; and what lies there is limited.

Where layers may run in several layouts, each figure is the least of any (pipeline/laid_out.py).

With one chunk these are minimised over all placements (one_chunk); with more, or where backwards are parted, over
counts of the main kind of layer, each count at the least that its layers cost in any chunks and modes that fit
(options). Orders to be found have bounds of their own beside that (placement/orders).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from mm_autoparallel.pipeline.laid_out import has_layouts, relaxed
from mm_autoparallel.pipeline.placement.bounds.bound import (
    ROUNDING_FRACTION,
    Bound,
    Look,
    Stopped,
    available_host_bytes,
    overfull_host,
)
from mm_autoparallel.pipeline.placement.bounds.many_chunks import bound_many_chunks
from mm_autoparallel.pipeline.placement.bounds.one_chunk import bound_one_chunk
from mm_autoparallel.pipeline.placement.bubbles.bounds import bound_all, decoder_beside, list_cuts
from mm_autoparallel.pipeline.placement.infeasible import explain_windows
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.segments import Segments, cut_into_segments
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.encoders.step import part_encoders
from mm_autoparallel.pipeline.simulate.loads import microbatch_classes

#: From this share of what is enough on, bounds of free orders are worth seconds (assumed).
NEAR_FRACTION = 0.97


def work_bound_ms(problem: Problem) -> float:
    """The bound that costs microseconds: work spread perfectly, memory left out (`work` above)."""
    if problem.encoders:
        encoded = part_encoders(problem)
        return bound_all(encoded, work_bound_ms(encoded.decoder)) * (1.0 - ROUNDING_FRACTION)
    problem = relaxed(problem)
    factors = problem.time_factors
    total_ms = sum(tail_ms / factor for tail_ms, factor in zip(problem.stage_tail_ms, factors, strict=True))
    largest_ms = 0.0
    for block in problem.chain:
        scale = sum(block.microbatch_scale) if block.microbatch_scale else float(problem.num_microbatches)
        load_ms = (block.forward_ms + block.backward_ms) * scale * problem.least_load_fraction
        total_ms += block.count * (load_ms + block.tail_ms / max(factors))
        largest_ms = max(largest_ms, load_ms * min(factors) + block.tail_ms)
    return max(total_ms / sum(1.0 / factor for factor in factors), largest_ms) * (1.0 - ROUNDING_FRACTION)


def bound_step(
    problem: Problem,
    sharpen: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    known_ms: float | None = None,
    enough_ms: float = np.inf,
    settles: bool = False,
) -> Bound:
    """The bound that costs milliseconds: paths through every stage, with the recompute that its memory enforces.

    sharpen: with several chunks a stage, look for a mixture of paths that counts the bubble, in tens of milliseconds,
    and bound each place for the first layer of the main kind by itself; with layouts, count mixes of whole layers;
    where the order is free and the bound near enough_ms, try all orders of the last stages, in up to some seconds.
    should_stop: once true, work alone is the bound, and nothing is said to fit or not to.
    known_ms: what is known to be a bound. Where the order is free, only steps near it are looked at then, in
    milliseconds; the answer is partial where none of them is left. enough_ms: nor are steps above that looked at, and
    with one chunk a stage not either.
    settles: with several chunks a stage, sharpen by counts of layers that stages can have too, in tenths of a second.
    """

    from mm_autoparallel.pipeline.placement.orders.levels import least_excess_bytes
    from mm_autoparallel.pipeline.placement.orders.options import explain_excess
    from mm_autoparallel.pipeline.placement.orders.v_shape.least import bound_v

    def look() -> None:
        if should_stop():
            raise Stopped

    if problem.encoders:
        encoded = part_encoders(problem)
        bound = bound_step(decoder_beside(encoded), sharpen, should_stop, enough_ms=enough_ms)
        step_ms = bound_all(encoded, bound.step_ms) * (1.0 - ROUNDING_FRACTION)
        with suppress(Stopped):
            cuts = None if bound.reason or step_ms >= enough_ms else list_cuts(encoded, look)
            step_ms = cuts.bound(step_ms, look) if cuts else step_ms
        return replace(bound, step_ms=step_ms, exact=False)
    if has_layouts(problem):
        return replace(_bound_layouts(problem, sharpen, look), exact=False)
    scaled, least_scale, most_scale = _mean_microbatch(problem)
    segments = cut_into_segments(scaled)
    reason = explain_windows(segments)
    if reason:
        return Bound(np.inf, reason)
    if problem.host_limit_bytes:
        kept_bytes = sum(block.count * block.host_static_bytes for block in problem.chain)
        if kept_bytes > available_host_bytes(problem).sum():
            return overfull_host(problem)
    floor_ms = work_bound_ms(problem)
    if problem.orders:
        return Bound(floor_ms)  # what follows knows orders by a rule, and what is true of all
    try:
        if find_schedule(problem.schedule, problem.num_chunks).given_by == "placement":
            counted = bound_many_chunks(problem, segments, least_scale, floor_ms, False, look)
            if problem.num_chunks == 1 and (known_ms is None or known_ms <= floor_ms or counted.reason):
                excess_bytes = max(counted.overflow_bytes, least_excess_bytes(segments))
                counted = replace(counted, overflow_bytes=excess_bytes)
            if counted.overflow_bytes:
                return Bound(np.inf, explain_excess(counted.overflow_bytes), counted.overflow_bytes)
            if counted.reason or microbatch_classes(problem)[0]:
                return counted
            low_ms, one_level = max(counted.step_ms, known_ms or 0.0), known_ms is not None
            if problem.num_chunks == 1:
                return _bound_free(segments, sharpen, floor_ms, low_ms, enough_ms, should_stop, one_level)
            return bound_v(segments, floor_ms, low_ms, enough_ms, should_stop, one_level) if sharpen else Bound(low_ms)
        if problem.num_chunks > 1 or problem.splits:
            settled_ms = enough_ms if settles else None
            return bound_many_chunks(problem, segments, least_scale, floor_ms, sharpen, look, settled_ms)
        bound = bound_one_chunk(segments, least_scale, most_scale, floor_ms, look, enough_ms=enough_ms)
    except Stopped:
        return Bound(floor_ms)
    # whether higher limits of devices would do is then a question of their hosts too
    return replace(bound, exact=False) if problem.host_limit_bytes else bound


def _bound_free(
    segments: Segments,
    sharpen: bool,
    floor_ms: float,
    low_ms: float,
    enough_ms: float,
    should_stop: Callable[[], bool],
    one_level: bool,
) -> Bound:
    """The bound of every order, at least low_ms, from the ways to fill each stage, where they are not too many to be
    listed. one_level: as in `bound_v`."""
    from mm_autoparallel.pipeline.placement.orders.bounds import bound_stages
    from mm_autoparallel.pipeline.placement.orders.levels import LEVELS, options_below
    from mm_autoparallel.pipeline.placement.orders.options import least_overflow
    from mm_autoparallel.pipeline.placement.orders.tails import raise_by_tails

    for level in LEVELS:
        most_ms = min(level * floor_ms if np.isfinite(level) else np.inf, enough_ms)
        if most_ms <= low_ms:
            continue
        try:
            options = options_below(segments, most_ms, should_stop, only_bounds=True)
        except TooManyPatterns:
            break
        if options is not None and np.isinf(most_ms):
            overflow_bytes, reason = least_overflow(options)
            if reason:
                return Bound(np.inf, reason, overflow_bytes)
        low_ms = max(low_ms, most_ms if options is None else min(most_ms, bound_stages(options).least_ms))
        if sharpen and options is not None and NEAR_FRACTION * enough_ms <= low_ms < most_ms:
            low_ms = raise_by_tails(options, low_ms, most_ms, should_stop)
        if low_ms < most_ms:
            break
        if one_level:
            return Bound(low_ms, is_partial=True)
    return Bound(low_ms)


def _bound_layouts(problem: Problem, sharpen: bool, look: Look) -> Bound:
    """The bound of the problem that has the least of each figure, with the loads of the true one's mixes."""
    from mm_autoparallel.pipeline.placement.patterns.layout_patterns import least_mixed_loads

    segments, floor_ms = cut_into_segments(relaxed(problem)), work_bound_ms(problem)
    reason = explain_windows(segments)
    if reason:
        return Bound(np.inf, reason)
    try:
        return bound_one_chunk(
            segments, 1.0, 1.0, floor_ms, look, lambda: least_mixed_loads(cut_into_segments(problem), sharpen)
        )
    except Stopped:
        return Bound(floor_ms)


def _mean_microbatch(problem: Problem) -> tuple[Problem, float, float]:
    """The problem with every micro-batch the mean of all, and the least and largest factor between any and the mean."""
    if not any(block.microbatch_scale for block in problem.chain):
        return problem, 1.0, 1.0
    chain: list[ChainBlock] = []
    least, most = 1.0, 1.0
    for block in problem.chain:
        scale = block.microbatch_scale or (1.0,)
        mean = sum(scale) / len(scale)
        if mean > 0:
            least, most = min(least, min(scale) / mean), max(most, max(scale) / mean)
        chain.append(
            replace(
                block,
                forward_ms=block.forward_ms * mean,
                backward_ms=block.backward_ms * mean,
                modes=tuple(
                    replace(
                        mode,
                        extra_forward_ms=mode.extra_forward_ms * mean,
                        extra_backward_ms=mode.extra_backward_ms * mean,
                        host_bytes=mode.host_bytes * mean,
                    )
                    for mode in block.modes
                ),
                microbatch_scale=(),
            )
        )
    # what a link carries is scaled here, and what lies on hosts is not: their limits are left out
    return replace(problem, chain=tuple(chain), host_limit_bytes=()), least, most
