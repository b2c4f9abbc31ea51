"""One real forward of a split model, watched: how layers are called, what every part keeps, hands on and holds.

Kept bytes by the rule that makes them add up to what a stage keeps: a storage counts with the first part that saves it.

- A layer saves its input, which is the output of the layer before, and not its output, so of n layers each counts one
  such tensor, and a stage that begins with a tensor it received counts it too, with its first layer.
- What the layers of a modality share (tables of positions, masks) is saved first by its first layer. That is more than
  a middle layer keeps, and is counted with the modality's `*_pre`, where it is made. A stage that begins in the midst
  of a modality holds one copy as well, which nothing counts: it is the less of a stage the more layers that holds.
- `*_post` counts its input where the last layer does not save it already.

So `*_pre` + n layers + `*_post` on one stage are exactly what autograd keeps there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.profilers.cutter import Place
from mm_autoparallel.profilers.kinds import Kinds
from mm_autoparallel.profilers.meter import KeptActivations, count_bytes, count_numbers, plain_tensors
from mm_autoparallel.profilers.split import Part, PartRun, Split, run_cut
from mm_autoparallel.profilers.stack import LayerCall
from mm_autoparallel.profilers.subject import Layout
from mm_autoparallel.profilers.torch_releases import autocast_type, tree_leaves


@dataclass(frozen=True)
class Observation:
    """What one forward showed, by part name. calls: of layers. output_bytes: of parts that hand on a known tensor."""

    calls: Mapping[str, LayerCall]
    kept_bytes: Mapping[str, int]
    parameter_count: Mapping[str, int]
    output_bytes: Mapping[str, int]


def observe(
    model: nn.Module, layout: Layout, split: Split, step: Callable[[], Tensor], device: torch.device, check: bool = True
) -> Observation:
    """Runs `step` once, cut, and drops its graph again.

    check: raise ProfileError where the loss is no finite number, naming the first part that gives one that is not.
    """
    watch = _Watch(KeptActivations(model), device)
    losses: list[Tensor] = []

    def watched_step() -> Tensor:
        with watch.kept:
            loss = step()
        losses.append(loss.detach())
        return loss

    runs = run_cut(model, layout, watched_step, watch.enter, watch.leave, split=split)
    if check and not _is_finite(losses):
        raise ProfileError(_describe_failure(runs))
    calls = {}
    for run in runs:
        if run.part.role == "layer":
            calls[run.part.name] = _layer_call(run, split, watch.autocast[run.part.name])
    return Observation(
        calls=calls,
        kept_bytes=watch.kept_bytes,
        parameter_count={name: count_numbers(own) for name, own in owned_parameters(split.parts).items()},
        output_bytes=_output_bytes(runs, calls),
    )


class _Watch:
    """Bytes that each part is the first to save, and the autocast type that it opens under."""

    def __init__(self, kept: KeptActivations, device: torch.device) -> None:
        self.kept, self._device = kept, device
        self.kept_bytes: dict[str, int] = {}
        self.autocast: dict[str, torch.dtype | None] = {}
        self._before_bytes = 0

    def enter(self, part: Part) -> None:
        self._before_bytes = self.kept.kept_bytes
        self.autocast[part.name] = autocast_type(self._device.type)

    def leave(self, part: Part) -> None:
        added_bytes = self.kept.kept_bytes - self._before_bytes
        self.kept_bytes[part.name] = self.kept_bytes.get(part.name, 0) + added_bytes


def _layer_call(run: PartRun, split: Split, autocast: torch.dtype | None) -> LayerCall:
    form = split.route.forms.get(Place(run.part.modality, "layer", run.part.index))
    if form is None:
        raise ProfileError(
            f"{run.part.name} gives no tensor of the shape and type of one that it takes, so layers cannot be stacked "
            "to measure them; layers must hand on a hidden state of one shape"
        )
    leaves, structure = pytree.tree_flatten((run.args, dict(run.kwargs)))
    requires_grad = leaves[form.taken_at].requires_grad
    args, kwargs = pytree.tree_unflatten(
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
    )
    return LayerCall(args, kwargs, form.taken_at, form.given_at, requires_grad, autocast)


def _output_bytes(runs: Sequence[PartRun], calls: Mapping[str, LayerCall]) -> dict[str, int]:
    """A layer hands on a tensor like the one it takes, `*_pre` what the first layer takes, `*_post` its outputs."""
    found = {}
    for run in runs:
        part = run.part
        if part.role == "post":
            if run.outputs:
                found[part.name] = count_bytes(run.outputs)
            continue
        call = calls[part.name if part.role == "layer" else f"{part.modality}_layer_0"]
        found[part.name] = count_bytes([tree_leaves((call.args, dict(call.kwargs)))[call.taken_at]])
    return found


def owned_parameters(parts: Sequence[Part]) -> dict[str, list[nn.Parameter]]:
    """Parameters by part name; a tied one belongs to the first part that has it."""
    seen: set[nn.Parameter] = set()
    found = {}
    for part in parts:
        found[part.name] = [parameter for parameter in part.parameters if parameter not in seen]
        seen.update(found[part.name])
    return found


def middle_bytes(kinds: Kinds, kept_bytes: Mapping[str, int]) -> dict[str, float]:
    """Kept bytes by kind, by the rule above: of a middle layer of each kind, and of the ends."""
    found: dict[str, float] = {}
    shared_bytes: dict[str, float] = {}
    for layer_kind in kinds.layers:
        modality = layer_kind.block.modality
        first, *middle = (kept_bytes[f"{modality}_layer_{index}"] for index in layer_kind.indices)
        found[layer_kind.block.kind] = sum(middle) / len(middle) if middle else first
        shared_bytes[modality] = shared_bytes.get(modality, 0) + first - found[layer_kind.block.kind]
    for end in kinds.ends:
        found[end.block.kind] = kept_bytes[end.part_name]
        if end.block.role == "pre":
            found[end.block.kind] = max(0.0, found[end.block.kind] + shared_bytes[end.block.modality])
    return found


def _is_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(plain.isfinite().all()) for tensor in tensors for plain in plain_tensors(tensor))


def _describe_failure(runs: Sequence[PartRun]) -> str:
    where = "the loss alone"
    for run in runs:
        # a layer is looked at where the next part takes what it gives, and frozen parts are seen there as well
        taken = [leaf for leaf in tree_leaves((run.args, dict(run.kwargs))) if isinstance(leaf, Tensor)]
        floats = [tensor for tensor in (*taken, *run.outputs) if tensor.is_floating_point()]
        if not _is_finite(floats):
            where = f"{run.part.name}, or what it is given"
            break
    return (
        f"the model's loss is no finite number; the first part with such numbers is {where}. Times of such a run say "
        "nothing; look at the initial values, the precision and the batch that forward_step makes"
    )
