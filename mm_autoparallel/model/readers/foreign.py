"""Section: typed look-ups in a model file of another tool, whose many other keys are none of our business.

Each look-up that fails raises JobError naming file, key, value and what would be right.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value
from mm_autoparallel.records import LARGEST_COUNT, MAX_LAYERS

Sizes = dict[str, Any]


def sizes(keys: str, *values: Any, **more: Any) -> Sizes:
    """A row of a table of defaults: the first of `keys`, as many as there are values, with these, and `more`."""
    return dict(zip(keys.split(), values, strict=False)) | more


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value <= LARGEST_COUNT


@dataclass(frozen=True)
class Section:
    """The mapping at `key` of the file `path`, which messages call `what`.

    What it leaves out comes from `defaults`; null counts as left out. aliases: key → another name that the file may
    have for it, which counts before the key itself.
    """

    content: Mapping[str, Any]
    path: Path
    key: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    what: str = "model file"
    aliases: Mapping[str, str] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        """True if the file or the defaults give `key` a value."""
        return self._find(key) is not None

    def is_null(self, key: str) -> bool:
        """True if the file itself says null at `key`, for keys where that is no default that was left out."""
        return self.name(key) in self.content and self.content[self.name(key)] is None

    def name(self, key: str) -> str:
        """What the file calls `key`."""
        alias = self.aliases.get(key, key)
        return key if self.content.get(alias) is None else alias

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1. With a `default` the key may be missing."""
        value = self._find(key, default)
        if value is None:
            raise self._missing(key, "a whole number, at least 1,")
        if not _is_number(value) or value < 1:
            raise self.refuse(key, "a whole number, at least 1, is expected")
        return value

    def layers(self, key: str, default: int | None = None) -> int:
        """A number of layers: from 1 to what can be gone through one by one. With a `default` it may be missing."""
        value = self.count(key, default)
        if value > MAX_LAYERS:
            raise self.refuse(key, f"it is at most {MAX_LAYERS:,}")
        return value

    def number(self, key: str, default: int) -> int:
        """A whole number of at least 0."""
        value = self._find(key, default)
        if not _is_number(value) or value < 0:
            raise self.refuse(key, "a whole number, at least 0, is expected")
        return value

    def ratio(self, key: str, default: float) -> int:
        """The whole number of which the value is the inverse: `0.5` → 2."""
        value = self._find(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.01 <= value <= 1:
            raise self.refuse(key, "a number from 0.01 to 1 is expected")
        return round(1 / value)

    def factor(self, key: str, default: float) -> float:
        """A number from 0.01 to 100, by which a size is multiplied."""
        value = self._find(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.01 <= value <= 100:
            raise self.refuse(key, "a number from 0.01 to 100 is expected")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._find(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false is expected")
        return value

    def text(self, key: str, default: str) -> str:
        """A text."""
        value = self._find(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "a text is expected")
        return value

    def indices(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0; empty where the key is missing."""
        value = self._find(key, [])
        if not isinstance(value, (list, tuple)) or not all(_is_number(item) and item >= 0 for item in value):
            raise self.refuse(key, "a list of whole numbers, at least 0, is expected")
        return tuple(value)

    def side(self, key: str) -> int:
        """A length in pixels; of a square, where it is given as a pair."""
        value = self._find(key)
        if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] == value[1]:
            value = value[0]
        if value is None:
            raise self._missing(key, "a whole number, at least 1,")
        if not _is_number(value) or value < 1:
            raise self.refuse(key, "a whole number, at least 1, or a pair of equal ones is expected")
        return value

    def section(
        self, key: str, defaults: Mapping[str, Any] | None = None, aliases: Mapping[str, str] | None = None
    ) -> Section:
        """The mapping under `key`; an empty one with `defaults` if it is missing and defaults are given."""
        value = self._find(key, {} if defaults is not None else None)
        if value is None:
            raise self._missing(key, "a mapping")
        if not isinstance(value, Mapping):
            raise self.refuse(key, "a mapping is expected")
        return replace(self, content=value, key=self.where(key), defaults=defaults or {}, aliases=aliases or {})

    def where(self, key: str) -> str:
        """The key as one would write it from the top of the file."""
        return f"{self.key}.{self.name(key)}" if self.key else self.name(key)

    def refuse(self, key: str, reason: str) -> JobError:
        """The error that says what stands at `key` and why that will not do; for the caller to raise."""
        reason = f"{self.where(key)} is {describe_value(self._find(key))}; {reason}"
        return JobError(reason, where=f"{self.what} {self.path}", key=self.where(key))

    def _missing(self, key: str, expected: str) -> JobError:
        near = difflib.get_close_matches(key, list(self.content), n=1, cutoff=0.85)  # assumed: a letter or two
        found = f' (there is "{near[0]}")' if near else ""
        reason = f"{self.where(key)} is missing{found}; {expected} is expected"
        return JobError(reason, where=f"{self.what} {self.path}", key=self.where(key))

    def _find(self, key: str, default: Any = None) -> Any:
        value = self.content.get(self.name(key))
        if value is None:
            value = self.defaults.get(key)
        return default if value is None else value
