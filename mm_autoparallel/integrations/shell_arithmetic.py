"""The shell's arithmetic: what stands in `$((…))`, worked out without running anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

_LARGEST = 2**63 - 1
"""Of the shell's arithmetic, which wraps beyond; such a number is none that a size could have."""

_MAX_ARITHMETIC = 300
"""Assumed: characters of one `$((…))`; Python's parser and its trees recurse."""

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
}


_EXPRESSION = re.compile(rf"[\w$ \t{{}}()+*/%-]{{1,{_MAX_ARITHMETIC}}}", re.ASCII)


def calculate(expression: str, variable: Callable[[str], int | None]) -> int | None:
    """Shell arithmetic of + - * / % and brackets. The shell divides towards zero."""
    if not _EXPRESSION.fullmatch(expression):
        return None
    try:
        tree = ast.parse(re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", expression).strip(), mode="eval")
    except SyntaxError:
        return None
    return _fold(tree.body, variable)


def _fold(node: ast.expr, variable: Callable[[str], int | None]) -> int | None:
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int and node.value <= _LARGEST else None
    if isinstance(node, ast.Name):
        return variable(node.id)
    if isinstance(node, ast.BinOp):
        left, right = _fold(node.left, variable), _fold(node.right, variable)
        if left is None or right is None:
            return None
        if type(node.op) in _OPERATIONS:
            result = _OPERATIONS[type(node.op)](left, right)
            return result if abs(result) <= _LARGEST else None
        if isinstance(node.op, (ast.Div, ast.Mod)) and right:
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if isinstance(node.op, ast.Div) else left - quotient * right
    return None
