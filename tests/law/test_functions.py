"""A function fits a screen and a half, and takes what a reader can keep in mind; compiled kernels are left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator

MAX_LINES = 80
MAX_ARGUMENTS = 10


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether numba compiles it: it takes arrays one by one, and calls inside cost it nothing to leave out."""
    return any(ast.unparse(each).split("(")[0] == "kernel" for each in function.decorator_list)


def count_arguments(function: ast.FunctionDef) -> int:
    """Of those that a caller gives, self and cls left out."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + (given.vararg is not None) + (given.kwarg is not None)


def oversized(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """(name, lines, arguments) of each function above either limit."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or is_kernel(node):
            continue
        num_lines, num_arguments = (node.end_lineno or node.lineno) - node.lineno + 1, count_arguments(node)
        if num_lines > MAX_LINES or num_arguments > MAX_ARGUMENTS:
            yield node.name, num_lines, num_arguments


def test_functions_are_small(sources: dict[str, ast.Module]) -> None:
    found = {f"{path}:{name}": sizes for path, tree in sources.items() for name, *sizes in oversized(tree)}
    assert not found, f"(lines, arguments); split these, or give them a record: {found}"


def test_the_limits_are_found() -> None:
    names = ", ".join(f"a{number}" for number in range(MAX_ARGUMENTS + 1))
    lines = "\n".join(["    pass"] * MAX_LINES)
    tree = ast.parse(
        f"def long():\n{lines}\n\n\ndef wide({names}): ...\n\n\n@kernel(nogil=True)\ndef fast({names}): ...\n\n\n"
        f"class One:\n    def fits(self, {names.rpartition(',')[0]}): ...\n\n    def wide(self, {names}): ...\n"
    )
    assert [name for name, *_ in oversized(tree)] == ["long", "wide", "wide"]
