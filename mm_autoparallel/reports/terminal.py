"""What a person reads on the way to a result: on standard error, so that a result on standard output stays clean."""

from __future__ import annotations

import csv
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.streams import is_terminal, rewrite_line, say, warn

__all__ = ["Progress", "check_writable", "say", "warn", "write_file", "write_table", "writing"]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of `path`: a full disk or a forbidden folder is the person's to mend, not a crash."""
    try:
        yield
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror or error}") from None


def write_file(path: Path, text: str) -> None:
    """Write `text` to `path` in one step. Raises JobError where it cannot be written."""
    from mm_autoparallel.files import write_text_atomically

    with writing(path):
        write_text_atomically(path, text)


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `rows` to `path` as CSV. Raises JobError where it cannot be written."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue())


def check_writable(path: Path) -> None:
    """Raises JobError where `path` cannot be written as things stand, so that long work does not end in vain."""
    with writing(path):
        if path.is_dir():
            raise IsADirectoryError("it is a directory; name a file")
        there = next(folder for folder in path.absolute().parents if folder.exists())
        if not there.is_dir():
            raise NotADirectoryError(f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"nothing may be written to {there}")


TICK_S = 1.0
"""How often a line that says what time is left is written anew."""


class Progress:
    """One line on a terminal that is rewritten in place; nothing where standard error is a file or a pipe."""

    def __init__(self) -> None:
        self._is_terminal = is_terminal(sys.stderr)
        self._line: Callable[[float], str] | None = None
        self._shown_s = 0.0
        self._lock = threading.RLock()  # an interrupt may come inside, and `close` after it
        self._closed = threading.Event()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, line: str | Callable[[float], str]) -> None:
        """Replace the line by `line`, or by what that says so many seconds from now, second by second."""
        if not self._is_terminal:
            return
        with self._lock:
            is_first = self._line is None
            self._line, self._shown_s = line if callable(line) else (lambda _: line), time.monotonic()
            rewrite_line(self._line(0.0))
            if is_first:
                self._closed = threading.Event()
                threading.Thread(target=self._tick, args=(self._closed,), daemon=True).start()

    def _tick(self, closed: threading.Event) -> None:
        while not closed.wait(TICK_S):
            with self._lock:
                if self._line and not closed.is_set():
                    rewrite_line(self._line(time.monotonic() - self._shown_s))

    def close(self) -> None:
        """Take the line away, so that the result starts in a clean place."""
        with self._lock:
            self._closed.set()
            if self._line:
                rewrite_line("")
                self._line = None
