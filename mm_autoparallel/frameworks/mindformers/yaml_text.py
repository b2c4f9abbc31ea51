"""Edits of a YAML text that leave every byte of it alone but the values that change.

Comments, quoting, anchors, key order and spacing are people's own: nothing is printed anew. Where a list keeps its
shape only its numbers change; another shape is written in brackets behind its key, comments inside it above the key.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import yaml

from mm_autoparallel.errors import JobError

KeyPath = tuple[str | int, ...]
"""Keys from the document's top, numbers for entries of a list: ("model", "model_config", "offset")."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML was built with it: the same nodes and marks, in a tenth of the time."""


def set_yaml_values(text: str, changes: Mapping[KeyPath, Any], aliases_follow: bool = False) -> str:
    """`text` with each value of `changes` (whole numbers, flags, names, lists of them) at its place.

    A missing key is added to its mapping; mappings on the way that are missing are made. aliases_follow: where a
    number that changes has an anchor, what refers to it changes with it, as whoever wrote the anchor wants. `text`
    must be valid YAML that holds a mapping. Raises JobError where the text is written so that an edit would change
    more than was asked for.
    """
    expected = copy.deepcopy(_load(text))
    aliases = {path: _list_aliases(text, path) for path in changes} if aliases_follow else {}
    try:
        for path, value in changes.items():
            if _is_there(expected, path, value):
                continue
            for place in (*aliases.get(path, ()), path):
                _set_in_document(expected, place, value)
            text = _set_one(text, path, value)
        is_right = _load(text) == expected
    except yaml.YAMLError:  # of an edited text: an alias ends where its anchor stands, and so did the edit
        is_right = False
    if not is_right:
        names = ", ".join(".".join(map(str, path)) for path in changes)
        raise JobError(
            f"{names} cannot be written without changing other keys, because anchors or merged mappings share the "
            "values; write these keys out as plain values first"
        )
    return text


@lru_cache(maxsize=4)
def _compose(text: str) -> Any:
    return yaml.compose(text, Loader=_LOADER)


def _load(text: str) -> Any:
    return yaml.load(text, Loader=_LOADER)


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


def _list_aliases(text: str, path: KeyPath) -> list[KeyPath]:
    """Where the scalar at `path`, if it has an anchor there, is referred to: an anchor comes before its aliases."""
    node = root = _compose(text)
    for key in path:
        found = _find(node, key)
        if found is None:
            return []
        node = found[1]
    places = [where for where, found in _walk(root, ()) if found is node]
    return places[1:] if isinstance(node, yaml.ScalarNode) and places[0] == path else []


def _walk(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every value below `node` with its path; what anchors share comes once for each place."""
    yield path, node
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _walk(value, (*path, name.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _walk(value, (*path, index))


def _set_one(text: str, path: KeyPath, value: Any) -> str:
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
        if found:
            return _replace(text, mapping, *found, value)
        return _insert(text, mapping, str(key), value, at_end=depth == 0)
    return text


def _find(node: Any, key: str | int) -> tuple[Any, Any] | None:
    """The key's own node and its value's; of an entry of a list its value's twice."""
    if isinstance(node, yaml.SequenceNode):
        return (node.value[key], node.value[key]) if isinstance(key, int) and key < len(node.value) else None
    return next(((name, value) for name, value in node.value if name.value == key), None)


def _replace(text: str, mapping: Any, key: Any, node: Any, value: Any) -> str:
    if node.value != "" and _load(yaml.serialize(node)) == value:
        return text
    colon = text.index(":", key.end_mark.index) + 1
    if node.start_mark.index < colon and node.end_mark.index < colon:  # an alias stands there, the node elsewhere
        alias = re.compile(r"\s*\*[^\s,\]\}]+").match(text, colon)
        end = alias.end() if alias else colon
        return f"{text[:colon]} {_render(value, '')}{text[end:]}"
    if _same_shape(node, value):
        for leaf, number in reversed(list(zip(_leaves(node), _flat(value), strict=True))):
            old = text[leaf.start_mark.index : leaf.end_mark.index]
            if _load(old) != number:
                text = text[: leaf.start_mark.index] + _render(number, old) + text[leaf.end_mark.index :]
        return text
    old = text[colon : _end(node)].rstrip()  # the mark of a literal block is behind its line
    end = colon + len(old)
    anchor = re.match(r"\s*(&\S+\s*)?", old)
    kept = (anchor[1] or "").strip() if anchor else ""
    rendered = _render(value, old[anchor.end() :] if anchor else old)
    edited = f"{text[:colon]} {kept + ' ' if kept else ''}{rendered}{text[end:]}"
    comments = re.findall(r"(?:^|\s)(#[^\n\r]*)", old)
    if comments and not mapping.flow_style:
        line = text.rfind("\n", 0, key.start_mark.index) + 1
        above = "".join(f"{' ' * key.start_mark.column}{comment}{_newline(text)}" for comment in comments)
        edited = edited[:line] + above + edited[line:]
    return edited


def _insert(text: str, mapping: Any, key: str, value: Any, at_end: bool) -> str:
    entry = f"{_key(key)}: {_render(value, '')}"
    if mapping.flow_style:
        start = text.index("{", mapping.start_mark.index) + 1
        return f"{text[:start]}{entry}{', ' if mapping.value else ''}{text[start:]}"
    newline = _newline(text)
    if at_end:
        return text + ("" if text.endswith("\n") else newline) + entry + newline
    first = mapping.value[0][0].start_mark
    return f"{text[: first.index]}{entry}{newline}{' ' * first.column}{text[first.index :]}"


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
