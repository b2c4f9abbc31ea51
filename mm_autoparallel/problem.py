"""Problem and Placement: the two nouns that simulation and placement share.

A Problem is a pipeline whose per-block costs are numbers already: nothing in it knows a model, a device or a strategy.
A Placement says how many layers of each block every virtual stage holds, and how many of them recompute.
Virtual stage k = chunk · num_stages + stage: the order data flows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mm_autoparallel.errors import PlanError


@dataclass(frozen=True)
class Recompute:
    """What recomputing one layer costs: it holds `activation_bytes` per in-flight micro-batch instead of the block's own,

    adds `extra_backward_ms` to the backward, and its stage holds `restored_bytes` once beside the checkpoints.
    """

    extra_backward_ms: float
    activation_bytes: float
    restored_bytes: float = 0.0


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

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.num_chunks

    @property
    def num_layers(self) -> int:
        return sum(block.count for block in self.chain if block.layer)


@dataclass(frozen=True)
class Placement:
    """`layers[k][e]`: how many of chain block e virtual stage k holds; `recompute[k][e]`: how many of those recompute."""

    layers: tuple[tuple[int, ...], ...]
    recompute: tuple[tuple[int, ...], ...]


def placement_from_modalities(
    problem: Problem,
    layers: dict[str, Sequence[int]],
    recompute: dict[str, Sequence[int]],
) -> Placement:
    """The placement that holds `layers[modality][k]` layers per virtual stage, the first `recompute[modality][k]` of them recomputed.

    Blocks that are no layers follow their `pinned` and `attach` marks. Raises PlanError where sums, order or counts do
    not fit the chain, naming stage and modality.
    """
    raise NotImplementedError
