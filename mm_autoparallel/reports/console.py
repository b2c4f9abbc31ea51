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
    width = None if drawn.isatty() else _FILE_WIDTH
    console = Console(file=drawn, width=width, markup=False, emoji=False, highlight=False, force_jupyter=False)

    def segments() -> Iterator[Segment]:
        for text, style, control in console.render(renderable):
            yield Segment(text if control else visible(text), style, control)

    console.print(Segments(segments()), crop=False, end="")
    write_rendered(drawn.getvalue())
