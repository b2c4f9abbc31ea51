"""Tables and sentences as HTML for notebooks: everything that stands in them is escaped, nothing runs."""

from __future__ import annotations

from html import escape

from rich.table import Table

from mm_autoparallel.streams import visible

_CELL = "padding:1px 8px;text-align:"


def text(words: object) -> str:
    """`words` as HTML and SVG show them: markup and hidden characters are written out."""
    return escape(visible(str(words)))


def render_table(table: Table) -> str:
    """A table of plain cells (reports/tables.py)."""
    head = "".join(f'<th style="{_CELL}{column.justify}">{text(column.header)}</th>' for column in table.columns)
    columns = [
        [f'<td style="{_CELL}{column.justify}">{text(cell)}</td>' for cell in column.cells] for column in table.columns
    ]
    rows = "".join(f"<tr>{''.join(cells)}</tr>" for cells in zip(*columns, strict=True))
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def render_heading(words: str) -> str:
    """A line that says what follows."""
    return f"<p><b>{text(words)}</b></p>"


def render_paragraph(words: str) -> str:
    """Lines of text."""
    return "<p>" + "<br>".join(text(line) for line in words.strip().splitlines()) + "</p>"
