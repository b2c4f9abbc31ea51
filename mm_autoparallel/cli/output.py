"""The result of a verb on standard output, as one document or in words; what is said on the way is streams.py's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mm_autoparallel.streams import is_terminal, open_output, write_output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mm_autoparallel.planner.evaluate import Estimate


def print_document(document: Mapping[str, Any]) -> None:
    """The one JSON document that `--json` promises on standard output."""
    from mm_autoparallel.planner.plan import format_document

    # the one character that JSON leaves as it is and a terminal might not
    write_output(format_document(document).replace("\x7f", "\\u007f"))


def print_line(line: str = "") -> None:
    """A line of a result in words."""
    write_output(f"{line}\n")


def print_text(text: str) -> None:
    """Lines of a result in words, with their ends."""
    write_output(text)


def print_parts(parts: Iterable[RenderableType]) -> None:
    """Tables and lines of a result, in their order."""
    from mm_autoparallel.reports.console import print_rich

    for part in parts:
        if isinstance(part, str):
            print_line(part)
        else:
            print_rich(part)


def print_timeline(estimate: Estimate) -> None:
    """The step and what stages hold as a small picture, where standard output is a terminal."""
    from mm_autoparallel.reports.console import print_rich
    from mm_autoparallel.reports.terminal_timeline import TerminalTimeline

    if is_terminal(open_output()):
        print_rich(TerminalTimeline(estimate.problem, estimate.timeline))
