"""Edits of a JSON text that leave every byte of it alone but the values that change.

People keep order, grouping and spacing in these files; a program that prints them anew makes every line a difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mm_autoparallel.files import BYTE_ORDER_MARK

_SPACE = f" \t\r\n{BYTE_ORDER_MARK}"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class _Value:
    """Where a value stands in the text, and where its members do if it is a mapping (key → its start, its value)."""

    start: int
    end: int
    members: Mapping[str, tuple[int, _Value]] = field(default_factory=dict)


def set_json_value(text: str, path: tuple[str, ...], value: Any, after: str) -> str:
    """`text` with `value` at `path`; what stands there is replaced.

    A key that is missing is put behind its sibling `after`, in that line's style. `text` must be valid JSON in which
    the mapping that `path` lies in is present, and `after` where the key is not.
    """
    _, whole = _scan(text, 0)
    *parents, last = path
    for key in parents:
        _, whole = whole.members[key]
    new = json.dumps(value)
    if last in whole.members:
        _, old = whole.members[last]
        return text[: old.start] + new + text[old.end :]
    key_start, sibling = whole.members[after]
    line_start = text.rfind("\n", 0, key_start) + 1
    indent = text[line_start:key_start]
    newline = "\r\n" if text[:line_start].endswith("\r\n") else "\n"
    # A mapping written on one line has no line of its own to copy.
    separator = f",{newline}{indent}" if not indent.strip(_SPACE) and line_start else ", "
    return f"{text[: sibling.end]}{separator}{json.dumps(last)}: {new}{text[sibling.end :]}"


def _scan(text: str, index: int) -> tuple[int, _Value]:
    """The value that begins at or after `index`, with the index behind it. `text` is known to be valid JSON."""
    start = _skip(text, index)
    if text[start] == "{":
        return _scan_mapping(text, start)
    if text[start] == "[":
        end = _skip(text, start + 1)
        while text[end] != "]":
            end, _ = _scan(text, end)
            end = _skip(text, end)
            end = _skip(text, end + 1) if text[end] == "," else end
        return end + 1, _Value(start, end + 1)
    _, end = _DECODER.raw_decode(text, start)
    return end, _Value(start, end)


def _scan_mapping(text: str, start: int) -> tuple[int, _Value]:
    members: dict[str, tuple[int, _Value]] = {}
    end = _skip(text, start + 1)
    while text[end] != "}":
        key_start = end
        key, end = _DECODER.raw_decode(text, key_start)
        colon = _skip(text, end)
        end, value = _scan(text, colon + 1)
        members[key] = (key_start, value)
        end = _skip(text, end)
        end = _skip(text, end + 1) if text[end] == "," else end
    return end + 1, _Value(start, end + 1, members)


def _skip(text: str, index: int) -> int:
    while text[index] in _SPACE:
        index += 1
    return index
