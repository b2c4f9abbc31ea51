"""Hydra's words in a configuration: overrides on the command line, and interpolations within the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value

_MOST_DEPTH = 20


def override(document: dict[str, Any], text: str) -> None:
    """Puts `a.b.c=value`, `+a.b=value` or `~a.b` into the document. Raises JobError where it is none of these."""
    found = re.fullmatch(r"(?P<sign>~|\+{0,2})(?P<key>[\w.]+)(?:=(?P<value>.*))?", text, re.DOTALL)
    if found is None or (found["sign"] != "~") != (found["value"] is not None):
        raise JobError(
            f"the override {describe_value(text)} is not understood; it is such as "
            "search_engine.hardware_info.memory_constraint=40"
        )
    *above, last = found["key"].split(".")
    section = document
    for key in above:
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            raise JobError(f"the override {text!r} goes below {key}, which is {describe_value(inner)}")
        section = inner
    if found["sign"] == "~":
        section.pop(last, None)
    else:
        section[last] = _value(found["value"])


def _value(text: str) -> Any:
    """A value as Hydra reads it: a number, true, false, null, or a text with or without quotes."""
    text = text.strip()
    words: dict[str, Any] = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", text):
        return float(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")


def resolve(value: Any, document: Mapping[str, Any], where: str, depth: int = 0) -> Any:
    """`value` with `${key}` and `${a.b}` as what stands there in the document; depth: of interpolations so far. Raises
    JobError where nothing does."""
    if depth > _MOST_DEPTH:
        raise JobError("interpolations lead in a circle", where=where)
    if isinstance(value, dict):
        return {key: resolve(inner, document, where, depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [resolve(inner, document, where, depth) for inner in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def at(name: str) -> Any:
        held: Any = document
        for key in name.split("."):
            if not isinstance(held, dict) or key not in held:
                raise JobError(f"${{{name}}} is not there; resolvers such as oc.env are not known here", where=where)
            held = held[key]
        return resolve(held, document, where, depth + 1)

    whole = _INTERPOLATION.fullmatch(value)
    if whole:
        return at(whole[1])
    return _INTERPOLATION.sub(lambda found: str(at(found[1])), value)
