"""Habits that keep code readable: units in names, documented names, no swallowed errors, no stubs, short files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from mm_autoparallel import records as fields

UNIT = re.compile(
    r"(?:^|_)(?:ms|us|s|bytes|mib|gb|flops|tokens|fraction|factor|scale|count|probability|price)(?:_per_(?:s|byte|token|flop))?$"
)
"""How the name of a float ends: its unit, or the word for a number without one."""

MAX_LINES = 400
ONE_IDEA: dict[str, str] = {}
"""Files that may be longer than MAX_LINES, with the one idea they are."""


def record_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Dataclasses and pydantic models: classes whose annotated names are fields."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        decorators = {ast.unparse(d).split("(")[0] for d in node.decorator_list}
        bases = {ast.unparse(base) for base in node.bases}
        if decorators & {"dataclass", "dataclasses.dataclass"} or bases & {"BaseModel", "Noun"}:
            yield node


FLOATS = {
    *("float", "Floats"),
    *(name for name, kind in vars(fields).items() if get_args(kind)[:1] == (float,)),
}


def holds_float(annotation: ast.expr) -> bool:
    """`float`, an array or container of it, or one of the float fields of records.py."""
    return any(isinstance(node, ast.Name) and node.id in FLOATS for node in ast.walk(annotation))


def floats_without_unit(tree: ast.Module) -> list[str]:
    return [
        f"{field.lineno}: {record.name}.{field.target.id}"
        for record in record_classes(tree)
        for field in record.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and "Callable" not in ast.unparse(field.annotation)
        and holds_float(field.annotation)
        and not UNIT.search(field.target.id)
    ]


def swallowed_errors(tree: ast.Module) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and all(isinstance(line, (ast.Pass, ast.Continue)) for line in node.body)
    ]


def undocumented(tree: ast.Module) -> list[str]:
    """Public modules, classes, functions and methods without a docstring; properties and overrides name themselves."""
    missing = [] if ast.get_docstring(tree) or not tree.body else ["the module"]
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            missing.append(f"{node.lineno}: {node.name}")
        if isinstance(node, ast.ClassDef):
            missing += [
                f"{method.lineno}: {node.name}.{method.name}"
                for method in node.body
                if isinstance(method, ast.FunctionDef)
                and not method.name.startswith("_")
                and not method.decorator_list
                and not ast.get_docstring(method)
            ]
    return missing


def stubs(tree: ast.Module) -> list[int]:
    """Lines that raise NotImplementedError: a promise that the reader takes for code."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and node.exc and "NotImplementedError" in ast.unparse(node.exc)
    ]


@pytest.mark.parametrize("finder", [floats_without_unit, swallowed_errors, undocumented, stubs])
def test_every_file_keeps_the_habit(finder: object, sources: dict[str, ast.Module]) -> None:
    assert callable(finder)
    wrong = [f"{path}:{found}" for path, tree in sources.items() for found in finder(tree)]
    assert not wrong, "\n".join(wrong)


def test_files_are_short(repository: Path, sources: dict[str, ast.Module]) -> None:
    lengths = {path: len((repository / "mm_autoparallel" / path).read_text().splitlines()) for path in sources}
    longest = sorted(lengths.items(), key=lambda item: -item[1])[:5]
    too_long = [path for path, length in lengths.items() if length > MAX_LINES and path not in ONE_IDEA]
    assert not too_long, f"split these, or give the one idea they are in ONE_IDEA: {too_long}; longest: {longest}"
    assert ONE_IDEA.keys() <= {path for path, length in lengths.items() if length > MAX_LINES}, "an excuse is left over"


def test_no_file_is_a_drawer(sources: dict[str, ast.Module]) -> None:
    drawers = re.compile(r"(?:^|/)(?:utils?|helpers?|common|misc|.*_v\d+|.*manager)\.py$")
    assert not [path for path in sources if drawers.search(path)]


def test_no_file_defers_work(repository: Path) -> None:
    marks = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")
    files = [path for room in ("mm_autoparallel", "tests", "examples") for path in (repository / room).rglob("*.py")]
    assert not [str(path) for path in files if marks.search(path.read_text(encoding="utf-8"))]


BAD = """
@dataclass(frozen=True)
class Cost:
    time: float
    time_ms: float
    peak_bytes_per_s: dict[str, float]
    latency: "float"

def price():
    try:
        pay()
    except OSError:
        pass
    raise NotImplementedError
"""


def test_the_finders_find() -> None:
    tree = ast.parse(BAD)
    assert floats_without_unit(tree) == ["4: Cost.time"]
    assert swallowed_errors(tree) == [12]
    assert undocumented(tree) == ["the module", "3: Cost", "9: price"]
    assert stubs(tree) == [14]
