"""Edits of a TOML text that leave every byte of it alone but the values that change.

For files of plain sections, `[name]` and `key = value` below it, as people write configurations.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from mm_autoparallel.errors import JobError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The document of a TOML, called `where` in messages. Raises JobError naming its line."""
    try:
        return tomllib.loads(text, parse_float=_parse_float)
    except (ValueError, RecursionError) as failure:  # tomllib's own are ValueErrors
        raise JobError(f"{where} is no TOML that can be read: {failure}") from None


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is infinite, NaN, or larger than any number that is kept")
    return number


def format_value(value: Any) -> str:
    """A TOML value: true, numbers, words, lists of these."""
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    return json.dumps(value)


def set_toml_values(text: str, changes: Mapping[tuple[str, str], Any], where: str) -> str:
    """`text` with each (section, key) of `changes` set to its value; None: the key goes.

    A key that is missing is put behind the last one of its section, a section at the end. Raises JobError where the
    file says a value in a way that is not edited here (dotted keys, sections within others).
    """
    expected = parse_toml(text, where)
    for (section, key), value in changes.items():
        text = _set(text, section, key, value)
        found = expected.setdefault(section, {})
        if value is None:
            found.pop(key, None)
        else:
            found[key] = value
    wanted = {key: each for key, each in expected.items() if each != {} or f"[{key}]" in text}
    if not _is_whole(text) or parse_toml(text, where) != wanted:
        raise JobError(f"{where}: its sections are not written as [name] with a line a key; write them so")
    return text


def _set(text: str, section: str, key: str, value: Any) -> str:
    lines = text.splitlines(keepends=True)
    start = next((at for at, line in enumerate(lines) if line.split("#")[0].strip() == f"[{section}]"), None)
    newline = "\r\n" if "\r\n" in text else "\n"
    new = None if value is None else f"{key} = {format_value(value)}"
    if start is None:
        gap = "" if not text or text.endswith(("\n", "\r")) else newline
        return text if new is None else f"{text}{gap}{newline}[{section}]{newline}{new}{newline}"
    headers = (
        at for at in range(start + 1, len(lines)) if lines[at].lstrip().startswith("[") and _is_header(lines[at])
    )
    end = next(headers, len(lines))
    name = re.compile(rf"\s*{re.escape(key)}\s*=")
    at = next((at for at in range(start + 1, end) if name.match(lines[at])), None)
    if at is not None:
        last = next(last for last in range(at, end) if _is_whole("".join(lines[at : last + 1])))
        comment = _comment(lines[last]) if at == last else ""
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        ending = newline if lines[last].endswith(("\n", "\r")) else ""
        lines[at : last + 1] = [] if new is None else [f"{indent}{new}{comment}{ending}"]
    elif new is not None:
        while end > start + 1 and not lines[end - 1].split("#")[0].strip():
            end -= 1
        if not lines[end - 1].endswith(("\n", "\r")):
            lines[end - 1] += newline
        lines.insert(end, f"{new}{newline}")
    return "".join(lines)


def _is_header(line: str) -> bool:
    return re.fullmatch(r"\[\[?[\w.\-\" ]+\]\]?", line.split("#")[0].strip()) is not None


def _is_whole(text: str) -> bool:
    """Whether the text is a TOML by itself: an assignment of which nothing is left open."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _comment(line: str) -> str:
    """The comment behind a value, with the space before it: the longest that leaves a whole assignment."""
    for match in re.finditer(r"\s*#", line):
        if _is_whole(line[: match.start()]):
            return line[match.start() :].rstrip("\r\n")
    return ""
