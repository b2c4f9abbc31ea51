"""Values of a record: what is said at all, one or several, numbers within bounds, or Malformed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mm_autoparallel.files import describe_value
from mm_autoparallel.samples.sample import MOST_TOKENS


class Malformed(Exception):
    """What is wrong with a record, and what would be right; whoever reads the file says where."""


def is_said(value: object) -> bool:
    """Whether it tells anything: None, empty text, an empty list and a mapping to None alone are as good as left out.
    Parquet's columns have these in rows that lack a value."""
    if isinstance(value, Mapping):
        return any(one is not None for one in value.values())
    return value is not None and not (isinstance(value, Sequence) and not isinstance(value, bytes) and not len(value))


def several(value: object) -> list[Any]:
    """One value, or a list of them; nothing where nothing is said."""
    if not is_said(value):
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [value]


def whole(value: object, key: str, least: int = 0, most: int = MOST_TOKENS) -> int:
    """The whole number that `value` is. Raises Malformed."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or not least <= value <= most:  # type: ignore[operator]
        raise Malformed(f"its {key} is {describe_value(value)}; a whole number from {least} to {most:,} is right")
    return int(value)  # type: ignore[call-overload,no-any-return]


def number(value: object, key: str, most: float) -> float:
    """The number above 0 that `value` is. Raises Malformed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise Malformed(f"its {key} is {describe_value(value)}; a number above 0, at most {most:,.0f}, is right")
    return float(value)
