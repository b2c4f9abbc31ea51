"""Pieces: every way to fill one virtual stage of a V, as rows of figures.

Virtual stages 0 to P - 1 run through the stages, P to 2P - 1 back, so stage s holds virtual stages s and 2P - 1 - s.
What both need of its memory is known of a pair of pieces alone; a piece says what it adds. Backwards are split or
whole as in `orders/options`: relaxed figures are of backwards that are both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.orders.figures import (
    FORWARD_MS,
    HOP_BACKWARD_MS,
    HOP_FORWARD_MS,
    INPUT_MS,
    KEPT,
    PENDING,
    TAIL_MS,
    WEIGHT_MS,
    Figures,
)
from mm_autoparallel.pipeline.placement.orders.options import Mixes
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns, undominated_rows
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import list_host_links
from mm_autoparallel.pipeline.simulate.loads import hop_ms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Known = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Ints, Floats]]
"""What `_ways_of` found, by how many layers of each group lie before a stretch's begin and end."""

#: Beside the columns of `orders/figures` up to PENDING. Bytes that a piece holds through the step, at work alone, and
#: once for its largest block; what passes during the optimizer's step, as `ChainBlock` has it; bytes on the host of a
#: micro-batch in flight, and through the step.
STATIC, RESTORED, TRANSIENT, STEP, STEP_ONCE, STEP_SHARD, ON_HOST, HOST_STATIC = range(PENDING + 1, PENDING + 9)
NUM_FIGURES = HOST_STATIC + 1

#: Rows beyond which nothing is listed.
MAX_ROWS = 200_000


@dataclass(frozen=True, eq=False)
class Pieces:
    """Rows of all K virtual stages in order of stage, begin and end; N segments, L lanes.

    virtual, begin, end: [R]. lanes: [R, L]. relaxed, split, whole: [R, NUM_FIGURES]; is_split, is_whole: [R] whether a
    piece that splits its backwards, or runs them whole, can do what the other cannot.
    """

    segments: Segments
    virtual: Ints
    begin: Ints
    end: Ints
    lanes: Ints
    relaxed: Figures
    split: Figures
    whole: Figures
    is_split: NDArray[np.bool_]
    is_whole: NDArray[np.bool_]

    @property
    def is_exact(self) -> NDArray[np.bool_]:
        """[R] whether the relaxed figures are what a piece costs."""
        exact: NDArray[np.bool_] = self.is_split & ~self.is_whole & np.all(self.relaxed == self.split, axis=1)
        return exact

    def select(self, rows: Ints | NDArray[np.bool_]) -> Pieces:
        """Those of a mask or of indices in order."""
        names = ("virtual", "begin", "end", "lanes", "relaxed", "split", "whole", "is_split", "is_whole")
        return Pieces(self.segments, **{name: getattr(self, name)[rows] for name in names})


def list_pieces(segments: Segments, most_ms: float, should_stop: Callable[[], bool]) -> Pieces:
    """Every piece of which a step of at most most_ms can be made. Raises TooManyPatterns where they are too many, or
    on should_stop."""
    mixes = Mixes(segments)
    parts: list[Pieces] = []
    known: Known = {}
    num_rows = 0
    for k in range(segments.problem.num_virtual_stages):
        parts.append(_pieces_of(segments, k, mixes, known, most_ms, should_stop))
        num_rows += len(parts[-1].virtual)
        if num_rows > MAX_ROWS:
            raise TooManyPatterns
    names = ("virtual", "begin", "end", "lanes", "relaxed", "split", "whole", "is_split", "is_whole")
    return Pieces(segments, **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _pieces_of(
    segments: Segments,
    virtual: int,
    mixes: Mixes,
    known: Known,
    most_ms: float,
    should_stop: Callable[[], bool],
) -> Pieces:
    problem = segments.problem
    most_load_ms = most_ms * (1.0 + 1e-9) / problem.num_microbatches
    factor = problem.time_factors[problem.stage_of[virtual]]
    begin, end = _stretches(segments, virtual, most_load_ms / factor if factor else np.inf)
    spans = zip(begin.tolist(), end.tolist(), strict=True)
    ways = [_ways_of(mixes, known, *span, should_stop) for span in spans]
    num_ways = [len(counts) for counts, _ in ways]
    if sum(num_ways) > MAX_ROWS:
        raise TooManyPatterns
    at = np.repeat(np.arange(len(ways)), num_ways)
    lanes = np.concatenate([np.zeros((0, segments.num_lanes), np.int64), *(counts for counts, _ in ways)])
    added = np.concatenate([np.zeros((0, 5)), *(sums for _, sums in ways)])
    pieces = _cost(segments, virtual, begin[at], end[at], lanes, added)
    return pieces_below(pieces, most_ms)


def _ways_of(mixes: Mixes, known: Known, begin: int, end: int, should_stop: Callable[[], bool]) -> tuple[Ints, Floats]:
    """The ways to run the layers of these segments that no other beats, and what they add."""
    key = mixes.before[begin], mixes.before[end]  # of equally many layers of each group the same
    if key not in known:
        if should_stop():
            raise TooManyPatterns
        counts, sums = mixes.fill(begin, end)
        if len(counts) > 1:
            best = undominated_rows(sums * [1.0, 1.0, -1.0, 1.0, 1.0])[0]
            counts, sums = counts[best], sums[best]
        known[key] = counts, sums
    return known[key]


def pieces_below(pieces: Pieces, most_ms: float) -> Pieces:
    """Those of which a step of at most most_ms can be made."""
    load_ms = pieces.relaxed[:, [FORWARD_MS, INPUT_MS, WEIGHT_MS]].sum(axis=1)
    return pieces.select(load_ms <= most_ms * (1.0 + 1e-9) / pieces.segments.problem.num_microbatches)


def _stretches(segments: Segments, virtual: int, most_load_ms: float) -> tuple[Ints, Ints]:
    """Begins and ends, in order, of what the virtual stage may hold with one forward and backward of so long."""
    problem = segments.problem
    begin, end = (
        axis.ravel()
        for axis in np.meshgrid(
            np.arange(segments.first[virtual], segments.last[virtual] + 1),
            np.arange(segments.first[virtual + 1], segments.last[virtual + 1] + 1),
            indexing="ij",
        )
    )
    lawful = begin < end
    begin, end = begin[lawful], end[lawful]
    a, b = segments.start[begin], segments.start[end]
    num_layers = segments.layers[b] - segments.layers[a]
    load_ms = segments.forward_ms[b] - segments.forward_ms[a] + segments.backward_ms[b] - segments.backward_ms[a]
    lawful = (num_layers >= 1) & (load_ms <= most_load_ms * (1.0 + 1e-9))
    if problem.max_layers_per_chunk is not None:
        lawful &= num_layers <= problem.max_layers_per_chunk
    return begin[lawful], end[lawful]


def _cost(segments: Segments, virtual: int, begin: Ints, end: Ints, lanes: Ints, added: Floats) -> Pieces:
    """Pieces with these segments and lanes; added: what `Mixes` says of them."""
    problem = segments.problem
    stage = problem.stage_of[virtual]
    factor, link_ms = problem.time_factors[stage], list_host_links(problem)[stage]
    a, b = segments.start[begin], segments.start[end]

    def total(sums: Floats) -> Floats:
        of: Floats = sums[b] - sums[a]
        return of

    whole = np.zeros((len(begin), NUM_FIGURES))
    host_ms = link_ms * added[:, 4]
    weight_ms, parted_ms = factor * total(segments.weight_ms), factor * total(segments.parted_ms)
    gradients_ms = factor * (total(segments.backward_ms) + added[:, 1])
    whole[:, FORWARD_MS] = np.maximum(factor * (total(segments.forward_ms) + added[:, 0]), host_ms)
    whole[:, INPUT_MS] = np.maximum(gradients_ms, host_ms)
    if virtual < problem.num_virtual_stages - 1 and virtual != problem.num_stages - 1:
        last_block = segments.flat[b - 1]
        for e in np.unique(last_block).tolist():
            whole[last_block == e, HOP_FORWARD_MS : HOP_BACKWARD_MS + 1] = hop_ms(problem, virtual, problem.chain[e])
    whole[:, TAIL_MS] = total(segments.tail_ms)
    whole[:, KEPT] = np.maximum(total(segments.activation_bytes) - added[:, 2], 0.0)
    whole[:, STATIC], whole[:, RESTORED] = total(segments.static_bytes), added[:, 3]
    whole[:, TRANSIENT] = _largest(segments.transient_bytes, a, b)
    whole[:, STEP], whole[:, STEP_SHARD] = total(segments.step_bytes), total(segments.step_shard_bytes)
    whole[:, STEP_ONCE] = _largest(segments.step_once_bytes, a, b)
    whole[:, ON_HOST], whole[:, HOST_STATIC] = added[:, 4], total(segments.host_static_bytes)
    split, relaxed = whole.copy(), whole.copy()
    parts = weight_ms > 0.0
    split[:, INPUT_MS] = np.maximum(gradients_ms - weight_ms, host_ms)
    split[:, WEIGHT_MS] = parted_ms
    split[:, PENDING] = np.where(parts, total(segments.pending_bytes), 0.0)
    relaxed[:, INPUT_MS] = np.minimum(split[:, INPUT_MS], whole[:, INPUT_MS])
    relaxed[:, WEIGHT_MS] = np.minimum(weight_ms, whole[:, INPUT_MS] - relaxed[:, INPUT_MS])
    relaxed[:, PENDING] = np.minimum(split[:, PENDING], relaxed[:, KEPT])
    buys = (split[:, PENDING] > split[:, KEPT]) | (split[:, INPUT_MS] + split[:, WEIGHT_MS] > whole[:, INPUT_MS])
    # what cannot be told from a whole backward counts as split; sums differ from their parts by rounding
    gains = split[:, INPUT_MS] + split[:, WEIGHT_MS] > whole[:, INPUT_MS] * (1.0 + 1e-12)
    is_whole = parts & buys & (gains | (split[:, PENDING] > split[:, KEPT]))
    relaxed[~is_whole] = split[~is_whole]
    number = np.full(len(begin), virtual)
    return Pieces(segments, number, begin, end, lanes, relaxed, split, whole, np.full(len(begin), True), is_whole)


def _largest(of_blocks: Floats, a: Ints, b: Ints) -> Floats:
    """[n] the largest from flat position a to before b."""
    padded = np.append(of_blocks, 0.0)
    if not len(a):
        return np.zeros(0)
    largest: Floats = np.maximum.reduceat(padded, np.column_stack([a, b]).ravel())[::2]
    return largest
