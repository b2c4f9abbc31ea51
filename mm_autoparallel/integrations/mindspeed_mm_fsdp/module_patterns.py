"""Patterns of module names as MindSpeed-MM's FSDP trainer has them: `{*}` is any number, `{0-11}` one of these.

The rules are those of MindSpeed, mindspeed/fsdp/utils/str_match.py (26.0 on). A plan names whole layers alone: all of a
list, or the first of it, so that each is named once: a module that two patterns match is recomputed twice over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

_BRACES = re.compile(r"\{([^}]*)\}")
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
_LIST = re.compile(r"(?P<path>[\w.]{1,200})\.\{(?:\*|\d{1,9}-\d{1,9})\}")
_WORDS = {"audio": ("audio",), "vision": ("visual", "vision", "vit", "resblocks", "image")}
_NAMES = ("layers", "blocks", "resblocks", "h")
"""What models call their lists of layers."""

_MAX_PATTERN, _MAX_STARS = 300, 4
"""Assumed: characters of a pattern, three times the longest known; its stars and braces, each tried at every letter."""


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names the module `name`; a pattern that the trainer would refuse names nothing."""
    found = _compile(pattern)
    match = found[0].fullmatch(name) if found else None
    if not found or not match:
        return False
    pairs = zip(found[1], map(int, match.groups()), strict=True)
    return all(limits is None or limits[0] <= number <= limits[1] for limits, number in pairs)


@lru_cache(maxsize=1024)
def _compile(pattern: str) -> tuple[re.Pattern[str], list[tuple[int, int] | None]] | None:
    """What names are matched with, and the range of each number in them; None where nothing can be."""
    if len(pattern) > _MAX_PATTERN or pattern.count("*") + pattern.count("{") > 2 * _MAX_STARS:
        return None
    ranges: list[tuple[int, int] | None] = []
    regex, end = "", 0
    for brace in _BRACES.finditer(pattern):
        found = _RANGE.fullmatch(brace[1])
        if not found and brace[1] != "*":
            return None
        ranges.append((int(found[1]), int(found[2])) if found else None)
        regex += _plain(pattern[end : brace.start()]) + r"(\d{1,9})"
        end = brace.end()
    return re.compile(regex + _plain(pattern[end:])), ranges


def _plain(text: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in text)


def find_layer_lists(patterns: Iterable[str], modalities: Sequence[str]) -> dict[str, str]:
    """modality → the path of its list of layers (`model.language_model.layers`), as far as the patterns show it.

    A list is what a pattern ends with, and its names tell whose it is: `visual`, `vision`, `audio`; else the text's.
    The first pattern of each counts.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        match = _LIST.fullmatch(pattern)
        if not match or match["path"].rpartition(".")[2] not in _NAMES:
            continue
        words = match["path"].split(".")
        if any(word.startswith("mtp") for word in words):
            continue
        told = (name for name, known in _WORDS.items() if any(part in word for word in words for part in known))
        owner = next(told, "text")
        if owner in modalities:
            found.setdefault(owner, match["path"])
    return found


def count_layers(patterns: Sequence[str], path: str, num_layers: int) -> int:
    """Layers of the list at `path` that `patterns` name as a whole."""
    return sum(any(matches(pattern, f"{path}.{index}") for pattern in patterns) for index in range(num_layers))


def name_layers(path: str, first_count: int, num_layers: int) -> list[str]:
    """Patterns that name the first `first_count` of the list's `num_layers` layers, each once."""
    if not first_count:
        return []
    return [f"{path}.{{*}}" if first_count == num_layers else f"{path}.{{0-{first_count - 1}}}"]


def list_of(pattern: str) -> str:
    """The path of the list whose layers `pattern` names as a whole; empty where it names something else."""
    match = _LIST.fullmatch(pattern)
    return match["path"] if match else ""
