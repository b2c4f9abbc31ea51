"""All that one stage could hold where the order is free, with what its passes take and keep, for `verify`.

Listed from the problem's own words. Of equal blocks only the choices of modes remain that no other beats in every time
and every byte: an order never gets slower or fuller when one of them falls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.certify.stage_options import list_contents, list_mode_choices, may_follow, undominated
from mm_autoparallel.pipeline.problem import Problem, list_host_links
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, allowed_host_bytes, hop_ms, sum_step_bytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Figures = NDArray[np.float64]
"""Columns of several units, which the constants below name."""

#: Fillings of all stages, in all places of the chain, beyond which the check would not end (assumed).
MAX_FILLINGS = 2_000_000

#: Columns of figures. Times of one micro-batch: its forward, the gradient of its input where backwards are split, its
#: weights', and its whole backward; the hops behind its forward and before its backward; what follows the last action.
FORWARD, INPUT, WEIGHT, WHOLE, HOP_FORWARD, HOP_BACKWARD, TAIL = range(7)
#: Bytes that a micro-batch keeps until its input's gradient has run, and from there until its weights' has.
KEPT, PENDING = 7, 8
#: What a stage has for these; how many micro-batches its host lets be in flight. Both as negative numbers, so that of
#: every figure less is better.
LESS_ROOM, LESS_ON_HOST = 9, 10
NUM_FIGURES = 11


@dataclass(frozen=True, eq=False)
class Fillings:
    """n ways to fill one stage, sorted by begin and end.

    begin, end: [n] positions in the flat chain. figures: [n, NUM_FIGURES]. layers, modes: [n, E], [n, D], how many of
    each block, and in each of the modes of all blocks in turn.
    """

    begin: Ints
    end: Ints
    figures: Figures
    layers: Ints
    modes: Ints

    def __len__(self) -> int:
        return len(self.begin)

    def select(self, chosen: NDArray[np.bool_] | Ints) -> Fillings:
        """Those of a mask or of indices."""
        return Fillings(
            self.begin[chosen], self.end[chosen], self.figures[chosen], self.layers[chosen], self.modes[chosen]
        )


def list_fillings(problem: Problem, bound_ms: float, should_stop: Callable[[], bool]) -> list[Fillings]:
    """Of every stage what it could hold in a step below bound_ms. Raises Unconfirmed where that is too much."""
    num_found = 0
    found = []
    for stage in range(problem.num_stages):
        found.append(_fill_stage(problem, stage, bound_ms, should_stop, MAX_FILLINGS - num_found))
        num_found += len(found[-1])
    return found


def _fill_stage(problem: Problem, stage: int, bound_ms: float, should_stop: Callable[[], bool], most: int) -> Fillings:
    chain = problem.chain
    flat = np.repeat(np.arange(len(chain)), [block.count for block in chain])
    edges = np.cumsum([0, *(block.count for block in chain)])
    may_cut = np.ones(len(flat) + 1, dtype=np.bool_)
    may_cut[1:-1] = may_follow(problem)[flat[:-1], flat[1:]]
    # rounding must not drop what fits: what a stage's work exceeds by rounding, the bounds leave out
    most_ms = (bound_ms - problem.stage_tail_ms[stage]) / problem.num_microbatches * (1.0 + 1e-9)
    parts: list[Fillings] = []
    num_found = 0
    for held in list_contents(problem, stage, most_ms):
        if should_stop():
            raise Unconfirmed("it was stopped while listing what the stages could hold")
        modes, figures = _ways_to_run(problem, stage, held)
        if not len(modes):
            continue
        first, last = np.flatnonzero(held)[[0, -1]]
        if first < last:
            begins = np.array([edges[first + 1] - held[first]])
        else:
            begins = np.arange(edges[first], edges[first + 1] - held[first] + 1)
        ends = begins + held.sum()
        begins = begins[may_cut[begins] & may_cut[ends]]
        if stage == 0:
            begins = begins[begins == 0]
        if stage == problem.num_stages - 1:
            begins = begins[begins + held.sum() == len(flat)]
        n = len(begins) * len(modes)
        num_found += n
        if num_found > most:
            raise Unconfirmed("the stages could hold more than can be listed")
        begin, way = np.repeat(begins, len(modes)), np.tile(np.arange(len(modes)), len(begins))
        parts.append(Fillings(begin, begin + held.sum(), figures[way], np.tile(held, (n, 1)), modes[way]))
    if not parts:
        num_modes = sum(len(block.modes) for block in chain)
        none = np.zeros(0, dtype=np.int64)
        return Fillings(
            none,
            none,
            np.zeros((0, NUM_FIGURES)),
            np.zeros((0, len(chain)), dtype=np.int64),
            np.zeros((0, num_modes), dtype=np.int64),
        )
    whole = Fillings(*(np.concatenate([getattr(p, name) for p in parts]) for name in Fillings.__dataclass_fields__))
    return whole.select(np.lexsort((whole.end, whole.begin)))


def _ways_to_run(problem: Problem, stage: int, held: Ints) -> tuple[Ints, Floats]:
    """How the held blocks may run, [n, D], and what that takes and keeps, [n, NUM_FIGURES]."""
    chain = problem.chain
    factor, link = problem.time_factors[stage], list_host_links(problem)[stage]
    modes = list_mode_choices(problem, held)
    rows = [(block, mode) for block in chain for mode in block.modes]
    of_modes = np.array(
        [
            (
                mode.extra_forward_ms,
                mode.extra_backward_ms,
                mode.activation_bytes - block.activation_bytes,
                mode.restored_bytes,
                mode.host_bytes,
            )
            for block, mode in rows
        ],
        dtype=np.float64,
    ).reshape(-1, 5)
    more_forward_ms, more_backward_ms, more_kept_bytes, restored_bytes, moved_bytes = (modes @ of_modes).T

    def total(name: str) -> float:
        return float(held @ np.array([getattr(block, name) for block in chain], dtype=np.float64))

    weight_ms, extra_ms = total("backward_weight_ms"), total("split_extra_ms")
    figures = np.zeros((len(modes), NUM_FIGURES))
    host_ms = link * moved_bytes
    figures[:, FORWARD] = np.maximum(factor * (total("forward_ms") + more_forward_ms), host_ms)
    of_input_ms = total("backward_ms") - weight_ms + more_backward_ms
    figures[:, INPUT] = np.maximum(factor * of_input_ms, host_ms)
    figures[:, WEIGHT] = factor * (weight_ms + extra_ms)
    figures[:, WHOLE] = np.maximum(factor * (total("backward_ms") + more_backward_ms), host_ms)
    if stage < problem.num_stages - 1:
        last = int(np.flatnonzero(held)[-1])
        figures[:, HOP_FORWARD], figures[:, HOP_BACKWARD] = hop_ms(problem, stage, chain[last])
    figures[:, TAIL] = problem.stage_tail_ms[stage] + total("tail_ms")
    figures[:, KEPT] = np.maximum(total("activation_bytes") + more_kept_bytes, 0.0)
    figures[:, PENDING] = total("pending_bytes")
    static_bytes = problem.stage_static_bytes[stage] + total("static_bytes")
    limit_bytes = float(allowed_bytes(problem)[stage])
    transient_bytes = max(block.transient_bytes for block, n in zip(chain, held, strict=True) if n)
    room_bytes = limit_bytes - static_bytes - restored_bytes - transient_bytes
    figures[:, LESS_ROOM] = -room_bytes
    host_room_bytes = float(allowed_host_bytes(problem)[stage]) - total("host_static_bytes")
    in_flight = np.full(len(modes), float(problem.num_microbatches))
    moves = moved_bytes > 0.0
    in_flight[moves] = np.minimum(in_flight[moves], np.floor(host_room_bytes / moved_bytes[moves] * (1.0 + 1e-12)))
    figures[:, LESS_ON_HOST] = -in_flight
    fits = (figures[:, KEPT] <= room_bytes) & (in_flight >= 1.0) & (host_room_bytes >= 0.0)
    fits &= static_bytes + float(sum_step_bytes(problem, held[None])[0]) <= limit_bytes
    chosen = np.flatnonzero(fits)
    chosen = chosen[undominated(np.zeros(len(chosen), dtype=np.int64), figures[chosen])]
    return modes[chosen], figures[chosen]
