"""Micro-benchmarks: each form by itself, run again from its form alone on the device at hand, on tensors of random
numbers, once its times have settled."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mm_autoparallel.model.profiles.operators.base import MAX_SAMPLES, Sampled
from mm_autoparallel.model.profiles.operators.form import OperatorForm, TensorForm
from mm_autoparallel.profilers.clock import Effort, Stopwatch, collect_samples
from mm_autoparallel.profilers.operators.clock import OperatorClock
from mm_autoparallel.profilers.operators.forms import ATTENTION, ATTENTION_BACKWARD, dtype_of
from mm_autoparallel.units import MIB

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


FORM_EFFORT = Effort(budget_s=0.5, min_rounds=5, max_rounds=MAX_SAMPLES, max_warm_up=4)

ROTATED_BYTES, MAX_ROTATED = 16 * MIB, 16
"""Assumed: calls go round so many operands, so that they lie no nearer than in a model, where others were at work
between; and at most so many sets of them."""

BATCH_MS = 1.0
"""Assumed: so long a row of launches takes on an accelerator, of which one alone would tell what the host takes."""
MAX_BATCH = 256


@dataclass(frozen=True)
class Failed:
    """A form that could not be measured, and why."""

    form: OperatorForm
    reason: str


def measure_forms(
    forms: Iterable[OperatorForm],
    device: torch.device,
    effort: Effort = FORM_EFFORT,
    on_form: Callable[[Sampled | Failed], None] = lambda _: None,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[list[Sampled], list[Failed]]:
    """The times of `forms`, each one's by itself; those that could not be run. on_form: told each as it is done.

    now: as of Stopwatch."""
    measured: list[Sampled] = []
    failed: list[Failed] = []
    for form in forms:
        try:
            found = Sampled(
                form, _time_us(_rotated(form, device), Stopwatch(device, now), effort, device.type == "cpu")
            )
        except Unrepeatable as failure:
            failed.append(Failed(form, str(failure)))
            on_form(failed[-1])
            continue
        measured.append(found)
        on_form(found)
    return measured, failed


def _rotated(form: OperatorForm, device: torch.device) -> Run:
    """What runs `form` once, each time on the next of several sets of tensors."""
    num_sets = min(MAX_ROTATED, max(1, ROTATED_BYTES // max(1, form.moved_bytes)))
    sets = itertools.cycle([prepare(form, device) for _ in range(num_sets)])
    return lambda: next(sets)()


def _time_us(run: Run, stopwatch: Stopwatch, effort: Effort, one_by_one: bool) -> list[float]:
    num_calls = 1
    if not one_by_one:
        alone_ms = stopwatch.time_ms(run)
        num_calls = min(MAX_BATCH, max(1, round(BATCH_MS / max(alone_ms, 1e-3))))

    def run_all() -> None:
        for _ in range(num_calls):
            run()

    samples = collect_samples(lambda: {"run": stopwatch.time_ms(run_all)}, effort)["run"]
    return [sample_ms * 1e3 / num_calls for sample_ms in samples]
