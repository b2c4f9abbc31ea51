"""A CSV file as rows whose cells are read with their type; what is no such table is a TableError.

What is malformed (a missing or extra cell, a number that is no number, a unit nobody knows) ends the reading of the
file, because the same slip may stand in rows where nothing shows it. A well-formed row that says something this project
cannot represent raises Unrepresentable, which costs that row alone.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import TableError
from mm_autoparallel.files import describe_value, read_text

MS_PER_UNIT = {"us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3, "min": 6e4, "h": 3.6e6}
BYTES_PER_UNIT = {
    "B": 1.0, "bytes": 1.0,
    "KB": 1e3, "MB": 1e6, "GB": 1e9,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip

_LEADING_COUNT = re.compile(r"\d+\b")


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
        return int(value)

    def leading_count(self, column: str) -> int:
        """The whole number that a cell begins with: `8192 (not stated)`. Raises TableError if there is none."""
        text = self.text(column)
        found = _LEADING_COUNT.match(text)
        if found is None:
            raise self.error(column, f"{text!r} does not begin with a number of tokens")
        return int(found[0])

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
        """A finite number above zero. Raises TableError."""
        value = self.number(column)
        if value <= 0:
            raise self.error(column, f"{describe_value(self.text(column))} is measured, so it must be above zero")
        return value

    def optional_positive(self, column: str) -> float | None:
        """A finite number above zero, None where the cell is empty. Raises TableError."""
        return self.positive(column) if self.has(column) else None

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
        return self.positive(column) * scales[unit]


@dataclass(frozen=True)
class Table:
    """header: the column names in their order; rows: data rows, empty lines left out."""

    path: Path
    header: tuple[str, ...]
    rows: tuple[Row, ...]


def read_csv(path: Path) -> Table:
    """The table in the CSV file at `path`.

    Raises TableError where the file is missing, too large, binary or empty, a column stands twice or has no name, or a
    row has more or fewer cells than the header, naming its row and line.
    """
    reader = csv.reader(io.StringIO(read_text(path, "table", "CSV file", TableError)), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as failure:
        raise TableError(f"table {path}: it is no valid CSV: {failure} in line {reader.line_num}") from None
    if not lines:
        raise TableError(f"table {path}: it is empty; a header and a row for each measurement are expected")
    header = tuple(cell.strip() for cell in lines[0][1])
    for index, column in enumerate(header):
        if not column:
            raise TableError(f"table {path}: column {index + 1} of the header has no name")
        if column in header[:index]:
            raise TableError(f"table {path}: the column {column} stands twice in the header; keep one of the two")
    rows = []
    for index, (line, cells) in enumerate(lines[1:]):
        if len(cells) != len(header):
            raise TableError(
                f"table {path}: row {index} (line {line}) has {len(cells)} cells and the header has {len(header)} "
                f"columns; {_where_it_breaks(header, cells)}"
            )
        named = {column: cell.strip() for column, cell in zip(header, cells, strict=True)}
        rows.append(Row(path, index, line, named))
    return Table(path, header, tuple(rows))


def _where_it_breaks(header: tuple[str, ...], cells: list[str]) -> str:
    if len(cells) < len(header):
        return f"the first column without a cell is {header[len(cells)]}"
    return f"{describe_value(cells[len(header)])} stands beyond the last column, {header[-1]}"
