"""Segments: the chain cut into the smallest pieces that a placement may part, with prefix sums over them.

Blocks that must stay together (attach) form one segment; equal segments in a row form a run. A chunk holds an interval
of segments, and everything it costs is a difference of prefix sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.laid_out import check_layouts, has_layouts, relaxed
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem, check_modes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Segments:
    """N segments over a flat chain of E blocks.

    flat: chain index of each flat block, [E]. start: flat position where each segment begins, [N + 1].
    run: which run each segment belongs to, [N]. run_size: segments in each run.
    forward_ms … layers, step_bytes, step_shard_bytes, weight_ms (of backwards, what is the weights'), parted_ms (that
    and what parting costs), pending_bytes: prefix sums over flat positions, [E + 1]. transient_bytes, step_once_bytes:
    per flat block, [E].
    groups: names of the G recompute groups (modes are taken in order along one). before: [G, E + 1] how many of its
    layers lie before each flat position. A lane is a group in one of its modes; lane_offset: [G + 1] the first of each
    group's, in the order of its modes. A chunk whose lanes of a group count n1, n2, … runs the first n1 of the group's
    layers that it holds in the first mode, the next n2 in the second, … extra_forward_ms, extra_backward_ms,
    saved_bytes, restored_bytes, host_bytes: [L, most + 1] prefix sums over the group's layers, were they in the lane's
    mode; saved is the block's own activation minus the mode's.
    Where layers have layouts, prefix sums are of the least of any layout: bounds of what the segments cost.
    first, last: lowest and highest segment index at which virtual stage k may begin, [K + 1] (boundary 0 is 0, K is N).
    num_spare: so many of the first virtual stages may hold nothing of the chain (`thinned`); 0: each has a layer.
    """

    problem: Problem
    flat: Ints
    start: Ints
    run: Ints
    run_size: Ints
    forward_ms: Floats
    backward_ms: Floats
    static_bytes: Floats
    host_static_bytes: Floats
    activation_bytes: Floats
    tail_ms: Floats
    layers: Ints
    transient_bytes: Floats
    step_bytes: Floats
    step_once_bytes: Floats
    step_shard_bytes: Floats
    groups: tuple[tuple[str, str], ...]
    before: Ints
    lane_offset: Ints
    extra_forward_ms: Floats
    extra_backward_ms: Floats
    saved_bytes: Floats
    restored_bytes: Floats
    host_bytes: Floats
    first: Ints
    last: Ints
    weight_ms: Floats
    parted_ms: Floats
    pending_bytes: Floats
    num_spare: int = 0

    @property
    def num_segments(self) -> int:
        return len(self.start) - 1

    @property
    def num_lanes(self) -> int:
        return int(self.lane_offset[-1])

    @property
    def limits_host(self) -> bool:
        """Whether a limit of what lies on the host can decide anything."""
        moves = self.host_bytes.any() or self.host_static_bytes.any()
        return bool(self.problem.host_limit_bytes) and bool(moves)

    @property
    def has_layouts(self) -> bool:
        """Whether layers may run in several layouts."""
        return has_layouts(self.problem)

    @property
    def has_step(self) -> bool:
        """Whether anything passes during the optimizer's step."""
        return bool(self.step_bytes.any() or self.step_once_bytes.any())

    @property
    def is_plain(self) -> bool:
        """Whether a mode, one at most in each group, changes backward and memory alone: recompute as it was always."""
        one_each = self.num_lanes == len(self.groups)
        return one_each and not self.extra_forward_ms.any() and not self.host_bytes.any()

    def placement(self, boundaries: list[int], lanes: list[list[int]]) -> Placement:
        """The placement with virtual stage k = segments boundaries[k] to boundaries[k + 1], lanes[k][lane] layers in
        each lane.
        """
        chain = self.problem.chain
        group_of = {name: g for g, name in enumerate(self.groups)}
        layers, modes = [], []
        for k, (begin, end) in enumerate(pairwise(boundaries)):
            held = [0] * len(chain)
            for e in self.flat[self.start[begin] : self.start[end]].tolist():
                held[e] += 1
            left = list(lanes[k])
            chosen = []
            for e, block in enumerate(chain):
                counts = []
                room = held[e]
                first = int(self.lane_offset[group_of[block.group]]) if block.modes else 0
                for lane in range(first, first + len(block.modes)):
                    counts.append(min(room, left[lane]))
                    left[lane] -= counts[-1]
                    room -= counts[-1]
                chosen.append(tuple(counts))
            layers.append(tuple(held))
            modes.append(tuple(chosen))
        return Placement(tuple(layers), tuple(modes))

    def boundaries(self, placement: Placement) -> tuple[list[int], list[list[int]]]:
        """The inverse of `placement`: segment boundaries [K + 1] and counts of lanes [K][L]."""
        group_of = {name: g for g, name in enumerate(self.groups)}
        ends = np.cumsum([0, *(sum(held) for held in placement.layers)])
        lanes = []
        for chosen in placement.modes:
            row = [0] * self.num_lanes
            for block, counts in zip(self.problem.chain, chosen, strict=True):
                for m, n in enumerate(counts):
                    row[int(self.lane_offset[group_of[block.group]]) + m] += n
            lanes.append(row)
        return np.searchsorted(self.start, ends).tolist(), lanes


def cut_into_segments(problem: Problem) -> Segments:
    """Flatten the chain. Raises JobError where pins or attachments contradict the chain's order, or modes one
    another."""
    check_modes(problem)
    check_layouts(problem)
    chain, least = problem.chain, relaxed(problem).chain
    flat = [e for e, block in enumerate(chain) for _ in range(block.count)]
    start = [0]
    for position, (before, after) in enumerate(pairwise(flat), start=1):
        glued = (
            chain[before].attach is not None
            if before == after
            else (chain[before].attach == "next" or chain[after].attach == "previous")
        )
        if not glued:
            start.append(position)
    start.append(len(flat))
    limited = bool(problem.host_limit_bytes)
    signatures: list[tuple[object, ...]] = [
        tuple(_signature(chain[e], limited) for e in flat[a:b]) for a, b in pairwise(start)
    ]
    run = np.cumsum([0, *(a != b for a, b in pairwise(signatures))])
    layers = _prefix([int(chain[e].layer) for e in flat]).astype(np.int64)
    first, last = _boundary_windows(problem, flat, start, layers)
    return Segments(
        problem=problem,
        flat=np.array(flat),
        start=np.array(start),
        run=run,
        run_size=np.bincount(run),
        forward_ms=_prefix([least[e].forward_ms for e in flat]),
        backward_ms=_prefix([least[e].backward_ms for e in flat]),
        static_bytes=_prefix([least[e].static_bytes for e in flat]),
        host_static_bytes=_prefix([least[e].host_static_bytes for e in flat]),
        activation_bytes=_prefix([least[e].activation_bytes for e in flat]),
        tail_ms=_prefix([least[e].tail_ms for e in flat]),
        layers=layers,
        transient_bytes=np.array([least[e].transient_bytes for e in flat], dtype=np.float64),
        step_bytes=_prefix([least[e].step_bytes for e in flat]),
        step_once_bytes=np.array([least[e].step_once_bytes for e in flat], dtype=np.float64),
        step_shard_bytes=_prefix([least[e].shard_bytes for e in flat]),
        **_sum_lanes(chain, flat),
        first=first,
        last=last,
        weight_ms=_prefix([chain[e].backward_weight_ms for e in flat]),
        parted_ms=_prefix([chain[e].backward_weight_ms + chain[e].split_extra_ms for e in flat]),
        pending_bytes=_prefix([chain[e].pending_bytes for e in flat]),
    )


def _prefix(values: list[float] | list[int]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])


def _signature(block: ChainBlock, limited: bool) -> tuple[object, ...]:
    """Everything a cost can depend on: blocks that differ in name alone are equal. limited: what the host keeps is."""
    return (
        block.forward_ms,
        block.backward_ms,
        block.static_bytes,
        block.activation_bytes,
        block.modes,
        block.group if block.modes else None,
        block.layer,
        block.pinned,
        block.transient_bytes,
        block.tail_ms,
        block.output_bytes,
        block.sends_gradient,
        block.microbatch_scale,
        block.host_static_bytes if limited else 0.0,
        block.step_bytes,
        block.step_once_bytes,
        block.shard_bytes,
        block.reshards,
        block.backward_weight_ms,
        block.pending_bytes,
        block.split_extra_ms,
        block.within,
    )


def _sum_lanes(chain: tuple[ChainBlock, ...], flat: list[int]) -> dict[str, Any]:
    """`groups`, lanes and their sums, as `Segments` holds them."""
    modes_of = {block.group: len(block.modes) for block in chain if block.modes}
    names = tuple(modes_of)
    before = np.zeros((len(names), len(flat) + 1), dtype=np.int64)
    lane_offset = np.cumsum([0, *modes_of.values()])
    sums = np.zeros((5, int(lane_offset[-1]), len(flat) + 1))
    for g, name in enumerate(names):
        members = [bool(chain[e].modes) and chain[e].group == name for e in flat]
        before[g, 1:] = np.cumsum(members)
        layers = [chain[e] for e, is_member in zip(flat, members, strict=True) if is_member]
        for m, lane in enumerate(range(lane_offset[g], lane_offset[g + 1])):
            for n, block in enumerate(layers):
                mode = block.modes[m]
                saved = block.activation_bytes - mode.activation_bytes
                each = (mode.extra_forward_ms, mode.extra_backward_ms, saved, mode.restored_bytes, mode.host_bytes)
                sums[:, lane, n + 1] = sums[:, lane, n] + each
            sums[:, lane, len(layers) :] = sums[:, lane, len(layers) : len(layers) + 1]
    fields = ("extra_forward_ms", "extra_backward_ms", "saved_bytes", "restored_bytes", "host_bytes")
    return {
        "groups": names,
        "before": before,
        "lane_offset": lane_offset,
        **dict(zip(fields, sums, strict=True)),
    }


def _boundary_windows(problem: Problem, flat: list[int], start: list[int], layers: Ints) -> tuple[Ints, Ints]:
    """Where each boundary may lie so that every chunk can have a layer, none too many, and pins hold.

    Empty windows (first > last) mean that no placement exists; `infeasible` says why.
    """
    chain, num_virtual, num_segments = problem.chain, problem.num_virtual_stages, len(start) - 1
    pinned = [[chain[e].pinned for e in flat[a:b]] for a, b in pairwise(start)]
    after_first = max((u + 1 for u, pins in enumerate(pinned) if "first" in pins), default=0)
    before_last = min((u for u, pins in enumerate(pinned) if "last" in pins), default=num_segments)
    low, high = np.zeros(num_virtual + 1, dtype=np.int64), np.full(num_virtual + 1, num_segments, dtype=np.int64)
    for u, (a, b) in enumerate(pairwise(start)):  # where a boundary may lie for the sake of blocks that keep to stages
        for begin, end in filter(None, (chain[e].within for e in flat[a:b])):
            high[min(begin, num_virtual)] = min(high[min(begin, num_virtual)], u)
            low[min(end, num_virtual)] = max(low[min(end, num_virtual)], u + 1)
    if num_virtual > 1 and after_first > before_last:
        names = ", ".join(block.name for block in chain if block.pinned)
        raise JobError(
            f"the pinned blocks ({names}) contradict the chain's order: pinned first must come before pinned last"
        )
    at = layers[np.array(start)]  # layers before each segment
    most = problem.max_layers_per_chunk if problem.max_layers_per_chunk is not None else int(layers[-1])
    first, last = np.zeros(num_virtual + 1, dtype=np.int64), np.full(num_virtual + 1, num_segments, dtype=np.int64)
    last[0] = 0
    for k in range(1, num_virtual + 1):  # leftmost: one layer each; rightmost: as many as allowed
        first[k] = np.searchsorted(at, at[first[k - 1]] + 1) if at[first[k - 1]] < at[-1] else num_segments + 1
        last[k] = np.searchsorted(at, at[last[k - 1]] + most, side="right") - 1
        if k == 1:
            first[k] = max(first[k], after_first)
        if k < num_virtual:
            last[k] = min(last[k], before_last)
        first[k], last[k] = max(first[k], low[k]), min(last[k], high[k])
        if first[k] > num_segments:
            return first, np.minimum(last, first - 1)
    first[num_virtual] = num_segments
    for k in range(num_virtual - 1, 0, -1):
        last[k] = min(last[k], np.searchsorted(at, at[last[k + 1]] - 1, side="right") - 1)
        first[k] = max(first[k], np.searchsorted(at, at[first[k + 1]] - most))
    return first, last
