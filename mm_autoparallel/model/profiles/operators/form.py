"""OperatorForm: what decides how long one call of an operator takes on a device, and the key that it is kept under.

A form is one row in documents:

    ["aten::mm", [[[512, 64], "fp32"], [[64, 160], "fp32", [1, 64]]], [[[512, 160], "fp32"]], "", 10485760, 499712]

operator, tensors that it takes, tensors that it gives, its other arguments, FLOPs and bytes of a call. A tensor is its
shape, its type, and its strides where it does not lie in order.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, model_serializer, model_validator

from mm_autoparallel.records import Name, Noun, Number

FORM_COLUMNS = ("operator", "inputs", "outputs", "arguments", "flops", "moved_bytes")

MAX_ARGUMENTS = 10_000
"""Characters that are kept of the arguments of a call. Assumed: far above all but lists of sizes of each sample."""

_VALUES_COUNT = ("pow", "native_dropout")
"""Operators whose time depends on the value of a fraction among their arguments: a square is a product."""


class TensorForm(Noun):
    """One tensor. strides: in numbers, None where it lies in the order of its shape."""

    shape: tuple[Number, ...]
    dtype: Name
    strides: tuple[Number, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_row(cls, row: Any) -> Any:
        if not isinstance(row, list):
            return row
        if len(row) not in (2, 3):
            raise ValueError(f"a tensor is its shape, its type and perhaps its strides, and this one has {len(row)}")
        return dict(zip(("shape", "dtype", "strides"), row))  # noqa: B905 - strides may be left out

    @model_serializer
    def _write_row(self) -> list[Any]:
        return self.row

    @property
    def row(self) -> list[Any]:
        """As documents have it."""
        strides = [] if self.strides is None else [list(self.strides)]
        return [list(self.shape), self.dtype, *strides]


class OperatorForm(Noun):
    """One call of an operator.

    operator: PyTorch's name with its overload (`aten::add.Tensor`), or the type of a kernel (`MatMulV2`). arguments:
    all that is no tensor, as JSON; empty where there is nothing. flops, moved_bytes: of the call, as in TracedOperator.
    """

    operator: Name
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    arguments: Annotated[str, Field(strict=True, max_length=MAX_ARGUMENTS)] = ""
    flops: Number = 0
    moved_bytes: Number = 0

    @model_validator(mode="before")
    @classmethod
    def _read_row(cls, row: Any) -> Any:
        if not isinstance(row, list):
            return row
        if len(row) != len(FORM_COLUMNS):
            raise ValueError(f"a form has the columns {', '.join(FORM_COLUMNS)}, and this one has {len(row)}")
        return dict(zip(FORM_COLUMNS, row, strict=True))

    @model_serializer
    def _write_row(self) -> list[Any]:
        return self.row

    @property
    def row(self) -> list[Any]:
        """As documents have it."""
        inputs, outputs = ([tensor.row for tensor in tensors] for tensors in (self.inputs, self.outputs))
        return [self.operator, inputs, outputs, self.arguments, self.flops, self.moved_bytes]

    @property
    def kind(self) -> str:
        """The operator without its library and overload: `add`."""
        return self.operator.removeprefix("aten::").split(".")[0]

    @property
    def dtype(self) -> str:
        """Of what it gives, or of what it takes where it gives no tensor."""
        tensors = self.outputs or self.inputs
        return tensors[0].dtype if tensors else ""

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal for calls that take equally long on one device: the key of a base.

        Where a result lies follows from the operands, and what a fraction among the arguments is changes no time.
        """
        results = [(tensor.shape, tensor.dtype) for tensor in self.outputs]
        key = [self.operator, [tensor.row for tensor in self.inputs], results, self._telling_arguments()]
        return hashlib.blake2b(json.dumps(key, separators=(",", ":")).encode(), digest_size=16).digest()

    @cached_property
    def family(self) -> bytes:
        """8 bytes that are equal for calls which differ in their sizes alone: between such times are regressed."""
        types = [[(tensor.dtype, len(tensor.shape), tensor.strides is None) for tensor in self.inputs], self.dtype]
        key = [self.operator, types, _without_numbers(self._telling_arguments())]
        return hashlib.blake2b(json.dumps(key, separators=(",", ":")).encode(), digest_size=8).digest()

    def _telling_arguments(self) -> Any:
        arguments = json.loads(self.arguments) if self.arguments else None
        return arguments if self.kind.startswith(_VALUES_COUNT) else _without_fractions(arguments)


def _without_fractions(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_fractions(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_fractions(inner) for inner in value]
    return "a fraction" if isinstance(value, float) else value


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_numbers(inner) for inner in value]
    return "a number" if isinstance(value, int) and not isinstance(value, bool) else value
