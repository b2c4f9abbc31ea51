"""The types job fields are made of: nothing is coerced, so `"32"` is no number, `32.5` no count and `true` no 1.

Every figure has a smallest and a largest by its unit. What lies outside is a slip of a unit or of the keyboard, and
would come back as infinity, as zero or in a hundred digits: it is refused where it is read. All bounds are assumed, far
from what is measured anywhere, and such that products of two figures and sums over a step stay exact enough to print.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from mm_autoparallel.units import describe_range
from mm_autoparallel.validation import OUT_OF_RANGE

LARGEST_COUNT = 10**15
"""Of anything that is counted or a whole number of bytes: a million times a billion."""

Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST_COUNT)]
"""A whole number, at least 1."""

MAX_LAYERS = 10_000
"""Assumed: ten times the deepest model planned for; ends typing errors that would take all memory."""

Few = Annotated[int, Field(strict=True, ge=1, le=MAX_LAYERS)]
"""A whole number of things that are gone through one by one: layers, nodes, devices of a node."""

Number = Annotated[int, Field(strict=True, ge=0, le=LARGEST_COUNT)]
"""A whole number, at least 0."""


def or_zero(largest: float) -> Any:
    """A figure from 0 to `largest`, before `within` refuses what lies too near 0."""
    return Field(strict=True, ge=0, le=largest, allow_inf_nan=False)


def above_zero(largest: float) -> Any:
    """A figure above 0 up to `largest`, before `within` refuses what lies too near 0."""
    return Field(strict=True, gt=0, le=largest, allow_inf_nan=False)


def within(smallest: float, largest: float) -> AfterValidator:
    """Refuses what lies between 0 and `smallest`; `largest` is for the message."""

    def check(value: float) -> float:
        if 0 < value < smallest:
            raise PydanticCustomError(OUT_OF_RANGE, "{expected}", {"expected": describe_range(smallest, largest)})
        return value

    return AfterValidator(check)


SMALLEST_MS, LARGEST_MS = 1e-12, 1e15
"""A thousandth of a picosecond: no clock and no operator has less. Thirty thousand years: sums over a step of millions
stay below 1e22."""

PositiveTime = Annotated[float, above_zero(LARGEST_MS), within(SMALLEST_MS, LARGEST_MS)]
"""Milliseconds that were measured, or must pass."""

Time = Annotated[float, or_zero(LARGEST_MS), within(SMALLEST_MS, LARGEST_MS)]
"""Milliseconds, or 0."""

Size = Annotated[float, or_zero(1e18), within(1e-6, 1e18)]
"""Bytes, or 0: some bring problems in a unit of their own, so that a part of one is lawful; an exabyte is more than a
cluster has."""

Rate = Annotated[float, above_zero(1e24), within(1.0, 1e24)]
"""A second: bytes, operations. The fastest device does 1e16."""

TimePerByte = Annotated[float, or_zero(LARGEST_MS), within(1e-24, LARGEST_MS)]
"""Milliseconds a byte, or 0: from far beyond the fastest memory to the longest time for one."""

Factor = Annotated[float, above_zero(1e6), within(1e-6, 1e6)]
"""How many times: above 0, so that it can be divided by."""

PositiveBytesEach = Annotated[float, above_zero(1e6), within(1e-3, 1e6)]
"""Bytes of one thing of which there are many, as a parameter: one bit is 0.125."""

BytesEach = Annotated[float, or_zero(1e6), within(1e-3, 1e6)]
"""The same, or 0."""

Fraction = Annotated[float, above_zero(1.0), within(1e-6, 1.0)]
"""A part of a whole: above 0, so that it can be divided by."""

ZeroToOne = Annotated[float, or_zero(1.0), within(1e-6, 1.0)]
"""The same, or 0."""

FailurePrice = Annotated[float, or_zero(1e3), within(1e-6, 1e3)]
"""What a failed start costs, as a part of the run, or 0: a thousand runs are a deadline missed."""

FitProbability = Annotated[float, Field(strict=True, ge=0.5, le=1 - 1e-6)]
"""That a plan fits: below a half it is none, and 1 nobody can promise."""

Computed = Annotated[float, or_zero(1e24), within(1e-100, 1e24)]
"""What this project worked out and wrote down: a bound, a price, a spread, or 0. Differences may be tiny."""

PositiveComputed = Annotated[float, above_zero(1e24), within(1e-100, 1e24)]
"""The same, and not 0."""

Signed = Annotated[float, Field(strict=True, ge=-1e24, le=1e24, allow_inf_nan=False)]
"""What this project worked out, of either sign."""

Flag = Annotated[bool, Field(strict=True)]
MAX_NAME = 200
Name = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_NAME)]


def _whole_float_as_int(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Bytes = Annotated[int, BeforeValidator(_whole_float_as_int), Field(strict=True, ge=0, le=LARGEST_COUNT)]
"""A whole number of bytes, at least 0; `64e9` is one too."""

PositiveBytes = Annotated[int, BeforeValidator(_whole_float_as_int), Field(strict=True, ge=1, le=LARGEST_COUNT)]
"""The same, above 0, so that it can be divided by."""


class Noun(BaseModel):
    """A frozen record read from a file; a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
