"""Documents with one value changed, for tests of what readers make of them."""

from __future__ import annotations

from typing import Any


def set_value(document: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` at the dotted `key`, making mappings on the way; `...` takes the key away, where it is there."""
    *path, last = key.split(".")
    for step in path:
        document = document.setdefault(step, {})
    document.pop(last, None)
    if value is not ...:
        document[last] = value
