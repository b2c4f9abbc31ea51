"""One operator run again from its form alone, on tensors of random numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mm_autoparallel.model.profiles.operators.form import OperatorForm, TensorForm
from mm_autoparallel.profilers.operators.clock import OperatorClock
from mm_autoparallel.profilers.operators.forms import ATTENTION, ATTENTION_BACKWARD, dtype_of

Run = Callable[[], Any]


class Unrepeatable(Exception):
    """A form that cannot be run from what it says, with the reason in a few words."""


def prepare(form: OperatorForm, device: torch.device) -> Run:
    """What runs `form` once on `device`, each time on the same tensors.

    Raises Unrepeatable where its operator is none of PyTorch's own, or where a run of it is of another form: forms
    come from files.
    """
    try:
        tensors = [_make(form, tensor, device) for tensor in form.inputs]
        attention = form.operator in (ATTENTION, ATTENTION_BACKWARD)
        run = _prepare_attention(form, tensors) if attention else _prepare_plain(form, tensors)
        _check(form, run)
    except (RuntimeError, TypeError, ValueError, IndexError, MemoryError) as failure:
        raise Unrepeatable(str(failure).splitlines()[0] if str(failure) else "there is no memory for it") from None
    return run


def _check(form: OperatorForm, run: Run) -> None:
    """Raises Unrepeatable where what runs is not `form`, and what PyTorch raises where it does not run."""
    with OperatorClock() as clock:
        run()
    ran = [sampled.form for sampled in clock.found]
    if form.digest not in [one.digest for one in ran]:
        raise Unrepeatable(f"here it runs as {', '.join(one.operator for one in ran) or 'nothing'}, or on other shapes")


def _prepare_plain(form: OperatorForm, tensors: Sequence[Tensor]) -> Run:
    library, _, name = form.operator.partition("::")
    packet_name, _, overload_name = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None) if library == "aten" else None
    overload = getattr(packet, overload_name or "default", None) if packet is not None else None
    if overload is None:
        raise Unrepeatable("it is no operator of this PyTorch")
    if any(argument.name == "filename" for argument in overload._schema.arguments):
        raise Unrepeatable("it opens files")
    given = json.loads(form.arguments) if form.arguments else {}
    try:
        arguments = {key: _read(value, tensors) for key, value in given.items()}
    except (AttributeError, KeyError, IndexError):
        raise Unrepeatable("its arguments name what is not there") from None
    needed = (argument.name for argument in overload._schema.arguments if not argument.has_default_value())
    arguments = dict.fromkeys(needed) | arguments  # what is nothing is not written

    def run() -> Any:
        with torch.no_grad():
            return overload(**arguments)

    return run


def _prepare_attention(form: OperatorForm, tensors: Sequence[Tensor]) -> Run:
    backward = form.operator == ATTENTION_BACKWARD
    query, key, value = (tensor.requires_grad_(backward) for tensor in tensors[:3])
    options: dict[str, Any] = {"is_causal": json.loads(form.arguments or "{}").get("is_causal", False)}
    if key.shape[1] != query.shape[1]:
        options["enable_gqa"] = True
    mask = tensors[3] if len(tensors) > 3 else None

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, mask, **options)

    if not backward:
        return forward
    output = forward()
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)


def _read(value: Any, tensors: Sequence[Tensor]) -> Any:
    """An argument from its JSON form."""
    if isinstance(value, str) and value.startswith("$"):
        return tensors[int(value[1:])]
    if isinstance(value, list):
        return [_read(inner, tensors) for inner in value]
    if isinstance(value, dict):
        return dtype_of(value["dtype"]) if "dtype" in value else getattr(torch, value["memory_format"])
    return value


def _highest(form: OperatorForm) -> int:
    """What integers stay below: the least length of a dimension; most of them say where to look something up."""
    sizes = [size for tensor in form.inputs for size in tensor.shape if size > 1 and _is_fraction(tensor)]
    return min(sizes, default=2)


def _is_fraction(tensor: TensorForm) -> bool:
    return tensor.dtype.startswith(("fp", "bf", "float"))


def _set_fraction(form: OperatorForm, mask: TensorForm) -> float:
    """How much of a mask is set: half, or as much as the smallest of the other tensors could fill."""
    counts = [math.prod(tensor.shape) for tensor in form.inputs if _is_fraction(tensor)]
    return min(0.5, min(counts, default=1) / max(1, math.prod(mask.shape)))


def _make(form: OperatorForm, tensor: TensorForm, device: torch.device) -> Tensor:
    """An operand of `form`: fractions around nothing, integers and masks that say where something lies."""
    try:
        dtype = dtype_of(tensor.dtype)
    except KeyError:
        raise Unrepeatable(f"{tensor.dtype} is no type of this PyTorch") from None
    strides = tensor.strides
    count = math.prod(tensor.shape)
    if strides is not None and count:
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if dtype == torch.bool:
        flat = torch.arange(count, device=device) < int(count * _set_fraction(form, tensor))
    elif dtype.is_floating_point:
        flat = torch.randn(count, device=device).to(dtype)
    else:
        flat = torch.randint(0, _highest(form), (count,), device=device).to(dtype)
    return flat.view(tensor.shape) if strides is None else flat.as_strided(tensor.shape, strides)
