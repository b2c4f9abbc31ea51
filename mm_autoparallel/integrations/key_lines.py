"""Which line of a configuration each of its keys stands on: JSON, YAML, TOML, Python, overrides. Nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.files import read_text
from mm_autoparallel.integrations.python_text import read_python

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_DEPTH = 40
"""Of nested mappings; assumed, deeper ones have no lines here."""
_HEADER = re.compile(r"\s*\[\[?([\w.\-]+)\]\]?\s*(?:#.*)?")
_ASSIGNED = re.compile(r"\s*(?:\+{0,2}|~)?([A-Za-z_][\w.\-]*)\s*=")


@dataclass(frozen=True)
class KeyLines:
    """lines: dotted key → line from 1, of a key that stands in several places the last. twice: keys that stand twice in
    one mapping, with the line of the second. text: of the file."""

    lines: dict[str, int]
    twice: tuple[tuple[str, int], ...]
    text: str

    def find(self, key: str) -> int | None:
        """The line of a dotted key, or of one that ends like it, or of its last word wherever that stands."""
        if key in self.lines:
            return self.lines[key]
        last = key.rpartition(".")[2]
        same = [line for name, line in self.lines.items() if name.rpartition(".")[2] == last]
        if same:
            return same[-1]
        found = re.search(rf"(?<![\w-]){re.escape(last)}(?![\w-])", self.text)
        return self.text.count("\n", 0, found.start()) + 1 if found else None


def read_key_lines(path: Path, entry: str | None = None) -> KeyLines:
    """The lines of the keys of the configuration at `path`; none where its form is not known. entry: the function
    that is meant, where a Python file has several: what it says comes last."""
    text = read_text(path, "configuration", "text")
    if path.suffix in (".json", ".yaml", ".yml"):
        found, twice = _of_nodes(text)
    elif path.suffix == ".py":
        found, twice = _of_python(path, entry), ()
    else:
        found, twice = [*_of_assignments(text)], ()
    return KeyLines(dict(found), twice, text)


def _of_nodes(text: str) -> tuple[list[tuple[str, int]], tuple[tuple[str, int], ...]]:
    """Of YAML, which JSON is too but for tabs."""
    try:
        root = yaml.compose(text.expandtabs(1), Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError):
        return [], ()
    found: list[tuple[str, int]] = []
    twice: list[tuple[str, int]] = []
    waiting: list[tuple[Any, str, int]] = [(root, "", 0)]
    looked_at: set[int] = set()  # aliases are the nodes that they name
    while waiting:
        node, above, depth = waiting.pop()
        if not isinstance(node, yaml.MappingNode) or depth > _MAX_DEPTH or id(node) in looked_at:
            continue
        looked_at.add(id(node))
        seen = set()
        for key, value in node.value:
            name = f"{above}{key.value}"
            line = key.start_mark.line + 1
            if name in seen and key.value != "<<":
                twice.append((name, line))
            seen.add(name)
            found.append((name, line))
            waiting.append((value, f"{name}.", depth + 1))
    return found, tuple(twice)


def _of_assignments(text: str) -> Iterator[tuple[str, int]]:
    """`key = value`, below `[section]` where there are such: TOML, overrides, and shell."""
    section = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.fullmatch(line):
            section = f"{header[1]}."
        elif match := _ASSIGNED.match(line):
            yield f"{section}{match[1]}", number


def _of_python(path: Path, entry: str | None) -> list[tuple[str, int]]:
    """Keywords of calls, keys of literals and assignments to attributes: `a=B(c=1)` and `x.a.c = 1` are both `a.c`;
    those of the function `entry` last."""
    try:
        body = read_python(path).body
        named = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == entry]
        return [pair for node in (*body, *named) for inner in ast.walk(node) for pair in _of_statement(inner)]
    except (PlannerError, RecursionError):
        return []


def _of_statement(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = ast.unparse(target)
            key = name.partition(".")[2] or name.lower()
            yield key, node.lineno
            yield from _below(node.value, f"{key}.")
    elif isinstance(node, (ast.Return, ast.Expr)):
        yield from _below(node.value, "")


def _below(node: ast.expr | None, above: str, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Keys of a call or a literal, and of those in it."""
    pairs: list[tuple[str, ast.expr, int]] = []
    if isinstance(node, ast.Call):
        pairs = [(str(each.arg), each.value, each.lineno) for each in node.keywords]
    elif isinstance(node, ast.Dict):
        both = zip(node.keys, node.values, strict=True)
        pairs = [(str(key.value), value, key.lineno) for key, value in both if isinstance(key, ast.Constant)]
    for name, value, line in pairs if depth < _MAX_DEPTH else ():
        yield f"{above}{name}", line
        yield name, line
        yield from _below(value, f"{above}{name}.", depth + 1)
