"""Which part of a live model is which block kind of the job's chain, and how deep a model shows every kind.

The chain of a job is expanded from its model's sizes, the parts are found in the live model; the two must tell the same
story. What the chain has between the last layer and the projector (a final norm) is part of a live `*_post`, and is
measured with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.blocks.chain import Block
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.tokens import TokenCounts, count_tokens
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.profilers.split import Part
from mm_autoparallel.profilers.split_check import structural_kind
from mm_autoparallel.profilers.subject import Layout

FEW_LAYERS = 3
"""Assumed: layers of a kind in the deeper of two stacks, so that the difference to a stack of one averages two."""

MANY_LAYERS = 6
"""Assumed: the same on a CPU core, whose caches are large beside its layers: a stack of few layers stays in them, as no
stage with its gradients and micro-batches in flight does, and would be too quick."""

MAX_DEPTH = 8
"""Assumed: layers of a modality beyond which fewer of each kind are enough."""


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer and which layers of the model that is built are of it."""

    block: Block
    indices: tuple[int, ...]


@dataclass(frozen=True)
class EndKind:
    """What lies before or after a modality's layers. merged: blocks of the chain that the same live part holds."""

    block: Block
    part_name: str
    merged: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Kinds:
    """All kinds of a job's chain that its workload gives something to do.

    depth: layers to build of each modality, idle ones too. tokens: of each modality.
    """

    layers: tuple[LayerKind, ...]
    ends: tuple[EndKind, ...]
    depth: Mapping[str, int]
    tokens: Mapping[str, TokenCounts]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """One block of each kind."""
        ends = (block for end in self.ends for block in (*end.merged, end.block))
        return (*(kind.block for kind in self.layers), *ends)

    @property
    def modalities(self) -> tuple[str, ...]:
        """Those that get tokens, in the order data flows."""
        return tuple(name for name in self.depth if self.tokens[name].layer_tokens)


def find_kinds(job: Job, num_layers: int = FEW_LAYERS, lacks: Collection[str] = ()) -> Kinds:
    """The kinds of the chain of `job`, to be built with `num_layers` of each kind of layer. lacks: kinds left out, as
    the Subject's code has none of them.

    Raises ProfileError for a block that no live part stands for, and where samples are packed.
    """
    if job.workload.samples_per_sequence > 1:
        raise ProfileError(
            f"workload.samples_per_sequence is {job.workload.samples_per_sequence}, and layers are run here on whole "
            "sequences, each of one sample; measure the job without packing, or plan it by analytic costs"
        )
    blocks = [block for block in expand(job.model).blocks if block.kind not in lacks]
    tokens = {modality.name: count_tokens(modality, job.workload) for modality in job.model.modalities}
    layers: list[LayerKind] = []
    ends: list[EndKind] = []
    depth: dict[str, int] = {}
    for name, counts in tokens.items():
        own = [block for block in blocks if block.modality == name]
        indices = _indices_by_kind(own)
        depth[name] = _choose_depth(list(indices.values()), num_layers) if counts.layer_tokens else 1
        if not counts.layer_tokens:
            continue
        for kind, found in indices.items():
            block = next(block for block in own if block.kind == kind)
            layers.append(LayerKind(block, tuple(index for index in found if index < depth[name])))
        ends += [EndKind(block, f"{name}_pre") for block in own if block.role == "pre"]
        ends.append(_merge_posts([block for block in own if block.role == "post"], f"{name}_post"))
    return Kinds(tuple(layers), tuple(ends), depth, tokens)


def _indices_by_kind(blocks: Sequence[Block]) -> dict[str, list[int]]:
    indices: dict[str, list[int]] = {}
    first = 0
    for block in blocks:
        if block.role == "layer":
            indices.setdefault(block.kind, []).extend(range(first, first + block.count))
            first += block.count
    return indices


def _choose_depth(indices_by_kind: Sequence[Sequence[int]], num_layers: int) -> int:
    """The fewest layers that show each kind `num_layers` times where it has as many; fewer times where that is deep."""

    def depth_for(wanted: int) -> int:
        return max(indices[min(wanted, len(indices)) - 1] + 1 for indices in indices_by_kind)

    depths = (depth_for(wanted) for wanted in (num_layers, FEW_LAYERS))
    return next((depth for depth in depths if depth <= MAX_DEPTH), depth_for(2))


def _merge_posts(posts: Sequence[Block], part_name: str) -> EndKind:
    *merged, main = posts
    for block in merged:
        if block.count > 1 or block.kind.endswith("_deepstack"):
            raise ProfileError(
                f"{block.name} runs beside the layers of {block.modality} and is no part before or after them, so it "
                "cannot be measured as a block; leave `profiles` out for analytic costs of this model"
            )
    return EndKind(main, part_name, tuple(merged))


def live_layout(kinds: Kinds, layout: Layout) -> Layout:
    """`layout` without modalities that get no tokens.

    Raises ProfileError where the live model and the job's model do not have the same modalities.
    """
    strange = [name for name in layout.layers if name not in kinds.depth]
    lacking = [name for name in kinds.modalities if name not in layout.layers]
    if strange or lacking:
        raise ProfileError(
            f"the live model's layers are of {', '.join(layout.layers)} and the job's model has "
            f"{', '.join(kinds.depth)}; call them alike (Layout, or --auto-parallel-layers MODALITY=PATH), and give "
            "the job the model that the script builds"
        )
    return Layout(
        layers={name: path for name, path in layout.layers.items() if name in kinds.modalities},
        post={name: path for name, path in layout.post.items() if name in kinds.modalities},
    )


def check_parts(kinds: Kinds, parts: Sequence[Part], layers: Mapping[str, Sequence[nn.Module]]) -> None:
    """Raises ProfileError where live parts and kinds do not stand for each other.

    layers: modality → its live layers. Every kind must have its part, layers of one kind must be built alike, depths
    must be those asked for, and what trains for the job must train in the live model.
    """
    for modality in kinds.modalities:
        if len(layers[modality]) != kinds.depth[modality]:
            raise ProfileError(
                f"build_model was asked for {kinds.depth[modality]} layers of {modality} and built "
                f"{len(layers[modality])}; it must build Build.depth layers of each modality"
            )
    for layer_kind in kinds.layers:
        modality = layer_kind.block.modality
        first, *others = layer_kind.indices
        for index in others:
            if structural_kind(layers[modality][index]) != structural_kind(layers[modality][first]):
                raise ProfileError(
                    f"layers {first} and {index} of {modality} are both {layer_kind.block.kind} in the job's model and "
                    "are built differently in the live one; give the job the model that the script builds"
                )
        _check_training(layer_kind.block, layers[modality][first].parameters(), f"{modality} layer {first}")
    by_name = {part.name: part for part in parts}
    for end in kinds.ends:
        part = by_name.get(end.part_name)
        if part is None:
            raise ProfileError(
                f"the job's model has {end.block.kind}, and the live model has no part of that name; its parts are "
                f"{', '.join(part.name for part in parts if part.role != 'layer')}. Name the module that ends "
                f"{end.block.modality} in Layout.post"
            )
        if not end.merged:
            _check_training(end.block, part.parameters, part.name)


def _check_training(block: Block, parameters: Iterable[nn.Parameter], name: str) -> None:
    live = list(parameters)
    trains = any(parameter.requires_grad for parameter in live)
    if live and trains != block.trainable:
        planned, found = ("trains", "does not") if block.trainable else ("is frozen", "trains")
        raise ProfileError(
            f"{block.kind} {planned} in the job's model, and {name} {found} in the live one; set the "
            "job's `freeze`, or requires_grad of the live model, so that both agree"
        )
