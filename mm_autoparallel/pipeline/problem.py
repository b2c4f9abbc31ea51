"""Problem and Placement: the two nouns that simulation and placement share.

A Problem is a pipeline whose per-block costs are numbers already: nothing in it knows a model, a device or a strategy.
A Placement says how many layers of each block every virtual stage holds, and how many of them run in which mode.
Virtual stages are numbered in the order data flows (schedules/virtual_stages.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.pipeline.dominance import Dominance
from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.footprint import Beside, Footprint
from mm_autoparallel.pipeline.layout import Layout, Reshard
from mm_autoparallel.pipeline.schedules.catalog import find_schedule, parts_backwards
from mm_autoparallel.pipeline.schedules.virtual_stages import list_stages, list_virtual_stages

SAME, LESS, MORE, LESS_ON_HOST, FILL = Dominance

#: The mode that a block's short form names: the layer keeps a checkpoint and runs its forward once more.
RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Mode:
    """Another way to run a layer of a block, to keep less: recompute of some or all of it, offload to the host.

    A layer in this mode holds `activation_bytes` per in-flight micro-batch instead of its block's own and adds
    `extra_forward_ms` and `extra_backward_ms`; its stage holds `restored_bytes` once for each such layer. `host_bytes`
    move to the host beside the forward of each micro-batch, lie there while it is in flight, and move back beside its
    backward. layout: the layer runs in that one, and what is extra is beyond its figures; None: in its block's own.
    """

    name: Annotated[str, SAME]
    extra_forward_ms: Annotated[float, LESS] = 0.0
    extra_backward_ms: Annotated[float, LESS] = 0.0
    activation_bytes: Annotated[float, LESS] = 0.0
    restored_bytes: Annotated[float, LESS] = 0.0
    host_bytes: Annotated[float, LESS] = 0.0
    layout: Annotated[Layout | None, SAME] = None


@dataclass(frozen=True)
class ChainBlock:
    """`count` consecutive equal blocks of the chain; every figure is for one block, one device, one micro-batch.

    layer False: does not count as a layer (an embedding, a projector, a head).
    pinned: must lie in the first or in the last virtual stage. attach: must share the virtual stage of its neighbour.
    within: must lie on these virtual stages, from the first of the two to before the second (None: on any).
    modes: ways to run a layer beside its own; each layer runs in one of them or in none.
    backward_weight_ms: the part of backward_ms that is the weights' gradient, which a schedule may run apart (0: it is
    not to be parted); split_extra_ms: what parting it costs, in that part. kept_for_weight_bytes: of activation_bytes,
    what stays until the weights' gradient has run where it runs apart (None: all of it).
    recompute_group: blocks of one group take modes in order: in one virtual stage the first n1 layers of the group take
    its first mode, the next n2 its second, …, the rest none (what frameworks do with "the first n layers"); by default
    each block is a group of its own. All blocks of a group that have modes have the same names of modes in one order.
    tail_ms: what the block adds after its stage's last backward (gradient reduction not overlapped, optimizer, gather).
    output_bytes: handed to the next virtual stage if the cut is right after this block. sends_gradient False: no
    gradient ever crosses that cut, so the backward edge costs nothing.
    microbatch_scale: factors on this block's times, one per micro-batch (empty: all 1).
    footprint: where its bytes come from; None where the problem was given as numbers alone.
    host_static_bytes: what it keeps on the host through the whole step.
    step_bytes, step_once_bytes: what passes during the optimizer's step, for each such block of a stage, and for the
    one of its blocks that needs most. step_shard_bytes: a stage passes at most the sum of these of its blocks in place
    of that largest step_once_bytes (a rank updates its shard of a weight); None: step_once_bytes, which limits nothing.
    reshards: where modes have layouts, between any two of these and the block's own; equal for all blocks of a group.
    Those of a virtual stage's layers in its order add to its times, from the own layout at its begin to it at its end.
    """

    name: Annotated[str, SAME]
    modality: Annotated[str, SAME]
    count: Annotated[int, SAME]
    forward_ms: Annotated[float, LESS]
    backward_ms: Annotated[float, LESS]
    static_bytes: Annotated[float, LESS] = 0.0
    activation_bytes: Annotated[float, LESS] = 0.0
    modes: Annotated[tuple[Mode, ...], SAME] = ()
    layer: Annotated[bool, SAME] = True
    pinned: Annotated[Literal["first", "last"] | None, SAME] = None
    attach: Annotated[Literal["previous", "next"] | None, SAME] = None
    recompute_group: Annotated[str | None, SAME] = None
    transient_bytes: Annotated[float, LESS] = 0.0
    tail_ms: Annotated[float, LESS] = 0.0
    output_bytes: Annotated[float, LESS] = 0.0
    sends_gradient: Annotated[bool, SAME] = True
    microbatch_scale: Annotated[tuple[float, ...], LESS] = ()
    footprint: Annotated[Footprint | None, FILL] = None
    host_static_bytes: Annotated[float, LESS_ON_HOST] = 0.0
    step_bytes: Annotated[float, LESS] = 0.0
    step_once_bytes: Annotated[float, LESS] = 0.0
    step_shard_bytes: Annotated[float | None, LESS] = None
    reshards: Annotated[tuple[Reshard, ...], SAME] = ()
    backward_weight_ms: Annotated[float, SAME] = 0.0
    kept_for_weight_bytes: Annotated[float | None, LESS] = None
    split_extra_ms: Annotated[float, LESS] = 0.0
    within: Annotated[tuple[int, int] | None, SAME] = None

    def may_lie_on(self, virtual: int, num_virtual: int) -> bool:
        """Whether what it is pinned to, and lies within, allow that virtual stage of so many."""
        first, end = self.within or (0, num_virtual)
        pins = {None: True, "first": virtual == 0, "last": virtual == num_virtual - 1}
        return pins[self.pinned] and first <= virtual < end

    @property
    def pending_bytes(self) -> float:
        """`kept_for_weight_bytes`, or what stands for it."""
        return self.activation_bytes if self.kept_for_weight_bytes is None else self.kept_for_weight_bytes

    @property
    def shard_bytes(self) -> float:
        """`step_shard_bytes`, or what stands for it."""
        return self.step_once_bytes if self.step_shard_bytes is None else self.step_shard_bytes

    @property
    def group(self) -> tuple[str, str]:
        """Whose layers take modes in order with this block's: its recompute_group, else itself alone, whatever others
        are called."""
        return ("group", self.recompute_group) if self.recompute_group else ("block", self.name)

    @property
    def recompute(self) -> Mode | None:
        """The mode named "recompute", if there is one."""
        return next((mode for mode in self.modes if mode.name == RECOMPUTE), None)


@dataclass(frozen=True)
class Problem:
    """A pipeline to place. Tuples over stages have `num_stages` entries, over hops `num_stages · num_chunks - 1`.

    Hop k carries virtual stage k's output to k + 1 and takes `p2p_ms[k] + p2p_ms_per_byte[k] · output_bytes` each way
    (nothing where one stage follows itself). Memory of stage s, at most `memory_limit_bytes[s]`: its static bytes
    + Σ static of its blocks + what passes, which is the larger of two moments:
        at work:  the largest Σ_chunk in-flight · activation over the schedule's order
                  + Σ restored over its layers in modes + the largest transient of its blocks
        the optimizer's step:  Σ step of its blocks + min(the largest step_once of its blocks, Σ step_shard of them)
    stage_time_factor[s] (empty: all 1) multiplies forward, backward and the modes' extra times of all that stage s
    holds (a slow rank, another device type). host_ms_per_byte[s]: of the link between stage s and its host, each way;
    both ways run at once. For each class of micro-batches virtual stage k on stage s takes
        forward  = max(factor_s · Σ (forward + extra forward), host_ms_per_byte_s · Σ host_bytes)
        backward = max(factor_s · Σ (backward + extra backward), host_ms_per_byte_s · Σ host_bytes)
    where a block's microbatch_scale multiplies both its times and its host_bytes. Where the schedule parts a backward,
        input   = max(factor_s · Σ (backward - backward weight + extra backward), host_ms_per_byte_s · Σ host_bytes)
        weight  = factor_s · Σ (backward weight + split extra)
    and a micro-batch is in flight until its input gradient has ended; from then until its weight gradient has, it is
    pending: each chunk adds pending · Σ kept_for_weight of all its layers to the moments at work.
    A forward and a backward that a schedule pairs take forward + backward - pair_overlap_fraction · the lesser of both.
    orders: of each stage where the schedule is `given`, in the text form of schedules/action.py.
    context_bytes, communicator_bytes: those of every stage's static bytes that lie outside the allocator.
    beside: what of these each stage holds of blocks that are none of the chain's (empty: nothing).
    encoders: whose work runs beside the pipeline (encoders.py); placements then have orders with their passes.
    host_limit_bytes[s] (empty: no limit): what stage s may keep on its host at most, which is Σ host_static of its
    blocks + the largest Σ_chunk in-flight · host_bytes of its layers in modes, over the schedule's order.
    """

    num_stages: Annotated[int, SAME]
    num_chunks: Annotated[int, SAME]
    num_microbatches: Annotated[int, SAME]
    schedule: Annotated[str, SAME]
    chain: Annotated[tuple[ChainBlock, ...], SAME]
    memory_limit_bytes: Annotated[tuple[float, ...], MORE]
    stage_static_bytes: Annotated[tuple[float, ...], LESS]
    stage_tail_ms: Annotated[tuple[float, ...], LESS]
    p2p_ms: Annotated[tuple[float, ...], LESS]
    p2p_ms_per_byte: Annotated[tuple[float, ...], LESS]
    max_layers_per_chunk: Annotated[int | None, SAME] = None
    context_bytes: Annotated[float, FILL] = 0.0
    communicator_bytes: Annotated[float, FILL] = 0.0
    host_ms_per_byte: Annotated[tuple[float, ...], LESS] = ()
    stage_time_factor: Annotated[tuple[float, ...], LESS] = ()
    host_limit_bytes: Annotated[tuple[float, ...], MORE] = ()
    orders: Annotated[tuple[str, ...], SAME] = ()
    pair_overlap_fraction: Annotated[float, MORE] = 0.0
    beside: Annotated[tuple[Beside, ...], SAME] = ()
    encoders: Annotated[tuple[Encoder, ...], SAME] = ()

    @property
    def splits(self) -> bool:
        """Whether its schedule parts backwards into those of inputs and of weights."""
        return parts_backwards(self.schedule, self.num_chunks, self.orders)

    @property
    def pairs(self) -> bool:
        """Whether forwards may run together with backwards."""
        schedule = find_schedule(self.schedule, self.num_chunks)
        return schedule.pairs or schedule.given_by == "placement" or any("(" in order for order in self.orders)

    @property
    def least_load_fraction(self) -> float:
        """What a stage takes at least of its forwards and backwards: of two that overlap the lesser is half."""
        return 1.0 - 0.5 * self.pair_overlap_fraction if self.pairs else 1.0

    @property
    def v_shaped(self) -> bool:
        """Whether every second chunk runs back through the stages."""
        return find_schedule(self.schedule, self.num_chunks).v_shaped

    @property
    def stage_of(self) -> tuple[int, ...]:
        """[K] the stage that holds each virtual stage."""
        return list_stages(self.num_stages, self.num_chunks, self.v_shaped)

    @property
    def virtual_stages(self) -> tuple[tuple[int, ...], ...]:
        """[P][V] the virtual stages that each stage holds, by chunk."""
        return list_virtual_stages(self.num_stages, self.num_chunks, self.v_shaped)

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.num_chunks

    @property
    def num_layers(self) -> int:
        return sum(block.count for block in self.chain if block.layer)

    @property
    def time_factors(self) -> tuple[float, ...]:
        """`stage_time_factor` of every stage."""
        return self.stage_time_factor or (1.0,) * self.num_stages


@dataclass(frozen=True)
class Placement:
    """`layers[k][e]` of chain block e are held by virtual stage k; `modes[k][e]` says how many of those run in each of
    the block's modes, in their order. orders: what each stage runs, one text a stage, where the schedule is `free` or
    encoders run beside it."""

    layers: tuple[tuple[int, ...], ...]
    modes: tuple[tuple[tuple[int, ...], ...], ...]
    orders: tuple[str, ...] = ()


def has_same_counts(problem: Problem, other: Problem) -> bool:
    """Whether placements of one are those of the other, but for what fits: as many stages, blocks of the same modes on
    the same stages, and as many micro-batches where placements have an order of them."""

    def counted(of: Problem) -> object:
        blocks = tuple((block.count, block.within, tuple(mode.name for mode in block.modes)) for block in of.chain)
        has_order = find_schedule(of.schedule, of.num_chunks).given_by == "placement"
        return of.num_stages, of.num_chunks, blocks, has_order and of.num_microbatches, len(of.encoders)

    return counted(problem) == counted(other)


def counts_in_mode(problem: Problem, placement: Placement, name: str) -> tuple[tuple[int, ...], ...]:
    """[k][e]: how many of chain block e virtual stage k runs in the mode called `name`; 0 where there is no such
    mode."""
    return tuple(
        tuple(
            next((n for mode, n in zip(block.modes, counts, strict=True) if mode.name == name), 0)
            for block, counts in zip(problem.chain, row, strict=True)
        )
        for row in placement.modes
    )


def recomputed(problem: Problem, placement: Placement) -> tuple[tuple[int, ...], ...]:
    """[k][e]: how many of chain block e virtual stage k runs in the mode "recompute"."""
    return counts_in_mode(problem, placement, RECOMPUTE)


def place_in_modes(
    problem: Problem, layers: Sequence[Sequence[int]], counts: Mapping[str, Sequence[Sequence[int]]]
) -> Placement:
    """The placement with `layers[k][e]`, of which `counts[name][k][e]` run in the mode called `name`; others are 0.

    Raises PlanError where a block has no mode of that name. What else may be wrong, `check_placement` says.
    """
    for name, rows in counts.items():
        for k, row in enumerate(rows):
            for block, n in zip(problem.chain, row, strict=True):
                if n and all(mode.name != name for mode in block.modes):
                    done = "recomputes" if name == RECOMPUTE else f'runs in mode "{name}"'
                    raise PlanError(
                        f"{name_virtual_stage(problem, k)} {done} {n} of {block.name}, which cannot be: it has no mode "
                        f'called "{name}"'
                    )

    def of_block(k: int, e: int, block: ChainBlock) -> tuple[int, ...]:
        return tuple(int(counts[mode.name][k][e]) if mode.name in counts else 0 for mode in block.modes)

    return Placement(
        tuple(tuple(int(n) for n in row) for row in layers),
        tuple(tuple(of_block(k, e, block) for e, block in enumerate(problem.chain)) for k in range(len(layers))),
    )


def check_modes(problem: Problem) -> None:
    """Raise JobError, naming block and mode, where modes contradict one another or lack the link they move bytes
    over.
    """
    names_of: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {}  # group → first block with modes, their names
    for block in problem.chain:
        names = tuple(mode.name for mode in block.modes)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise JobError(f'block "{block.name}": two of its modes are called "{twice}"; each needs a name of its own')
        if not names:
            continue
        first, expected = names_of.setdefault(block.group, (block.name, names))
        if names != expected:
            raise JobError(
                f'blocks "{first}" and "{block.name}" are of one recompute_group, "{block.group[1]}", and have '
                f"other modes: {', '.join(expected)} and {', '.join(names)}; all blocks of a group that have modes "
                f"need the same names in the same order"
            )
    for key, values in (
        ("host_ms_per_byte", problem.host_ms_per_byte),
        ("stage_time_factor", problem.stage_time_factor),
        ("host_limit_bytes", problem.host_limit_bytes),
    ):
        if values and len(values) != problem.num_stages:
            raise JobError(f"{key} has {len(values)} entries; num_stages is {problem.num_stages}")
    list_host_links(problem)


def list_host_links(problem: Problem) -> tuple[float, ...]:
    """`host_ms_per_byte` of every stage; zeros where nothing moves. Raises JobError where a mode moves bytes and it is
    not given.
    """
    if problem.host_ms_per_byte:
        return problem.host_ms_per_byte
    for block in problem.chain:
        for mode in block.modes:
            if mode.host_bytes:
                raise JobError(
                    f'block "{block.name}": mode "{mode.name}" moves {mode.host_bytes:g} bytes to the host, and '
                    f"host_ms_per_byte does not say how long a byte takes; give it per stage or as one number"
                )
    return (0.0,) * problem.num_stages


def name_virtual_stage(problem: Problem, virtual: int) -> str:
    """`stage 3`, or with chunks `stage 3, chunk 1`."""
    chunk, stage = virtual // problem.num_stages, problem.stage_of[virtual]
    return f"stage {stage}" if problem.num_chunks == 1 else f"stage {stage}, chunk {chunk}"
