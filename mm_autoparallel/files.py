"""The small documents people edit: YAML or JSON in, text out, nothing half-read or half-written.

Strict where YAML and JSON are lax: a key given twice, a key that is no text, NaN and infinity are refused, and a number
is what YAML 1.2 calls one (`25e9` is a number, `1:30` is not). Files that are too large or binary are refused unparsed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from mm_autoparallel.errors import JobError, PlannerError

MAX_DOCUMENT_BYTES = 10_000_000
"""Assumed: a thousand times a job file and ten times the largest profile seen."""

MAX_VALUES = 1_000_000
"""Assumed: values in one document, aliases counted each time; ends alias bombs that a size limit cannot see."""


MAX_DEPTH = 200
"""Assumed: mappings and lists inside each other in YAML. PyYAML's compiled reader recurses, and tens of thousands end
the process."""


class _Refusal(Exception):
    """What is wrong with a document, before file and purpose are put in front of it."""


def read_document(path: Path, what: str, error: type[PlannerError] = JobError) -> dict[str, Any]:
    """The mapping in the YAML or JSON file at `path` (JSON where the name ends in `.json`).

    `what` names its purpose in messages ("job file"). Raises `error` where the file is missing, a directory, above
    10 MB, binary, malformed, no mapping, holds a key twice, or NaN or infinity.
    """
    try:
        text = _read_text(path)
        document = _parse_json(text) if path.suffix.lower() == ".json" else _parse_yaml(text)
        _check_values(document)
    except RecursionError:
        raise error(f"{what} {path}: it is nested too deeply to be read") from None
    except _Refusal as refusal:
        raise error(f"{what} {path}: {refusal}") from None
    if not isinstance(document, dict):
        found = "it is empty" if document is None else f"it holds {describe_value(document)}"
        raise error(f"{what} {path}: {found}; a mapping of keys to values is expected")
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


def write_text_atomically(path: Path, text: str) -> None:
    """Writes `text` to `path` in one step: a reader sees the old file or the new one, never half of either.

    Makes missing folders. Raises OSError where the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    try:
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if path.exists():
            temporary.chmod(path.stat().st_mode)
        temporary.replace(path)
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


def read_text(path: Path, what: str, form: str, error: type[PlannerError] = JobError) -> str:
    """The UTF-8 text in the file at `path`, a byte order mark left out.

    `what` names its purpose in messages ("table"), `form` what it should be ("CSV file"). Raises `error` where the file
    is missing, a directory, above 10 MB, binary or no UTF-8.
    """
    try:
        return _read_text(path, form)
    except _Refusal as refusal:
        raise error(f"{what} {path}: {refusal}") from None


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


def _read_text(path: Path, form: str = "YAML or JSON text") -> str:
    try:
        if path.is_dir():
            raise _Refusal("it is a directory; the path of a file is expected")
        size_bytes = path.stat().st_size
        if size_bytes > MAX_DOCUMENT_BYTES:
            raise _Refusal(
                f"it is {size_bytes / 1e6:.1f} MB large; at most {MAX_DOCUMENT_BYTES / 1e6:.0f} MB are read, "
                "so this is probably another file"
            )
        content = path.read_bytes()
    except FileNotFoundError:
        raise _Refusal("there is no such file") from None
    except OSError as failure:
        raise _Refusal(f"it cannot be read ({failure.strerror or failure})") from None
    if b"\0" in content:
        raise _Refusal(f"it is binary; a {form} is expected")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise _Refusal(f"it is no UTF-8 text (byte {failure.start}); a {form} is expected") from None


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
        _check_depth(text)
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as failure:
        mark = failure.problem_mark or failure.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _Refusal(f"it is no valid YAML: {failure.problem or failure.context}{where}") from None
    except (yaml.YAMLError, ValueError) as failure:
        raise _Refusal(f"it is no valid YAML: {str(failure).splitlines()[0]}") from None


def _check_depth(text: str) -> None:
    """Refuses YAML nested deeper than `MAX_DEPTH`, from its events, which are read without recursion."""
    depth = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise _Refusal("it is nested too deeply to be read")


def _check_values(document: object) -> None:
    """Refuses NaN, infinity and documents that unfold to more than `MAX_VALUES` values."""
    pending: list[tuple[Any, object]] = [(None, document)]
    num_values = 0
    while pending:
        trail, value = pending.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            raise _Refusal(f"it unfolds to more than {MAX_VALUES:,} values, so this is probably another file")
        if isinstance(value, dict):
            pending.extend(((trail, f".{key}"), item) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend(((trail, f"[{index}]"), item) for index, item in enumerate(value))
        elif isinstance(value, float) and not math.isfinite(value):
            raise _Refusal(f"{_name(trail)} is {value}; every number must be finite")


def _name(trail: Any) -> str:
    """`((None, ".a"), "[1]")` → `a[1]`: a linked list, so that walking deep documents stays linear."""
    parts = []
    while trail:
        trail, part = trail
        parts.append(part)
    return "".join(reversed(parts)).removeprefix(".") or "it"
