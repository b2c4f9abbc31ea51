"""Walks over autograd graphs that cuts have parted: what a tensor was computed from, back to the nearest cuts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from mm_autoparallel.profilers.cutter import Cut, Place


@dataclass(eq=False)
class Reach:
    """What a graph is made of: its nodes, the cuts whose leaves it reads, the variables (parameters) it reads."""

    nodes: set[Node] = field(default_factory=set)
    cuts: dict[Cut, None] = field(default_factory=dict)
    variables: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Piece:
    """The graph that ends in `cuts` of one boundary and belongs to the part at `place`.

    shared: parts whose earlier pieces hold some of the same nodes (their own part among them).
    """

    place: Place
    order: int
    cuts: list[Cut]
    reach: Reach
    shared: frozenset[Place] = frozenset()


def walk(nodes: Iterable[Node], cut_of_node: Mapping[Node, Cut]) -> Reach:
    """All that `nodes` were computed from, as far as the nearest cuts. cut_of_node: where a cut's leaf is handed on."""
    found, waiting = Reach(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in found.nodes:
            continue
        cut = cut_of_node.get(node)
        if cut is not None:
            found.cuts[cut] = None
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:  # an AccumulateGrad: many graphs may end in one, as in a tied weight
            found.variables[id(variable)] = variable
            continue
        found.nodes.add(node)
        waiting += [before for before, _ in node.next_functions if before is not None]
    return found


def find_pieces(cuts: Iterable[Cut], cut_of_node: Mapping[Node, Cut]) -> list[Piece]:
    """The graphs between cuts, in the order of time; sets the place of cuts that turn out to belong elsewhere.

    What is made ready for layers from nothing of their modality belongs to `*_pre`, even where only a later layer takes
    it (states for cross attention); its backward waits for that of all layers. All else between layers belongs to the
    layer that comes next.
    """
    grouped: dict[tuple[Place, int], list[Cut]] = {}
    reaches = {cut: _reach(cut.root, cut_of_node) for cut in cuts}
    last_pre: dict[str, int] = {}
    for cut, reach in reaches.items():
        order = cut.order
        if cut.place.role == "pre":
            last_pre[cut.place.modality] = order
        elif cut.entering and all(read.place.modality != cut.place.modality for read in reach.cuts):
            cut.place = Place(cut.place.modality, "pre")
            order = last_pre.get(cut.place.modality, order)
            if any(read.order > order for read in reach.cuts):
                order = cut.order
        grouped.setdefault((cut.place, order), []).append(cut)
    pieces, owner = [], dict[Node, set[Place]]()
    for (place, order), own in sorted(grouped.items(), key=lambda item: item[0][1]):
        reach = Reach()
        for cut in own:
            reach.nodes |= reaches[cut].nodes
            reach.cuts |= reaches[cut].cuts
            reach.variables |= reaches[cut].variables
        shared = frozenset(other for node in reach.nodes for other in owner.get(node, ()))
        for node in reach.nodes:
            owner.setdefault(node, set()).add(place)
        pieces.append(Piece(place, order, own, reach, shared))
    return pieces


def _reach(root: Tensor, cut_of_node: Mapping[Node, Cut]) -> Reach:
    if root.grad_fn is None:
        return Reach(variables={id(root): root})
    return walk([root.grad_fn], cut_of_node)
