"""The form of one call of an operator, as an operator base keys it, from the call itself.

Arguments are written in their order, tensors among them by their number: `[["$0", "$1"], -1]` of a cat. Attention is
written as one operator whatever kernel carries it out, so that what was traced without a device is found where a device
ran another kernel than the CPU has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mm_autoparallel.model.profiles.operators.form import MAX_ARGUMENTS, OperatorForm, TensorForm

ATTENTION = "scaled_dot_product_attention"
ATTENTION_BACKWARD = "scaled_dot_product_attention_backward"
_KERNELS = "_scaled_dot_product"
_PLACES = frozenset({"device", "layout", "pin_memory", "generator"})
"""Arguments that say where a result is to lie or what number comes next, not what is worked out."""

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    """`bf16`, `int64`: as traces call it."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def dtype_of(name: str) -> torch.dtype:
    """The other way round. Raises KeyError for a name that is none."""
    by_name = {short: dtype for dtype, short in _SHORT.items()}
    found = by_name.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise KeyError(name)
    return found


def tensor_form(tensor: Tensor) -> TensorForm:
    """Its shape, type and, where it does not lie in order, strides."""
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorForm(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), strides=strides)


def form_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor], flops: int, moved_bytes: int
) -> OperatorForm:
    """The form of a call of `func`. outputs: the tensors that it gave. flops, moved_bytes: of the call."""
    given = _named(func, args, kwargs)
    if _KERNELS in func._schema.name:
        return _attention_form(func, given, outputs, flops, moved_bytes)
    tensors: list[Tensor] = []
    named = {name: _written(value, tensors) for name, value in given.items() if name not in _PLACES}
    overload = func._overloadname
    return OperatorForm(
        operator=func._schema.name + ("" if overload == "default" else f".{overload}"),
        inputs=tuple(map(tensor_form, tensors)),
        outputs=tuple(map(tensor_form, outputs)),
        arguments=_kept({name: value for name, value in named.items() if value is not None}),
        flops=flops,
        moved_bytes=moved_bytes,
    )


def _attention_form(
    func: Any, given: Mapping[str, Any], outputs: Sequence[Tensor], flops: int, moved_bytes: int
) -> OperatorForm:
    backward = "backward" in func._schema.name
    operands = [given[name] for name in ("query", "key", "value")]
    mask = given.get("attn_mask") if given.get("attn_mask") is not None else given.get("attn_bias")
    operands += [mask] if isinstance(mask, Tensor) else []
    results = outputs[:3] if backward else outputs[:1]
    return OperatorForm(
        operator=ATTENTION_BACKWARD if backward else ATTENTION,
        inputs=tuple(map(tensor_form, operands)),
        outputs=tuple(TensorForm(shape=tuple(one.shape), dtype=dtype_name(one.dtype)) for one in results),
        arguments=json.dumps({"is_causal": bool(given.get("is_causal", False))}),
        flops=flops,
        moved_bytes=moved_bytes,
    )


def _kept(named: Mapping[str, Any]) -> str:
    """As text; what is longer than a form keeps is told apart by its digest, and cannot be run again."""
    text = json.dumps(named)
    if len(text) <= MAX_ARGUMENTS:
        return text
    return json.dumps({"digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()})


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args)) | dict(kwargs)  # noqa: B905 - defaults are left out


def _written(value: Any, tensors: list[Tensor]) -> Any:
    """As JSON, tensors by their number in `tensors`, to which they are added; None for what says nothing of time."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"${len(tensors) - 1}"
    if isinstance(value, (list, tuple)):
        return [_written(inner, tensors) for inner in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    return value if isinstance(value, (bool, int, float, str)) else None
