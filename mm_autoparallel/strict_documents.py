"""YAML and JSON read strictly: a key given twice, a key that is no text, NaN and infinity are refused, and a number is
what YAML 1.2 calls one (`25e9` is a number, `1:30` is not). What would unfold to more than anybody writes is refused
before it is built.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml

MAX_VALUES = 1_000_000
"""Assumed: values in one document; ends what fits the size limit and takes all memory once it is read."""

MAX_YAML_VALUES = 200_000
"""Assumed: values in one YAML document, aliases and merged mappings counted each time; a hundred times what people
write. Fewer than of JSON, because YAML is read event by event, some two hundred thousand of them in half a second."""

MAX_DEPTH = 200
"""Assumed: mappings and lists inside each other. PyYAML's compiled reader recurses, and tens of thousands end the
process; much that goes through documents recurses too."""


class Refusal(Exception):
    """What is wrong with a document, before file and purpose are put in front of it."""


def parse(text: str, is_json: bool, last_holds: bool = False) -> object:
    """The document in `text`, JSON or YAML. last_holds: of a key that YAML has twice the last counts, as for PyYAML.

    Raises Refusal, or RecursionError where it is nested too deeply.
    """
    document = _parse_json(text) if is_json else _parse_yaml(text, _LastLoader if last_holds else _StrictLoader)
    _check_values(document)
    return document


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


def _parse_json(text: str) -> object:
    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key, value in items:
            if key in mapping:
                raise Refusal(f'the key "{key}" stands twice in one mapping; keep one of the two')
            mapping[key] = value
        return mapping

    def constant(name: str) -> object:
        raise Refusal(f"it holds {name}; every number must be finite")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as failure:
        raise Refusal(f"it is no valid JSON: {failure.msg} in line {failure.lineno}, column {failure.colno}") from None
    except ValueError as failure:  # an integer of more digits than Python converts
        raise Refusal(f"it is no valid JSON: {failure}") from None


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader with the numbers of YAML 1.2, no dates, and no key twice."""

    last_holds = False
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise Refusal(f"a key in line {line} is no text; put quotes around it or mend it")
            if key_node.value in seen and not self.last_holds:
                raise Refusal(
                    f'the key "{key_node.value}" stands twice in one mapping (again in line {line}); '
                    "keep one of the two"
                )
            seen.add(key_node.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


class _LastLoader(_StrictLoader):
    """The same, but of a key that stands twice the last counts."""

    last_holds = True


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


def _parse_yaml(text: str, loader: type[_StrictLoader] = _StrictLoader) -> object:
    try:
        _check_events(text)
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as failure:
        mark = failure.problem_mark or failure.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        if failure.context_mark and str(failure.context).startswith("found duplicate anchor"):
            where = f" of the anchor in line {failure.context_mark.line + 1}{where}; rename one of the two"
        raise Refusal(f"it is no valid YAML: {failure.problem or failure.context}{where}") from None
    except (yaml.YAMLError, ValueError) as failure:
        raise Refusal(f"it is no valid YAML: {str(failure).splitlines()[0]}") from None


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
            raise Refusal(f"it unfolds to more than {MAX_YAML_VALUES:,} values, so this is probably another file")
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
            raise Refusal(f"it has the tag {describe_value(event.tag)}, and values have none here; leave it out")
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, num_values))
            if len(open_collections) > MAX_DEPTH:
                raise Refusal("it is nested too deeply to be read")


def _check_values(document: object) -> None:
    """Refuses NaN, infinity, text that is no Unicode, and documents too deep or of more than `MAX_VALUES` values."""
    pending: list[tuple[Any, object, int]] = [(None, document, 0)]
    num_values = 1
    while pending:
        trail, value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise Refusal("it is nested too deeply to be read")
        if isinstance(value, (dict, list)):
            num_values += len(value)  # before they are put on the list, which takes more memory than they do
        if num_values > MAX_VALUES:
            raise Refusal(f"it unfolds to more than {MAX_VALUES:,} values, so this is probably another file")
        if isinstance(value, dict):
            for key, item in value.items():
                _check_unicode((trail, f".{key}"), key)
                pending.append(((trail, f".{key}"), item, depth + 1))
        elif isinstance(value, list):
            pending.extend(((trail, f"[{index}]"), item, depth + 1) for index, item in enumerate(value))
        elif isinstance(value, float) and not math.isfinite(value):
            found = "NaN" if math.isnan(value) else "infinite, or larger than any number that is kept"
            raise Refusal(f"{_name(trail)} is {found}; every number must be finite")
        elif isinstance(value, str):
            _check_unicode(trail, value)


def _check_unicode(trail: Any, text: str) -> None:
    """Half a surrogate pair (`"\\ud800"` in JSON) can be read, and then neither printed nor written."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise Refusal(f"{describe_value(_name(trail))} has half a surrogate pair, which is no character; take it out")


def _name(trail: Any) -> str:
    """`((None, ".a"), "[1]")` → `a[1]`: a linked list, so that walking deep documents stays linear."""
    parts = []
    while trail:
        trail, part = trail
        parts.append(part)
    return "".join(reversed(parts)).removeprefix(".") or "it"
