"""Cuts: all ways to cut a decoder's chain with encoders beside it, and what none of them goes below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import ANY_STEP_MS, Look, least_step
from mm_autoparallel.pipeline.placement.bounds.gaps import Strand, Times, bound_gaps
from mm_autoparallel.pipeline.placement.bounds.kept_paths import Beside, least_rest, open_stretches
from mm_autoparallel.pipeline.placement.bounds.one_chunk import MAX_INTERVALS, OneChunk, least_loads, prepare
from mm_autoparallel.pipeline.placement.bounds.pairs import Pair, can_take, count_work
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.simulate.graph import TaskGraph

Floats = NDArray[np.float64]

#: Cuts that are bounded one by one at most. Assumed.
MAX_LISTED = 300
#: Steps that `pairs` may make for all of them at one step that is looked at, seconds of work. Assumed.
MAX_WORK = 300_000_000


@dataclass(frozen=True, eq=False)
class Cuts:
    """Those of a decoder with one chunk a stage, whose micro-batches are equal, whatever the order of encoders' passes.

    loads_ms, rest_ms: see `least_loads` and `least_rest`. strands: of encoders' passes, where a rule gives the order of
    the decoder, whose graph is then `graph`. bounds_ms: of cuts by their boundaries, as far as they were asked for.
    pairs: of encoders' passes forth and back, looked at where `strands` leave a cut open. beside_kept: the decoder with
    room for so many passes, two or more, of a part of an encoder at full moments; loads_kept_ms: its loads. refuted_ms,
    possible_ms: the largest step that pairs refute of a cut, and the least that they do not.
    """

    of: OneChunk
    loads_ms: Floats
    rest_ms: Floats
    graph: TaskGraph | None = None
    strands: tuple[Strand, ...] = ()
    feed_ms: Floats = field(default_factory=lambda: np.zeros(0))
    return_ms: Floats = field(default_factory=lambda: np.zeros(0))
    bounds_ms: dict[tuple[int, ...], float] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    beside_kept: Callable[[tuple[int, int], int], Segments] | None = None
    loads_kept_ms: dict[tuple[tuple[int, int], int], Floats] = field(default_factory=dict)
    refuted_ms: dict[tuple[int, ...], float] = field(default_factory=dict)
    possible_ms: dict[tuple[int, ...], float] = field(default_factory=dict)

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
            left = [cut for cut in cuts if self._bound_cut(cut, look) <= step_ms]
            if left and self._pairs_work() * len(left) <= MAX_WORK:
                return any(self._can_take(cut, step_ms, look) for cut in left)
            return not cuts or bool(left)

        return least_step(floor_ms, is_possible, look).step_ms if is_possible(ANY_STEP_MS) else np.inf

    def _bound_cut(self, cut: tuple[int, ...], look: Look) -> float:
        """What no order of the cut with these boundaries goes below, as its strands say. Raises what `look` does."""
        if cut not in self.bounds_ms:
            look()
            assert self.graph is not None
            self.bounds_ms[cut] = bound_gaps(self.graph, self._times_of(cut), self.strands, 0.0)
        return self.bounds_ms[cut]

    def _pairs_work(self) -> int:
        graph = self.graph
        return 0 if graph is None else sum(count_work(graph, pair) for pair in self.pairs)

    def _can_take(self, cut: tuple[int, ...], step_ms: float, look: Look) -> bool:
        """Whether no pair refutes that some order of the cut takes step_ms. Raises what `look` does."""
        if step_ms <= self.refuted_ms.get(cut, 0.0):
            return False
        if step_ms < self.possible_ms.get(cut, np.inf):
            if not all(self._can_run(cut, pair, step_ms, look) for pair in self.pairs):
                self.refuted_ms[cut] = step_ms
                return False
            self.possible_ms[cut] = step_ms
        return True

    def _can_run(self, cut: tuple[int, ...], pair: Pair, step_ms: float, look: Look) -> bool:
        """Whether the stage of a pair can run everything within step_ms, however many passes are kept."""
        assert self.graph is not None
        times, stage = self._times_of(cut), pair.forwards.stage
        begin, end = cut[stage : stage + 2]
        if not pair.is_limited:
            return can_take(self.graph, times, pair, pair.most_kept, step_ms)
        for kept in range(1, pair.most_kept + 1):
            look()
            load = self._load_kept(pair.part_of, kept, look)[stage, begin, end]
            if self.graph.num_microbatches * load > step_ms:
                return False  # nor with room for more
            own = times
            if self.of.is_plain:
                backward = times.backward_ms.copy()
                backward[stage] = max(backward[stage], load - times.forward_ms[stage])
                own = times._replace(backward_ms=backward)
            if can_take(self.graph, own, pair, kept, step_ms):
                return True
        return False

    def _load_kept(self, part_of: tuple[int, int], kept: int, look: Look) -> Floats:
        """[P, N + 1, N + 1] `loads_ms` where at some full moment a stage keeps so many passes of a part of an encoder.
        Raises what `look` does."""
        if kept < 2 or self.beside_kept is None:
            return self.loads_ms
        if (part_of, kept) not in self.loads_kept_ms:
            segments = self.beside_kept(part_of, kept)
            self.loads_kept_ms[part_of, kept] = least_loads(prepare(segments, 1.0, 1.0, self.of.beside), look)
        return self.loads_kept_ms[part_of, kept]

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
