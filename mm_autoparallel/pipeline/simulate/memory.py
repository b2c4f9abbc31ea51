"""What each stage holds at its fullest moment, by cause: finer than the sum that placement keeps within the limit.

Placement adds up largest values that need not meet in one moment (problem.Problem): the working set of any block, one
layer's restored activations, and all that is kept. Here the backward is followed block by block: while a block's
gradient is computed, what the blocks behind it kept of this micro-batch is freed; a recomputed layer is restored then
and not before; a block without a backward works while the blocks behind it keep nothing yet. So a stage never needs
more than placement counted, and the difference is left to the allocator. The optimizer step is a moment of its own, to
placement as well, which outweighs the others only where samples are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.footprint import Beside, Footprint, sum_held_once
from mm_autoparallel.pipeline.laid_out import lay_out
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, INPUT, WEIGHT
from mm_autoparallel.pipeline.simulate.encoders.orders import encoders_peak_bytes
from mm_autoparallel.pipeline.simulate.graph import TaskGraph, distinct_rows
from mm_autoparallel.pipeline.simulate.loads import sum_step_bytes

Ints = NDArray[np.int64]
#: A block, how many of it a virtual stage holds, and how many of those run in each of its modes.
Held = tuple[ChainBlock, int, tuple[int, ...]]


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage at its fullest moment. The parts add up to the peak that is held against the limit; beside
    encoders they may add up to more, for what those keep most of is counted whenever it is.

    activation_bytes: kept for backward. restored_bytes: what the layer in a mode that is at work kept less of, made or
    fetched again beside what it kept.
    transient_bytes: working set of the block at work. workspace_bytes: held once for all blocks (costs/held_once.py).
    communicator_bytes, context_bytes: outside the allocator. reserve_bytes: counted by placement beyond all that, left
    for the allocator's rounding and fragments.
    """

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    restored_bytes: float
    transient_bytes: float
    workspace_bytes: float
    communicator_bytes: float
    context_bytes: float
    reserve_bytes: float

    @property
    def allocated_bytes(self) -> float:
        """What the allocator reports as the peak of allocated bytes (torch.cuda.max_memory_allocated)."""
        return (
            self.weight_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.restored_bytes
            + self.transient_bytes
            + self.workspace_bytes
        )

    @property
    def resting_bytes(self) -> float:
        """What stays allocated between two steps."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.workspace_bytes

    @property
    def total_bytes(self) -> float:
        return self.allocated_bytes + self.communicator_bytes + self.context_bytes + self.reserve_bytes


def list_stage_memory(
    problem: Problem, placement: Placement, graph: TaskGraph, peaks: NDArray[np.float64]
) -> tuple[StageMemory, ...]:
    """The memory of every stage under `placement`, whose chain has footprints. peaks: [P] as placement counts them."""
    problem, placement = lay_out(problem, placement)
    return tuple(
        _stage_memory(problem, placement, stage, _list_moments(graph)[stage], float(peaks[stage]))
        for stage in range(problem.num_stages)
    )


def list_first_step_bytes(
    problem: Problem, placement: Placement, memory: Sequence[StageMemory], num_shards: int = 1
) -> tuple[float, ...]:
    """Per stage the peak of allocated bytes up to the end of the first step. memory: of the steps that follow.

    Adam makes its moments when it is first called, so the first forward and backward run without them. Logs that tell a
    peak after one iteration (Megatron-LM's report_memory) tell this, of the first data parallel rank alone. num_shards:
    ranks that share its optimizer (_first_shard_bytes).
    """
    problem, placement = lay_out(problem, placement)
    peaks = []
    for stage, parts in enumerate(memory):
        virtual = _virtual_stages(problem, stage)
        held = [(_footprint(block), n) for k in virtual for block, n, _ in _held_blocks(problem, placement, k)]
        moment_bytes = sum(n * footprint.moment_bytes for footprint, n in held)
        step_bytes = _step_bytes(problem, placement, stage)
        if num_shards > 1:
            step_bytes = min(step_bytes, _first_shard_bytes(problem, placement, stage, num_shards))
        at_work_bytes = parts.activation_bytes + parts.restored_bytes + parts.transient_bytes
        static_bytes = parts.allocated_bytes - at_work_bytes
        peaks.append(static_bytes + max(at_work_bytes - moment_bytes, step_bytes))
    return tuple(peaks)


@dataclass(frozen=True)
class _Moment:
    """A block at work, relative to what the stage keeps when a task of its chunk begins. layer: it is one."""

    kind: int
    kept_bytes: float
    restored_bytes: float
    transient_bytes: float
    layer: bool = False

    @property
    def size_bytes(self) -> float:
        return self.kept_bytes + self.restored_bytes + self.transient_bytes


@lru_cache(maxsize=64)
def _list_moments(graph: TaskGraph) -> tuple[Ints, ...]:
    """Per stage the different moments at which a task begins, [., 2V + 2]: micro-batches in flight, those whose weight
    gradient alone is left, kind, chunk."""
    moments = []
    of_stage = np.argsort(graph.stage.astype(np.int16), kind="stable")  # few stages: sorted in one pass
    for mine in np.split(of_stage, np.cumsum(np.bincount(graph.stage, minlength=graph.num_stages))[:-1]):
        kind, chunk = graph.kind[mine].astype(np.int64), graph.chunk[mine].astype(np.int64)
        change, at = np.zeros((len(kind), 2 * graph.num_chunks), dtype=np.int64), np.arange(len(kind))
        change[at, chunk] = np.where(kind == FORWARD, 1, np.where(kind == WEIGHT, 0, -1))
        change[at, graph.num_chunks + chunk] = np.where(kind == INPUT, 1, np.where(kind == WEIGHT, -1, 0))
        before = np.cumsum(change, axis=0) - change
        moments.append(distinct_rows(np.column_stack([before, kind, chunk])))
    return tuple(moments)


def list_shelved_bytes(problem: Problem, placement: Placement, graph: TaskGraph) -> tuple[float, ...]:
    """Per stage, by how much what its layers worked in at most makes the fullest moment of another block fuller than
    the fullest of all; 0 where it does not.

    What a layer worked in is shelved by the allocator in segments of other sizes than the logits of a head, say, need.
    """
    problem, placement = lay_out(problem, placement)
    shelved = []
    for stage, moments in enumerate(_list_moments(graph)):
        held = [_held_blocks(problem, placement, k) for k in _virtual_stages(problem, stage)]
        fullest_bytes, other_bytes = (
            kept_bytes + moment.size_bytes
            for moment, kept_bytes in (
                _fullest_moment(problem, placement, stage, moments, held, with_layers) for with_layers in (True, False)
            )
        )
        layers = (moment for blocks in held for moment in _list_work(blocks) if moment.layer)
        working_bytes = max((moment.restored_bytes + moment.transient_bytes for moment in layers), default=0.0)
        shelved.append(max(0.0, other_bytes + working_bytes - fullest_bytes))
    return tuple(shelved)


def _virtual_stages(problem: Problem, stage: int) -> tuple[int, ...]:
    return problem.virtual_stages[stage]


def _fullest_moment(
    problem: Problem,
    placement: Placement,
    stage: int,
    moments: Ints,
    held: Sequence[list[Held]],
    with_layers: bool = True,
) -> tuple[_Moment, float]:
    """The fullest moment of a stage and what it keeps when that task begins. held: by chunk. with_layers: layers at
    work count too."""
    num_chunks = problem.num_chunks
    kept = [sum(_kept_bytes(*block) for block in blocks) for blocks in held]
    kept += [sum(n * block.pending_bytes for block, n, _ in blocks) for blocks in held]
    worst: dict[tuple[int, int], _Moment] = {}
    for chunk, blocks in enumerate(held):
        for moment in _list_work(blocks):
            key = (moment.kind, chunk)
            if moment.layer and not with_layers:
                continue
            if key not in worst or moment.size_bytes > worst[key].size_bytes:
                worst[key] = moment
    best, best_kept = _Moment(FORWARD, 0.0, 0.0, _step_bytes(problem, placement, stage)), 0.0
    for row in moments.tolist():
        found = worst.get((row[-2], row[-1]))
        in_flight_bytes = float(np.dot(row[: 2 * num_chunks], kept))
        if found and in_flight_bytes + found.size_bytes > best_kept + best.size_bytes:
            best, best_kept = found, in_flight_bytes
    return best, best_kept


def _stage_memory(problem: Problem, placement: Placement, stage: int, moments: Ints, peak_bytes: float) -> StageMemory:
    held = [_held_blocks(problem, placement, k) for k in _virtual_stages(problem, stage)]
    footprints = [(_footprint(block), n) for blocks in held for block, n, _ in blocks]
    best, best_kept = _fullest_moment(problem, placement, stage, moments, held)
    beside = problem.beside[stage] if problem.beside else Beside(0.0, 0.0, 0.0, 0.0)
    encoders_bytes = encoders_peak_bytes(problem.encoders, placement.orders[stage]) if problem.encoders else 0.0
    memory = StageMemory(
        weight_bytes=sum(n * footprint.weight_bytes for footprint, n in footprints) + beside.weight_bytes,
        gradient_bytes=sum(n * footprint.gradient_bytes for footprint, n in footprints) + beside.gradient_bytes,
        optimizer_bytes=sum(n * footprint.optimizer_bytes for footprint, n in footprints) + beside.optimizer_bytes,
        activation_bytes=best_kept + best.kept_bytes + beside.kept_bytes + encoders_bytes,
        restored_bytes=best.restored_bytes,
        transient_bytes=best.transient_bytes,
        workspace_bytes=sum_held_once(footprint for footprint, _ in footprints),
        communicator_bytes=problem.communicator_bytes,
        context_bytes=problem.context_bytes,
        reserve_bytes=0.0,
    )
    return replace(memory, reserve_bytes=max(0.0, peak_bytes - memory.total_bytes))


def _step_bytes(problem: Problem, placement: Placement, stage: int) -> float:
    """What passes during the optimizer step, when no activations are kept."""
    held = np.array([placement.layers[k] for k in _virtual_stages(problem, stage)]).sum(axis=0, keepdims=True)
    return float(sum_step_bytes(problem, held)[0])


def _first_shard_bytes(problem: Problem, placement: Placement, stage: int, num_shards: int) -> float:
    """What passes during the optimizer step of the first of `num_shards` ranks, which share one buffer of all weights.

    Megatron-LM's distributed optimizer lays the last weights first (core/distributed/param_and_grad_buffer.py), and
    each rank updates a piece: the first one the head and the last layers, and of a table at the beginning what is left.
    """
    held_bytes, once_bytes = 0.0, 0.0
    for virtual_stage in _virtual_stages(problem, stage):
        blocks = _held_blocks(problem, placement, virtual_stage)
        left_bytes = sum(n * block.shard_bytes for block, n, _ in blocks)  # each chunk of a stage has its own buffer
        for block, n, _ in reversed(blocks):
            held_bytes += n * block.step_bytes
            piece_bytes = min(left_bytes, n * block.shard_bytes * num_shards)
            once_bytes = max(once_bytes, min(block.step_once_bytes, piece_bytes))
            left_bytes -= piece_bytes
    return held_bytes + once_bytes


def _held_blocks(problem: Problem, placement: Placement, virtual_stage: int) -> list[Held]:
    """The blocks of a virtual stage in the order data flows."""
    rows = zip(problem.chain, placement.layers[virtual_stage], placement.modes[virtual_stage], strict=True)
    return [(block, n, counts) for block, n, counts in rows if n]


def _kept_bytes(block: ChainBlock, count: int, in_modes: tuple[int, ...]) -> float:
    kept_bytes = sum(n * mode.activation_bytes for n, mode in zip(in_modes, block.modes, strict=True))
    return (count - sum(in_modes)) * block.activation_bytes + kept_bytes


def _footprint(block: ChainBlock) -> Footprint:
    if block.footprint is None:
        raise ValueError(f"block {block.name} was given as numbers alone; its bytes have no causes")
    return block.footprint


def _list_work(blocks: list[Held]) -> list[_Moment]:
    """The moments of one task of a chunk: forward ones of blocks without a backward, backward ones of the others, whole
    or in their parts. While a weight gradient is computed, everything that is kept for those is there.

    Of equal blocks the last one in the order data flows is first in the backward, when most is still kept; of those
    without a backward the last one works when most is kept already.
    """
    moments, before_bytes = [], 0.0
    after_bytes = sum(_kept_bytes(*held) for held in blocks)
    pending_bytes = sum(n * block.pending_bytes for block, n, _ in blocks)  # of those behind
    for block, n, in_modes in blocks:
        working_bytes = _footprint(block).working_bytes
        after_bytes -= _kept_bytes(block, n, in_modes)
        pending_bytes -= n * block.pending_bytes
        if not _footprint(block).has_backward:
            moments.append(_Moment(FORWARD, before_bytes, 0.0, working_bytes, block.layer))
        plain = n - sum(in_modes)
        if _footprint(block).has_backward and plain:
            moments += _list_backwards(-after_bytes, pending_bytes, 0.0, working_bytes, block.layer)
        freed_bytes, rest_bytes = (
            after_bytes + plain * block.activation_bytes,
            pending_bytes + plain * block.pending_bytes,
        )
        for mode, count in reversed(list(zip(block.modes, in_modes, strict=True))):
            if count:  # the first layers take the first mode, so the layers in later ones are freed by then
                restored_bytes = max(0.0, block.activation_bytes - mode.activation_bytes)
                moments += _list_backwards(-freed_bytes, rest_bytes, restored_bytes, working_bytes, block.layer)
            freed_bytes += count * mode.activation_bytes
            rest_bytes += count * block.pending_bytes
        before_bytes += _kept_bytes(block, n, in_modes)
    return moments


def _list_backwards(
    kept_bytes: float, pending_bytes: float, restored_bytes: float, working_bytes: float, layer: bool
) -> tuple[_Moment, _Moment, _Moment]:
    """A block in a whole backward, in that of an input, and in a weight gradient, which frees what it was computed of.

    kept_bytes: relative to what is kept when the backward begins. pending_bytes: what layers behind keep for theirs.
    """
    return (
        _Moment(BACKWARD, kept_bytes, restored_bytes, working_bytes, layer),
        _Moment(INPUT, kept_bytes + pending_bytes, restored_bytes, working_bytes, layer),
        _Moment(WEIGHT, 0.0, 0.0, working_bytes, layer),
    )
