"""Problem and Placement: the two nouns that simulation and placement share.

A Problem is a pipeline whose per-block costs are numbers already: nothing in it knows a model, a device or a strategy.
A Placement says how many layers of each block every virtual stage holds, and how many of them recompute.
Virtual stage k = chunk · num_stages + stage: the order data flows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mm_autoparallel.errors import PlanError


@dataclass(frozen=True)
class Recompute:
    """A recomputed layer holds `activation_bytes` per in-flight micro-batch instead of its block's own, adds
    `extra_backward_ms` to the backward, and its stage holds `restored_bytes` once beside the checkpoints.
    """

    extra_backward_ms: float
    activation_bytes: float
    restored_bytes: float = 0.0


@dataclass(frozen=True)
class Footprint:
    """What a block's memory consists of, finer than a placement asks; weights, gradients and optimizer are its static.

    working_bytes: beyond what is kept, while its own backward runs (its forward, where it has none). held_once_bytes:
    name → bytes that its stage holds once, however many blocks ask for it: the largest that any of them asks.
    moment_bytes: the part of optimizer_bytes that the first step makes. step_bytes, step_once_bytes: what passes during
    an optimizer step, of each such block, and of the one that needs most.
    """

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    working_bytes: float
    has_backward: bool
    held_once_bytes: tuple[tuple[str, float], ...] = ()
    moment_bytes: float = 0.0
    step_bytes: float = 0.0
    step_once_bytes: float = 0.0

    @property
    def static_bytes(self) -> float:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


def sum_held_once(footprints: Iterable[Footprint]) -> float:
    """Bytes that one stage with these blocks holds once: of each name the largest."""
    largest: dict[str, float] = {}
    for footprint in footprints:
        for name, size_bytes in footprint.held_once_bytes:
            largest[name] = max(largest.get(name, 0.0), size_bytes)
    return sum(largest.values())


@dataclass(frozen=True)
class ChainBlock:
    """`count` consecutive equal blocks of the chain; every figure is for one block, one device, one micro-batch.

    layer False: does not count as a layer (an embedding, a projector, a head).
    pinned: must lie in the first or in the last virtual stage. attach: must share the virtual stage of its neighbour.
    recompute_group: blocks of one group in one virtual stage are recomputed from the first on (what frameworks do with
    "the first n layers"); by default each block is a group of its own.
    tail_ms: what the block adds after its stage's last backward (gradient reduction not overlapped, optimizer, gather).
    output_bytes: handed to the next virtual stage if the cut is right after this block. sends_gradient False: no
    gradient ever crosses that cut, so the backward edge costs nothing.
    microbatch_scale: factors on this block's times, one per micro-batch (empty: all 1).
    footprint: where its bytes come from; None where the problem was given as numbers alone.
    """

    name: str
    modality: str
    count: int
    forward_ms: float
    backward_ms: float
    static_bytes: float = 0.0
    activation_bytes: float = 0.0
    recompute: Recompute | None = None
    layer: bool = True
    pinned: Literal["first", "last"] | None = None
    attach: Literal["previous", "next"] | None = None
    recompute_group: str | None = None
    transient_bytes: float = 0.0
    tail_ms: float = 0.0
    output_bytes: float = 0.0
    sends_gradient: bool = True
    microbatch_scale: tuple[float, ...] = ()
    footprint: Footprint | None = None

    @property
    def group(self) -> str:
        return self.recompute_group or self.name


@dataclass(frozen=True)
class Problem:
    """A pipeline to place. Tuples over stages have `num_stages` entries, over hops `num_stages · num_chunks - 1`.

    Hop k carries virtual stage k's output to k + 1 and takes `p2p_ms[k] + p2p_ms_per_byte[k] · output_bytes` each way
    (nothing where one stage follows itself). Memory of stage s, at most `memory_limit_bytes[s]`: its static bytes
    + Σ static of its blocks + the largest Σ_chunk in-flight · activation over the schedule's order
    + Σ restored over its recomputed layers + the largest transient of its blocks.
    context_bytes, communicator_bytes: those of every stage's static bytes that lie outside the allocator.
    """

    num_stages: int
    num_chunks: int
    num_microbatches: int
    schedule: str
    chain: tuple[ChainBlock, ...]
    memory_limit_bytes: tuple[float, ...]
    stage_static_bytes: tuple[float, ...]
    stage_tail_ms: tuple[float, ...]
    p2p_ms: tuple[float, ...]
    p2p_ms_per_byte: tuple[float, ...]
    max_layers_per_chunk: int | None = None
    context_bytes: float = 0.0
    communicator_bytes: float = 0.0

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.num_chunks

    @property
    def num_layers(self) -> int:
        return sum(block.count for block in self.chain if block.layer)


@dataclass(frozen=True)
class Placement:
    """`layers[k][e]` of chain block e are held by virtual stage k, `recompute[k][e]` of those recompute."""

    layers: tuple[tuple[int, ...], ...]
    recompute: tuple[tuple[int, ...], ...]


def placement_from_modalities(
    problem: Problem,
    layers: Mapping[str, Sequence[int]],
    recompute: Mapping[str, Sequence[int]],
) -> Placement:
    """The placement that holds `layers[modality][k]` layers per virtual stage, the first `recompute[modality][k]` of
    them recomputed.

    Blocks that are no layers follow their `pinned` and `attach` marks, and where they have none the block before them.
    Raises PlanError where sums, order or counts do not fit the chain, naming stage and modality.
    """
    num_virtual, chain = problem.num_virtual_stages, problem.chain
    modalities = list(dict.fromkeys(block.modality for block in chain if block.layer))
    for what, counts in (("layers", layers), ("recompute", recompute)):
        for modality, row in counts.items():
            if modality not in modalities and any(row):
                raise PlanError(f"{what}: there is no modality {modality}; known are {', '.join(modalities)}")
            if len(row) != num_virtual:
                raise PlanError(f"{what} of {modality}: {len(row)} counts for {num_virtual} (virtual) stages")
            if any(count < 0 for count in row):
                k = next(k for k, count in enumerate(row) if count < 0)
                where = name_virtual_stage(problem, k)
                raise PlanError(f"{what} of {modality}: {where} has {row[k]}; it must be at least 0")
    stage_of_layer: dict[str, list[int]] = {}
    for modality in modalities:
        row = layers.get(modality, (0,) * num_virtual)
        held = sum(block.count for block in chain if block.layer and block.modality == modality)
        if sum(row) != held:
            raise PlanError(f"layers of {modality}: they sum to {sum(row)}, and the model has {held}")
        stage_of_layer[modality] = [k for k, count in enumerate(row) for _ in range(count)]
    holder = _assign_blocks(problem, stage_of_layer)
    placed = [[0] * len(chain) for _ in range(num_virtual)]
    for (e, _), k in holder.items():
        placed[k][e] += 1
    recomputed = [[0] * len(chain) for _ in range(num_virtual)]
    for modality, row in recompute.items():
        for k, count in enumerate(row):
            left = count
            for e, block in enumerate(chain):
                if block.modality == modality and block.layer and block.recompute is not None:
                    recomputed[k][e] = min(left, placed[k][e])
                    left -= recomputed[k][e]
            if left:
                raise PlanError(
                    f"recompute of {modality}: {name_virtual_stage(problem, k)} recomputes {count}, and "
                    f"{count - left} of its {modality} layers can be "
                    f"(frozen layers with nothing trained before them keep nothing)"
                )
    return Placement(tuple(map(tuple, placed)), tuple(map(tuple, recomputed)))


def _assign_blocks(problem: Problem, stage_of_layer: Mapping[str, Sequence[int]]) -> dict[tuple[int, int], int]:
    """The virtual stage of the i-th of chain block e, by (e, i), given that of each modality's layers in turn.

    Raises PlanError where a layer would come before one that feeds it.
    """
    chain = problem.chain
    flat = [(e, i) for e, block in enumerate(chain) for i in range(block.count)]
    next_layer = {modality: iter(stages) for modality, stages in stage_of_layer.items()}
    holder: dict[tuple[int, int], int] = {}
    latest, latest_modality = 0, ""
    for e, i in flat:
        block = chain[e]
        if block.layer:
            k = next(next_layer[block.modality])
            if k < latest:
                raise PlanError(
                    f"layers: {name_virtual_stage(problem, k)} holds {block.modality} layers that follow "
                    f"{latest_modality} layers of {name_virtual_stage(problem, latest)}: data flows "
                    f"{' → '.join(stage_of_layer)}, so {block.modality} may not begin on an earlier stage than "
                    f"{latest_modality} ends on"
                )
            holder[e, i] = latest = k
            latest_modality = block.modality
        elif block.pinned:
            holder[e, i] = 0 if block.pinned == "first" else problem.num_virtual_stages - 1
    following = problem.num_virtual_stages - 1
    for e, i in reversed(flat):
        if (e, i) not in holder and chain[e].attach == "next":
            holder[e, i] = following
        following = holder.get((e, i), following)
    before = 0
    for e, i in flat:
        before = holder.setdefault((e, i), before)
    return holder


def name_virtual_stage(problem: Problem, virtual_stage: int) -> str:
    """`stage 3`, or with chunks `stage 3, chunk 1`."""
    chunk, stage = divmod(virtual_stage, problem.num_stages)
    return f"stage {stage}" if problem.num_chunks == 1 else f"stage {stage}, chunk {chunk}"
