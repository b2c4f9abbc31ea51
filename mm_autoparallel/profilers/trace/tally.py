"""Tally: the operators that ran, alike ones together, with their FLOPs, the bytes they move, and what they send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from mm_autoparallel.model.profiles.traced import FormCalls, OperatorKind, Phase, TracedOperator
from mm_autoparallel.profilers.meter import count_bytes
from mm_autoparallel.profilers.operators.forms import form_of
from mm_autoparallel.profilers.shard import COLLECTIVES

Shapes = tuple[tuple[int, ...], ...]

_ATTENTION = "scaled_dot_product"
"""In the names of PyTorch's attention kernels."""

_NOTHING_MOVED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"})
"""They take memory and leave it as it is."""

_READ_AS_MUCH_AS_THEY_GIVE = frozenset({"embedding", "index", "index_select", "gather"})
"""They read as many numbers of their source as they give, not the whole source."""


@dataclass(frozen=True)
class Key:
    """What makes two calls alike: operator, class, shapes of its tensors, type of its result."""

    name: str
    kind: OperatorKind
    shapes: Shapes
    dtype: str


@dataclass(frozen=True)
class Calls:
    """Calls of one Key: how many, and the sums of their FLOPs and bytes. A collective's bytes: of its whole tensor."""

    num_calls: int = 0
    flops: int = 0
    moved_bytes: int = 0

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.num_calls + other.num_calls, self.flops + other.flops, self.moved_bytes + other.moved_bytes)

    def beyond(self, other: Calls) -> Calls:
        """What is here more than in `other`; one call that does more counts as a call."""
        num_calls, flops = max(0, self.num_calls - other.num_calls), max(0, self.flops - other.flops)
        moved_bytes = max(0, self.moved_bytes - other.moved_bytes)
        return Calls(num_calls or int(flops + moved_bytes > 0), flops, moved_bytes)


class Tally(dict[Key, Calls]):
    """Calls by what they are. forms: how many calls of each form there were, by what they are."""

    def __init__(self, calls: Mapping[Key, Calls] | None = None) -> None:
        super().__init__(calls or {})
        self.forms: dict[Key, dict[bytes, FormCalls]] = {}

    def add(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """One call of the operator `func`; views and questions about a tensor are none. inputs, outputs: its
        tensors.
        """
        name = operator_name(func)
        collective = COLLECTIVES.get(func._schema.name)
        if collective:
            moved_bytes = max(count_bytes([tensor]) for tensor in (*inputs, *outputs))
            key = Key(collective, "collective", _shapes(inputs[:1]), _dtype(inputs))
            self[key] = self.get(key, Calls()) + Calls(1, 0, moved_bytes)
            return
        if does_nothing(func, inputs, outputs):
            return
        kind, flops, moved_bytes = weigh_call(func, args, kwargs, result, inputs, outputs)
        key = Key(name, kind, _shapes(inputs or outputs), _dtype(outputs))
        self[key] = self.get(key, Calls()) + Calls(1, flops, moved_bytes)
        form = form_of(func, args, kwargs, outputs, flops, moved_bytes)
        known = self.forms.setdefault(key, {})
        num_calls = known[form.digest].num_calls if form.digest in known else 0
        known[form.digest] = FormCalls(num_calls=num_calls + 1, form=form)

    def beyond(self, other: Tally) -> Tally:
        """What ran here more than in `other`."""
        found = Tally()
        for key, calls in self.items():
            more = calls.beyond(other.get(key, Calls()))
            if more.num_calls:
                found[key] = more
                found.forms[key] = _forms_beyond(self.forms.get(key, {}), other.forms.get(key, {}))
        return found

    def operators(self, phase: Phase) -> Iterator[TracedOperator]:
        """As records of `phase`, the sums of alike calls divided among them."""
        for key, calls in self.items():
            yield TracedOperator(
                phase=phase,
                name=key.name,
                kind=key.kind,
                shapes=key.shapes,
                dtype=key.dtype,
                num_calls=calls.num_calls,
                flops=round(calls.flops / calls.num_calls),
                moved_bytes=round(calls.moved_bytes / calls.num_calls),
                forms=tuple(self.forms.get(key, {}).values()),
            )


def _forms_beyond(own: Mapping[bytes, FormCalls], other: Mapping[bytes, FormCalls]) -> dict[bytes, FormCalls]:
    """The forms of calls that are here more than in `other`; all of them where none of them tells."""
    found = {}
    for digest, calls in own.items():
        num_calls = calls.num_calls - (other[digest].num_calls if digest in other else 0)
        if num_calls > 0:
            found[digest] = FormCalls(num_calls=num_calls, form=calls.form)
    return found or dict(own)


def weigh_call(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Any,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> tuple[OperatorKind, int, int]:
    """The class of a call of `func`, its FLOPs and the bytes that it moves. inputs, outputs: its tensors."""
    name = operator_name(func)
    kind = _classify(name, func)
    flops = _count_flops(name, func, args, kwargs, result) if kind != "memory_bound" else 0
    return kind, flops, _moved_bytes(name, inputs, outputs)


def operator_name(func: Any) -> str:
    """PyTorch's, without library, overload and device."""
    return str(func._schema.name).removeprefix("aten::").replace("_for_cpu", "")


def does_nothing(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether it is a view, a question about a tensor, or takes memory and leaves it as it is."""
    return not outputs or operator_name(func) in _NOTHING_MOVED or _is_view(func, inputs, outputs)


def _classify(name: str, func: Any) -> OperatorKind:
    """Attention kernels by their name, products by PyTorch's own list of operators with FLOPs; all else moves bytes."""
    if _ATTENTION in name:
        return "attention"
    return "matrix_product" if func._overloadpacket in flop_registry or name == "_grouped_mm" else "memory_bound"


def _count_flops(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """By the formulas of torch.utils.flop_counter, but where it has none.

    Attention: two products forward and five backward, as there, for any number of query heads to a key; a causal kernel
    works out half of the scores, where the flop counter counts all.
    """
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if name == "_grouped_mm":
        return int(2 * args[0].numel() * args[1].shape[-1])
    if _ATTENTION not in name:
        return int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
    (batch, num_heads, num_queries, width), keys, values = given["query"].shape, given["key"], given["value"]
    scores = batch * num_heads * num_queries * keys.shape[-2]
    if given.get("is_causal", False):
        scores //= 2
    of_keys, of_values = 2 * scores * width, 2 * scores * values.shape[-1]
    return int(3 * of_keys + 2 * of_values if "backward" in name else of_keys + of_values)


def _is_view(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether all that comes out lies in the memory of what went in, and nothing was written there."""
    if func._schema.is_mutable:
        return False
    before = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in before for tensor in outputs)


def _moved_bytes(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Operands and results, once each; what is repeated by a stride of 0 is read once."""
    written_bytes = sum(_size_bytes(tensor) for tensor in outputs)
    if name in _READ_AS_MUCH_AS_THEY_GIVE:
        return 2 * written_bytes + sum(_size_bytes(tensor) for tensor in inputs[1:])
    read = inputs[1:] if name in {"copy_", "fill_", "zero_"} else inputs
    return written_bytes + sum(_size_bytes(tensor) for tensor in read)


def _size_bytes(tensor: Tensor) -> int:
    held = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        held *= length if stride else 1
    return held * tensor.element_size()


def _shapes(tensors: Sequence[Tensor]) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors)


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def _dtype(tensors: Sequence[Tensor]) -> str:
    return _NAMES.get(tensors[0].dtype, str(tensors[0].dtype).removeprefix("torch.")) if tensors else ""
