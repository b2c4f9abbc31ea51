"""Where words go: results to standard output, everything said on the way to standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError


def say(message: str) -> None:
    """Tell the person something; never part of the result."""
    print(f"mm-autoparallel: {message}", file=sys.stderr, flush=True)


def warn(warnings: tuple[str, ...]) -> None:
    """Tell what should be known before the result is trusted."""
    for warning in warnings:
        say(f"warning: {warning}")


def print_document(document: Mapping[str, Any]) -> None:
    """The one JSON document that `--json` promises on standard output."""
    from mm_autoparallel.plan import format_document

    print(format_document(document), end="")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of `path`: a full disk or a forbidden folder is the person's to mend, not a crash."""
    try:
        yield
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror or error}") from None


class Progress:
    """One line on a terminal that is rewritten in place; nothing where standard error is a file or a pipe."""

    def __init__(self) -> None:
        self._shown = False
        self._is_terminal = sys.stderr.isatty()

    def show(self, line: str) -> None:
        """Replace the line by `line`."""
        if self._is_terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            self._shown = True

    def close(self) -> None:
        """Take the line away, so that the result starts in a clean place."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False
