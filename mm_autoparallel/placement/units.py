"""Units: the chain cut into the smallest pieces that a placement may part, with prefix sums over them.

Blocks that must stay together (attach) form one unit; equal units in a row form a run. A chunk holds an interval of
units, and everything it costs is a difference of prefix sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.errors import JobError
from mm_autoparallel.problem import RECOMPUTE, ChainBlock, Placement, Problem, check_modes, place_in_modes, recomputed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Units:
    """N units over a flat chain of E blocks.

    flat: chain index of each flat block, [E]. start: flat position where each unit begins, [N + 1].
    run: which run each unit belongs to, [N]. run_size: units in each run.
    forward_ms … layers: prefix sums over flat positions, [E + 1]. transient_bytes: per flat block, [E].
    groups: names of the G recompute groups ("the first n layers" counts through one). before: [G, E + 1] how many of
    its layers lie before each flat position. extra_ms, saved_bytes, restored_bytes: [G, most + 1] prefix sums over its
    layers; saved is activation minus checkpoint.
    first, last: lowest and highest unit index at which virtual stage k may begin, [K + 1] (boundary 0 is 0, K is N).
    """

    problem: Problem
    flat: Ints
    start: Ints
    run: Ints
    run_size: Ints
    forward_ms: Floats
    backward_ms: Floats
    static_bytes: Floats
    activation_bytes: Floats
    tail_ms: Floats
    layers: Ints
    transient_bytes: Floats
    groups: tuple[str, ...]
    before: Ints
    extra_ms: Floats
    saved_bytes: Floats
    restored_bytes: Floats
    first: Ints
    last: Ints

    @property
    def num_units(self) -> int:
        return len(self.start) - 1

    def placement(self, boundaries: list[int], recompute: list[list[int]]) -> Placement:
        """The placement with virtual stage k = units boundaries[k] to boundaries[k + 1], recompute[k][group] first
        layers."""
        chain = self.problem.chain
        group_of = {name: g for g, name in enumerate(self.groups)}
        layers, chosen_rows = [], []
        for k, (begin, end) in enumerate(pairwise(boundaries)):
            held = [0] * len(chain)
            for e in self.flat[self.start[begin] : self.start[end]].tolist():
                held[e] += 1
            left = list(recompute[k])
            chosen = [0] * len(chain)
            for e, block in enumerate(chain):
                if block.recompute is not None and held[e]:
                    g = group_of[block.group]
                    chosen[e] = min(held[e], left[g])
                    left[g] -= chosen[e]
            layers.append(held)
            chosen_rows.append(chosen)
        return place_in_modes(self.problem, layers, {RECOMPUTE: chosen_rows})

    def boundaries(self, placement: Placement) -> tuple[list[int], list[list[int]]]:
        """The inverse of `placement`: unit boundaries [K + 1] and recompute counts [K][G]."""
        group_of = {name: g for g, name in enumerate(self.groups)}
        ends = np.cumsum([0, *(sum(held) for held in placement.layers)])
        recompute = []
        for chosen in recomputed(self.problem, placement):
            row = [0] * len(self.groups)
            for block, r in zip(self.problem.chain, chosen, strict=True):
                if r:
                    row[group_of[block.group]] += r
            recompute.append(row)
        return np.searchsorted(self.start, ends).tolist(), recompute


def cut_into_units(problem: Problem) -> Units:
    """Flatten the chain. Raises JobError where pins or attachments contradict the chain's order, or modes one
    another."""
    check_modes(problem)
    chain = problem.chain
    if (
        problem.stage_time_factor
        or problem.host_ms_per_byte
        or any(b.modes and b.modes != (b.recompute,) for b in chain)
    ):
        raise JobError("several modes of a block, host links and stage_time_factor are simulated, and not placed yet")
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
    signatures: list[tuple[object, ...]] = [tuple(_signature(chain[e]) for e in flat[a:b]) for a, b in pairwise(start)]
    run = np.cumsum([0, *(a != b for a, b in pairwise(signatures))])
    layers = _prefix([int(chain[e].layer) for e in flat]).astype(np.int64)
    first, last = _boundary_windows(problem, flat, start, layers)
    return Units(
        problem=problem,
        flat=np.array(flat),
        start=np.array(start),
        run=run,
        run_size=np.bincount(run),
        forward_ms=_prefix([chain[e].forward_ms for e in flat]),
        backward_ms=_prefix([chain[e].backward_ms for e in flat]),
        static_bytes=_prefix([chain[e].static_bytes for e in flat]),
        activation_bytes=_prefix([chain[e].activation_bytes for e in flat]),
        tail_ms=_prefix([chain[e].tail_ms for e in flat]),
        layers=layers,
        transient_bytes=np.array([chain[e].transient_bytes for e in flat]),
        **_recompute_sums(chain, flat),
        first=first,
        last=last,
    )


def _prefix(values: list[float] | list[int]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])


def _signature(block: ChainBlock) -> tuple[object, ...]:
    """Everything a cost can depend on: blocks that differ in name alone are equal."""
    return (
        block.forward_ms,
        block.backward_ms,
        block.static_bytes,
        block.activation_bytes,
        block.recompute,
        block.group if block.recompute else None,
        block.layer,
        block.pinned,
        block.transient_bytes,
        block.tail_ms,
        block.output_bytes,
        block.sends_gradient,
        block.microbatch_scale,
    )


def _recompute_sums(chain: tuple[ChainBlock, ...], flat: list[int]) -> dict[str, Any]:
    """`groups` and their sums, as `Units` holds them."""
    names = tuple(dict.fromkeys(block.group for block in chain if block.recompute is not None))
    before = np.zeros((len(names), len(flat) + 1), dtype=np.int64)
    sums = np.zeros((3, len(names), len(flat) + 1))
    for g, name in enumerate(names):
        member = [chain[e].recompute is not None and chain[e].group == name for e in flat]
        before[g, 1:] = np.cumsum(member)
        n = 0
        for e, is_member in zip(flat, member, strict=True):
            recompute = chain[e].recompute
            if is_member and recompute is not None:
                saved = chain[e].activation_bytes - recompute.activation_bytes
                sums[:, g, n + 1] = sums[:, g, n] + (recompute.extra_backward_ms, saved, recompute.restored_bytes)
                n += 1
        sums[:, g, n:] = sums[:, g, n : n + 1]
    return {"groups": names, "before": before, "extra_ms": sums[0], "saved_bytes": sums[1], "restored_bytes": sums[2]}


def _boundary_windows(problem: Problem, flat: list[int], start: list[int], layers: Ints) -> tuple[Ints, Ints]:
    """Where each boundary may lie so that every chunk can have a layer, none too many, and pins hold.

    Empty windows (first > last) mean that no placement exists; `infeasible` says why.
    """
    chain, num_virtual, num_units = problem.chain, problem.num_virtual_stages, len(start) - 1
    pinned = [[chain[e].pinned for e in flat[a:b]] for a, b in pairwise(start)]
    after_first = max((u + 1 for u, pins in enumerate(pinned) if "first" in pins), default=0)
    before_last = min((u for u, pins in enumerate(pinned) if "last" in pins), default=num_units)
    if num_virtual > 1 and after_first > before_last:
        names = ", ".join(block.name for block in chain if block.pinned)
        raise JobError(
            f"the pinned blocks ({names}) contradict the chain's order: pinned first must come before pinned last"
        )
    at = layers[np.array(start)]  # layers before each unit
    most = problem.max_layers_per_chunk if problem.max_layers_per_chunk is not None else int(layers[-1])
    first, last = np.zeros(num_virtual + 1, dtype=np.int64), np.full(num_virtual + 1, num_units, dtype=np.int64)
    last[0] = 0
    for k in range(1, num_virtual + 1):  # leftmost: one layer each; rightmost: as many as allowed
        first[k] = np.searchsorted(at, at[first[k - 1]] + 1) if at[first[k - 1]] < at[-1] else num_units + 1
        last[k] = np.searchsorted(at, at[last[k - 1]] + most, side="right") - 1
        if k == 1:
            first[k] = max(first[k], after_first)
        if k < num_virtual:
            last[k] = min(last[k], before_last)
        if first[k] > num_units:
            return first, np.minimum(last, first - 1)
    first[num_virtual] = num_units
    for k in range(num_virtual - 1, 0, -1):
        last[k] = min(last[k], np.searchsorted(at, at[last[k + 1]] - 1, side="right") - 1)
        first[k] = max(first[k], np.searchsorted(at, at[first[k + 1]] - most))
    return first, last
