"""Kernels of CANN as forms: shapes and types as its profiler writes them, and the FLOPs of products."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mm_autoparallel.model.profiles.operators.form import OperatorForm, TensorForm

ABSENT = "none"
"""The type of an operand that may be left out, and was."""

COLLECTIVES = "HCCL"
"""The accelerator core of collective operations, which are the network's."""

_NAMES = {
    "float": "fp32",
    "float32": "fp32",
    "float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "double": "fp64",
    "undefined": ABSENT,
    "n/a": ABSENT,
    "": ABSENT,
}
_SIZES_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "bool": 1, ABSENT: 0}
_PRODUCTS = ("matmul", "batchmatmul")
_OTHER_PRODUCTS = ("flashattention", "conv", "groupedmatmul", "promptflashattention", "increflashattention")
"""Kernels whose FLOPs do not follow from shapes alone: they have none, and so nothing is regressed from them."""


def read_shapes(text: str) -> list[tuple[int, ...]]:
    """`"8192,4096;;4096"`, quote marks and all, as shapes; an operand that is absent or a scalar has none.

    Raises ValueError where a size is no whole number.
    """
    bare = text.strip().strip('"')
    if bare in ("", "N/A"):
        return [()] if bare == "" else []
    return [tuple(int(size) for size in one.split(",") if size.strip()) for one in bare.split(";")]


def read_types(text: str, count: int) -> list[str]:
    """`DT_BF16;FLOAT` as the base names types, for `count` operands: what is not said is absent."""
    named = [_name(one) for one in text.strip().strip('"').split(";")]
    return (named + [ABSENT] * count)[:count]


def kernel_form(
    kind: str, inputs: Sequence[TensorForm], outputs: Sequence[TensorForm], arguments: Mapping[str, Any]
) -> OperatorForm:
    """The form of a kernel of CANN. arguments: what else changes its time."""
    plain = kind.lower()
    moved_bytes = sum(_size_bytes(tensor) for tensor in (*inputs, *outputs))
    flops = 0
    if plain.startswith(_PRODUCTS):
        flops = _product_flops(inputs, outputs)
        moved_bytes = moved_bytes if flops else 0
    elif plain.startswith(_OTHER_PRODUCTS):
        moved_bytes = 0
    written = json.dumps({key: value for key, value in arguments.items() if value not in ("", None)}, sort_keys=True)
    return OperatorForm(
        operator=kind,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        arguments=written,
        flops=flops,
        moved_bytes=moved_bytes,
    )


def _name(text: str) -> str:
    plain = text.strip().lower().removeprefix("dt_")
    return _NAMES.get(plain, plain)


def _size_bytes(tensor: TensorForm) -> int:
    digits = "".join(letter for letter in tensor.dtype if letter.isdigit())
    return math.prod(tensor.shape) * _SIZES_BYTES.get(tensor.dtype, int(digits or 8) // 8)


def _product_flops(inputs: Sequence[TensorForm], outputs: Sequence[TensorForm]) -> int:
    """2·m·k·n for each matrix of a batch, either operand transposed or not; 0 where shapes do not fit each other."""
    if len(inputs) < 2 or not outputs or min(len(one.shape) for one in (*inputs[:2], outputs[0])) < 2:
        return 0
    (rows, columns), batch = outputs[0].shape[-2:], math.prod(outputs[0].shape[:-2])
    inner = [
        (set_of[0] if set_of[1] == size else set_of[1])
        for set_of, size in ((inputs[0].shape[-2:], rows), (inputs[1].shape[-2:], columns))
        if size in set_of
    ]
    return 2 * batch * rows * columns * inner[0] if len(inner) == 2 and inner[0] == inner[1] else 0
