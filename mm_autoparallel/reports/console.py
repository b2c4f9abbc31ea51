"""Printing tables: as wide as they are where output goes to a file, within the window where it goes to a terminal."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType

_FILE_WIDTH = 240
"""Assumed: wider than any table here, so that a log never has its columns cut."""


def print_rich(renderable: RenderableType) -> None:
    """Print `renderable` on standard output, without colours or cut columns where that is no terminal."""
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    Console(file=sys.stdout, width=width, highlight=False).print(renderable)
