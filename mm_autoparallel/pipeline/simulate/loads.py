"""Loads: what a placement makes each virtual stage, hop and stage cost. The one place where block costs are summed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.laid_out import has_layouts, in_every_layout, lay_out, reshard_ms
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem, list_host_links
from mm_autoparallel.pipeline.simulate.graph import TaskGraph, full_graph, short_graph

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Loads:
    """Sums per virtual stage (K), hop (K - 1) and stage (P); C classes of micro-batches.

    forward_ms, backward_ms, recompute_ms: [K, C]; the backward includes what modes add to it, recompute_ms. input_ms,
    weight_ms: [K, C] the parts of a backward, [0, C] where the schedule parts none. pair_ms: of each pair of the graph.
    hop_forward_ms, hop_backward_ms: [K - 1]. tail_ms: [P].
    static_bytes, restored_bytes, transient_bytes, host_static_bytes: [P]; activation_bytes, host_bytes: [K], of one
    micro-batch in flight; pending_bytes: [K] of one whose weight gradient alone is left. step_bytes: [P], what passes
    during the optimizer's step.
    """

    forward_ms: Floats
    backward_ms: Floats
    recompute_ms: Floats
    input_ms: Floats
    weight_ms: Floats
    pair_ms: Floats
    hop_forward_ms: Floats
    hop_backward_ms: Floats
    tail_ms: Floats
    static_bytes: Floats
    activation_bytes: Floats
    pending_bytes: Floats
    restored_bytes: Floats
    transient_bytes: Floats
    host_bytes: Floats
    host_static_bytes: Floats
    step_bytes: Floats

    @property
    def durations_ms(self) -> Floats:
        """The layout `TaskGraph.duration` indexes: forward and backward [2 · K · C], where the schedule parts backwards
        also input and weight [4 · K · C], and where it pairs any those of pairs and a zero."""
        alone = (self.forward_ms, self.backward_ms, self.input_ms, self.weight_ms)
        return np.concatenate([*(of_kind.ravel() for of_kind in alone), self.pair_ms, [0.0] * bool(len(self.pair_ms))])

    @property
    def hops_ms(self) -> Floats:
        """[2 · (K - 1) + 1], forward, backward and a zero: the layout `TaskGraph.hop` indexes."""
        return np.concatenate([self.hop_forward_ms, self.hop_backward_ms, [0.0]])


def microbatch_classes(problem: Problem) -> tuple[tuple[int, ...], Floats]:
    """Class of each micro-batch (empty where all are equal) and the scale of each chain block in each class, [E, C]."""
    if not any(block.microbatch_scale for block in problem.chain):
        return (), np.ones((len(problem.chain), 1))
    ones = (1.0,) * problem.num_microbatches
    scales = np.array([block.microbatch_scale or ones for block in problem.chain])
    classes, of_microbatch = np.unique(scales, axis=1, return_inverse=True)
    return tuple(int(c) for c in np.ravel(of_microbatch)), classes


def graph_of(problem: Problem, placement: Placement | None = None) -> TaskGraph:
    """The full graph of the problem's schedule; where the order is the placement's, of that. Raises JobError where
    there is none, PlanError where its orders are wrong.
    """
    return full_graph(
        problem.schedule,
        problem.num_stages,
        problem.num_chunks,
        problem.num_microbatches,
        microbatch_classes(problem)[0],
        problem.orders or (placement.orders if placement is not None and not problem.encoders else ()),
    )


def equal_graphs(problem: Problem) -> tuple[TaskGraph, TaskGraph]:
    """The short and the full graph of a problem whose order is no placement's, as if its micro-batches were equal."""
    of = (problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    if problem.orders:
        full = full_graph(*of, (), problem.orders)
        return full, full
    return short_graph(*of), full_graph(*of)


def hop_ms(problem: Problem, hop: int, last_block: ChainBlock) -> tuple[float, float]:
    """Forward and backward time of `hop` where the cut is right after `last_block`."""
    if problem.num_stages == 1:
        return 0.0, 0.0
    time_ms = problem.p2p_ms[hop] + problem.p2p_ms_per_byte[hop] * last_block.output_bytes
    return time_ms, time_ms if last_block.sends_gradient else 0.0


def sum_loads(problem: Problem, placement: Placement) -> Loads:
    """The loads of a placement that `check_placement` accepts."""
    if has_layouts(problem):
        return _add_resharding(problem, placement, sum_loads(*lay_out(problem, placement)))
    _, scales = microbatch_classes(problem)
    num_stages, num_virtual = problem.num_stages, problem.num_virtual_stages
    layers = np.array(placement.layers, dtype=np.float64).reshape(num_virtual, -1)
    chain = problem.chain
    counts = _pad([[[float(n) for n in block] for block in row] for row in placement.modes])  # [K, E, modes]
    extra_forward, extra_backward, kept, restored, host = (
        _pad([[[getattr(mode, name) for mode in b.modes] for b in chain]])[0]
        for name in ("extra_forward_ms", "extra_backward_ms", "activation_bytes", "restored_bytes", "host_bytes")
    )  # each [E, modes]
    activation = np.array([b.activation_bytes for b in chain])
    static, tail, transient, host_static = (
        np.array([getattr(b, field) for b in chain])
        for field in ("static_bytes", "tail_ms", "transient_bytes", "host_static_bytes")
    )
    of_stage = np.array(problem.stage_of)
    per_stage = np.zeros((num_stages, len(chain)))
    np.add.at(per_stage, of_stage, layers)
    modes_per_stage = np.zeros((num_stages, *counts.shape[1:]))
    np.add.at(modes_per_stage, of_stage, counts)
    factors = np.array(problem.time_factors)[of_stage, None]
    recompute_ms = (counts * extra_backward).sum(axis=2) @ scales * factors
    extra_forward_ms = (counts * extra_forward).sum(axis=2) @ scales * factors
    host_ms = (counts * host).sum(axis=2) @ scales * np.array(list_host_links(problem))[of_stage, None]
    forward_ms = np.maximum((layers * [b.forward_ms for b in chain]) @ scales * factors + extra_forward_ms, host_ms)
    backward_ms = np.maximum((layers * [b.backward_ms for b in chain]) @ scales * factors + recompute_ms, host_ms)
    input_ms = weight_ms = np.zeros((0, scales.shape[1]))
    if problem.splits:
        of_input = layers * [b.backward_ms - b.backward_weight_ms for b in chain]
        input_ms = np.maximum(of_input @ scales * factors + recompute_ms, host_ms)
        weight_ms = (layers * [b.backward_weight_ms + b.split_extra_ms for b in chain]) @ scales * factors
    hops = [hop_ms(problem, k, chain[int(np.flatnonzero(layers[k])[-1])]) for k in range(num_virtual - 1)]
    return Loads(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        recompute_ms=recompute_ms,
        input_ms=input_ms,
        weight_ms=weight_ms,
        pair_ms=_pair_ms(problem, placement, forward_ms, backward_ms),
        hop_forward_ms=np.array([forward for forward, _ in hops]),
        hop_backward_ms=np.array([backward for _, backward in hops]),
        tail_ms=np.array(problem.stage_tail_ms) + per_stage @ tail,
        static_bytes=np.array(problem.stage_static_bytes) + per_stage @ static,
        activation_bytes=(layers - counts.sum(axis=2)) @ activation + _sum_modes(counts, kept),
        pending_bytes=layers @ [b.pending_bytes for b in chain],
        restored_bytes=_sum_modes(modes_per_stage, restored),
        transient_bytes=np.max(np.where(per_stage > 0, transient, 0.0), axis=1),
        host_bytes=_sum_modes(counts, host),
        host_static_bytes=per_stage @ host_static,
        step_bytes=sum_step_bytes(problem, per_stage),
    )


def _pair_ms(problem: Problem, placement: Placement, forward_ms: Floats, backward_ms: Floats) -> Floats:
    """What each pair of the graph takes: see Problem."""
    if not problem.pairs:
        return np.zeros(0)
    forward, backward = graph_of(problem, placement).pairs.T
    first_ms, second_ms = forward_ms.ravel()[forward], backward_ms.ravel()[backward - forward_ms.size]
    both_ms: Floats = first_ms + second_ms - problem.pair_overlap_fraction * np.minimum(first_ms, second_ms)
    return both_ms


def _add_resharding(problem: Problem, placement: Placement, loads: Loads) -> Loads:
    """The loads with what changes of layout add to them; one chunk a stage and equal micro-batches."""
    added_ms = np.array(reshard_ms(problem, placement)) * np.array(problem.time_factors)[:, None]
    return replace(
        loads,
        forward_ms=loads.forward_ms + added_ms[:, :1],
        backward_ms=loads.backward_ms + added_ms[:, 1:],
    )


def sum_step_bytes(problem: Problem, held: NDArray[Any]) -> Floats:
    """[n] what passes during the optimizer's step of stages with so many of each chain block, [n, E]."""
    step, once, shard = (
        np.array([getattr(block, field) for block in problem.chain])
        for field in ("step_bytes", "step_once_bytes", "shard_bytes")
    )
    total: Floats = held @ step + np.minimum(np.max(np.where(held > 0, once, 0.0), axis=1), held @ shard)
    return total


def _pad(rows: list[list[list[float]]]) -> Floats:
    """[., E, most modes of any block, at least 1], zeros where a block has fewer."""
    most = max(1, *(len(block) for block in rows[0]))
    return np.array([[block + [0.0] * (most - len(block)) for block in row] for row in rows])


def _sum_modes(counts: Floats, each: Floats) -> Floats:
    """[.]: Σ counts [., E, modes] · each [E, modes]."""
    total: Floats = sum((counts[:, :, m] @ each[:, m] for m in range(each.shape[1])), np.zeros(len(counts)))
    return total


def allowed_bytes(problem: Problem) -> Floats:
    """[P] what a stage's bytes may come to, added up in any order, where it is not overfull: for what looks for
    placements, or rules them out. What it finds may still be overfull by rounding; `overfull_stages` decides."""
    return np.array(problem.memory_limit_bytes) + 2.0 * _rounding_bytes(problem)


def allowed_host_bytes(problem: Problem) -> Floats:
    """[P] the same of its host; infinite where that is not limited."""
    return _host_limits(problem) + 2.0 * _host_rounding_bytes(problem)


def overfull_stages(problem: Problem, peaks: Floats) -> list[int]:
    """Stages whose peak [P] of device memory exceeds the limit by more than rounding."""
    limits = np.array(problem.memory_limit_bytes) + _rounding_bytes(problem)
    return [int(s) for s in np.flatnonzero(peaks > limits)]


def overfull_hosts(problem: Problem, host_peaks: Floats) -> list[int]:
    """Stages whose peak [P] on the host exceeds its limit, if there is one, by more than rounding."""
    return [int(s) for s in np.flatnonzero(host_peaks > _host_limits(problem) + _host_rounding_bytes(problem))]


def _host_limits(problem: Problem) -> Floats:
    return np.array(problem.host_limit_bytes or (np.inf,) * problem.num_stages)


def _rounding_bytes(problem: Problem) -> float:
    """By how much sums of the same bytes of a stage may differ, added up in another order, or as differences of longer
    sums. Nothing where all are whole numbers, whose sums are exact."""
    blocks = [
        (
            block.count,
            [
                block.static_bytes,
                block.transient_bytes,
                *(mode.restored_bytes for mode in block.modes),
                *filter(None, (block.step_bytes, block.step_once_bytes, block.shard_bytes)),
            ],
            [block.activation_bytes, block.pending_bytes, *(mode.activation_bytes for mode in block.modes)],
        )
        for block in in_every_layout(problem).chain
    ]
    return _rounding([*problem.memory_limit_bytes, *problem.stage_static_bytes], blocks, problem)


def _host_rounding_bytes(problem: Problem) -> float:
    """The same of what a stage keeps on its host."""
    if not problem.host_limit_bytes:
        return 0.0
    blocks = [
        (block.count, [block.host_static_bytes], [0.0, *(mode.host_bytes for mode in block.modes)])
        for block in problem.chain
    ]
    return _rounding(list(problem.host_limit_bytes), blocks, problem)


def _rounding(of_stages: list[float], blocks: list[tuple[int, list[float], list[float]]], problem: Problem) -> float:
    """blocks: of each its count, what one holds once, and what it keeps of each micro-batch in flight, by mode."""
    figures = [*of_stages, *(figure for _, held, kept in blocks for figure in (*held, *kept))]
    figures = [float(figure) for figure in figures if np.isfinite(figure)]  # a limit may be none
    in_flight = problem.num_microbatches * problem.num_chunks
    largest = max(figures) + sum(count * (sum(held) + in_flight * max(kept)) for count, held, kept in blocks)
    if largest < 2.0**53 and all(figure.is_integer() for figure in figures):
        return 0.0
    num_terms = sum(count * (len(held) + len(kept)) for count, held, kept in blocks)
    return num_terms * float(np.finfo(np.float64).eps) * largest


def never_fits(problem: Problem, placement: Placement, stage: int) -> bool:
    """Whether `stage`, which holds what it holds in `placement`, exceeds a limit in whatever modes that runs: each
    block takes the mode that is least in each state of the schedule.
    """
    graph = graph_of(problem, placement)
    held = np.array(placement.layers)[[*problem.virtual_stages[stage]]]  # [V, E]
    transient = max(b.transient_bytes for b, n in zip(problem.chain, held.sum(axis=0), strict=True) if n)
    fixed = problem.stage_static_bytes[stage] + transient
    most = 0.0
    for row, rests in zip(graph.in_flight[stage].tolist(), graph.pending[stage].tolist(), strict=True):
        at_work = 0.0
        for in_flight, pending, counts in zip(row, rests, held.tolist(), strict=True):
            for block, n in zip(problem.chain, counts, strict=True):
                kept = [in_flight * mode.activation_bytes + mode.restored_bytes for mode in block.modes]
                least = min([in_flight * block.activation_bytes, *kept])
                at_work += n * (block.static_bytes + least + pending * block.pending_bytes)
        most = max(most, at_work)
    on_host = float(held.sum(axis=0) @ [block.host_static_bytes for block in problem.chain])
    return bool(fixed + most > allowed_bytes(problem)[stage] or on_host > allowed_host_bytes(problem)[stage])


def find_misfits(problem: Problem, peaks: Floats, host_peaks: Floats) -> list[int]:
    """Stages that exceed a limit, of the device or of the host, by more than rounding; where none does, all fits."""
    return sorted({*overfull_stages(problem, peaks), *overfull_hosts(problem, host_peaks)})


def peak_bytes(problem: Problem, loads: Loads, graph: TaskGraph | None = None) -> Floats:
    """[P] peak memory of each stage. The order alone decides what is in flight, so no play is needed.

    graph: of the step, where the placement says the order.
    """
    graph = graph or graph_of(problem)
    kept = _most_kept(problem, graph, loads.activation_bytes, loads.pending_bytes)
    at_work = loads.static_bytes + kept + loads.restored_bytes + loads.transient_bytes
    peaks: Floats = np.maximum(at_work, loads.static_bytes + loads.step_bytes)
    return peaks


def peak_host_bytes(problem: Problem, loads: Loads, graph: TaskGraph | None = None) -> Floats:
    """[P] the most that each stage keeps on its host. graph: see `peak_bytes`."""
    if not loads.host_bytes.any():
        return loads.host_static_bytes
    peaks: Floats = loads.host_static_bytes + _most_kept(
        problem, graph or graph_of(problem), loads.host_bytes, np.zeros_like(loads.host_bytes)
    )
    return peaks


def _most_kept(problem: Problem, graph: TaskGraph, in_flight_bytes: Floats, pending_bytes: Floats) -> Floats:
    """[P] the most that micro-batches keep, over the graph's order. in_flight_bytes, pending_bytes: [K] of one."""
    most = []
    for rows, rests, mine in zip(graph.in_flight, graph.pending, problem.virtual_stages, strict=True):
        kept = rows @ in_flight_bytes[[*mine]]
        most.append(float(np.max(kept + rests @ pending_bytes[[*mine]] if graph.num_kinds > 2 else kept)))
    return np.array(most)
