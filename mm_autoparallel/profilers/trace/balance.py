"""Experts without numbers: which tokens chose them is not known, so they are balanced: each gets an equal part.

What a router chose is followed from where it is chosen (`topk`, `argmax`) through what is made of it: one-hot masks,
comparisons, counts. Where code asks for numbers of those, it gets what a balanced choice gives: all were chosen,
each by `num_chosen / num_experts` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mm_autoparallel.profilers.dispatch import tensors_in

_aten = torch.ops.aten

_CHOOSING = {"aten::topk": 2, "aten::argmax": 1, "aten::max": 1}
"""Operators that choose, and where among their arguments the dimension stands."""

READING = frozenset({_aten.nonzero.default, _aten._local_scalar_dense.default, _aten.bincount.default})
"""Operators that need numbers."""

_COUNTING = frozenset({"aten::sum", "aten::any", "aten::amax", "aten::bincount", "aten::histc"})
_MARKING = frozenset({"aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_"})
_NOT_FOLLOWED = frozenset({"aten::cumsum", "aten::sort", "aten::argsort"})
"""What they give has other numbers than the counts or marks that they are made of."""

_NAME = "_choice_of_experts"


@dataclass(frozen=True)
class Choice:
    """What was chosen among: `num_chosen` in all, of `num_experts`. counted: summed over something already."""

    num_experts: int
    num_chosen: int
    counted: bool = False

    @property
    def each(self) -> int:
        """Tokens of one expert."""
        return max(1, self.num_chosen // self.num_experts)


def choice_in(args: object) -> Choice | None:
    """What the first tensor of `args` that is made of a choice is made of."""
    for tensor in tensors_in(args):
        found = getattr(tensor, _NAME, None) if isinstance(tensor, FakeTensor) else None
        if isinstance(found, Choice):
            return found
    return None


def follow_choice(func: Any, args: Sequence[Any], result: Any) -> None:
    """Mark what an operator made of a choice; the choice itself where `func` is one."""
    name = func._schema.name
    found = choice_in(args)
    if found is None and name in _CHOOSING:
        found = _chosen_by(name, args, result)
    if found is None or name in _NOT_FOLLOWED:
        return
    if name in _COUNTING:
        found = replace(found, counted=True)
    for tensor in tensors_in(result):
        if isinstance(tensor, FakeTensor) and (name in _MARKING or not tensor.is_floating_point()):
            setattr(tensor, _NAME, found)


def _chosen_by(name: str, args: Sequence[Any], result: Any) -> Choice | None:
    """What an operator chose that gives, for each row of scores, the places of the largest."""
    scores = args[0]
    places = [tensor for tensor in tensors_in(result) if isinstance(tensor, FakeTensor)]
    if not places or not isinstance(scores, FakeTensor) or places[-1].is_floating_point() or scores.dim() < 2:
        return None
    at = _CHOOSING[name]
    dim = args[at] if len(args) > at else -1
    return Choice(scores.shape[dim], places[-1].numel()) if isinstance(dim, int) else None


def read_balanced(func: Any, args: Sequence[Any]) -> Any:
    """What `func`, which reads numbers, gives of a balanced choice; None where it reads no such thing."""
    known = choice_in(args[:1]) if func in READING else None
    if known is None:
        return None
    asked: Tensor = args[0]
    if func is _aten._local_scalar_dense.default:
        if asked.dtype == torch.bool:
            return True
        return known.each if known.counted else None
    if func is _aten.bincount.default:
        counts = asked.new_empty((max(known.num_experts, args[2] if len(args) > 2 else 0),))
        setattr(counts, _NAME, replace(known, counted=True))
        return counts
    if known.counted and _is_of_experts(asked, known):
        return torch.arange(known.num_experts)[:, None]
    return torch.zeros((_count_true(asked, known), asked.dim()), dtype=torch.int64)


def rows_of_mask(mask: object) -> tuple[Tensor, ...] | None:
    """Of a mask that is made of a choice, as many places as it has true ones; None of another."""
    known = choice_in(mask)
    if known is None or not isinstance(mask, FakeTensor) or mask.dtype != torch.bool:
        return None
    return torch.zeros((_count_true(mask, known), mask.dim()), dtype=torch.int64).unbind(1)


def deal_counts(counts: Tensor) -> list[int] | None:
    """The numbers of tokens that each expert gets, where `counts` holds these; their sum is what was chosen."""
    known = choice_in(counts)
    if known is None or not known.counted or counts.shape != (known.num_experts,):
        return None
    each, rest = divmod(known.num_chosen, known.num_experts)
    return [each + (at < rest) for at in range(known.num_experts)]


def _is_of_experts(asked: Tensor, known: Choice) -> bool:
    """Whether it has a number for each expert, and maybe one for what is padding."""
    return asked.dim() == 1 and asked.shape[0] in (known.num_experts, known.num_experts + 1)


def _count_true(mask: Tensor, known: Choice) -> int:
    """Of marks of all experts as many as were chosen, of one expert's its part."""
    return known.num_chosen if mask.numel() > known.num_chosen else known.each
