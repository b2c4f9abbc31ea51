"""What a model that nobody described is made of: found by running it, cut at its lists of layers.

A *route* is a way to run a part of it: its images or its sounds to tokens of text (`get_image_features`, which
transformers 5 gives nearly all classes), and its tokens to a loss; or, where a class offers no more, everything at
once. The lists whose members are called one after another on the same width are layers. What else a route uses stands
before or after them, and what no route uses is idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.profilers.trace.cut_run import CutForward, MemberCall
from mm_autoparallel.profilers.trace.lists import find_lists
from mm_autoparallel.profilers.trace.routes import (
    PROBE_TOKENS,
    Media,
    Route,
    first_that_runs,
    input_table,
    list_routes,
    run_route,
    whole_steps,
)
from mm_autoparallel.profilers.trace.samples import count_places

WHOLE = -1
"""Of a part whose only layer is a whole tower."""

SMALL_PART = 0.01
"""Assumed: a list of fewer of the parameters that its route uses is no list of layers but a part of an end."""


@dataclass(frozen=True)
class Slot:
    """Parameters of one block: `pre`, `layer` (index of its kind), `own_post` (of the tower itself), `post`, `idle`."""

    role: Literal["pre", "layer", "own_post", "post", "idle"]
    kind: int = 0


@dataclass(frozen=True, eq=False)
class Part:
    """A run of layers, with what stands before and after it. route: index. order: its layers as they are called.

    kinds: of each layer the number of its kind. gaps: indices of what runs before and after in the route's run.
    """

    name: str
    media: Media
    route: int
    lists: tuple[str, ...]
    order: tuple[tuple[str, int], ...]
    kinds: tuple[int, ...]
    gaps: tuple[int, int]
    hidden_size: int
    whats: tuple[str, ...]
    parameters: dict[Slot, list[nn.Parameter]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Anatomy:
    """All of a model. parts: in the order data flows, text last. roots: where an encoder's tower lies."""

    routes: tuple[Route, ...]
    parts: tuple[Part, ...]
    lists: Mapping[str, nn.ModuleList]
    remarks: tuple[str, ...]

    def part_of(self, route: int) -> dict[str, str]:
        """list → name of its part, of one route."""
        return {path: part.name for part in self.parts if part.route == route for path in part.lists}

    def lists_of(self, route: int) -> dict[str, nn.ModuleList]:
        """The lists of one route's parts."""
        return {path: self.lists[path] for path in self.part_of(route)}


def find_anatomy(model: nn.Module, dtype: torch.dtype) -> Anatomy:
    """Take `model` apart. Raises ProfileError naming the structure that is missing."""
    config: Any = model.config
    lists = find_lists(model)
    if not lists:
        raise ProfileError("it has no list of layers (a torch.nn.ModuleList of two or more), so it cannot be divided")
    routes, probes, reasons = [], [], []
    for media, steps in list_routes(model, config, dtype):
        found = first_that_runs(model, lists, media, steps)
        if isinstance(found, str):
            reasons.append(f"{media}: {found}")
        else:
            routes.append(found[0])
            probes.append(found[1])
    lacks_text = not routes or routes[-1].media != "text"
    if lacks_text or reasons or _skips_layers(probes[-1], lists) or _lacks_encoder(config, probes, lists):
        beside, found = _run_whole(model, lists, config, dtype)
        if not isinstance(found, str) and (not routes or _reaches_more(found[1], probes)):
            places = count_places(config, model.forward)
            routes, probes = [replace(found[0], beside=beside, fixed_tokens=places)], [found[1]]
        elif not routes or routes[-1].media != "text":
            raise ProfileError(
                f"its forward cannot be run on tokens ({'; '.join(reasons) or found}), so it is not known what calls "
                "its layers"
            )
        elif not reasons and _lacks_encoder(config, probes, lists):
            raise ProfileError(
                "it is an encoder and a decoder, and no way was found to run more than the decoder "
                f"({routes[-1].refused or found}), so what its encoder computes and keeps is not known; trace your own "
                "code with `mm-autoparallel trace --model`"
            )
    remarks = [f"its {reason.partition(':')[0]} cannot be run: {reason.partition(': ')[2]}" for reason in reasons]
    if routes[0].beside is None:
        return _assemble(model, lists, routes, probes, remarks)
    found_whole = _assemble(model, lists, routes, probes, [])
    if len(found_whole.parts) > 1:  # the encoders ran with the rest
        return found_whole
    unseen = [remark for remark in remarks if not remark.startswith("its text")]
    return replace(found_whole, remarks=(*unseen, *found_whole.remarks))


def _run_whole(
    model: nn.Module, lists: Mapping[str, nn.ModuleList], config: Any, dtype: torch.dtype
) -> tuple[Media, tuple[Route, CutForward] | str]:
    """All of the model at once, on tokens and images or else sounds: which, and as `first_that_runs`."""
    seen = first_that_runs(model, lists, "text", whole_steps(model, config, dtype, "images"))
    if not isinstance(seen, str):
        return "images", seen
    return "audios", first_that_runs(model, lists, "text", whole_steps(model, config, dtype, "audios"))


def _reaches_more(probe: CutForward, probes: Sequence[CutForward]) -> bool:
    return len(probe.calls) > sum(len(other.calls) for other in probes)


def _skips_layers(probe: CutForward, lists: Mapping[str, nn.ModuleList]) -> bool:
    """Whether a list that was reached has members that were not."""
    reached = {(call.path, call.index) for call in probe.calls}
    return any((path, index) not in reached for path, _ in reached for index in range(len(lists[path])))


def _lacks_encoder(config: Any, probes: Sequence[CutForward], lists: Mapping[str, nn.ModuleList]) -> bool:
    """Whether of a model of an encoder and a decoder the decoder alone ran: a list of many parameters was missed."""
    sizes = {path: sum(each.numel() for each in members.parameters()) for path, members in lists.items()}
    reached = {call.path for probe in probes for call in probe.calls}
    missed = any(size >= SMALL_PART * sum(sizes.values()) for path, size in sizes.items() if path not in reached)
    return len(probes) == 1 and bool(getattr(config, "is_encoder_decoder", False)) and missed


# -------------------------------------------------------------------------------------------------------- the parts


def _assemble(
    model: nn.Module,
    lists: Mapping[str, nn.ModuleList],
    routes: Sequence[Route],
    probes: Sequence[CutForward],
    remarks: list[str],
) -> Anatomy:
    parts: list[Part] = []
    used: dict[int, tuple[str, Literal["pre", "post"]]] = {}
    for index, (route, probe) in enumerate(zip(routes, probes, strict=True)):
        groups = _group_calls(lists, probe, {path for part in parts for path in part.lists})
        if not groups:
            tower = _form_tower(model, index, route, probe, [other.name for other in parts])
            if route.media != "text" and any(
                f"{call.path}.".startswith(f"{tower.order[0][0]}.") for call in probes[-1].calls
            ):
                remarks.append(f"its {route.media} cannot be run: they use no module that its text does not use too")
                continue
            parts.append(tower)
            for storage in probe.used:
                used.setdefault(storage, (tower.name, "post"))
            why = "no list of layers one after another, on one width" if probe.calls else "no list of layers"
            verb = "passes" if route.media == "text" else "pass"
            remarks.append(f"its {route.media} {verb} {why}, so {tower.name} is one block, in one stage")
            continue
        names = _name_parts(route, len(groups), [part.name for part in parts])
        own = {path: name for name, calls in zip(names, groups, strict=True) for path in {c.path for c in calls}}
        again = run_route(model, {path: lists[path] for path in own}, own, route.step(1, PROBE_TOKENS, 1), False)
        model.zero_grad(set_to_none=True)
        for at, (name, calls) in enumerate(zip(names, groups, strict=True)):
            media: Media = route.media if name == "text" else route.beside or route.media
            parts.append(_form_part(name, media, index, calls, (at, at + 1)))
        for storage, gap in again.used.items():
            role: Literal["pre", "post"] = "pre" if gap == 0 else "post"
            used.setdefault(storage, (names[max(0, gap - 1)], role))
    parts = [_part_owners(part, lists) for part in parts]
    remarks += [
        f"layers of its {part.name} share parameters, which are counted with the first of them"
        for part in parts
        if _shares(part, lists)
    ]
    _deal_parameters(model, lists, parts, used)
    return Anatomy(tuple(routes), tuple(parts), lists, tuple(remarks))


def _count_owned(part: Part, lists: Mapping[str, nn.ModuleList]) -> list[tuple[int, int]]:
    """Of each layer, its parameters, and those of them that no layer before it has too."""
    seen, counts = set[int](), []
    for path, index in part.order if part.lists else ():
        own = {id(each): each.numel() for each in lists[path][index].parameters()}
        counts.append((sum(own.values()), sum(size for each, size in own.items() if each not in seen)))
        seen |= own.keys()
    return counts


def _shares(part: Part, lists: Mapping[str, nn.ModuleList]) -> bool:
    return any(owned < count for count, owned in _count_owned(part, lists))


def _part_owners(part: Part, lists: Mapping[str, nn.ModuleList]) -> Part:
    """`part` with layers that own parameters and those that share them as two kinds, alike as they are in work."""
    owned = _count_owned(part, lists)
    if not _shares(part, lists):
        return part
    numbers: dict[tuple[int, int], int] = {}
    kinds = [numbers.setdefault((kind, own), len(numbers)) for kind, (_, own) in zip(part.kinds, owned, strict=True)]
    return replace(part, kinds=tuple(kinds), whats=tuple(part.whats[kind] for kind, _ in numbers))


def _form_tower(model: nn.Module, index: int, route: Route, probe: CutForward, taken: Sequence[str]) -> Part:
    """A part that cannot be divided: one layer, the module of the lists that its route calls, or of all it uses."""
    name = _name_parts(route, 1, taken)[0]
    if probe.calls:
        paths = [call.path.split(".") for call in probe.calls]
        width = probe.calls[-1].kind.shape[-1]
    else:
        table = input_table(model)
        paths = [
            path.split(".")[:-1]
            for path, each in model.named_parameters()
            if each is not table and each.untyped_storage()._cdata in probe.used
        ]
        width = next(leaf.shape[-1] for leaf in pytree.tree_leaves(probe.output) if isinstance(leaf, Tensor))
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    root = ".".join(names[0] for names in shared)
    return Part(name, route.media, index, (), ((root, WHOLE),), (0,), (0, 0), width, (f"the whole of {root}",))


def _group_calls(lists: Mapping[str, nn.ModuleList], probe: CutForward, taken: set[str]) -> list[list[MemberCall]]:
    """The calls of each run of layers: of one list, or of several whose calls alternate."""
    spans: dict[str, list[int]] = {}
    for at, call in enumerate(probe.calls):
        spans.setdefault(call.path, []).append(at)
    sizes = {path: sum(p.numel() for p in lists[path].parameters()) for path in spans}
    total = sum(sizes.values())
    found: list[tuple[int, int, set[str]]] = []
    for path, calls in spans.items():
        kinds = [probe.calls[at].kind for at in calls]
        once = len({probe.calls[at].index for at in calls}) == len(calls)
        chained = all(kind.keeps_shape and kind.shape == kinds[0].shape for kind in kinds)
        if path in taken or not once or not chained or len(calls) < 2 or sizes[path] < SMALL_PART * total:
            continue
        first, last = calls[0], calls[-1]
        if found and first < found[-1][1]:
            start, end, paths = found.pop()
            found.append((min(start, first), max(end, last), {*paths, path}))
        else:
            found.append((first, last, {path}))
    return [[call for call in probe.calls if call.path in paths] for _, _, paths in found]


def _name_parts(route: Route, count: int, taken: Sequence[str]) -> list[str]:
    base = {"images": "vision", "audios": "audio", "text": "text_encoder"}[route.beside or route.media]
    wanted = count - 1 if route.media == "text" else count
    names = [base if at == 0 else f"{base}_{at + 1}" for at in range(wanted)]
    names = [name if name not in taken else f"{name}_{len(taken) + 1}" for name in names]
    return [*names, "text"] if route.media == "text" else names


def _form_part(name: str, media: Media, route: int, calls: Sequence[MemberCall], gaps: tuple[int, int]) -> Part:
    kinds: dict[int, int] = {}
    for call in calls:
        kinds.setdefault(id(call.kind), len(kinds))
    firsts = {kinds[id(call.kind)]: call for call in reversed(calls)}
    return Part(
        name=name,
        media=media,
        route=route,
        lists=tuple(dict.fromkeys(call.path for call in calls)),
        order=tuple((call.path, call.index) for call in calls),
        kinds=tuple(kinds[id(call.kind)] for call in calls),
        gaps=gaps,
        hidden_size=calls[0].kind.shape[-1],
        whats=tuple(f"{type(firsts[at].kind.member).__name__} {firsts[at].path}" for at in range(len(kinds))),
    )


def _deal_parameters(
    model: nn.Module,
    lists: Mapping[str, nn.ModuleList],
    parts: Sequence[Part],
    used: Mapping[int, tuple[str, Literal["pre", "post"]]],
) -> None:
    """Every parameter to one slot of one part, in place."""
    by_name = {part.name: part for part in parts}
    text, dealt = by_name["text"], set[int]()

    def deal(part: Part, slot: Slot, parameter: nn.Parameter) -> None:
        if id(parameter) not in dealt:
            dealt.add(id(parameter))
            part.parameters.setdefault(slot, []).append(parameter)

    table = input_table(model)
    if table is not None:
        deal(text, Slot("pre"), table)
    for part in parts:
        for (path, index), kind in zip(part.order, part.kinds, strict=True):
            members = model.get_submodule(path) if index == WHOLE else lists[path][index]
            for parameter in members.parameters():
                deal(part, Slot("layer", kind), parameter)
    roots = {part.name: _root_of(model, part, parts) for part in parts}
    left = [(name, each) for name, each in model.named_parameters() if id(each) not in dealt]
    outside = {
        used[each.untyped_storage()._cdata][0]
        for name, each in left
        if used.get(each.untyped_storage()._cdata, ("", "pre"))[1] == "post"
        and not name.startswith(f"{roots[used[each.untyped_storage()._cdata][0]]}.")
    }
    for name, parameter in left:
        found = used.get(parameter.untyped_storage()._cdata)
        if found is None:
            deal(text, Slot("idle"), parameter)
            continue
        part, role = by_name[found[0]], found[1]
        inside = part is not text and name.startswith(f"{roots[part.name]}.")
        if role == "post" and inside and (part.name in outside or (parameter.dim() == 1 and _is_norm(model, name))):
            deal(part, Slot("own_post"), parameter)
        else:
            deal(part, Slot(role), parameter)


def _is_norm(model: nn.Module, name: str) -> bool:
    """Whether the module that holds this parameter has vectors alone."""
    return all(each.dim() <= 1 for each in model.get_submodule(name.rpartition(".")[0]).parameters())


def _root_of(model: nn.Module, part: Part, parts: Sequence[Part]) -> str:
    """The outermost module that holds the layers of `part` and of no other, nor the model's base itself."""
    others = [path for other in parts if other is not part for path in other.lists]
    if not part.lists:
        return part.order[0][0]
    names = part.lists[0].split(".")
    base = str(getattr(model, "base_model_prefix", "") or "")
    for count in range(1, len(names)):
        prefix = ".".join(names[:count])
        if prefix != base and not any(f"{path}.".startswith(f"{prefix}.") for path in others):
            return prefix
    return part.lists[0]
