"""The pipeline of a pretrain YAML as a placement problem, in the units of the pipeline search.

The forward of one expert layer (of any layer, where the model has no experts) is 1; problem.py's `_ms` fields carry
this unit. A dense layer's forward is layer_ratio; backward is b_ratio times the forward. Recompute adds ra_ratio to an
expert layer's backward and layer_ratio to a dense one's (its own forward). head_loss adds to the last chunk's forward.
All of these are of layers of which nothing is recomputed.

With seq_split_num above 1 a problem's micro-batches are pieces (schedules/seq_1f1b.py), each of which takes its share
of these times: MindFormers' attention reads a masked whole sequence in each. A layer then holds caches of keys and
values and of their gradients, and each piece keeps keys and values of the whole sequence (mindformers/models/llama/
llama_transformer.py, seq_pipe; SAPP pipeline balance counts them so too). Whole layers are then not recomputed: a
forward that ran twice would add to the caches twice (SAPP's sapp_solver.py refuses it likewise).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.mindformers.layout import Grid, Layout, selected_counts
from mm_autoparallel.integrations.mindformers.memory_figures import LayerMemory, MemoryFigures
from mm_autoparallel.integrations.mindformers.model_job import key_value_bytes
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.integrations.mindformers.recompute_kinds import (
    BACKWARD_SHARE,
    BOTH,
    COMM,
    FULL,
    KINDS,
    SELECT,
    count_kinds,
)
from mm_autoparallel.integrations.mindformers.selected_operators import SELECT_KEYS
from mm_autoparallel.pipeline.modalities import placement_from_modalities
from mm_autoparallel.pipeline.problem import (
    ChainBlock,
    Mode,
    Placement,
    Problem,
    counts_in_mode,
)
from mm_autoparallel.pipeline.schedules.catalog import find_schedule, name_seq_1f1b

Order = Literal["default", "low_memory"]
ORDERS: dict[Order, str] = {"default": "interleaved_1f1b", "low_memory": "interleaved_1f1b_low_memory"}
"""What the pipeline search calls the two orders of more than one chunk a stage; one chunk is 1f1b in both."""

MODALITY = "text"
DENSE, EXPERT, HEAD = "dense", "moe", "head"
_GROUP = "layers"
"""MindFormers recomputes the first layers of a chunk, of whatever kind they are."""


@dataclass(frozen=True)
class Ratios:
    """Times as shares of the forward of one expert layer: see the module's words.

    select_factor: what select recompute adds to a layer's backward, as a share of it; None: what its operators' sizes
    say, else what SAPP takes for it.
    """

    layer_factor: float
    backward_factor: float
    head_factor: float
    recompute_factor: float
    select_factor: float | None = None


def build_pipeline_problem(pretrain: Pretrain, ratios: Ratios, memory: MemoryFigures, order: Order) -> Problem:
    """The problem whose placements are the YAML's layouts. Raises JobError where the YAML's pipeline has no room."""
    if pretrain.pp == 1 and pretrain.vp > 1:
        raise pretrain.error(
            "model.model_config.pp_interleave_num", f"is {pretrain.vp} for one pipeline stage; chunks need two or more"
        )
    if pretrain.num_virtual_stages > pretrain.num_layers:
        raise pretrain.error(
            "parallel_config.pipeline_stage",
            f"{pretrain.pp} · pp_interleave_num {pretrain.vp} makes {pretrain.num_virtual_stages} chunks for "
            f"{pretrain.num_layers} layers (multi-token prediction included); each chunk needs one",
        )
    if pretrain.vp > 1 and pretrain.num_microbatches % pretrain.pp:
        raise pretrain.error(
            "parallel_config.micro_batch_num",
            f"is {pretrain.num_microbatches}; with pp_interleave_num {pretrain.vp} it must be a multiple of "
            f"pipeline_stage {pretrain.pp}",
        )
    num_dense, pieces = pretrain.num_dense, pretrain.seq_split_num
    if pieces > 1 and pretrain.vp > 1:
        raise pretrain.error(
            "parallel_config.seq_split_num",
            f"is {pieces}; with pp_interleave_num {pretrain.vp} that is a schedule that is not simulated (nd-search "
            "and rank try several chunks a stage, and take seq_split_num 1)",
        )
    memory = _split_memory(pretrain, memory)
    kinds = [(EXPERT, pretrain.num_layers - num_dense, 1.0, ratios.recompute_factor, memory.expert)]
    if num_dense and memory.dense is not None:
        kinds.insert(0, (DENSE, num_dense, ratios.layer_factor, ratios.layer_factor, memory.dense))
    chain = [
        _block(name, count, forward / pieces, again if pieces == 1 else None, kept, ratios)
        for name, count, forward, again, kept in kinds
    ]
    head_forward = (ratios.head_factor + pretrain.num_last_mtp) / pieces  # a prediction module is a layer with experts
    head = ChainBlock(
        HEAD, MODALITY, 1, head_forward, head_forward * ratios.backward_factor, layer=False, pinned="last"
    )
    schedule = "1f1b" if pretrain.vp == 1 else ORDERS[order]
    if pieces > 1:
        schedule = name_seq_1f1b(pieces)
    find_schedule(schedule, pretrain.vp)
    num_hops = pretrain.num_virtual_stages - 1
    statics = _per_stage(memory.stage_static_bytes, pretrain.pp)
    kept = memory.stage_kept_bytes or (0.0,) * pretrain.pp
    return Problem(
        num_stages=pretrain.pp,
        num_chunks=pretrain.vp,
        num_microbatches=pretrain.num_microbatches * pieces,
        schedule=schedule,
        chain=(*chain, head),
        memory_limit_bytes=_limits(memory.limit_bytes, pretrain.pp),
        stage_static_bytes=tuple(static + more for static, more in zip(statics, kept, strict=True)),
        stage_tail_ms=(0.0,) * pretrain.pp,
        p2p_ms=(0.0,) * num_hops,
        p2p_ms_per_byte=(0.0,) * num_hops,
    )


def layout_of(problem: Problem, placement: Placement) -> Layout:
    """The layout that `placement` is. Its lists of selected operators count the layers before them that are recomputed
    more, as MindFormers' do.
    """
    layers = [block.layer for block in problem.chain]
    grids = {kind: _grid(problem, counts_in_mode(problem, placement, kind), layers) for kind in KINDS}
    selected = []
    for key, kind in zip(SELECT_KEYS, (SELECT, COMM), strict=True):
        more = _add(grids[BOTH], grids[kind])
        if any(map(any, more)):
            counted = tuple(
                tuple(f + m if m else 0 for f, m in zip(*rows, strict=True))
                for rows in zip(grids[FULL], more, strict=True)
            )
            selected.append((key, "", counted))
    return Layout(_grid(problem, placement.layers, layers), grids[FULL], tuple(selected))


def placement_of(problem: Problem, layout: Layout) -> Placement:
    """The placement that `layout` is. Raises PlanError where it does not fit the problem's model."""
    if len(layout.layers) != problem.num_chunks or len(layout.layers[0]) != problem.num_stages:
        raise PlanError(
            f"the layout has {len(layout.layers)} chunks of {len(layout.layers[0])} stages; the problem has "
            f"{problem.num_chunks} of {problem.num_stages}"
        )
    layers, full = ([count for row in grid for count in row] for grid in (layout.layers, layout.recompute))
    none = ((0,) * problem.num_stages,) * problem.num_chunks
    select, comm = ([count for row in selected_counts(layout, key) or none for count in row] for key in SELECT_KEYS)
    kinds = [count_kinds(*counts) for counts in zip(full, select, comm, strict=True)]
    others = {kind: [getattr(counts, kind) for counts in kinds] for kind in (BOTH, SELECT, COMM)}
    used = {kind: counts for kind, counts in others.items() if any(counts)}
    return placement_from_modalities(problem, {MODALITY: layers}, {MODALITY: full}, {MODALITY: used})


def _add(one: Grid, other: Grid) -> Grid:
    return tuple(tuple(a + b for a, b in zip(*rows, strict=True)) for rows in zip(one, other, strict=True))


def _split_memory(pretrain: Pretrain, memory: MemoryFigures) -> MemoryFigures:
    """`memory`, of whole micro-batches, as it is where they go in pieces."""
    pieces = pretrain.seq_split_num
    if pieces == 1:
        return memory
    whole_bytes = key_value_bytes(pretrain)

    def split(kept_bytes: float) -> float:
        return max(0.0, kept_bytes - whole_bytes) / pieces + whole_bytes

    def split_layer(layer: LayerMemory) -> LayerMemory:
        return replace(
            layer,
            static_bytes=layer.static_bytes + 2 * whole_bytes,
            activation_bytes=split(layer.activation_bytes),
            others=tuple(replace(other, kept_bytes=split(other.kept_bytes)) for other in layer.others),
        )

    dense = None if memory.dense is None else split_layer(memory.dense)
    return replace(memory, dense=dense, expert=split_layer(memory.expert))


def _block(
    name: str, count: int, forward: float, again: float | None, memory: LayerMemory, ratios: Ratios
) -> ChainBlock:
    """again: what recompute of the whole layer adds; None: it is not to be had."""
    always = memory.extra_factor * forward  # not in a layer that is recomputed whole
    backward = forward * ratios.backward_factor
    modes = []
    if again is not None:
        modes.append(Mode(FULL, extra_backward_ms=max(0.0, again - always), activation_bytes=memory.recomputed_bytes))
    for other in memory.others:
        extra = BACKWARD_SHARE[other.kind] * backward if other.extra_factor is None else other.extra_factor * forward
        if ratios.select_factor is not None and other.kind == SELECT:
            extra = ratios.select_factor * backward
        modes.append(Mode(other.kind, extra_backward_ms=extra, activation_bytes=other.kept_bytes))
    return ChainBlock(
        name,
        MODALITY,
        count,
        forward,
        backward + always,
        memory.static_bytes,
        memory.activation_bytes,
        tuple(modes),
        recompute_group=_GROUP,
    )


def _per_stage(first_others_last: tuple[float, float, float], num_stages: int) -> tuple[float, ...]:
    """A single stage is first and last at once, with what any has counted once."""
    first, others, last = first_others_last
    return (first + last - others,) if num_stages == 1 else (first, *[others] * (num_stages - 2), last)


def _limits(first_others_last: tuple[float, float, float], num_stages: int) -> tuple[float, ...]:
    return (min(first_others_last),) if num_stages == 1 else _per_stage(first_others_last, num_stages)


def _grid(problem: Problem, counts: tuple[tuple[int, ...], ...], is_layer: list[bool]) -> Grid:
    def rows() -> Iterator[tuple[int, ...]]:
        for chunk in range(problem.num_chunks):
            held = counts[chunk * problem.num_stages : (chunk + 1) * problem.num_stages]
            yield tuple(sum(n for n, layer in zip(row, is_layer, strict=True) if layer) for row in held)

    return tuple(rows())
