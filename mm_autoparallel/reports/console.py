"""Printing tables: as wide as they are where output goes to a file, within the window where it goes to a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments

from mm_autoparallel.streams import is_terminal, open_output, visible, write_rendered

_FILE_WIDTH = 240
"""Assumed: wider than any table here, so that a log never has its columns cut."""


class _Drawn(io.StringIO):
    """What is drawn for `stream`: with its lines and colours, if it has any, and not yet written."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return is_terminal(self._stream)


def print_rich(renderable: RenderableType) -> None:
    """Print `renderable` on standard output, without colours or cut columns where that is no terminal.

    What stands in cells is text: neither markup nor control characters in it are obeyed. Raises as `write_output`.
    """
    drawn = _Drawn(open_output())
    _draw(renderable, drawn, None if drawn.isatty() else _FILE_WIDTH)
    write_rendered(drawn.getvalue())


def draw_text(*renderables: RenderableType) -> str:
    """`renderables` one below the other as plain text, as `print_rich` writes them to a file."""
    drawn = io.StringIO()
    for renderable in renderables:
        if isinstance(renderable, str):  # a sentence, however long, is one line
            drawn.write(f"{visible(renderable)}\n")
        else:
            _draw(renderable, drawn, _FILE_WIDTH)
    return drawn.getvalue()


def _draw(renderable: RenderableType, drawn: io.StringIO, width: int | None) -> None:
    console = Console(file=drawn, width=width, markup=False, emoji=False, highlight=False, force_jupyter=False)

    def segments() -> Iterator[Segment]:
        for text, style, control in console.render(renderable):
            yield Segment(text if control else visible(text), style, control)

    console.print(Segments(segments()), crop=False, end="")
