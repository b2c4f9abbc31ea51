"""The small documents people edit: YAML or JSON in, text out, nothing half-read or half-written.

Strict where YAML and JSON are lax: a key given twice, a key that is no text, NaN and infinity are refused, and a number
is what YAML 1.2 calls one (`25e9` is a number, `1:30` is not). Files that are too large or binary are refused unparsed,
and what would unfold to more than anybody writes before it is built. Every file that a person gives is read here.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from mm_autoparallel.confinement import is_folder as is_folder
from mm_autoparallel.confinement import is_there as is_there
from mm_autoparallel.confinement import open_file, pinned
from mm_autoparallel.errors import JobError, PlannerError, TableError

MAX_DOCUMENT_BYTES = 10_000_000
"""Assumed: a thousand times a job file and ten times the largest profile seen."""

MAX_VALUES = 1_000_000
"""Assumed: values in one document; ends what fits the size limit and takes all memory once it is read."""

MAX_YAML_VALUES = 200_000
"""Assumed: values in one YAML document, aliases and merged mappings counted each time; a hundred times what people
write. Fewer than of JSON, because YAML is read event by event, some two hundred thousand of them in half a second."""

MAX_COLUMNS, MAX_ROWS, MAX_COLUMN_NAME = 1_000, 10_000, 200
"""Assumed: of a CSV table; ten times the widest known, seven times the longest, four times the longest name."""

BYTE_ORDER_MARK = "\ufeff"

MAX_DEPTH = 200
"""Assumed: mappings and lists inside each other. PyYAML's compiled reader recurses, and tens of thousands end the
process; much that goes through documents recurses too."""


class _Refusal(Exception):
    """What is wrong with a document, before file and purpose are put in front of it."""


def read_document(path: Path, what: str, error: type[PlannerError] = JobError, part: str = "") -> dict[str, Any]:
    """The mapping in the YAML or JSON file at `path` (JSON where the name ends in `.json`).

    `what` names its purpose in messages ("job file"). part: YAML that stands in it, to be read in place of the whole.
    Raises `error` where the file is missing, irregular, above 10 MB, binary, malformed, no mapping, or holds a key
    twice, a tag, NaN or infinity, or too many values."""
    try:
        text, is_json = part or _read_text(path), path.suffix.lower() == ".json" and not part
        document = _parse_json(text) if is_json else _parse_yaml(text)
        _check_values(document)
    except RecursionError:
        raise error("it is nested too deeply to be read", where=f"{what} {path}") from None
    except _Refusal as refusal:
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
    except _Refusal as refusal:
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
                raise _Refusal(f"it has more than {MAX_ROWS:,} rows, the most that are read; divide it")
            if len(cells) != len(header):
                raise _Refusal(
                    f"row {len(rows)} (line {line}) has {len(cells)} cells and the header has {len(header)} columns; "
                    f"{_where_it_breaks(header, cells)}"
                )
            rows.append((line, cells))
    except csv.Error as failure:
        raise error(f"it is no valid CSV: {failure} in line {reader.line_num}", where=f"{what} {path}") from None
    except _Refusal as refusal:
        raise error(f"{refusal}", where=f"{what} {path}") from None
    return found, header, rows


def _check_columns(header: tuple[str, ...]) -> None:
    if not header:
        raise _Refusal("it is empty; a line that names the columns and a line for each row are expected")
    if len(header) > MAX_COLUMNS:
        raise _Refusal(f"it has {len(header):,} columns; at most {MAX_COLUMNS:,} are read")
    seen: set[str] = set()
    for index, column in enumerate(header):
        if not column:
            raise _Refusal(f"column {index + 1} of the header has no name")
        if len(column) > MAX_COLUMN_NAME:
            raise _Refusal(f"column {index + 1} of the header has a name of {len(column):,} characters")
        if column in seen:
            raise _Refusal(f"the column {column} stands twice in the header; keep one of the two")
        seen.add(column)


def _where_it_breaks(header: tuple[str, ...], cells: list[str]) -> str:
    if len(cells) < len(header):
        return f"the first column without a cell is {header[len(cells)]}"
    return f"{describe_value(cells[len(header)])} stands beyond the last column, {header[-1]}"


def describe_value(value: object) -> str:
    """How a message quotes a value: `"abc"`, `-3`, `a list of 3`, `a mapping`; long texts are cut."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing"
    text = json.dumps(value) if isinstance(value, (str, bool, int, float)) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
                raise _Refusal(_KINDS.get(stat.S_IFMT(status.st_mode), "it is no regular file"))
            if status.st_size > max_bytes:
                raise _Refusal(
                    f"it is {status.st_size / 1e6:.1f} MB large; at most {max_bytes / 1e6:.0f} MB are read, so this is "
                    "probably another file"
                )
            content = stream.read(max_bytes + 1)  # a file that is being written grows, and those of /proc tell size 0
    except FileNotFoundError:
        raise _Refusal("there is no such file") from None
    except (OSError, ValueError) as failure:  # ValueError: a path with a character that no path can have
        raise _Refusal(f"it cannot be read ({getattr(failure, 'strerror', None) or failure})") from None
    if len(content) > max_bytes:
        raise _Refusal(f"it is larger than {max_bytes / 1e6:.0f} MB, and no more is read")
    return content


def _read_text(
    path: Path, form: str = "YAML or JSON text", with_marks: bool = False, max_bytes: int = MAX_DOCUMENT_BYTES
) -> str:
    content = _read_bytes(path, max_bytes)
    if b"\0" in content:
        raise _Refusal(f"it is binary; a {form} is expected")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise _Refusal(f"it is no UTF-8 text (byte {failure.start}); a {form} is expected") from None
    return text if with_marks else text.lstrip(BYTE_ORDER_MARK)


def _parse_json(text: str) -> object:
    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key, value in items:
            if key in mapping:
                raise _Refusal(f'the key "{key}" stands twice in one mapping; keep one of the two')
            mapping[key] = value
        return mapping

    def constant(name: str) -> object:
        raise _Refusal(f"it holds {name}; every number must be finite")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as failure:
        raise _Refusal(f"it is no valid JSON: {failure.msg} in line {failure.lineno}, column {failure.colno}") from None
    except ValueError as failure:  # an integer of more digits than Python converts
        raise _Refusal(f"it is no valid JSON: {failure}") from None


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader with the numbers of YAML 1.2, no dates, and no key twice."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise _Refusal(f"a key in line {line} is no text; put quotes around it or mend it")
            if key_node.value in seen:
                raise _Refusal(
                    f'the key "{key_node.value}" stands twice in one mapping (again in line {line}); '
                    "keep one of the two"
                )
            seen.add(key_node.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


# Tag, what is read as it, the characters it can begin with (yaml.org/spec/1.2.2, section 10.3.2; yes, no, on and off
# stay booleans as in YAML 1.1, because flags are written so).
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$", list("yYnNtTfFoO")),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
    ("merge", r"^<<$", ["<"]),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def _parse_yaml(text: str) -> object:
    try:
        _check_events(text)
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as failure:
        mark = failure.problem_mark or failure.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        if failure.context_mark and str(failure.context).startswith("found duplicate anchor"):
            where = f" of the anchor in line {failure.context_mark.line + 1}{where}; rename one of the two"
        raise _Refusal(f"it is no valid YAML: {failure.problem or failure.context}{where}") from None
    except (yaml.YAMLError, ValueError) as failure:
        raise _Refusal(f"it is no valid YAML: {str(failure).splitlines()[0]}") from None


def _check_events(text: str) -> None:
    """Refuses YAML that is nested too deeply, has tags, or unfolds to too many values, before anything is built.

    From its events, without recursion. An alias counts as what it stands for, as merging it (`<<: *base`) does.
    """
    open_collections: list[tuple[str | None, int]] = []
    sizes: dict[str | None, int] = {}
    num_values = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_collections.pop()
            sizes[anchor] = num_values - before
        if not isinstance(event, yaml.NodeEvent):
            continue
        if isinstance(event, yaml.AliasEvent):
            endless = any(anchor == event.anchor for anchor, _ in open_collections)
            num_values += MAX_YAML_VALUES if endless else sizes.get(event.anchor, 0)
        num_values += 1
        if num_values > MAX_YAML_VALUES:
            raise _Refusal(f"it unfolds to more than {MAX_YAML_VALUES:,} values, so this is probably another file")
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
            raise _Refusal(f"it has the tag {describe_value(event.tag)}, and values have none here; leave it out")
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, num_values))
            if len(open_collections) > MAX_DEPTH:
                raise _Refusal("it is nested too deeply to be read")


def _check_values(document: object) -> None:
    """Refuses NaN, infinity, text that is no Unicode, and documents too deep or of more than `MAX_VALUES` values."""
    pending: list[tuple[Any, object, int]] = [(None, document, 0)]
    num_values = 1
    while pending:
        trail, value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _Refusal("it is nested too deeply to be read")
        if isinstance(value, (dict, list)):
            num_values += len(value)  # before they are put on the list, which takes more memory than they do
        if num_values > MAX_VALUES:
            raise _Refusal(f"it unfolds to more than {MAX_VALUES:,} values, so this is probably another file")
        if isinstance(value, dict):
            for key, item in value.items():
                _check_unicode((trail, f".{key}"), key)
                pending.append(((trail, f".{key}"), item, depth + 1))
        elif isinstance(value, list):
            pending.extend(((trail, f"[{index}]"), item, depth + 1) for index, item in enumerate(value))
        elif isinstance(value, float) and not math.isfinite(value):
            found = "NaN" if math.isnan(value) else "infinite, or larger than any number that is kept"
            raise _Refusal(f"{_name(trail)} is {found}; every number must be finite")
        elif isinstance(value, str):
            _check_unicode(trail, value)


def _check_unicode(trail: Any, text: str) -> None:
    """Half a surrogate pair (`"\\ud800"` in JSON) can be read, and then neither printed nor written."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise _Refusal(f"{describe_value(_name(trail))} has half a surrogate pair, which is no character; take it out")


def _name(trail: Any) -> str:
    """`((None, ".a"), "[1]")` → `a[1]`: a linked list, so that walking deep documents stays linear."""
    parts = []
    while trail:
        trail, part = trail
        parts.append(part)
    return "".join(reversed(parts)).removeprefix(".") or "it"
