"""A CSV file as rows whose cells are read with their type; what is no such table is a TableError.

What is malformed (a missing or extra cell, a number that is no number, a unit nobody knows) ends the reading of the
file, because the same slip may stand in rows where nothing shows it. A well-formed row that says something this project
cannot represent raises Unrepresentable, which costs that row alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import TableError
from mm_autoparallel.files import describe_value
from mm_autoparallel.records import LARGEST_COUNT, SMALLEST_MS
from mm_autoparallel.units import describe_range

MS_PER_UNIT = {"us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3, "min": 6e4, "h": 3.6e6}
BYTES_PER_UNIT = {
    "B": 1.0, "bytes": 1.0,
    "KB": 1e3, "MB": 1e6, "GB": 1e9,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip

_LEADING_COUNT = re.compile(r"([0-9]{1,15})(?:\.0{1,3})?(?:\s*\(.*)?", re.DOTALL)

SMALLEST, LARGEST = SMALLEST_MS, 1e15
"""Of what was measured: no time is shorter, and no bytes, seconds or operations of one row are more. Assumed."""


class Unrepresentable(Exception):
    """Why a row cannot be predicted, in a sentence."""


@dataclass(frozen=True)
class Row:
    """One data row. index: counted from 0. line: of the file, counted from 1. cells: column → text, blanks trimmed."""

    path: Path
    index: int
    line: int
    cells: Mapping[str, str]

    def error(self, column: str, finding: str) -> TableError:
        """The error that names this file, row and `column`."""
        return TableError(f"table {self.path}: row {self.index} (line {self.line}), column {column}: {finding}")

    def has(self, column: str) -> bool:
        """Whether the cell is there and not empty."""
        return bool(self.cells.get(column))

    def text(self, column: str, default: str | None = None) -> str:
        """The cell; `default` where it is empty. Raises TableError where it is empty and there is no default."""
        found = self.cells.get(column) or default
        if found is None:
            raise self.error(column, "the cell is empty, and every row needs a value there")
        return found

    def count(self, column: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, at least `least`; 8.0 is one. Raises TableError."""
        if default is not None and not self.has(column):
            return default
        value = self.number(column)
        if not value.is_integer() or value < least:
            raise self.error(column, f"{describe_value(self.text(column))} is no whole number of at least {least}")
        if value > LARGEST_COUNT:
            raise self.error(column, f"{describe_value(self.text(column))} is above {LARGEST_COUNT:,}")
        return int(value)

    def leading_count(self, column: str) -> int:
        """The whole number of a cell that may say more in brackets: `8192 (not stated)`. Raises TableError if the cell
        holds anything else, such as `8,192` or `8 k`, whose first digits are another number.
        """
        text = self.text(column)
        found = _LEADING_COUNT.fullmatch(text)
        if found is None:
            raise self.error(
                column,
                f"{describe_value(text)} is no whole number of tokens; digits alone belong there, with what is said of "
                "them in brackets",
            )
        return int(found[1])

    def number(self, column: str) -> float:
        """A finite number. Raises TableError."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            raise self.error(
                column, f"{describe_value(text)} is no number; a number without a unit belongs there"
            ) from None
        if not math.isfinite(value):
            raise self.error(column, f"{describe_value(text)} is not finite")
        return value

    def positive(self, column: str) -> float:
        """A number above zero that can have been measured. Raises TableError."""
        return self._measured(column, 1.0)

    def optional_positive(self, column: str) -> float | None:
        """As `positive`, None where the cell is empty. Raises TableError."""
        return self.positive(column) if self.has(column) else None

    def measurement(self, column: str) -> float | None:
        """As `optional_positive`, but what cannot have been measured costs this row alone: raises Unrepresentable."""
        value = self.number(column) if self.has(column) else None
        if value is not None and not SMALLEST <= value <= LARGEST:
            raise Unrepresentable(f"{column} {describe_value(self.text(column))} cannot have been measured")
        return value

    def flag(self, column: str, default: bool | None = None) -> bool:
        """True or false in any case, or 1 and 0. Raises TableError."""
        if default is not None and not self.has(column):
            return default
        known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        text = self.text(column)
        if text.lower() not in known:
            raise self.error(column, f"{describe_value(text)} is neither true nor false")
        return known[text.lower()]

    def in_unit(self, column: str, unit_column: str, scales: Mapping[str, float]) -> float:
        """The positive number in `column` times the scale of the unit named in `unit_column`. Raises TableError."""
        unit = self.text(unit_column)
        if unit not in scales:
            raise self.error(
                unit_column, f"{describe_value(unit)} is no unit known here; known are {', '.join(scales)}"
            )
        return self._measured(column, scales[unit])

    def _measured(self, column: str, scale: float) -> float:
        value = self.number(column)
        if value <= 0:
            raise self.error(column, f"{describe_value(self.text(column))} is measured, so it must be above zero")
        if not SMALLEST <= value * scale <= LARGEST:
            raise self.error(
                column,
                f"{describe_value(self.text(column))} cannot have been measured; "
                f"{describe_range(SMALLEST / scale, LARGEST / scale)} is expected",
            )
        return value * scale
