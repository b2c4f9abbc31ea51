"""One forward of a model that nobody described, cut at its layers: what runs before, between and after them.

Members of the lists are called through us. The first of each kind runs, with what it was called with kept so that it
can be run by itself; the others hand on what the first of their kind gave. A *gap* is what runs between them: before a
part's first layer (with what is after the last layer of the part before), and after the last. The graph is cut at
layers, so that each gap has a backward of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mm_autoparallel.profilers.dispatch import tensors_in
from mm_autoparallel.profilers.meter import KeptActivations
from mm_autoparallel.profilers.stack import LayerCall
from mm_autoparallel.profilers.torch_releases import autocast_type
from mm_autoparallel.profilers.trace.lists import form_of, form_of_call
from mm_autoparallel.profilers.trace.recorder import Recorder


@dataclass(eq=False)
class Kind:
    """Members that are alike in parameters, in what they tell and in how they are called. keeps_shape: what it gives
    has the form of what it takes. beside_bytes: of what else crosses with the hidden state and carries a gradient.
    """

    member: nn.Module
    call: LayerCall
    shape: tuple[int, ...]
    keeps_shape: bool
    beside_bytes: int


@dataclass(frozen=True)
class MemberCall:
    """The `index`-th member of the list at `path` was called, and is of `kind`."""

    path: str
    index: int
    kind: Kind


@dataclass
class Gap:
    """What ran between two parts. users: storages of parameters that it used. leaf: what it began with."""

    kept_bytes: int = 0
    forward: list[str] = field(default_factory=list)
    leaf: Tensor | None = None
    output_bytes: int = 0


@dataclass(frozen=True)
class CutForward:
    """calls: in order. gaps: one more than parts. used: storage of a parameter → the gap that first used it."""

    calls: Sequence[MemberCall]
    gaps: Sequence[Gap]
    recorder: Recorder
    used: Mapping[int, int]
    output: Any


class _Users(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which gap first used a parameter, by the storage it lies in. at None: a layer is running."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {parameter.untyped_storage()._cdata for parameter in parameters}
        self.used: dict[int, int] = {}
        self.at: int | None = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.at is not None:
            for tensor in tensors_in(args, kwargs):
                key = tensor.untyped_storage()._cdata
                if key in self._own:
                    self.used.setdefault(key, self.at)
        return func(*args, **dict(kwargs or {}))


def run_cut_forward(
    model: nn.Module,
    lists: Mapping[str, nn.ModuleList],
    part_of: Mapping[str, str],
    forward: Callable[[], Any],
    reached: bool,
    frugal: bool = True,
    calls: list[MemberCall] | None = None,
) -> CutForward:
    """Run `forward`, cut at the members of `lists`. part_of: list → what part it belongs to; another part, another gap.

    reached: a gradient flows through all layers, whatever trains in this run. frugal: only the first of a kind runs,
    graphs are freed once, and what layers give is handed on itself; not all models bear that. calls: an empty list that
    is filled with the calls as they come, so that a run that fails says how far it came.
    """
    recorder, users = Recorder(), _Users(list(model.parameters()))
    state = _State(recorder, users, KeptActivations(model), part_of, reached, frugal, [] if calls is None else calls)
    with state.kept, recorder, users, _routed(lists, state.call):
        state.open()
        output = forward()
        state.close([leaf for leaf in pytree.tree_leaves(_plain_output(output)) if isinstance(leaf, Tensor)])
    return CutForward(state.calls, state.gaps, recorder, users.used, output)


class _State:
    def __init__(
        self,
        recorder: Recorder,
        users: _Users,
        kept: KeptActivations,
        part_of: Mapping[str, str],
        reached: bool,
        frugal: bool,
        calls: list[MemberCall],
    ) -> None:
        self.kept, self.calls, self.gaps = kept, calls, [Gap()]
        self._recorder, self._users, self._part_of = recorder, users, part_of
        self._reached, self._frugal = reached, frugal
        self._kinds: dict[tuple[Any, ...], tuple[Kind, Any]] = {}
        self._part: str | None = None
        self._inside = False
        self._start_bytes = 0

    def open(self) -> None:
        """What runs from here on belongs to the last gap."""
        self._users.at = len(self.gaps) - 1
        self._recorder.open(f"{self._users.at} forward")

    def close(self, outputs: Sequence[Tensor]) -> None:
        """The last gap has ended with `outputs`."""
        self._recorder.close()
        self._users.at = None
        gap, name = self.gaps[-1], len(self.gaps) - 1
        gap.kept_bytes = self.kept.kept_bytes - self._start_bytes
        gap.output_bytes = max((each.numel() * each.element_size() for each in outputs), default=0)
        roots = [each for each in outputs if each.requires_grad and each.grad_fn is not None]
        if not roots:
            return
        if any(each.dim() == 0 for each in roots):
            roots = [each for each in roots if each.dim() == 0][:1]  # a loss: all else hangs on it
        gradients = [torch.ones_like(each) for each in roots]
        if gap.leaf is not None and gap.leaf.requires_grad:
            self._recorder.open(f"{name} inputs")
            torch.autograd.backward(roots, gradients, inputs=[gap.leaf], retain_graph=True)
            self._recorder.close()
        self._recorder.open(f"{name} backward")
        torch.autograd.backward(roots, gradients, retain_graph=not self._frugal)
        self._recorder.close()

    def call(self, path: str, index: int, member: nn.Module, plain: Any, args: Any, kwargs: Any) -> Any:
        if self._inside:  # a layer that runs one of another list
            return plain(*args, **kwargs)
        hidden, taken_at = _find_hidden(args, kwargs)
        if hidden is None:
            return plain(*args, **kwargs)
        if self._part_of.get(path) != self._part:
            crossing = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.close([leaf for leaf in crossing if leaf is hidden or leaf.grad_fn is not None])
            self._part = self._part_of.get(path)
            self.gaps.append(Gap())
            self._start_bytes = self.kept.kept_bytes
        else:
            self._recorder.close()
            self._users.at = None
        form = (form_of(member), form_of_call(args, kwargs))
        if form not in self._kinds or not self._frugal:
            self._inside = True
            detached_args, detached_kwargs = pytree.tree_map(copy_state, (args, kwargs))
            with torch.no_grad():
                output = plain(*args, **kwargs)
            self._inside = False
            given, given_at = _find_given(output, hidden)
            trains = self._reached or hidden.requires_grad or any(p.requires_grad for p in member.parameters())
            leaves = pytree.tree_leaves((args, kwargs))
            beside = {
                id(leaf): leaf.numel() * leaf.element_size()
                for at, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and at != taken_at and leaf.requires_grad
            }
            call = LayerCall(detached_args, detached_kwargs, taken_at, given_at, trains, autocast_type("cpu"))
            keeps = given is not None and given.shape == hidden.shape
            made = Kind(member, call, tuple(hidden.shape), keeps, sum(beside.values()))
            self._kinds.setdefault(form, (made, output))
        else:
            output = self._kinds[form][1]
        kind = self._kinds[form][0]
        self.calls.append(MemberCall(path, index, kind))
        grads = kind.call.requires_grad
        output = pytree.tree_map(lambda leaf: _as_leaf(leaf, grads), output)
        given, _ = _find_given(output, hidden)
        self.gaps[-1].leaf = given
        self._users.at = len(self.gaps) - 1
        if not self._frugal:  # a leaf that trains cannot be changed in place
            output = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output)
        self._recorder.open(f"{self._users.at} forward")
        return output


def copy_state(leaf: Any) -> Any:
    """An argument of a layer as it is now, without its graph: a cache of keys and values changes while a layer runs."""
    if isinstance(leaf, Tensor):
        return leaf.detach() if leaf.requires_grad else leaf
    if isinstance(leaf, (list, tuple, dict)):
        return pytree.tree_map(copy_state, leaf)
    if not hasattr(leaf, "get_seq_length"):  # what transformers calls a cache, and its part for a layer, have
        return leaf
    copied = copy.copy(leaf)
    vars(copied).update({name: copy_state(value) for name, value in vars(leaf).items()})
    return copied


def _as_leaf(leaf: Any, grads: bool) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.detach().requires_grad_(grads)


def _find_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, int]:
    """The first fractions of two dimensions or more among the arguments, and where among their leaves they are."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    named = kwargs.get("hidden_states")
    for at, leaf in enumerate(leaves):
        if named is not None and leaf is not named and not args:
            continue
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() >= 2:
            return leaf, at
    return None, 0


def _find_given(output: Any, hidden: Tensor) -> tuple[Tensor | None, int]:
    """What is handed on: of the form of what came in if there is such, else the first fractions."""
    found: tuple[Tensor | None, int] = (None, 0)
    for at, leaf in enumerate(pytree.tree_leaves(output)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if leaf.shape == hidden.shape:
                return leaf, at
            if found[0] is None:
                found = leaf, at
    return found


def _plain_output(output: Any) -> Any:
    """Outputs of transformers are mappings; pytree knows those of classes that were registered alone."""
    return dict(output) if isinstance(output, Mapping) else output


@contextmanager
def _routed(lists: Mapping[str, nn.ModuleList], call: Callable[..., Any]) -> Iterator[None]:
    """Members of `lists` are called through `call(path, index, member, plain forward, args, kwargs)`."""
    changed: list[nn.Module] = []
    try:
        for path, members in lists.items():
            for index, member in enumerate(members):
                if "forward" not in vars(member):
                    changed.append(member)
                    vars(member)["forward"] = _route(call, path, index, member)
        yield
    finally:
        for member in changed:
            del vars(member)["forward"]


def _route(call: Callable[..., Any], path: str, index: int, member: nn.Module) -> Callable[..., Any]:
    plain = member.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(path, index, member, plain, args, kwargs)

    return forward
