"""read_table: which format a table has, told by its columns, and its rows as cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mm_autoparallel.errors import TableError
from mm_autoparallel.files import describe_value, read_csv
from mm_autoparallel.measurements import (
    bridge_performance,
    galvatron,
    korthikanti,
    megatron_bridge,
    megatron_ci,
    mindspeed_mm,
    multimodal,
    neutral,
    runs,
    sc21,
    simumax,
    torchtitan,
    vtrain,
)
from mm_autoparallel.measurements.case import MeasuredCase, Refused
from mm_autoparallel.measurements.table import Row, Unrepresentable


@dataclass(frozen=True)
class Format:
    """Columns a table of this format must have, in their order, and may have; what turns a row into a case."""

    name: str
    columns: tuple[str, ...]
    optional: frozenset[str]
    read_row: Callable[[Row], MeasuredCase]

    @property
    def required(self) -> frozenset[str]:
        return frozenset(self.columns)

    def fits(self, header: frozenset[str]) -> bool:
        """Whether all its columns are there and no other."""
        return self.required <= header and not self.unknown(header)

    def unknown(self, header: Iterable[str]) -> set[str]:
        """The columns that are not of this format."""
        return set(header) - self.required - self.optional


def _format(name: str, reader: ModuleType) -> Format:
    optional = getattr(reader, "OPTIONAL", "")
    return Format(name, tuple(reader.REQUIRED.split()), frozenset(optional.split()), reader.read_row)


_MAX_NAMED = 10
"""Columns that a message names; more bury what it says."""

FORMATS = (
    _format("korthikanti", korthikanti),
    _format("sc21", sc21),
    _format("vtrain", vtrain),
    _format("simumax", simumax),
    _format("megatron-ci", megatron_ci),
    _format("mindspeed-mm", mindspeed_mm),
    _format("multimodal", multimodal),
    _format("megatron-bridge", megatron_bridge),
    _format("bridge-performance", bridge_performance),
    _format("torchtitan", torchtitan),
    _format("galvatron", galvatron),
    _format("neutral", neutral),
    _format("runs", runs),
)


def read_table(path: Path) -> tuple[list[MeasuredCase], list[Refused]]:
    """All rows of the table at `path`: those that can be predicted, and the others with their reason.

    A column that its format does not know refuses the rows that have something there. Raises TableError where the file
    is no table, lacks columns that every known format needs, or has a malformed cell.
    """
    format_, header, rows = read_csv(path, "table", lambda header: find_format(header, path))
    cases: list[MeasuredCase] = []
    refused: list[Refused] = []
    for index, (line, cells) in enumerate(rows):
        found = _try_to_read(format_, Row(path, index, line, dict(zip(header, cells, strict=True))))
        if isinstance(found, MeasuredCase):
            cases.append(found)
        else:
            refused.append(found)
    return cases, refused


def read_content(content: Mapping[str, str], name: str) -> MeasuredCase | None:
    """The case of one row that was kept apart from its table, called `name`; None where it is none any more."""
    header = frozenset(content)
    row = Row(Path(name), 0, 0, content)
    try:
        found = next((_try_to_read(format_, row) for format_ in FORMATS if format_.fits(_told(header))), None)
    except TableError:
        return None
    return found if isinstance(found, MeasuredCase) else None


def _try_to_read(format_: Format, row: Row) -> MeasuredCase | Refused:
    """The case of `row`, or why it is none: it says more than its format knows, or what cannot be represented."""
    said = sorted(column for column in format_.unknown(_told(row.cells)) if row.has(column))
    if said:
        columns = " and ".join(f"{column} ({describe_value(row.text(column))})" for column in said[:_MAX_NAMED])
        return Refused(
            row.index,
            f"the format {format_.name} does not know what the row says under {columns}, which may change what it "
            "means; leave empty what changes nothing",
        )
    try:
        return format_.read_row(row)
    except Unrepresentable as reason:
        return Refused(row.index, str(reason))


def _told(header: Iterable[str]) -> frozenset[str]:
    """The columns that say something of their own: what begins with `derived_` follows from others."""
    return frozenset(column for column in header if not column.startswith("derived_"))


def find_format(columns: Sequence[str], path: Path) -> Format:
    """The format that has the columns of the table at `path`, or all that it needs among them: what else stands there
    concerns the rows that fill it. Raises TableError naming those unknown or missing.
    """
    header = _told(columns)
    for format_ in FORMATS:
        if format_.fits(header):
            return format_
    complete = [format_ for format_ in FORMATS if format_.required <= header]
    if complete:
        return min(complete, key=lambda format_: len(format_.unknown(header)))
    known = f"known formats are {', '.join(format_.name for format_ in FORMATS)}"
    nearest = max(FORMATS, key=lambda format_: len(header & format_.required) / len(format_.required))
    if not header & nearest.required:
        raise TableError(
            f"table {path}: none of its columns ({', '.join(columns[:5])} …) is known; {known}, in files "
            "whose first line names the columns, separated by commas"
        )
    unknown = [column for column in columns if column in header - nearest.required - nearest.optional]
    missing = [column for column in nearest.columns if column not in header]
    findings = []
    if unknown:
        findings.append(f"the columns {_listed(unknown)} are unknown")
    if missing:
        findings.append(f"the columns {', '.join(missing)} are missing")
    raise TableError(
        f"table {path}: its columns are those of no known format; the nearest is {nearest.name}, and there "
        f"{' and '.join(findings)}; {known}"
    )


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns[:_MAX_NAMED]) + (
        f" and {len(columns) - _MAX_NAMED} more" if len(columns) > _MAX_NAMED else ""
    )
