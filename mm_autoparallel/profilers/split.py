"""A live model as parts: before each modality's layers, every layer, after them; each with a graph and a backward.

`find_split` runs the user's own forward once to learn what belongs to which part; `run_cut` runs it cut at their
boundaries; `backward_parts` runs backward part by part in reverse, handing gradients across the cuts.

    vision_pre │ vision_layer_0 │ … │ vision_post │ text_pre │ text_layer_0 │ … │ text_post
            leaf             leaf  leaf         leaf      leaf            leaf    leaf      loss

A leaf may be read by any later part, not only by the next one, and collects the gradients of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mm_autoparallel.profilers.cutter import Cut, Cutter, Place, Windows, place_layers
from mm_autoparallel.profilers.graph import Piece, find_pieces
from mm_autoparallel.profilers.parts import Part, Split, find_split
from mm_autoparallel.profilers.subject import Layout

__all__ = ["Part", "PartRun", "Place", "Segment", "Split", "backward_parts", "find_split", "run_cut"]

Watch = Callable[[Part], None]
"""What is told which part opens or closes."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A graph that ends in cuts of one boundary. leaves: what stands for each root further on; None for the loss.

    order: of the boundary in time. inputs: the leaves it reads. retain: part of this graph is also in one whose
    backward comes later.
    """

    order: int
    inputs: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]
    leaves: tuple[Tensor | None, ...]
    retain: bool


@dataclass(frozen=True, eq=False)
class PartRun:
    """One part in one forward.

    inputs: leaves of other parts that its graph reads; after its backward their `.grad` holds what it adds. outputs:
    tensors with its graph that are handed on, or the loss. Both are empty where no gradient flows (frozen parts).
    args, kwargs: of a layer's (last) call, with leaves for what was cut and without caches; else empty. segments: its
    graph in the order of time, mostly one.
    """

    part: Part
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    segments: tuple[Segment, ...]


def run_cut(
    model: nn.Module,
    layout: Layout,
    step: Callable[[], Tensor],
    on_enter: Watch | None = None,
    on_leave: Watch | None = None,
    stub_layers: bool = False,
    split: Split | None = None,
) -> tuple[PartRun, ...]:
    """One forward, cut at the boundaries of the parts: a PartRun for each Part, in the order data flows.

    step: () → the scalar loss of one forward of `model`. on_enter, on_leave: told as each part's computation begins and
    ends; a part may open more than once. stub_layers: no layer runs, each hands on its hidden state as it came, so that
    a backward gives what lies before and after the layers gradients of the right shape. split: as find_split found it
    for this model; None: find it now.
    """
    split = split or find_split(model, layout, step)
    parts = {Place(part.modality, part.role, part.index): part for part in split.parts}
    windows = Windows(_by_place(on_enter, parts), _by_place(on_leave, parts))
    cutter = Cutter(place_layers(model, layout), split.ends, split.route, windows, stub_layers)
    cutter.run(model, step)
    return tuple(_part_runs(cutter, parts))


def backward_parts(
    runs: Sequence[PartRun],
    on_enter: Watch | None = None,
    on_leave: Watch | None = None,
    inputs_only: bool = False,
) -> None:
    """Backward of the loss through all parts, in the reverse of the order they ran; parameters collect `.grad`.

    The gradients of leaves are let go as soon as the part before them has used them. Parts that no gradient reaches do
    not run. on_enter, on_leave: as each part's backward begins and ends. inputs_only: no gradients of parameters, only
    those that one part gives another.
    """
    steps = sorted(((segment, run.part) for run in runs for segment in run.segments), key=lambda step: -step[0].order)
    open_part: Part | None = None
    for segment, part in steps:
        pairs = [
            (root, None if leaf is None else leaf.grad)
            for root, leaf in zip(segment.roots, segment.leaves, strict=True)
            if leaf is None or leaf.grad is not None
        ]
        if not pairs or (inputs_only and not segment.inputs):
            continue
        if part is not open_part:
            if open_part is not None and on_leave:
                on_leave(open_part)
            if on_enter:
                on_enter(part)
            open_part = part
        torch.autograd.backward(
            [root for root, _ in pairs],
            [gradient for _, gradient in pairs],
            retain_graph=segment.retain,
            inputs=segment.inputs if inputs_only else None,
        )
        for leaf in segment.leaves:
            if leaf is not None:
                leaf.grad = None
    if open_part is not None and on_leave:
        on_leave(open_part)


def _by_place(watch: Watch | None, parts: Mapping[Place, Part]) -> Callable[[Place], None] | None:
    return None if watch is None else lambda place: watch(parts[place])


def _part_runs(cutter: Cutter, parts: Mapping[Place, Part]) -> Iterator[PartRun]:
    pieces: dict[Place, list[Piece]] = {}
    readers: dict[Cut, set[Place]] = {}
    for piece in find_pieces(cutter.cuts, cutter.cut_of_node):
        pieces.setdefault(piece.place, []).append(piece)
        for cut in piece.reach.cuts:
            readers.setdefault(cut, set()).add(piece.place)
    for place, part in parts.items():
        own = pieces.get(place, [])
        read = dict.fromkeys(cut for piece in own for cut in piece.reach.cuts if cut.place != place)
        given = [cut for piece in own for cut in piece.cuts if readers.get(cut) != {place}]
        args, kwargs = cutter.arguments.get(place, ((), {}))
        yield PartRun(
            part=part,
            inputs=tuple(cut.leaf for cut in read if cut.leaf is not None),
            outputs=tuple(cut.root for cut in given),
            args=args,
            kwargs=kwargs,
            segments=tuple(_segment(piece) for piece in own),
        )


def _segment(piece: Piece) -> Segment:
    return Segment(
        order=piece.order,
        inputs=tuple(cut.leaf for cut in piece.reach.cuts if cut.leaf is not None),
        roots=tuple(cut.root for cut in piece.cuts),
        leaves=tuple(cut.leaf for cut in piece.cuts),
        retain=bool(piece.shared),
    )
