"""Figures of Galvatron's profiles as they are read, and lines through them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
LARGEST = 1e12


@dataclass(frozen=True)
class Line:
    """ms that grow by the same for each sample, or each MiB."""

    each_ms: float
    fixed_ms: float = 0.0

    def at(self, x: float) -> float:
        """ms of `x` samples, or MiB."""
        return self.each_ms * x + self.fixed_ms

    @classmethod
    def through(cls, x: Iterable[float], y: Iterable[float]) -> Line:
        """By least squares."""
        each_ms, fixed_ms = np.polyfit(np.array([*x], dtype=float), np.array([*y], dtype=float), 1)
        return cls(float(each_ms), float(fixed_ms))


def section_at(document: Mapping[str, Any], key: str, where: str, above: str = "") -> Mapping[str, Any]:
    """The mapping under `key`. Raises JobError that names the key, below `above`."""
    place, value = f"{above}.{key}" if above else str(key), document.get(key)
    if not isinstance(value, dict):
        found = f"is {describe_value(value)}; a mapping is expected" if key in document else "is missing"
        raise JobError(f"{place} {found}", where=where, key=place)
    return value


def figure_at(document: Mapping[str, Any], key: str, where: str, above: str = "", is_zero: bool = False) -> float:
    """A number above 0 (is_zero: or 0). Raises JobError that names the key."""
    place, value = f"{above}.{key}" if above else key, document.get(key)
    if key not in document:
        raise JobError(f"{place} is missing", where=where, key=place)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (0 if is_zero else 1e-12) <= value <= LARGEST
    ):
        wanted = f"a number {'of at least 0' if is_zero else 'above 0'} and up to {LARGEST:g}"
        raise JobError(f"{place} is {describe_value(value)}; {wanted} is expected", where=where, key=place)
    return float(value)


def measured_at(held: Mapping[_Key, _Value], key: _Key, where: str, name: str) -> _Value:
    """What was measured under `key`. Raises JobError that calls it `name` where nothing was."""
    if key not in held:
        raise JobError(f"{name} is missing; it was not measured", where=where, key=name)
    return held[key]
