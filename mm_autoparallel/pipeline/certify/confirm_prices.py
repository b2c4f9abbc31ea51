"""Confirm a bound by prices: add up, for each part of the space, what its prices show of every placement in it.

Written from the problem alone. With weights of paths (in all 1), prices of memory and prices of counts, no placement of
a part is below

    Σ weight · (hops and fixed tail of the path) - Σ price · room + Σ price · (least or most of the count)
    + Σ over blocks: how many there are · what the cheapest way to place one costs,

where one on virtual stage k in mode m costs its passes, as often as the mean path has them (computed, or moved to the
host), its tail and the price of its bytes, less the prices of the counts that it belongs to (Lagrange).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.placement.relaxation.duals import Division, Prices
from mm_autoparallel.pipeline.problem import Problem, list_host_links
from mm_autoparallel.pipeline.simulate import loads
from mm_autoparallel.pipeline.simulate.step import CriticalPath

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Parts shown to be this little below the bound count as shown: sums of the same numbers in another order.
CONFIRMED_FRACTION = 1e-7
#: Rounding of a sum, as a fraction of the sizes of its terms.
ROUNDING_FRACTION = 1e-12


@dataclass(frozen=True)
class _Counts:
    """Least and most of the main block, on each stage [P] and virtual stage [K]."""

    stage_least: Ints
    stage_most: Ints
    virtual_least: Ints
    virtual_most: Ints


def confirm_prices(
    problem: Problem,
    main: int,
    paths: Sequence[CriticalPath],
    prices: Sequence[Prices],
    parts: Sequence[Division | int | None],
    bound_ms: float,
    should_stop: Callable[[], bool],
) -> None:
    """Show that no placement is below bound_ms. Divisions name later parts, each of them once.

    Raises PlanError naming a part that is not shown, Unconfirmed where it is stopped.
    """
    shown = _Shown(problem, main, paths, bound_ms)
    nothing = np.zeros(problem.num_virtual_stages, dtype=np.int64)
    most = nothing + problem.chain[main].count
    waiting = [(0, _Counts(nothing[: problem.num_stages], most[: problem.num_stages], nothing, most))]
    while waiting:
        if should_stop():
            raise Unconfirmed(f"the check was stopped with {len(waiting)} of its parts open")
        at, counts = waiting.pop()
        tight = shown.tighten(counts)
        if tight is None:
            continue
        part = parts[at]
        if isinstance(part, Division):
            kind = "virtual" if part.of_virtual_stage else "stage"
            fewer, more = (getattr(tight, f"{kind}_{name}").copy() for name in ("most", "least"))
            fewer[part.at], more[part.at] = min(fewer[part.at], part.least - 1), max(more[part.at], part.least)
            waiting.append((part.fewer, replace(tight, **{f"{kind}_most": fewer})))
            waiting.append((part.more, replace(tight, **{f"{kind}_least": more})))
            continue
        part_ms = 0.0 if part is None else shown.least_ms(prices[part], tight)
        if not part_ms >= bound_ms * (1.0 - CONFIRMED_FRACTION):
            raise PlanError(
                f"lower_bound_ms is {bound_ms!r}, but proof.parts[{at}] shows only that no placement of it is below "
                f"{part_ms!r} ms"
            )


class _Shown:
    """What prices show of one problem's placements that are below bound_ms."""

    def __init__(self, problem: Problem, main: int, paths: Sequence[CriticalPath], bound_ms: float) -> None:
        self.problem, self.main, self.bound_ms = problem, main, bound_ms
        self._list_ways()
        graph = loads.graph_of(problem)
        stages = np.repeat(np.arange(problem.num_stages), [len(rows) for rows in graph.in_flight])
        of_chunk = np.concatenate(graph.in_flight)[:, self.virtual // problem.num_stages]
        here = stages[:, None] == self.virtual % problem.num_stages
        room = loads.allowed_bytes(problem) - np.array(problem.stage_static_bytes) - _passing_bytes(problem, bound_ms)
        self.room_bytes = np.concatenate([room[stages], loads.allowed_host_bytes(problem)[stages]])
        self.bytes = np.concatenate(
            [
                np.where(here, of_chunk * self.activation_bytes + self.held_bytes, 0.0),
                np.where(here, of_chunk * self.host_bytes + self.host_held_bytes, 0.0),
            ]
        )
        self.counts = [np.concatenate([path.forward.ravel(), path.backward.ravel()]) for path in paths]
        self.ends = [path.end_stage for path in paths]
        hops = [[loads.hop_ms(problem, k, b) for b in problem.chain] for k in range(problem.num_virtual_stages - 1)]
        least = np.array(hops).reshape(len(hops), len(problem.chain), 2).min(axis=1)  # [K - 1, forth and back]
        self.fixed_ms = [
            float(path.hop_forward @ least[:, 0] + path.hop_backward @ least[:, 1])
            + problem.stage_tail_ms[path.end_stage]
            for path in paths
        ]

    def _list_ways(self) -> None:
        """Every way to place one of a block: [n] virtual stage, block, and what it costs there in one of its modes."""
        problem = self.problem
        _, scales = loads.microbatch_classes(problem)
        links, last = list_host_links(problem), problem.num_virtual_stages - 1
        ways = []
        for k in range(problem.num_virtual_stages):
            factor, link = problem.time_factors[k % problem.num_stages], links[k % problem.num_stages]
            for e, b in enumerate(problem.chain):
                if (b.pinned == "first" and k > 0) or (b.pinned == "last" and k < last):
                    continue
                if b.within and not b.within[0] <= k < b.within[1]:
                    continue
                modes = [(0.0, 0.0, b.activation_bytes, 0.0, 0.0)] + [
                    (m.extra_forward_ms, m.extra_backward_ms, m.activation_bytes, m.restored_bytes, m.host_bytes)
                    for m in b.modes
                ]
                for forward, backward, kept, restored, host in modes:
                    times = ((b.forward_ms + forward) * factor, (b.backward_ms + backward) * factor, host * link)
                    ways.append((k, e, *times, kept, b.static_bytes + restored, host, b.host_static_bytes, b.tail_ms))
        columns = [np.array(column) for column in zip(*ways, strict=True)]
        self.virtual, self.block = columns[0].astype(np.int64), columns[1].astype(np.int64)
        self.forward_ms, self.backward_ms, self.host_ms = (ms[:, None] * scales[self.block] for ms in columns[2:5])
        self.activation_bytes, self.held_bytes, self.host_bytes, self.host_held_bytes, self.tail_ms = columns[5:]
        self.is_layer = np.array([b.layer for b in problem.chain])[self.block]

    def tighten(self, counts: _Counts) -> _Counts | None:
        """Counts that a step below the bound keeps as well; None: no placement has them all.

        A stage works one task after another, and holds what its virtual stages hold.
        """
        problem, chain = self.problem, self.problem.chain
        main = chain[self.main]
        most = counts.stage_most
        each_ms = (main.forward_ms + main.backward_ms) * problem.num_microbatches * np.array(problem.time_factors)
        if each_ms.min() > 0.0 and not any(block.microbatch_scale for block in chain):
            pinned_ms = np.zeros(problem.num_stages)
            for block in chain:
                if block.pinned and block is not main:
                    stage = 0 if block.pinned == "first" else -1
                    pinned_ms[stage] += block.count * (block.forward_ms + block.backward_ms)
            pinned_ms *= problem.num_microbatches * np.array(problem.time_factors)
            room = np.floor((self.bound_ms - pinned_ms) / each_ms * (1.0 + 1e-9))
            most = np.minimum(most, room).astype(np.int64)
        sums = [
            x.reshape(problem.num_chunks, -1).sum(axis=0) for x in (counts.virtual_least, counts.virtual_most)
        ]  # fmt: skip
        least, most = np.maximum(counts.stage_least, sums[0]), np.minimum(most, sums[1])
        if np.any(least > most) or least.sum() > main.count or most.sum() < main.count:
            return None
        return replace(counts, stage_least=least, stage_most=most)

    def least_ms(self, prices: Prices, counts: _Counts) -> float:
        """No placement with these counts is below."""
        problem = self.problem
        num_stages, num_virtual = problem.num_stages, problem.num_virtual_stages
        whole = sum(prices.path_fraction.values())
        passes = np.zeros(len(self.counts[0]))
        ends, fixed_ms = np.zeros(num_stages), 0.0
        for path, weight in prices.path_fraction.items():
            passes += weight / whole * self.counts[path]
            ends[self.ends[path]] += weight / whole
            fixed_ms += weight / whole * self.fixed_ms[path]
        moved = np.zeros(len(passes))
        moved[list(prices.moved_count)] = list(prices.moved_count.values())
        moved = np.minimum(moved, passes)
        computes, moves = (
            x.reshape(2, num_virtual, -1)[:, self.virtual] for x in (passes - moved, moved)
        )  # [2, n, C], forward and backward
        cost_ms = (computes[0] * self.forward_ms + computes[1] * self.backward_ms).sum(axis=1)
        cost_ms += (moves.sum(axis=0) * self.host_ms).sum(axis=1)
        cost_ms += ends[self.virtual % num_stages] * self.tail_ms
        terms_ms, fixed_terms_ms = cost_ms.copy(), abs(fixed_ms)  # sizes of what is added up
        for row, price in prices.memory_ms.items():
            cost_ms += price * self.bytes[row]
            fixed_ms -= price * self.room_bytes[row]
            terms_ms += abs(price) * self.bytes[row]
            fixed_terms_ms += abs(price * self.room_bytes[row])
        is_main = self.block == self.main
        no_less, no_more = np.ones(num_virtual), np.full(num_virtual, problem.max_layers_per_chunk or np.inf)
        for named, belongs, where, least, most in (
            (prices.layers_ms, self.is_layer, self.virtual, no_less, no_more),
            (prices.stages_ms, is_main, self.virtual % num_stages, counts.stage_least, counts.stage_most),
            (prices.virtual_stages_ms, is_main, self.virtual, counts.virtual_least, counts.virtual_most),
        ):
            for at, price in named.items():
                bound = least[at] if price > 0.0 else most[at]
                fixed_ms += price * bound
                fixed_terms_ms += abs(price * bound)
                cost_ms[belongs & (where == at)] -= price
                terms_ms[belongs & (where == at)] += abs(price)
        least_ms, largest_ms = np.full(len(problem.chain), np.inf), np.zeros(len(problem.chain))
        np.minimum.at(least_ms, self.block, cost_ms)
        np.maximum.at(largest_ms, self.block, terms_ms)
        counts_of = np.array([block.count for block in problem.chain])
        rounding_ms = ROUNDING_FRACTION * (fixed_terms_ms + largest_ms @ counts_of)
        return float(fixed_ms + least_ms @ counts_of - rounding_ms)


def _passing_bytes(problem: Problem, bound_ms: float) -> Floats:
    """[P] transient bytes that each stage has at its peak, at least, where the step is below bound_ms.

    Every chunk has a layer: the least of all layers. Take any block e of layers. Stage s's last chunk has a layer of e
    or of a block behind it, and then so has the last chunk of each stage behind s; or all of e lies on the last chunks
    of stages s + 1 to P - 1. There stage j has n_j of them: its first pass comes once a micro-batch went through those
    before it, its last goes back through them, and between the two it works n_j · M. Where that is too much for the
    bound, stage s has at least what the layers from e on all have.
    """
    if problem.num_stages == 1:  # it holds them all
        return np.array([max(block.transient_bytes for block in problem.chain)])
    layers = [block for block in problem.chain if block.layer]
    passing = np.full(problem.num_stages, min(block.transient_bytes for block in layers))
    if loads.microbatch_classes(problem)[0]:
        return passing
    for i, block in enumerate(layers):
        behind = min(layer.transient_bytes for layer in layers[i:])
        each_ms = (block.forward_ms + block.backward_ms) * min(problem.time_factors)
        if block.pinned or each_ms <= 0.0:
            continue
        for s in range(problem.num_stages):
            room = 0  # of layers like these on the stages behind s, in time
            for _ in range(problem.num_stages - 1 - s):
                room += max(0, int((bound_ms * (1.0 + 1e-9) / each_ms - room) / problem.num_microbatches))
            if room < block.count:
                passing[s] = max(passing[s], behind)
    return passing
