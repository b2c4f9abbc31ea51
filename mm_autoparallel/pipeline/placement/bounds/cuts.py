"""Cuts: all ways to cut a decoder's chain with encoders beside it, and what none of them goes below."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import Look, least_step
from mm_autoparallel.pipeline.placement.bounds.gaps import Strand, Times, bound_gaps
from mm_autoparallel.pipeline.placement.bounds.kept_paths import Beside, least_rest, open_stretches
from mm_autoparallel.pipeline.placement.bounds.one_chunk import MAX_INTERVALS, OneChunk, least_loads, prepare
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.simulate.graph import TaskGraph

Floats = NDArray[np.float64]

#: Cuts that are bounded one by one at most. Assumed.
MAX_LISTED = 300


@dataclass(frozen=True, eq=False)
class Cuts:
    """Those of a decoder with one chunk a stage, whose micro-batches are equal, whatever the order of encoders' passes.

    loads_ms, rest_ms: see `least_loads` and `least_rest`. strands: of encoders' passes, where a rule gives the order of
    the decoder, whose graph is then `graph`. bounds_ms: of cuts by their boundaries, as far as they were asked for.
    """

    of: OneChunk
    loads_ms: Floats
    rest_ms: Floats
    graph: TaskGraph | None = None
    strands: tuple[Strand, ...] = ()
    feed_ms: Floats = field(default_factory=lambda: np.zeros(0))
    return_ms: Floats = field(default_factory=lambda: np.zeros(0))
    bounds_ms: dict[tuple[int, ...], float] = field(default_factory=dict)

    @classmethod
    def of_segments(cls, segments: Segments, beside: Beside, look: Look) -> Cuts | None:
        """None where intervals are too many. Raises what `look` does."""
        if segments.problem.num_stages * (segments.num_segments + 1) ** 2 > MAX_INTERVALS:
            return None
        of = prepare(segments, 1.0, 1.0, beside)
        loads = least_loads(of, look)
        return cls(of, loads, least_rest(of, loads))

    def bound(self, floor_ms: float, look: Look) -> float:
        """A step, at least `floor_ms`, that none goes below; infinite where none fits. Raises what `look` does."""
        if np.isinf(self.rest_ms[0, 0]):
            return np.inf

        def is_possible(step_ms: float) -> bool:
            is_open = open_stretches(self.of, self.loads_ms, self.rest_ms, step_ms)
            if is_open is None or not self.strands:
                return is_open is not None
            cuts = _list_cuts(is_open)
            return not cuts or any(self._bound_cut(cut, look) <= step_ms for cut in cuts)

        return least_step(floor_ms, is_possible, look).step_ms

    def _bound_cut(self, cut: tuple[int, ...], look: Look) -> float:
        """What no order of the cut with these boundaries goes below, as its strands say. Raises what `look` does."""
        if cut not in self.bounds_ms:
            look()
            assert self.graph is not None
            self.bounds_ms[cut] = bound_gaps(self.graph, self._times_of(cut), self.strands, 0.0)
        return self.bounds_ms[cut]

    def _times_of(self, cut: tuple[int, ...]) -> Times:
        """The least times of each stage: what modes add is known to be backward, or left out."""
        of, begin, end = self.of, np.array(cut[:-1]), np.array(cut[1:])
        at = np.arange(len(begin))
        forward = (of.forward_ms[end] - of.forward_ms[begin]) * of.time_factor
        backward = (of.backward_ms[end] - of.backward_ms[begin]) * of.time_factor
        if of.is_plain:
            backward = self.loads_ms[at, begin, end] - forward
        tail = of.stage_tail_ms + of.tail_ms[end] - of.tail_ms[begin]
        both, back = of.hop_ms[at, end][:-1], of.hop_back_ms[at, end][:-1]
        hops = np.concatenate([both - back, back, [0.0]])
        return Times(forward, backward, tail, hops, self.feed_ms, self.return_ms)

    def lightest(self, step_ms: float) -> list[int] | None:
        """Boundaries in segments [P + 1] of the least work, of stages that `step_ms` leaves open; None where there are
        none."""
        is_open = open_stretches(self.of, self.loads_ms, self.rest_ms, step_ms)
        if is_open is None:
            return None
        loads = np.where(is_open, self.loads_ms, np.inf)
        least, through = np.where(np.arange(loads.shape[1]) == 0, 0.0, np.inf), []
        for of_stage in loads:
            total = least[:, None] + of_stage
            through.append(total.argmin(axis=0))
            least = total.min(axis=0)
        if np.isinf(least[-1]):
            return None
        boundaries = [loads.shape[1] - 1]
        for begins in reversed(through):
            boundaries.append(int(begins[boundaries[-1]]))
        return boundaries[::-1]


def _list_cuts(is_open: NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """The boundaries in segments [P + 1] of all cuts into open stretches; none where they are more than MAX_LISTED."""
    num_stages, size = is_open.shape[0], is_open.shape[1]
    num_ways = np.zeros((num_stages + 1, size))
    num_ways[-1, -1] = 1.0
    for s in range(num_stages - 1, -1, -1):
        num_ways[s] = is_open[s] @ num_ways[s + 1]
    if num_ways[0, 0] > MAX_LISTED:
        return []
    begun: list[tuple[int, ...]] = [(0,)]
    for s in range(num_stages):
        leads_on = is_open[s] & (num_ways[s + 1] > 0.0)
        begun = [(*cut, end) for cut in begun for end in np.flatnonzero(leads_on[cut[-1]]).tolist()]
    return begun
