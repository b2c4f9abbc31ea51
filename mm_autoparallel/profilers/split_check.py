"""Does a split model compute what the whole one computes: the same loss and the same gradient of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.profilers.layout import structural_kind
from mm_autoparallel.profilers.split import Part, Split, backward_parts, find_split, run_cut
from mm_autoparallel.profilers.subject import Layout

__all__ = ["check_split", "structural_kind"]

TOLERANCE_FRACTION: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
"""Largest difference of a gradient, as part of its largest number: about a hundred roundings (in 16 bits a dozen), for
gradients of several readers add up in another order. assumed"""

SEED = 20240229
"""Of both forwards, so that dropout drops the same. Any number will do."""


def check_split(model: nn.Module, layout: Layout, step: Callable[[], Tensor]) -> tuple[str, ...]:
    """Compare a step of the whole model with one cut into parts; returns what is unusual about the split, in words.

    step: () → the scalar loss of one forward of `model`, on the same batch each time. The model's gradients are
    dropped, random number generators seeded. Raises ProfileError naming the part where a gradient differs by more than
    TOLERANCE_FRACTION, where parts share a graph that no boundary cuts, or where the loss is no number.
    """
    whole_loss, whole = _run(model, lambda: _step_whole(step))
    if not torch.isfinite(whole_loss):
        raise ProfileError(
            f"The loss of one forward of {type(model).__name__} is {whole_loss.item()}: nothing measured on such a "
            "model says how it trains. Check its initialisation, its data type and the batch."
        )
    split = find_split(model, layout, step)
    if split.crossings:
        raise ProfileError(
            f"{type(model).__name__} cannot be cut into parts. {' '.join(dict.fromkeys(split.crossings))} Stages of a "
            "pipeline hand on only what goes into and comes out of layers: pass it as an argument or an output of the "
            "layer, or leave it out of the loss."
        )
    parted_loss, parted = _run(model, lambda: _step_parted(model, layout, step, split))
    if _differ(whole_loss, parted_loss):
        raise ProfileError(
            f"The model cut into parts gives the loss {parted_loss.item()}, the whole one {whole_loss.item()}: "
            "forward_step must run the same batch each time, and layers must not depend on how often they have run."
        )
    for name, parameter in model.named_parameters():
        if _differ(whole[name], parted[name]):
            raise ProfileError(_tell(name, parameter, whole[name], parted[name], split.parts))
    return split.remarks


def _run(model: nn.Module, step: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """(loss, parameter name → its gradient) of one forward and backward; leaves no gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    loss = step().detach()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss, gradients


def _step_whole(step: Callable[[], Tensor]) -> Tensor:
    loss = step()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _step_parted(model: nn.Module, layout: Layout, step: Callable[[], Tensor], split: Split) -> Tensor:
    losses: list[Tensor] = []

    def keep() -> Tensor:
        losses.append(step())
        return losses[-1]

    backward_parts(run_cut(model, layout, keep, split=split))
    return losses[-1]


def _differ(whole: Tensor | None, parted: Tensor | None) -> bool:
    """A gradient that never came counts as zeros."""
    if whole is None or parted is None:
        only = parted if whole is None else whole
        return only is not None and bool(only.count_nonzero())
    if not whole.numel():
        return False
    allowed = TOLERANCE_FRACTION[whole.dtype] * whole.abs().max()
    return not bool((whole - parted).abs().max() <= allowed)


def _tell(
    name: str, parameter: nn.Parameter, whole: Tensor | None, parted: Tensor | None, parts: tuple[Part, ...]
) -> str:
    holders = [part.name for part in parts if any(parameter is other for other in part.parameters)]
    if whole is None or parted is None:
        where = "whole model" if parted is None else "model in parts"
        what = f"there is one in the {where} alone"
    else:
        what = f"the largest difference is {(whole - parted).abs().max().item():.3g} of {whole.abs().max().item():.3g}"
    return (
        f"Cut into parts, the model's gradients go another way in {' and '.join(holders) or 'no known part'}: of that "
        f"of `{name}`, {what}. Something flows past the boundaries of that part: pass it as an argument or an output "
        "of layers, and let nothing detach it or run layers a second time (turn recompute off)."
    )
