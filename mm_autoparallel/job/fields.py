"""The types job fields are made of: nothing is coerced, so `"32"` is no number, `32.5` no count and `true` no 1."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(strict=True, ge=1, le=10**15)]
"""A whole number, at least 1."""

MAX_LAYERS = 10_000
"""Assumed: ten times the deepest model planned for; ends typing errors that would take all memory."""

Few = Annotated[int, Field(strict=True, ge=1, le=MAX_LAYERS)]
"""A whole number of things that are gone through one by one: layers, nodes, devices of a node."""

Number = Annotated[int, Field(strict=True, ge=0, le=10**15)]
"""A whole number, at least 0."""

LARGEST = 1e100
"""Assumed: above every figure in any unit; a product of two such numbers and their sums stay finite."""

Positive = Annotated[float, Field(strict=True, gt=0, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, le=LARGEST, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(strict=True, min_length=1, max_length=200)]


def _whole_float_as_int(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Bytes = Annotated[int, BeforeValidator(_whole_float_as_int), Field(strict=True, ge=0, le=10**15)]
"""A whole number of bytes, at least 0; `64e9` is one too."""


class Noun(BaseModel):
    """A frozen record read from a file; a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
