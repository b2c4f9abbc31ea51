"""docs/reference/python.md and the notebook do what they show."""

from __future__ import annotations

import ast
import doctest
import json
from pathlib import Path
from typing import Any

import pytest


def test_the_examples_of_the_page(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    text = (repository / "docs" / "reference" / "python.md").read_text(encoding="utf-8").replace("```\n", "\n")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    page = doctest.DocTestParser().get_doctest(text, {}, "python.md", "docs/reference/python.md", 0)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=flags).run(page, out=said.append)
    assert result.attempted > 15
    assert not result.failed, "".join(said)


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; the value of its last line, where that is an expression."""
    *lines, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        lines, last = [*lines, last], None
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None


def test_the_notebook(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cell by cell in this process: a Jupyter kernel would bring thirty packages for the same."""
    notebook = json.loads((repository / "examples" / "plan_in_a_notebook.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    shown = [run_cell("".join(c["source"]), names) for c in notebook["cells"] if c["cell_type"] == "code"]
    drawn = [result._repr_html_() for result in shown if hasattr(result, "_repr_html_")]
    assert len(drawn) == 3
    assert all("<svg" in html and "<table" in html for html in drawn)
    assert "times as long" in capsys.readouterr().out
    assert shown[-1]["step_ms"] > 0
    assert not any(cell.get("outputs") for cell in notebook["cells"])
