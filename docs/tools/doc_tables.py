"""Tables and words of Markdown."""

from __future__ import annotations


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown; what would end a cell or a line is written so that it does not."""
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def escaped(text: str) -> str:
    """Words of a docstring or of a help text: what HTML and Markdown would obey stands as it is."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("*", "\\*")
