"""All that one stage could hold where its layers may run in several layouts, listed layer by layer for `verify`.

Rows grow along the chain: a row is what the blocks so far take, and in which mode the last layer of them runs. Of rows
that end in the same mode only those remain that no other beats in every time and every byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.certify.stage_options import StageOptions, list_contents, undominated
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.simulate.graph import TaskGraph
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, hop_ms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Rows of one stage's content beyond which memory and time would end the check.
MAX_ROWS = 300_000
#: Figures of a row: ms of forward, backward and tail; bytes through the step with those of micro-batches in flight;
#: bytes through the step with what passes in the optimizer's; the sum of its shards; the two largest that pass.
_SUMS, _NUM_FIGURES = 6, 8


class _Rows(NamedTuple):
    """figures: [n, 8]. taken: [n, D] how many in each mode, of all blocks in turn. last: [n] the last layer's mode, its
    own way being the last one."""

    figures: Floats
    taken: Ints
    last: Ints


def list_layout_options(
    problem: Problem, graph: TaskGraph, stage: int, below_ms: float, should_stop: Callable[[], bool]
) -> StageOptions:
    """Everything that `stage` could hold in a step below `below_ms`. Raises Unconfirmed where that is too much."""
    chain, factor = problem.chain, problem.time_factors[stage]
    in_flight = float(graph.in_flight[stage].max())
    room_bytes = float(allowed_bytes(problem)[stage]) - problem.stage_static_bytes[stage]
    most_ms = (below_ms - problem.stage_tail_ms[stage]) / problem.num_microbatches
    least = replace(problem, chain=tuple(map(_at_its_fastest, chain)))
    contents = list_contents(least, stage, most_ms)
    parts, numbers = [], []
    for held in contents:
        if should_stop():
            raise Unconfirmed("it was stopped while listing what the stages could hold")
        rows = _grow(problem, held, in_flight, room_bytes, most_ms / factor)
        at_step = rows.figures[:, 4] + np.minimum(rows.figures[:, 7], rows.figures[:, 5])
        fits = (rows.figures[:, 3] + rows.figures[:, 6] <= room_bytes) & (at_step <= room_bytes)
        chosen = np.flatnonzero(fits)
        chosen = chosen[undominated(np.zeros(len(chosen), dtype=np.int64), rows.figures[chosen, :3])]
        parts.append(_Rows(rows.figures[chosen], rows.taken[chosen], rows.last[chosen]))
        numbers.append(len(chosen))
    num_modes = sum(len(block.modes) for block in chain)
    figures = np.concatenate([np.zeros((0, _NUM_FIGURES)), *(part.figures for part in parts)])
    taken = np.concatenate([np.zeros((0, num_modes), dtype=np.int64), *(part.taken for part in parts)])
    layers = np.repeat(contents, numbers, axis=0)
    last = np.array([int(np.flatnonzero(row)[-1]) for row in layers], dtype=np.int64)
    hops_ms = np.zeros((len(layers), 2))
    if stage < problem.num_stages - 1 and len(layers):
        hops_ms = np.array([hop_ms(problem, stage, block) for block in chain])[last]
    tail_ms = problem.stage_tail_ms[stage] + figures[:, 2]
    return StageOptions(
        layers=layers[:, None],
        modes=taken[:, None],
        used=layers,
        first=np.array([[int(np.flatnonzero(row)[0])] for row in layers], dtype=np.int64).reshape(-1, 1),
        last=last[:, None],
        times_ms=np.column_stack([factor * figures[:, :2], hops_ms, tail_ms]),
    )


def _at_its_fastest(block: ChainBlock) -> ChainBlock:
    """The block with the least forward and the least backward of its layouts."""
    layouts = [mode.layout for mode in block.modes if mode.layout is not None]
    return replace(
        block,
        forward_ms=min([block.forward_ms, *(one.forward_ms for one in layouts)]),
        backward_ms=min([block.backward_ms, *(one.backward_ms for one in layouts)]),
    )


def _figures(block: ChainBlock, mode: int, in_flight: float) -> Floats:
    """[8] of one of the block in the mode of that number; the number behind the last one is its own way."""
    found = np.zeros(_NUM_FIGURES)
    plain = mode == len(block.modes)
    own = block if plain else block.modes[mode].layout or block
    kept_bytes = own.activation_bytes if plain else block.modes[mode].activation_bytes
    found[:3] = own.forward_ms, own.backward_ms, own.tail_ms
    found[3] = own.static_bytes + in_flight * kept_bytes
    if not plain:
        found[:2] += block.modes[mode].extra_forward_ms, block.modes[mode].extra_backward_ms
        found[3] += block.modes[mode].restored_bytes
    found[4] = own.static_bytes + own.step_bytes
    found[5] = own.step_once_bytes if own.step_shard_bytes is None else own.step_shard_bytes
    found[6:] = own.transient_bytes, own.step_once_bytes
    return found


def _layout_of(block: ChainBlock, mode: int) -> str:
    layout = None if mode == len(block.modes) else block.modes[mode].layout
    return layout.name if layout else ""


def _change_ms(block: ChainBlock, source: str, target: str) -> tuple[float, float]:
    """Forward and backward of what going from one layout of the block to another takes."""
    if source == target:
        return 0.0, 0.0
    return next((r.forward_ms, r.backward_ms) for r in block.reshards if (r.source, r.target) == (source, target))


def _grow(problem: Problem, held: Ints, in_flight: float, room_bytes: float, most_ms: float) -> _Rows:
    """All rows of a content [E] that may fit and take at most most_ms, forward and backward."""
    chain = problem.chain
    num_modes = [len(block.modes) for block in chain]
    rows = _Rows(
        np.zeros((1, _NUM_FIGURES)), np.zeros((1, sum(num_modes)), dtype=np.int64), np.zeros(1, dtype=np.int64)
    )
    before: ChainBlock | None = None  # whose layers' layouts the rows stand in
    for e, block in enumerate(chain):
        for _ in range(int(held[e])):
            if before is not None and (before.group != block.group or not block.modes):
                rows, before = _leave(rows, before), None
            is_first = before is None
            before = block if block.modes else None
            column = sum(num_modes[:e])
            grown = [_append(rows, block, mode, column, in_flight, is_first) for mode in range(len(block.modes) + 1)]
            rows = _Rows(
                *(np.concatenate([getattr(one, name) for one in grown]) for name in ("figures", "taken", "last"))
            )
            rows = _cut(rows, room_bytes, most_ms)
    return rows if before is None else _leave(rows, before)


def _append(rows: _Rows, block: ChainBlock, mode: int, column: int, in_flight: float, is_first: bool) -> _Rows:
    """The rows with one more of the block in a mode, where the group's layers may go on to it."""
    able = np.ones(len(rows.last), dtype=np.bool_) if is_first else rows.last <= mode
    figures, taken, last = rows.figures[able].copy(), rows.taken[able].copy(), rows.last[able]
    target = _layout_of(block, mode)
    for source_mode in np.unique(last).tolist():
        source = "" if is_first else _layout_of(block, source_mode)
        figures[last == source_mode, :2] += _change_ms(block, source, target)
    added = _figures(block, mode, in_flight)
    figures[:, :_SUMS] += added[:_SUMS]
    figures[:, _SUMS:] = np.maximum(figures[:, _SUMS:], added[_SUMS:])
    if mode < len(block.modes):
        taken[:, column + mode] += 1
    return _Rows(figures, taken, np.full(len(last), mode))


def _leave(rows: _Rows, block: ChainBlock) -> _Rows:
    """The rows gone back to the block's own layout."""
    figures = rows.figures.copy()
    for mode in np.unique(rows.last).tolist():
        figures[rows.last == mode, :2] += _change_ms(block, _layout_of(block, mode), "")
    return _Rows(figures, rows.taken, np.zeros(len(rows.last), dtype=np.int64))


def _cut(rows: _Rows, room_bytes: float, most_ms: float) -> _Rows:
    """Without what is too slow or too large already, and without what others beat."""
    figures = rows.figures
    within = (figures[:, 0] + figures[:, 1] <= most_ms) & (figures[:, 3] + figures[:, 6] <= room_bytes)
    chosen = np.flatnonzero(within)
    if len(chosen) > MAX_ROWS:
        raise Unconfirmed("a stage could hold more than can be listed")
    chosen = chosen[undominated(rows.last[chosen], figures[chosen])]
    return _Rows(figures[chosen], rows.taken[chosen], rows.last[chosen])
