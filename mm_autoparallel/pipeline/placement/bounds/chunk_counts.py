"""Counts: what stages with several chunks take by how many layers of the main kind each has.

Which of its chunks holds a layer is left open, and `options` knows what so many cost at least: of a stage's work, and
of any mixture of paths. What stands before the main kind in the chain may fill virtual stages alone, and from the first
layer of the main kind on each holds one, so all of it hangs on the place of that layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.bounds.bound import ANY_STEP_MS, available_bytes, available_host_bytes
from mm_autoparallel.pipeline.placement.bounds.main_kind import MainKind, fullest_moments, least_freed, least_total
from mm_autoparallel.pipeline.placement.bounds.options import least_cost, most_layers, options_of
from mm_autoparallel.pipeline.placement.bounds.stage_counts import Work, path_of_counts
from mm_autoparallel.pipeline.placement.paths.average_path import AveragePath, average_path
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.simulate.loads import microbatch_classes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Place = int | None
"""The virtual stage that has the first layer of the main kind; None: any, and any stage may be without one."""

#: Mixtures are looked for with work from each such part of a row of virtual stages on (assumed).
PARTS_OF_ROW = 4
#: What a mixture is looked for is rounded to so many digits, so that one serves many problems; it bounds all of them.
DIGITS = 2


@dataclass(frozen=True, eq=False)
class Chain:
    """Blocks by their place in the chain. main: one of the main kind, which has num_layers. pinned: others that must
    lie on one stage, with that stage; free: those that need not, in_front and behind: those of them that stand before
    and after all of the main kind. places: of the first layer of the main kind. num_after: layers of other kinds that
    follow the last.
    """

    main: int
    num_layers: int
    pinned: tuple[tuple[int, int], ...]
    free: tuple[int, ...]
    in_front: tuple[int, ...]
    behind: tuple[int, ...]
    places: tuple[Place, ...]
    num_after: int


def divide(problem: Problem, segments: Segments) -> Chain:
    """The chain by its main kind: the movable layers with the most work."""
    chain = problem.chain
    loads_ms = [block.count * (block.forward_ms + block.backward_ms) for block in segments.problem.chain]
    main = max((e for e, block in enumerate(chain) if not block.pinned), key=lambda e: loads_ms[e])
    kind = replace(chain[main], name="", count=0)
    others = [e for e, block in enumerate(chain) if replace(block, name="", count=0) != kind]
    ours = [e for e in range(len(chain)) if e not in others]
    layers = {e: chain[e].count for e in others if chain[e].layer}
    together = chain[main].layer and not any(ours[0] < e < ours[-1] for e in layers)
    num_before = sum(count for e, count in layers.items() if e < ours[0])
    stage_of = {"first": 0, "last": problem.stage_of[-1], None: -1}
    return Chain(
        main=main,
        num_layers=sum(chain[e].count for e in ours),
        pinned=tuple((e, stage_of[chain[e].pinned]) for e in others if chain[e].pinned),
        free=tuple(e for e in others if not chain[e].pinned),
        in_front=tuple(e for e in others if not chain[e].pinned and e < ours[0]),
        behind=tuple(e for e in others if not chain[e].pinned and e > ours[-1]),
        places=tuple(range(min(num_before + 1, problem.num_virtual_stages))) if together else (None,),
        num_after=sum(count for e, count in layers.items() if e > ours[-1]),
    )


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of paths for work from virtual stage `begin` on; below -1 it names one for counts of stages."""

    begin: int
    path: AveragePath


class Counts:
    """What stages of n layers of the main kind take, by the place of the first."""

    def __init__(self, problem: Problem, segments: Segments, chain: Chain, of: MainKind, least_scale: float) -> None:
        """segments: of the mean micro-batch. least_scale: as in `bound_many_chunks`."""
        self.chain, self._problem, self._segments = chain, problem, segments
        blocks, num_stages, factors = segments.problem.chain, problem.num_stages, problem.time_factors
        self._factors, self._available_bytes = np.array(factors), available_bytes(problem)
        # [P, N + 1] layers, or bytes, that must be freed at least; below 0 where that many do not fit
        self._freed_count = least_freed(of, len(blocks[chain.main].modes) < 2)
        moments = fullest_moments(problem.schedule, num_stages, problem.num_chunks, problem.num_microbatches)
        self._moments = [(rows, [self._room_of(s, row) for row in rows]) for s, rows in enumerate(moments)]
        self._host_bytes = np.full(num_stages, np.inf)
        if problem.host_limit_bytes:
            self._host_bytes = available_host_bytes(problem)
        self._passes = problem.num_microbatches * problem.least_load_fraction  # of each chunk, as far as they take time
        loads_ms = [self._passes * (block.forward_ms + block.backward_ms) for block in blocks]
        self._pinned_ms = np.zeros(num_stages)  # work in the whole step
        for e, stage in chain.pinned:
            self._pinned_ms[stage] += blocks[e].count * loads_ms[e] * factors[stage]
        self._free_ms = sum(blocks[e].count * loads_ms[e] for e in chain.free) * min(factors)
        begin = segments.start[segments.first[:num_stages]]  # no stage's first chunk begins earlier
        latency_ms = np.zeros(num_stages)
        if num_stages > 1:
            latency_ms[1:] = np.cumsum(problem.p2p_ms[: num_stages - 1])
        least_factor = np.minimum.accumulate([factors[0], *factors[:-1]])  # of the stages before
        forward_before_ms = least_scale * segments.forward_ms[begin] * least_factor + latency_ms
        # [P] what a stage's first forward and last backward wait for; and the larger sum over all stages, of that or of
        # what comes before their forwards and after their work
        self._before_ms = forward_before_ms
        if not problem.splits:  # else weight gradients may follow, for which no other stage waits
            self._before_ms = forward_before_ms + least_scale * segments.backward_ms[begin] * least_factor
        tails_ms = float(segments.tail_ms[-1]) + sum(problem.stage_tail_ms)
        self._taken_ms = max(float(self._before_ms.sum()), float(forward_before_ms.sum()) + tails_ms)
        self._works_ms: dict[Place, Floats] = {}
        self._least: dict[tuple[int, int, int], Floats] = {}
        self._most: dict[tuple[int, int, float], float] = {}

    def _room_of(self, stage: int, in_flight: Floats) -> float:
        """Bytes that pinned blocks, and what passes beside a layer, leave on a stage with so many micro-batches."""
        problem, last = self._problem, self._problem.num_chunks - 1
        room_bytes = float(self._available_bytes[stage]) - problem.chain[self.chain.main].transient_bytes
        for e, at in self.chain.pinned:
            if at == stage:
                block = problem.chain[e]
                kept_bytes = min([block.activation_bytes, *(mode.activation_bytes for mode in block.modes)])
                chunk = 0 if block.pinned == "first" else last
                room_bytes -= block.count * (block.static_bytes + float(in_flight[chunk]) * kept_bytes)
        return room_bytes

    def can_hold(self, place: Place, excess_bytes: float) -> bool:
        """Whether limits that much higher could hold all layers of the main kind, if the first lies there; True where
        that is unknown."""
        if place is None:
            return True
        total = 0.0
        for s in range(self._problem.num_stages):
            key = (s, self._num_without(s, place), excess_bytes)
            if key not in self._most:
                self._most[key] = self._most_layers(*key)
            if self._most[key] < 0.0:
                return False
            total += self._most[key]
        return total >= self.chain.num_layers

    def _most_layers(self, stage: int, num_without: int, excess_bytes: float) -> float:
        """How many layers of the main kind fit on a stage at most, below 0 where not even those that must be."""
        options = options_of(self._problem.chain[self.chain.main])
        chunks, moments = self._chunks(stage, num_without), zip(*self._moments[stage], strict=True)
        return min(most_layers(options, row, *chunks, room + excess_bytes) for row, room in moments)

    def _num_without(self, stage: int, place: Place) -> int:
        """How many first chunks of a stage have no layer of the main kind; -1: any may."""
        return -1 if place is None else sum(virtual < place for virtual in self._problem.virtual_stages[stage])

    def _chunks(self, stage: int, num_without: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """[C] chunks of a stage that may have layers of the main kind, and those that must have one."""
        virtual_stages = np.array(self._problem.virtual_stages[stage])
        is_allowed = np.arange(len(virtual_stages)) >= num_without
        last = self._problem.num_virtual_stages - self.chain.num_after
        is_needed = is_allowed & (virtual_stages < last) & (num_without >= 0)
        return is_allowed, is_needed

    # ----------------------------------------------------------------------------------------------------------- work

    def has_room(self, place: Place, step_ms: float) -> bool:
        """Whether the stages can take all work within `step_ms` (`stage`, summed over all stages)."""
        works_ms = self._works_at(place)
        work_ms = self._free_ms + float(least_total(works_ms, works_ms, step_ms - self._before_ms))
        return work_ms <= len(self._before_ms) * step_ms - self._taken_ms

    def _works_at(self, place: Place) -> Floats:
        """[P, N + 1] a stage's work in the whole step, with what must be freed and what is pinned."""
        known = self._works_ms.get(place)
        if known is None:
            passes = np.full((self._problem.num_stages, self._problem.num_chunks), self._passes)
            known = self._costs(self._segments.problem.chain[self.chain.main], -1, passes, passes, place)
            known = known * self._factors[:, None] + self._pinned_ms[:, None]
            self._works_ms[place] = known
        return known

    def _costs(
        self, block: ChainBlock, begin: int, forward_count: Floats, backward_count: Floats, place: Place
    ) -> Floats:
        """[P, N + 1] the least that n layers add where passes in each chunk count so often, [P, C]; before the stage's
        factor; infinite where that many cannot be. begin: names the counts; -1: those of work."""
        rows = []
        for s in range(self._problem.num_stages):
            num_without = self._num_without(s, place)
            key = (begin, s, num_without)
            if key not in self._least:
                self._least[key] = self._cost(block, s, num_without, forward_count[s], backward_count[s])
            rows.append(self._least[key])
        return np.array(rows)

    def _cost(
        self, block: ChainBlock, stage: int, num_without: int, forward_count: Floats, backward_count: Floats
    ) -> Floats:
        """The same of one stage, whose first num_without chunks have none and whose others have one; -1: any may."""
        is_allowed, is_needed = self._chunks(stage, num_without)
        freed_count = self._freed_count[stage]
        most = len(freed_count) - 1
        options, rows = options_of(block), zip(*self._moments[stage], strict=True)
        least_ms = np.zeros(most + 1)
        for in_flight, room_bytes in rows:
            passes = (forward_count, backward_count, in_flight)
            at_moment = least_cost(options, *passes, is_allowed, is_needed, room_bytes, self._host_bytes[stage], most)
            least_ms = np.maximum(least_ms, at_moment)
        if len(block.modes) == 1:  # whole layers that must take the mode
            mode, own = block.modes[0], forward_count * block.forward_ms + backward_count * block.backward_ms
            extra = forward_count * mode.extra_forward_ms + backward_count * mode.extra_backward_ms
            own_ms, extra_ms = own[is_allowed].min(initial=np.inf), extra[is_allowed].min(initial=np.inf)
            if np.isfinite(own_ms):
                least_ms = np.maximum(least_ms, np.arange(most + 1) * own_ms + freed_count * extra_ms)
        return np.where(freed_count < 0, np.inf, least_ms)

    # ------------------------------------------------------------------------------------------------------- mixtures

    def begin_of(self, place: Place) -> int:
        """The virtual stage from which on the mixture of a place is looked for."""
        part = max(1, self._problem.num_stages // PARTS_OF_ROW)
        return 0 if place is None else place // part * part

    def mix(self, begin: int) -> Mixture | None:
        """A mixture of paths found for the problem's work from virtual stage `begin` on, and what modes cost at least;
        None where the schedule is too long for one."""
        problem, main = self._problem, self.chain.main
        chain, num_stages = problem.chain, problem.num_stages
        works_ms = self._works_at(None) - self._pinned_ms[:, None]
        mean = self._segments.problem.chain[main]
        own_ms = np.arange(works_ms.shape[1]) * (mean.forward_ms + mean.backward_ms)
        extra_ms = works_ms / self._factors[:, None] / problem.num_microbatches - own_ms
        recompute_ms = float(least_total(extra_ms, works_ms, np.full(num_stages, ANY_STEP_MS)))
        if not np.isfinite(recompute_ms):
            return None
        classes, scales = microbatch_classes(problem)
        count = np.array([block.count for block in chain])
        forward_ms = count * [block.forward_ms for block in chain] @ scales
        backward_ms = count * [block.backward_ms for block in chain] @ scales + recompute_ms * scales[main]
        hop_ms = float(np.mean(problem.p2p_ms)) if num_stages > 1 else 0.0
        times_ms = (forward_ms, backward_ms, np.array([self._segments.tail_ms[-1], hop_ms]))
        segment_ms = max(float(np.mean(forward_ms + backward_ms)), 1e-300)
        rounded = (tuple(float(f"{each:.{DIGITS}g}") for each in of / segment_ms) for of in times_ms)
        of = (problem.schedule, num_stages, problem.num_chunks, problem.num_microbatches, classes)
        path = _mixture_of(*of, *rounded, begin)
        return None if path is None else Mixture(begin, path)

    def condition(self, place: Place, mixture: Mixture | None) -> Callable[[float], bool]:
        """What is true of a step if some placement with the first layer there takes no longer."""
        if mixture is None:
            return lambda step_ms: self.has_room(place, step_ms)
        costs_ms, fixed_ms = self.costs_on(mixture, place)
        works_ms = self._works_at(place)

        def is_possible(step_ms: float) -> bool:
            least_ms = least_total(costs_ms, works_ms, step_ms - self._before_ms) + fixed_ms
            return self.has_room(place, step_ms) and bool(least_ms <= step_ms)

        return is_possible

    def costs_on(self, mixture: Mixture, place: Place) -> tuple[Floats, float]:
        """[P, N + 1] what n layers of each stage make a mixture cost at least, and what all else does."""
        forward_count, backward_count = (self._per_chunk(count, self.chain.main) for count in _counts_of(mixture.path))
        block = self._problem.chain[self.chain.main]
        costs_ms = self._costs(block, mixture.begin, forward_count, backward_count, place)
        ends = mixture.path.end_fraction * block.tail_ms
        costs_ms = costs_ms * self._factors[:, None] + np.arange(costs_ms.shape[1]) * ends[:, None]
        return costs_ms, self._fixed_ms(mixture.path, place)

    def allowed(self, place: Place, step_ms: float) -> Bools | None:
        """[P, N + 1] counts of which each stage can take the work within `step_ms`; None where all cannot take all."""
        if not self.has_room(place, step_ms):
            return None
        may_be: Bools = self._works_at(place) <= (step_ms - self._before_ms)[:, None]
        return may_be

    def work_of(self, place: Place, counts: Ints) -> Work:
        """What a placement with so many layers of the main kind on each stage, [P], takes of each micro-batch about."""
        problem, chain, of = self._problem, self._segments.problem.chain, self.chain
        num_stages, num_virtual, block = problem.num_stages, problem.num_virtual_stages, chain[of.main]
        first, own_ms = place or 0, np.array([block.forward_ms, block.backward_ms])
        fixed_ms = np.zeros((2, num_virtual))
        if place is not None:
            fixed_ms[:, first : num_virtual - of.num_after] = own_ms[:, None]
        held = np.array(
            [np.count_nonzero(fixed_ms[0, s::num_stages] + fixed_ms[1, s::num_stages]) for s in range(num_stages)]
        )
        rest_ms = np.maximum(counts - held, 0) * own_ms[:, None]
        works_ms = self._works_at(place)[np.arange(num_stages), counts] - self._pinned_ms
        extra_ms = works_ms / self._factors / problem.num_microbatches - counts * own_ms.sum()
        rest_ms[1] += np.maximum(extra_ms, 0.0)
        for e in (*(e for e, _ in of.pinned), *of.behind):
            at = 0 if chain[e].pinned == "first" else num_virtual - 1
            fixed_ms[:, at] += chain[e].count * np.array([chain[e].forward_ms, chain[e].backward_ms])
        free = [e for e in of.free if e not in of.behind]
        free_ms = [
            float(sum(chain[e].count * getattr(chain[e], name) for e in free)) for name in ("forward_ms", "backward_ms")
        ]
        hops_ms = np.zeros(2 * num_virtual - 1)
        hops_ms[: num_virtual - 1] = problem.p2p_ms
        if all(each.sends_gradient for each in chain):
            hops_ms[num_virtual - 1 : -1] = problem.p2p_ms
        factors = self._factors[np.arange(num_virtual) % num_stages]
        tails_ms = np.array(problem.stage_tail_ms) + counts * block.tail_ms
        fixed_ms, rest_ms = fixed_ms * factors, rest_ms * self._factors
        last_free = num_virtual - 1 if place is None else place
        shared, free_of = (rest_ms[0], rest_ms[1], first), (free_ms[0], free_ms[1], last_free)
        return Work(fixed_ms[0], fixed_ms[1], *shared, *free_of, hops_ms, tails_ms)

    def play(self, place: Place, counts: Ints, number: int) -> Mixture | None:
        """A mixture of paths found for a placement with such counts; None as in `mix`. number: of it, 0 or more."""
        problem = self._problem
        path = path_of_counts(
            problem.schedule,
            problem.num_stages,
            problem.num_chunks,
            problem.num_microbatches,
            self.work_of(place, counts),
        )
        return None if path is None else Mixture(-2 - number, path)

    def _per_chunk(self, count: Floats, e: int) -> Floats:
        """[P, C] how often passes of chain block e lie on a mixture, of counts [K, classes]."""
        _, scales = microbatch_classes(self._problem)
        counts: Floats = (count @ scales[e]).reshape(-1, self._problem.num_stages).T.copy()
        return counts

    def _fixed_ms(self, path: AveragePath, place: Place) -> float:
        """What all but the main kind adds to the mixture's length at least, if its first layer lies there: what stands
        in front of it lies no further on, and what stands behind it no further ahead."""
        problem, chain = self._problem, self._problem.chain

        def cost_ms(e: int) -> Floats:
            """[P, C] of one such block, by where it lies."""
            forward_count, backward_count = (self._per_chunk(count, e) for count in _counts_of(path))
            passes_ms = forward_count * chain[e].forward_ms + backward_count * chain[e].backward_ms
            costs_ms: Floats = passes_ms * self._factors[:, None] + (path.end_fraction * chain[e].tail_ms)[:, None]
            return costs_ms

        fixed_ms = float(path.end_fraction @ np.array(problem.stage_tail_ms))
        for e, stage in self.chain.pinned:
            chunk = 0 if chain[e].pinned == "first" else problem.num_chunks - 1
            fixed_ms += chain[e].count * float(cost_ms(e)[stage, chunk])
        for e in self.chain.free:
            along = cost_ms(e).T.ravel()  # [K]
            if place is not None and e in self.chain.in_front:
                along = along[: place + 1]
            elif place is not None and e in self.chain.behind:
                along = along[place:]
            fixed_ms += chain[e].count * float(along.min())
        if problem.num_stages > 1:
            fixed_ms += float(path.hop_forward_count @ np.array(problem.p2p_ms))
            if all(block.sends_gradient for block in chain):
                fixed_ms += float(path.hop_backward_count @ np.array(problem.p2p_ms))
        return fixed_ms


def _counts_of(path: AveragePath) -> tuple[Floats, Floats]:
    return path.forward_count, path.backward_count


@lru_cache(maxsize=1024)
def _mixture_of(
    schedule: str,
    num_stages: int,
    num_chunks: int,
    num_microbatches: int,
    classes: tuple[int, ...],
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    tail_and_hop: tuple[float, float],
    begin: int,
) -> AveragePath | None:
    """`average_path` of times in any unit."""
    of = (schedule, num_stages, num_chunks, num_microbatches, classes)
    return average_path(*of, np.array(forward), np.array(backward), *tail_and_hop, begin)
