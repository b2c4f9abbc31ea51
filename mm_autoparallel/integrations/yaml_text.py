"""Edits of a YAML text that leave every byte of it alone but the values that change.

Comments, quoting, anchors, key order and spacing are people's own: nothing is printed anew. Where a list keeps its
shape only its numbers change; another shape is written in brackets behind its key, comments inside it above the key.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import BYTE_ORDER_MARK
from mm_autoparallel.integrations.export import read_exactly

KeyPath = tuple[str | int, ...]
"""Keys from the document's top, numbers for entries of a list: ("model", "model_config", "offset")."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML was built with it: the same nodes and marks, in a tenth of the time."""


@dataclass(frozen=True)
class _Change:
    """One value's change of a text. place: keys down to what is written. start, end: the part of the text, both ends
    included, that decides what is written. edits: (start, end, new), ascending. appended: goes to the text's end.
    """

    place: KeyPath
    start: int
    end: int
    edits: tuple[tuple[int, int, str], ...] = ()
    appended: str = ""

    def is_beside(self, other: _Change) -> bool:
        """Whether neither looks at what the other writes, so that both may be worked out from the same text."""
        depth = min(len(self.place), len(other.place))
        apart = self.end < other.start or other.end < self.start or bool(self.appended or other.appended)
        return apart and self.place[:depth] != other.place[:depth]


def set_yaml_values(text: str, changes: Mapping[KeyPath, Any], aliases_follow: bool = False) -> str:
    """`text` with each value of `changes` (whole numbers, flags, names, lists of them) at its place.

    A missing key is added to its mapping; mappings on the way that are missing are made. aliases_follow: where a
    number that changes has an anchor, what refers to it changes with it, as whoever wrote the anchor wants. `text`
    must hold a mapping. Raises JobError where the text is written so that an edit would change more than was asked
    for, or is no YAML for readers of version 1.1, as those of the training stacks are.
    """
    return edit_yaml(text, changes, aliases_follow)[0]


def set_file_values(path: Path, what: str, changes: Mapping[KeyPath, Any], aliases_follow: bool = False) -> str:
    """The text of the YAML file at `path`, which messages call `what`, with `changes` as `set_yaml_values` makes them.

    Byte order marks stay. Raises JobError as that and read_text do.
    """
    exact = read_exactly(path, what, "YAML file")
    plain = exact.lstrip(BYTE_ORDER_MARK)
    return exact[: len(exact) - len(plain)] + set_yaml_values(plain, changes, aliases_follow)


def edit_yaml(text: str, changes: Mapping[KeyPath, Any], aliases_follow: bool = False) -> tuple[str, Any]:
    """What `set_yaml_values` gives, and its document."""
    expected = copy.deepcopy(_read(text))
    aliases = {path: _shared_places(text, path) for path in changes} if aliases_follow else {}
    pending: list[_Change] = []
    try:
        for path, value in changes.items():
            if _is_there(expected, path, value):
                continue
            for place in (*aliases.get(path, ()), path):
                _set_in_document(expected, place, value)
            is_inside = any(path[: len(other.place)] == other.place for other in pending)
            change = None if is_inside else _find_change(text, path, value)
            if change is None or not all(change.is_beside(other) for other in pending):
                text, pending = _apply(text, pending), []
                change = _find_change(text, path, value)
            if change.edits or change.appended:
                pending.append(change)
        text = _apply(text, pending)
        is_right = _load(text) == expected
    except yaml.YAMLError:  # of an edited text: an alias ends where its anchor stands, and so did the edit
        is_right = False
    if not is_right:
        names = ", ".join(".".join(map(str, path)) for path in changes)
        raise JobError(
            f"{names} cannot be written without changing other keys, because anchors or merged mappings share the "
            "values; write these keys out as plain values first"
        )
    return text, expected


@lru_cache(maxsize=4)
def _compose(text: str) -> Any:
    return yaml.compose(text, Loader=_LOADER)


def _load(text: str) -> Any:
    return yaml.load(text, Loader=_LOADER)


@lru_cache(maxsize=4)
def _read(text: str) -> Any:
    """The document of a text that was not edited yet."""
    try:
        return _load(text)
    except yaml.MarkedYAMLError as failure:
        mark = failure.problem_mark or failure.context_mark
        problem = f"{failure.problem}" + (f" in line {mark.line + 1}" if mark else "")
    except (yaml.YAMLError, ValueError) as failure:  # ValueError: a date or a number that is none
        problem = str(failure)
    raise JobError(
        f"the YAML cannot be written anew: readers of YAML 1.1, as training stacks have, refuse it ({problem}); put "
        "quotes around the value"
    )


def _apply(text: str, changes: Sequence[_Change]) -> str:
    for start, end, new in sorted((edit for change in changes for edit in change.edits), reverse=True):
        text = text[:start] + new + text[end:]
    for change in changes:
        if change.appended:
            text += ("" if text.endswith("\n") else _newline(text)) + change.appended
    return text


def _set_in_document(document: Any, path: KeyPath, value: Any) -> None:
    for key, below in pairwise(path):
        held = document.get(key) if isinstance(document, dict) else document[key]
        if not isinstance(held, list if isinstance(below, int) else dict):
            document[key] = {}
        document = document[key]
    document[path[-1]] = value


def _is_there(document: Any, path: KeyPath, value: Any) -> bool:
    for key in path:
        found = isinstance(document, dict) and key in document
        if not found and not (isinstance(document, list) and isinstance(key, int)):
            return False
        document = document[key]
    return bool(document == value) and type(document) is type(value)


def _shared_places(text: str, path: KeyPath) -> list[KeyPath]:
    """Where the scalar at `path`, if it has an anchor there, is referred to: an anchor comes before its aliases."""
    node, shared = _find_shared(text)
    for key in path:
        found = _find(node, key)
        if found is None:
            return []
        node = found[1]
    places = shared.get(id(node), ())
    return list(places[1:]) if places and places[0] == path else []


@lru_cache(maxsize=4)
def _find_shared(text: str) -> tuple[Any, dict[int, list[KeyPath]]]:
    """The text's node, and all places of each scalar that has several, in their order, by its node's identity."""
    root = _compose(text)
    times = Counter(id(node) for node in _values(root))
    places: dict[int, list[KeyPath]] = {}
    if max(times.values()) > 1:
        for path, node in _walk(root, ()):
            if isinstance(node, yaml.ScalarNode) and times[id(node)] > 1:
                places.setdefault(id(node), []).append(path)
    return root, places


def _values(node: Any) -> Iterator[Any]:
    yield node
    if isinstance(node, (yaml.MappingNode, yaml.SequenceNode)):
        for entry in node.value:
            yield from _values(entry[1] if isinstance(entry, tuple) else entry)


def _walk(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every value below `node` with its path; what anchors share comes once for each place."""
    yield path, node
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _walk(value, (*path, name.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _walk(value, (*path, index))


def _find_change(text: str, path: KeyPath, value: Any) -> _Change:
    mapping = _compose(text)
    for depth, key in enumerate(path):
        found = _find(mapping, key)
        below = path[depth + 1] if depth < len(path) - 1 else None
        kind = yaml.SequenceNode if isinstance(below, int) else yaml.MappingNode
        if found and below is not None and isinstance(found[1], kind):
            mapping = found[1]
            continue
        for missing in reversed(path[depth + 1 :]):
            value = {missing: value}
        place = path[: depth + 1]
        if found:
            return _replace(text, place, mapping, *found, value)
        return _insert(text, place, mapping, value)
    raise AssertionError("a path has keys")


def _find(node: Any, key: str | int) -> tuple[Any, Any] | None:
    """The key's own node and its value's; of an entry of a list its value's twice. A scalar has neither."""
    if isinstance(node, yaml.SequenceNode):
        return (node.value[key], node.value[key]) if isinstance(key, int) and key < len(node.value) else None
    if not isinstance(node, yaml.MappingNode):
        return None
    return next(((name, value) for name, value in node.value if name.value == key), None)


def _replace(text: str, place: KeyPath, mapping: Any, key: Any, node: Any, value: Any) -> _Change:
    colon = text.index(":", key.end_mark.index) + 1
    line = text.rfind("\n", 0, key.start_mark.index) + 1
    edits: list[tuple[int, int, str]] = []
    if node.value != "" and _load(yaml.serialize(node)) == value:
        pass
    elif node.start_mark.index < colon and node.end_mark.index < colon:  # an alias stands there, the node elsewhere
        alias = re.compile(r"\s*\*[^\s,\]\}]+").match(text, colon)
        edits.append((colon, alias.end() if alias else colon, f" {_render(value, '')}"))
    elif _same_shape(node, value):
        for leaf, number in zip(_leaves(node), _flat(value), strict=True):
            old = text[leaf.start_mark.index : leaf.end_mark.index]
            if _load(old) != number:
                edits.append((leaf.start_mark.index, leaf.end_mark.index, _render(number, old)))
    else:
        old = text[colon : _end(node)].rstrip()  # the mark of a literal block is behind its line
        anchor = re.match(r"\s*(&\S+\s*)?", old)
        kept = (anchor[1] or "").strip() if anchor else ""
        rendered = _render(value, old[anchor.end() :] if anchor else old)
        comments = re.findall(r"(?:^|\s)(#[^\n\r]*)", old)
        if comments and not mapping.flow_style:
            above = "".join(f"{' ' * key.start_mark.column}{comment}{_newline(text)}" for comment in comments)
            edits.append((line, line, above))
        edits.append((colon, colon + len(old), f" {kept + ' ' if kept else ''}{rendered}"))
    ends = [colon, _end(node), *(end for _, end, _ in edits)]
    return _Change(place, min(line, int(node.start_mark.index)), max(ends), tuple(edits))


def _insert(text: str, place: KeyPath, mapping: Any, value: Any) -> _Change:
    entry = f"{_key(str(place[-1]))}: {_render(value, '')}"
    begin = int(mapping.start_mark.index)
    if mapping.flow_style:
        start = text.index("{", begin) + 1
        return _Change(place, begin, start, ((start, start, f"{entry}{', ' if mapping.value else ''}"),))
    newline = _newline(text)
    if len(place) == 1:
        return _Change(place, len(text), len(text), appended=entry + newline)
    first = mapping.value[0][0].start_mark
    inserted = f"{entry}{newline}{' ' * first.column}"
    return _Change(place, int(first.index), int(first.index), ((first.index, first.index, inserted),))


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _same_shape(node: Any, value: Any) -> bool:
    if isinstance(node, yaml.SequenceNode):
        return (
            isinstance(value, list)
            and len(node.value) == len(value) > 0
            and all(_same_shape(item, entry) for item, entry in zip(node.value, value, strict=True))
            and all(  # an alias among them stands for a number elsewhere
                before.end_mark.index <= after.start_mark.index
                for before, after in zip(node.value, node.value[1:], strict=False)
            )
            and node.value[0].start_mark.index >= node.start_mark.index
        )
    return isinstance(node, yaml.ScalarNode) and not isinstance(value, (list, dict)) and node.value != ""


def _leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _leaves(item)
    else:
        yield node


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _end(node: Any) -> int:
    """Where a node's text ends. Marks of a block list or mapping stand where the next key begins, behind comments."""
    if isinstance(node, (yaml.SequenceNode, yaml.MappingNode)) and not node.flow_style:
        last = node.value[-1]
        return max(_end(last[1]), int(last[0].end_mark.index) + 1) if isinstance(last, tuple) else _end(last)
    return int(node.end_mark.index)


def _render(value: Any, old: str) -> str:
    if isinstance(value, bool):
        word = str(value)
        return word if not old or old[0].isupper() else word.lower()
    if isinstance(value, int):
        return (old[: old.index(" ") + 1] if old.startswith("&") and " " in old else "") + str(value)
    if isinstance(value, list):
        return "[" + ", ".join(_render(item, "") for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)}: {_render(item, '')}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _key(key: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_]\w*", key) and _load(key) == key  # not `true`, which YAML takes for a flag
    return key if plain else json.dumps(key)
