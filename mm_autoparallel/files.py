"""The small documents people edit: YAML or JSON in, text out, nothing half-read or half-written.

Files that are too large or binary are refused unparsed; strict_documents.py reads what is in the others. Every file
that a person gives is read here.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import hashlib
import io
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from mm_autoparallel.confinement import is_folder as is_folder
from mm_autoparallel.confinement import is_there as is_there
from mm_autoparallel.confinement import open_file, pinned
from mm_autoparallel.errors import JobError, PlannerError, TableError
from mm_autoparallel.strict_documents import Refusal, parse
from mm_autoparallel.strict_documents import describe_value as describe_value

MAX_DOCUMENT_BYTES = 10_000_000
"""Assumed: a thousand times a job file and ten times the largest profile seen."""

MAX_COLUMNS, MAX_ROWS, MAX_COLUMN_NAME = 1_000, 10_000, 200
"""Assumed: of a CSV table; ten times the widest known, seven times the longest, four times the longest name."""

BYTE_ORDER_MARK = "\ufeff"


def read_document(
    path: Path, what: str, error: type[PlannerError] = JobError, part: str = "", last_holds: bool = False
) -> dict[str, Any]:
    """The mapping in the YAML or JSON file at `path` (JSON where the name ends in `.json`).

    `what` names its purpose in messages ("job file"). part: YAML that stands in it, to be read in place of the whole.
    last_holds: of a key that YAML has twice the last counts, as for PyYAML.
    Raises `error` where the file is missing, irregular, above 10 MB, binary, malformed, no mapping, or holds a key
    twice, a tag, NaN or infinity, or too many values."""
    try:
        is_json = path.suffix.lower() == ".json" and not part
        document = parse(part or _read_text(path), is_json, last_holds)
    except RecursionError:
        raise error("it is nested too deeply to be read", where=f"{what} {path}") from None
    except Refusal as refusal:
        raise error(f"{refusal}", where=f"{what} {path}") from None
    if not isinstance(document, dict):
        found = "it is empty" if document is None else f"it holds {describe_value(document)}"
        raise error(f"{found}; a mapping of keys to values is expected", where=f"{what} {path}")
    return document


def hash_sources(sources: Iterable[str]) -> str:
    """SHA-256 of code of this package: of files, and of all files of rooms, named from where the package lies."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for source in sources:
        path = package / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"\n{file.relative_to(package).as_posix()}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def write_text_atomically(path: Path, text: str, mode: int | None = None) -> None:
    """Writes `text` to `path` in one step: a reader sees the old file or the new one, never half of either. Makes
    missing folders. mode: of the file; None: as it was. Raises OSError where the folder cannot be written."""
    with pinned(path) as target:
        temporary = temporary_of(target)
        try:
            with temporary.open("x", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            if mode is not None or target.exists():
                temporary.chmod(target.stat().st_mode if mode is None else mode)
            temporary.replace(target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            raise


def temporary_of(path: Path) -> Path:
    """A new name beside `path`, for what is to take its place once it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


_TEMPORARY = re.compile(r"\..+\.[0-9]+\.[0-9a-f]{8}\.tmp")


def is_temporary(path: Path) -> bool:
    """Whether `path` has a name that `temporary_of` gives."""
    return _TEMPORARY.fullmatch(path.name) is not None


def read_text(
    path: Path,
    what: str,
    form: str,
    error: type[PlannerError] = JobError,
    *,
    with_marks: bool = False,
    max_bytes: int = MAX_DOCUMENT_BYTES,
) -> str:
    """The UTF-8 text in the file at `path`, with the byte order marks that it begins with or without them.

    `what` names its purpose in messages ("table"), `form` what it should be ("CSV file"). Raises `error` where the file
    is missing, no regular file, above `max_bytes`, binary or no UTF-8.
    """
    try:
        return _read_text(path, form, with_marks, max_bytes)
    except Refusal as refusal:
        raise error(f"{refusal}", where=f"{what} {path}") from None


Found = TypeVar("Found")


def read_csv(
    path: Path, what: str, check_header: Callable[[tuple[str, ...]], Found], error: type[PlannerError] = TableError
) -> tuple[Found, tuple[str, ...], list[tuple[int, list[str]]]]:
    """What `check_header` makes of the columns of the CSV file at `path`, the columns, and its rows: line and cells.

    check_header: called before any row is read; raises where columns are wrong. Cells are trimmed, empty lines left
    out. Raises `error` as read_text does, and where the file is empty, a column has no name or stands twice, a row has
    more or fewer cells than there are columns, or there are more than `MAX_COLUMNS` or `MAX_ROWS`.
    """
    reader = csv.reader(io.StringIO(read_text(path, what, "CSV file", error)), strict=True)
    lines = ((reader.line_num, [cell.strip() for cell in cells]) for cells in reader)
    filled = ((line, cells) for line, cells in lines if any(cells))
    try:
        header = tuple(next(filled, (0, []))[1])
        _check_columns(header)
        found = check_header(header)
        rows: list[tuple[int, list[str]]] = []
        for line, cells in filled:
            if len(rows) == MAX_ROWS:
                raise Refusal(f"it has more than {MAX_ROWS:,} rows, the most that are read; divide it")
            if len(cells) != len(header):
                raise Refusal(
                    f"row {len(rows)} (line {line}) has {len(cells)} cells and the header has {len(header)} columns; "
                    f"{_where_it_breaks(header, cells)}"
                )
            rows.append((line, cells))
    except csv.Error as failure:
        raise error(f"it is no valid CSV: {failure} in line {reader.line_num}", where=f"{what} {path}") from None
    except Refusal as refusal:
        raise error(f"{refusal}", where=f"{what} {path}") from None
    return found, header, rows


def _check_columns(header: tuple[str, ...]) -> None:
    if not header:
        raise Refusal("it is empty; a line that names the columns and a line for each row are expected")
    if len(header) > MAX_COLUMNS:
        raise Refusal(f"it has {len(header):,} columns; at most {MAX_COLUMNS:,} are read")
    if len(header) == 1:
        _check_separator(header[0])
    seen: set[str] = set()
    for index, column in enumerate(header):
        if not column:
            raise Refusal(f"column {index + 1} of the header has no name")
        if len(column) > MAX_COLUMN_NAME:
            raise Refusal(f"column {index + 1} of the header has a name of {len(column):,} characters")
        if column in seen:
            raise Refusal(f"the column {column} stands twice in the header; keep one of the two")
        seen.add(column)


_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def _check_separator(line: str) -> None:
    """Raises Refusal where a line that was taken for one column names several, apart by something else than commas."""
    for separator, name in _SEPARATORS.items():
        if separator in line:
            raise Refusal(
                f"its first line has no comma and {line.count(separator)} {name}; columns apart by commas, and a point "
                "for the decimals, are expected"
            )


def _where_it_breaks(header: tuple[str, ...], cells: list[str]) -> str:
    if len(cells) < len(header):
        return f"the first column without a cell is {header[len(cells)]}"
    return f"{describe_value(cells[len(header)])} stands beyond the last column, {header[-1]}"


_KINDS = {
    stat.S_IFDIR: "it is a directory; the path of a file is expected",
    stat.S_IFIFO: "it is a named pipe; the path of a file is expected, so write what comes out of it to one",
    stat.S_IFCHR: "it is a device; the path of a file is expected",
    stat.S_IFBLK: "it is a device; the path of a file is expected",
}


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file, of what opened it: what lies there may be another thing a moment later."""
    try:
        # Without O_NONBLOCK the opening of a pipe waits for a writer; a regular file does not know the difference.
        with open(open_file(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as stream:  # noqa: PTH123
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Refusal(_KINDS.get(stat.S_IFMT(status.st_mode), "it is no regular file"))
            if status.st_size > max_bytes:
                raise Refusal(
                    f"it is {status.st_size / 1e6:.1f} MB large; at most {max_bytes / 1e6:.0f} MB are read, so this is "
                    "probably another file"
                )
            content = stream.read(max_bytes + 1)  # a file that is being written grows, and those of /proc tell size 0
    except FileNotFoundError:
        raise Refusal("there is no such file") from None
    except (OSError, ValueError) as failure:  # ValueError: a path with a character that no path can have
        raise Refusal(f"it cannot be read ({getattr(failure, 'strerror', None) or failure})") from None
    if len(content) > max_bytes:
        raise Refusal(f"it is larger than {max_bytes / 1e6:.0f} MB, and no more is read")
    return content


def _read_text(
    path: Path, form: str = "YAML or JSON text", with_marks: bool = False, max_bytes: int = MAX_DOCUMENT_BYTES
) -> str:
    content = _read_bytes(path, max_bytes)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Refusal(f"it is UTF-16 text; a {form} in UTF-8 is expected")
    if b"\0" in content:
        raise Refusal(f"it is binary; a {form} is expected")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise Refusal(f"it is no UTF-8 text (byte {failure.start}); a {form} is expected") from None
    return text if with_marks else text.lstrip(BYTE_ORDER_MARK)
