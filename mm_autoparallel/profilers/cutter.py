"""One forward of a model, cut: hooks on module calls replace tensors at the boundaries of parts by leaves of their own.

Nothing of the model is traced or copied. Before a layer runs, every tensor among its arguments that requires grad is
detached into a leaf; after it ran, every such tensor of its output; and so with the outputs of the modules that end an
encoder. Each part has a graph of its own then, and what it reads of another part is a leaf. Calls of modules outside
the layers are noted, because the graph, not the clock, says which part they belong to: text is often embedded before
the vision encoder runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.blocks.chain import Role
from mm_autoparallel.profilers.layout import layers_of
from mm_autoparallel.profilers.subject import Layout
from mm_autoparallel.profilers.torch_releases import tree_leaves

CACHES = frozenset({"past_key_values", "past_key_value", "layer_past", "inference_params", "inference_context"})
"""Arguments that hold keys and values of earlier calls (Hugging Face, Megatron-LM); another call would add to them."""


@dataclass(frozen=True)
class Place:
    """One part of the model: `vision_pre`, layer 3 of text, `text_post`."""

    modality: str
    role: Role
    index: int | None = None

    @property
    def name(self) -> str:
        return f"{self.modality}_{self.role}" + ("" if self.index is None else f"_{self.index}")


@dataclass(eq=False)
class Cut:
    """One tensor at a boundary: `root` ends the graph of the part at `place`, `leaf` stands for it further on.

    order: number of the boundary in time; the same for all tensors of one. leaf None: the loss. entering: the layer at
    `place` was about to run (else the boundary lies after what ran).
    """

    place: Place
    order: int
    root: Tensor
    leaf: Tensor | None
    entering: bool = False


@dataclass(eq=False)
class ModuleCall:
    """The `number`th call of a module outside the layers, that no other such call encloses."""

    path: str
    number: int
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class EndCall:
    """The `number`th call of a module whose output ends `modality`."""

    modality: str
    path: str
    number: int


@dataclass(frozen=True)
class Form:
    """How a layer takes and gives its hidden state: positions among the flattened arguments and outputs.

    outputs: the flattened others, as one real call gave them. structure: to put all together again.
    """

    taken_at: int
    given_at: int
    outputs: tuple[Any, ...]
    structure: pytree.TreeSpec


class _HandOn(torch.autograd.Function):
    """A leaf under another name: unlike the leaf itself, it may be changed in place by what reads it."""

    @staticmethod
    def forward(_: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Windows:
    """Which part is open at each moment; tells `on_enter` and `on_leave`. A part may open several times."""

    def __init__(self, on_enter: Callable[[Place], None] | None, on_leave: Callable[[Place], None] | None) -> None:
        self._on_enter, self._on_leave = on_enter, on_leave
        self.open: Place | None = None

    def go(self, place: Place | None) -> None:
        """Close what is open and open `place`; nothing happens where it is open already."""
        if place == self.open:
            return
        if self.open is not None and self._on_leave:
            self._on_leave(self.open)
        self.open = place
        if place is not None and self._on_enter:
            self._on_enter(place)


@dataclass(frozen=True)
class Route:
    """What a first, learning run found out, for the windows of the runs after it; empty in the learning run.

    order: modalities as they run. owners: (path, number) of a module call → its part. last_ends: modality → the call
    that ends its `*_post`. forms: of the layers.
    """

    order: tuple[str, ...] = ()
    owners: Mapping[tuple[str, int], Place] = field(default_factory=dict)
    last_ends: Mapping[str, EndCall] = field(default_factory=dict)
    forms: Mapping[Place, Form] = field(default_factory=dict)

    def next_pre(self, modality: str) -> Place | None:
        """The part that opens after the last of `modality`; None in a learning run."""
        later = self.order[self.order.index(modality) + 1 :] if self.order else ()
        return Place(later[0], "pre") if later else None


class Cutter:
    """Runs a step once with all cuts; afterwards holds them, the calls of layers and modules, and their order.

    arguments: of each layer's last call, leaves for what was cut. taken: all tensors among the arguments of its calls.
    """

    def __init__(
        self, layers: Mapping[Place, nn.Module], ends: Mapping[str, str], route: Route, windows: Windows, stub: bool
    ) -> None:
        """layers: every layer of the model; ends: path → modality of the modules whose outputs end an encoder."""
        self.layers, self.ends = layers, ends
        self.route, self.windows, self.stub = route, windows, stub
        self.cuts: list[Cut] = []
        self.cut_of_node: dict[Node, Cut] = {}
        self.arguments: dict[Place, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.taken: dict[Place, set[Tensor]] = {}
        self.forms: dict[Place, Form] = {}
        self.events: list[Place | ModuleCall | EndCall] = []
        self._last_layer = {place.modality: place for place in layers}
        self._stood_for: dict[tuple[int, Node | None], Tensor] = {}
        self._leaf_of: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []
        self._num_calls: dict[str, int] = {}
        self._order = self._depth = 0
        self._before: Place | None = None

    def run(self, model: nn.Module, step: Callable[[], Tensor]) -> None:
        """Run `step`, a forward of `model`, to its loss. Raises ProfileError where a layer never ran."""
        handles: list[RemovableHandle] = []
        replaced: list[tuple[nn.Module, dict[str, Any]]] = []
        try:
            for place, layer in self.layers.items():
                handles += self._watch_layer(place, layer)
                if self.stub:
                    replaced.append((layer, {key: value for key, value in vars(layer).items() if key == "forward"}))
                    vars(layer)["forward"] = self._stub(place, layer)
            for path, modality in self.ends.items():
                handles.append(self._watch_end(path, modality, model.get_submodule(path)))
            for path, module in _modules_outside(model, self.layers.values()):
                handles += self._watch_module(path, module)
            if self.route.order:
                self.windows.go(Place(self.route.order[0], "pre"))
            loss = step()
        finally:
            for handle in handles:
                handle.remove()
            for layer, forward in replaced:
                vars(layer).pop("forward")
                vars(layer).update(forward)
        self.windows.go(None)
        self._check_end(loss)
        if loss.requires_grad:
            self._order += 1
            self.cuts.append(Cut(Place("text", "post"), self._order, loss, None))

    def _check_end(self, loss: object) -> None:
        missing = [place for place in self.layers if place not in self.arguments]
        if missing:
            names = ", ".join(place.name for place in missing[:4]) + (" …" if len(missing) > 4 else "")
            raise ProfileError(
                f"{len(missing)} of the model's {len(self.layers)} layers did not run in one step: {names}. Either the "
                "layout names a list that training does not use, or the batch lacks that modality, or layers are "
                "dropped at random; name the lists that run, and turn layer drop off."
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ProfileError(f"forward_step must return the loss, a tensor of one number; it returned {_tell(loss)}.")

    def _watch_layer(self, place: Place, layer: nn.Module) -> list[RemovableHandle]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            producer = Place(place.modality, "pre") if place.index == 0 else place
            args, kwargs = self._cut((args, kwargs), producer, entering=True)
            leaves = pytree.tree_map_only(Tensor, lambda tensor: self._leaf_of.get(id(tensor), tensor), (args, kwargs))
            self.arguments[place] = leaves[0], {name: None if name in CACHES else v for name, v in leaves[1].items()}
            taken = (leaf for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor))
            self.taken.setdefault(place, set()).update(taken)
            self.events.append(place)
            self._depth += 1
            self.windows.go(place)
            return args, kwargs

        def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            self._depth -= 1
            if place not in self.forms and not self.stub:
                form = _find_form(args, kwargs, output)
                if form:
                    self.forms[place] = form
            output = self._cut(output, place)
            self.windows.go(self._after_layer(place))
            return output

        return [
            layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            layer.register_forward_hook(leave, prepend=True, with_kwargs=True),
        ]

    def _stub(self, place: Place, layer: nn.Module) -> Callable[..., Any]:
        form = self.route.forms.get(place)
        return lambda *args, **kwargs: _hand_on(layer, place, form, args, kwargs)

    def _after_layer(self, place: Place) -> Place | None:
        if not self.route.order:
            return None
        if place.index is not None and place != self._last_layer[place.modality]:
            return Place(place.modality, "layer", place.index + 1)
        if place.modality == "text" or place.modality in self.route.last_ends:
            return Place(place.modality, "post")
        return self.route.next_pre(place.modality)

    def _watch_end(self, path: str, modality: str, module: nn.Module) -> RemovableHandle:
        number = 0

        def end(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            nonlocal number
            number += 1
            call = EndCall(modality, path, number)
            self.events.append(call)
            output = self._cut(output, Place(modality, "post"))
            if self.route.last_ends.get(modality) == call:
                self.windows.go(self.route.next_pre(modality))
            return output

        return module.register_forward_hook(end, prepend=True)

    def _watch_module(self, path: str, module: nn.Module) -> list[RemovableHandle]:
        def enter(_: nn.Module, __: tuple[Any, ...]) -> None:
            self._depth += 1
            if self._depth == 1:
                self._num_calls[path] = self._num_calls.get(path, 0) + 1
                self._before = self.windows.open
                self.windows.go(self.route.owners.get((path, self._num_calls[path]), self._before))

        def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._depth -= 1
            if self._depth == 0:
                tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                nodes = tuple(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)
                self.events.append(ModuleCall(path, self._num_calls[path], nodes))
                self.windows.go(self._before)

        # Registered after the end of an encoder and put before it: the call is noted before its output is cut.
        return [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, prepend=True),
        ]

    def _cut(self, tree: Any, place: Place, entering: bool = False) -> Any:
        self._order += 1
        return pytree.tree_map_only(Tensor, lambda tensor: self._cut_tensor(tensor, place, entering), tree)

    def _cut_tensor(self, tensor: Tensor, place: Place, entering: bool) -> Tensor:
        # A tensor is known by its place in the graph too: one that was changed in place is another.
        node = tensor.grad_fn
        if not tensor.requires_grad or not torch.is_grad_enabled() or node in self.cut_of_node:
            return tensor
        if (id(tensor), node) in self._stood_for:
            return self._stood_for[id(tensor), node]
        leaf = tensor.detach().requires_grad_()
        standing: Tensor = _HandOn.apply(leaf)  # type: ignore[no-untyped-call]
        self._stood_for[id(tensor), node], self._leaf_of[id(standing)] = standing, leaf
        self._alive += [tensor, standing]  # or another tensor could take over the id
        cut = Cut(place, self._order, tensor, leaf, entering)
        assert standing.grad_fn is not None
        self.cut_of_node[standing.grad_fn] = cut
        self.cuts.append(cut)
        return standing


def place_layers(model: nn.Module, layout: Layout) -> dict[Place, nn.Module]:
    """Every layer of `model`, in the order data flows."""
    return {
        Place(modality, "layer", index): layer
        for modality, layers in layers_of(model, layout).items()
        for index, layer in enumerate(layers)
    }


def _modules_outside(model: nn.Module, layers: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Modules with parameters, their own or below them, that lie in no layer and hold none."""
    inside = {module for layer in layers for module in layer.modules()}
    return [
        (path, module)
        for path, module in model.named_modules()
        if path and next(module.parameters(), None) is not None and not inside & set(module.modules())
    ]


def _find_form(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Form | None:
    """None where no argument has the shape and type of an output."""
    taken = tree_leaves((args, kwargs))
    given, structure = pytree.tree_flatten(output)
    floats = [at for at, leaf in enumerate(given) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not floats:
        return None
    given_at = next((at for at in floats if given[at].requires_grad), floats[0])
    named = kwargs.get("hidden_states")
    alike = [at for at, leaf in enumerate(taken) if isinstance(leaf, Tensor) and _same_form(leaf, given[given_at])]
    alike.sort(key=lambda at: at >= len(tree_leaves(args)) and taken[at] is not named)
    outputs = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in given)
    outputs = (*outputs[:given_at], None, *outputs[given_at + 1 :])
    return Form(alike[0], given_at, outputs, structure) if alike else None


def _same_form(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _hand_on(layer: nn.Module, place: Place, form: Form | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a stub gives: its hidden state as it came, in the form of the layer's output."""
    if form is None:
        raise ProfileError(
            f"{place.name} ({type(layer).__name__}) gives no tensor of the shape and type of one that it takes, so it "
            "cannot be left out to measure what lies around the layers: all must hand on a hidden state of one shape."
        )
    hidden = tree_leaves((args, kwargs))[form.taken_at]
    trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in layer.parameters())
    if trains and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    outputs = [*form.outputs]
    outputs[form.given_at] = hidden
    return pytree.tree_unflatten(outputs, form.structure)


def _tell(value: object) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
