"""What belongs to which part, learned from one forward: modules and parameters by the graph, else by the clock.

A module's call belongs to the part whose graph it is in. Where it is in none (a frozen encoder run without gradients,
an output nobody reads) it belongs to the part that was open when it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from mm_autoparallel.model.blocks.chain import Role
from mm_autoparallel.profilers.cutter import Cut, Cutter, EndCall, ModuleCall, Place, Route, Windows, place_layers
from mm_autoparallel.profilers.graph import find_pieces, walk
from mm_autoparallel.profilers.subject import Layout


@dataclass(frozen=True, eq=False)
class Part:
    """One part of the model.

    index: of the layer in its modality. modules: dotted paths of the modules with parameters that run in it.
    parameters: theirs, and those that its graph reads without a module. A tied weight belongs to all parts that use it.
    """

    name: str
    modality: str
    role: Role
    index: int | None
    modules: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """What a model's forward is made of; holds for all runs of this model on batches with the same modalities.

    parts: in the order data flows. ends: path → modality of the modules whose outputs are cut. remarks: in words, what
    goes another way than from each part to the next. crossings: in words, what no cut can part.
    """

    parts: tuple[Part, ...]
    ends: Mapping[str, str]
    route: Route
    remarks: tuple[str, ...]
    crossings: tuple[str, ...]


def find_split(model: nn.Module, layout: Layout, step: Callable[[], Tensor]) -> Split:
    """Learn the parts of `model` from one forward (two where an encoder ends in more modules than the layout names).

    For that forward all parameters require grad, so that the graph tells what frozen ones belong to; the state of the
    random number generators is left as it was. Raises ProfileError where a layer does not run.
    """
    ends = {path: modality for modality, path in layout.post.items()}
    study = _Study(model, layout, step, ends)
    more = study.find_more_ends()
    if more:
        study = _Study(model, layout, step, ends | more)
    return study.conclude()


class _Study:
    """One forward with all parameters trainable, and what it shows."""

    def __init__(self, model: nn.Module, layout: Layout, step: Callable[[], Tensor], ends: Mapping[str, str]) -> None:
        self.model, self.layout, self.ends = model, layout, ends
        self.layers = place_layers(model, layout)
        self.cutter = Cutter(self.layers, ends, Route(), Windows(None, None), stub=False)
        with _all_trainable(model), _same_random_numbers(model):
            self.cutter.run(model, step)
        self.pieces = find_pieces(self.cutter.cuts, self.cutter.cut_of_node)
        self.calls = [event for event in self.cutter.events if isinstance(event, ModuleCall)]
        self.owners = self._find_owners()
        self.parameters = {id(parameter): parameter for parameter in model.parameters()}
        self.in_layers = {id(parameter) for layer in self.layers.values() for parameter in layer.parameters()}

    def find_more_ends(self) -> dict[str, str]:
        """Path → encoder of modules that end it beside those known: they read its layers and nothing else, and another
        modality reads them (a projector that the layout does not name; DeepStack's mergers)."""
        nodes = {node: call for call in self.calls for node in call.nodes}
        reads: dict[ModuleCall, set[str]] = {}
        ends: dict[str, str] = {}
        for call in self.calls:
            reach = walk(call.nodes, self.cutter.cut_of_node)
            inner = [nodes[node] for node in reach.nodes if node in nodes and nodes[node] is not call]
            read = {_encoder_read(cut) for cut in reach.cuts}
            reads[call] = read if all(reads.get(other, set()) == read for other in inner) else set()
            owner = self.owners[call.path, call.number]
            if len(read) == 1 and reads[call] == read and "" not in read and owner.modality not in read:
                ends[call.path] = next(iter(read))
        return ends

    def conclude(self) -> Split:
        """All parts, in the order data flows."""
        order = tuple(dict.fromkeys(event.modality for event in self.cutter.events if isinstance(event, Place)))
        ends = [event for event in self.cutter.events if isinstance(event, EndCall)]
        last_ends = {end.modality: end for end in ends}
        route = Route(order, self.owners, last_ends, self.cutter.forms)
        places = [
            place
            for modality in self.layout.layers
            for place in [
                Place(modality, "pre"),
                *(layer for layer in self.layers if layer.modality == modality),
                Place(modality, "post"),
            ]
        ]
        parts = tuple(self._part(place) for place in places)
        return Split(parts, self.ends, route, tuple(self._tell_remarks(parts)), tuple(self._tell_crossings()))

    def _find_owners(self) -> dict[tuple[str, int], Place]:
        by_node = {node: piece.place for piece in reversed(self.pieces) for node in piece.reach.nodes}
        by_clock = dict(self._by_clock())
        return {
            (call.path, call.number): next((by_node[node] for node in call.nodes if node in by_node), by_clock[call])
            for call in self.calls
        }

    def _by_clock(self) -> Iterator[tuple[ModuleCall, Place]]:
        """What was open when each module ran: before the first layer, between layers (`*_post`), or after them until
        the encoder's end, where that is known."""
        events = self.cutter.events
        layers = [(at, event) for at, event in enumerate(events) if isinstance(event, Place)]
        for at, call in enumerate(events):
            if not isinstance(call, ModuleCall):
                continue
            before = next((place.modality for i, place in reversed(layers) if i < at), None)
            after = next((place.modality for i, place in layers if i > at), None)
            ended = not any(isinstance(event, EndCall) and event.modality == before for event in events[at:])
            if after is None:
                yield call, Place("text", "post")
            elif before == after or (before is not None and not ended):
                yield call, Place(before, "post")
            else:
                yield call, Place(after, "pre")

    def _part(self, place: Place) -> Part:
        modules = [path for (path, _), owner in self.owners.items() if owner == place]
        if place.role == "layer":
            modules = [f"{self.layout.layers[place.modality]}.{place.index}", *modules]
        parameters = [p for path in dict.fromkeys(modules) for p in self.model.get_submodule(path).parameters()]
        read = [key for piece in self.pieces if piece.place == place for key in piece.reach.variables]
        parameters += [self.parameters[key] for key in read if key in self.parameters and key not in self.in_layers]
        unique = {id(parameter): parameter for parameter in parameters}
        return Part(
            name=place.name,
            modality=place.modality,
            role=place.role,
            index=place.index,
            modules=tuple(dict.fromkeys(modules)),
            parameters=tuple(unique.values()),
        )

    def _tell_remarks(self, parts: tuple[Part, ...]) -> Iterator[str]:
        """Leaves that others than the next part read, outputs that nothing reads, parameters that no part holds."""
        following = dict(pairwise(parts))
        readers: dict[Place, set[Place]] = {}
        live: set[Cut] = set()
        for piece in reversed(self.pieces):
            if any(cut.leaf is None or cut in live for cut in piece.cuts):
                live |= piece.reach.cuts.keys()
                for cut in piece.reach.cuts:
                    readers.setdefault(cut.place, set()).add(piece.place)
        names = [part.name for part in parts]
        made = {cut.place for cut in self.cutter.cuts if cut.leaf is not None}
        for part, then in following.items():
            place = Place(part.modality, part.role, part.index)
            if place in made and place not in readers:
                yield f"Nothing that the loss depends on reads the output of {part.name}, so no gradient reaches it."
            expected = {part.name, "text_pre" if part.role == "post" else then.name}
            others = sorted({reader.name for reader in readers.get(place, ())} - expected, key=names.index)
            if others:
                where = "where they run" if len(others) > 1 else "where it runs"
                yield f"What {part.name} gives is read by {', '.join(others)}, and must be sent on to {where}."
        held = {id(parameter) for part in parts for parameter in part.parameters}
        idle = [name for name, parameter in self.model.named_parameters() if id(parameter) not in held]
        if idle:
            yield f"No part holds {', '.join(f'`{name}`' for name in idle)}: the modules they are in did not run."

    def _tell_crossings(self) -> Iterator[str]:
        """Graphs that two parts share, layers that read what is neither theirs nor given to them, or give no graph."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        gave = set()
        for piece in self.pieces:
            for other in piece.shared - {piece.place}:
                yield (
                    f"The graph of {piece.place.name} reaches into that of {other.name} by a way that no boundary cuts "
                    "(a tensor from inside it, kept aside and used later)."
                )
            layer = self.layers.get(piece.place)
            if layer is None or piece.cuts[0].entering:
                continue
            gave.add(piece.place)
            own = {id(parameter) for parameter in layer.parameters()}
            strange = [f"`{names[key]}`" for key in piece.reach.variables if key in names.keys() - own]
            given = self.cutter.taken[piece.place]
            strange += [f"what {cut.place.name} gives" for cut in piece.reach.cuts if cut.leaf not in given]
            for what in strange:
                yield f"{piece.place.name} reads {what} other than through a tensor among its arguments."
        for place, layer in self.layers.items():
            if place not in gave and any(parameter.requires_grad for parameter in layer.parameters()):
                yield (
                    f"{place.name} trains, but no tensor among its outputs requires grad: it runs without gradients "
                    "(recompute with use_reentrant=True does that), or hides its output in an object of a class that "
                    "torch.utils._pytree does not know."
                )


def _encoder_read(cut: Cut) -> str:
    """The encoder whose layers a leaf comes from; empty for others."""
    return cut.place.modality if cut.place.role != "post" and cut.place.modality != "text" else ""


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    frozen = [p for p in model.parameters() if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def _same_random_numbers(model: nn.Module) -> Iterator[None]:
    """Leaves the generators of the CPU and of the model's device as they were."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type not in {"cpu", "meta"}}
    kind = next((device.type for device in devices), None)
    with torch.random.fork_rng(sorted(device.index or 0 for device in devices), device_type=kind or "cuda"):
        yield
