"""Log: the text of one training log as clean lines, in which readers look for what a framework prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import TableError
from mm_autoparallel.files import read_text

MAX_LOG_BYTES = 200_000_000
"""Assumed: a line of 400 bytes a step for half a million steps."""

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"^\s*(?:\[(?:rank|default)?(\d+)\]:|\[[\w.-]+:\d+\]:|(\d+):)\s?")
"""What launchers put before a line: `[rank3]:` or `[default3]:` (torchrun), `[host:3]:`, `3:` (srun --label)."""


@dataclass(frozen=True)
class Line:
    """One line. number: of the file, counted from 1. rank: what a launcher put before it; None where nothing."""

    number: int
    rank: int | None
    text: str


@dataclass(frozen=True)
class Log:
    """The lines of the file at `path`, without colours and without what launchers put before them."""

    path: Path
    lines: tuple[Line, ...]

    def error(self, finding: str, line: Line | None = None) -> TableError:
        """The error that names this file, and a line of it."""
        where = f" (line {line.number})" if line else ""
        return TableError(f"log {self.path}{where}: {finding}")

    def find(self, pattern: re.Pattern[str]) -> Iterator[tuple[Line, re.Match[str]]]:
        """Every match of `pattern` in a line, in order: two processes may write into one line."""
        for line in self.lines:
            for match in pattern.finditer(line.text):
                yield line, match

    def find_same(self, pattern: re.Pattern[str], what: str) -> str | None:
        """Group 1 of `pattern` wherever it is found; None where it is nowhere. Raises TableError where two differ."""
        found: tuple[Line, str] | None = None
        for line, match in self.find(pattern):
            if found and found[1] != match[1]:
                raise self.error(
                    f"{what} is {match[1]} here and {found[1]} in line {found[0].number}: two jobs in one log; "
                    "divide it",
                    line,
                )
            found = found or (line, match[1])
        return found[1] if found else None


def read_log(path: Path) -> Log:
    """The log at `path`. Raises TableError where it is missing, binary, too large or no UTF-8."""
    text = read_text(path, "log", "training log", TableError, max_bytes=MAX_LOG_BYTES)
    return parse_log(text, path)


def parse_log(text: str, path: Path) -> Log:
    """The log that holds `text`. A carriage return, with which progress bars write over themselves, ends a line too."""
    lines = []
    for number, whole in enumerate(text.split("\n"), start=1):
        for part in whole.split("\r"):
            plain = _COLOUR.sub("", part)
            label = _RANK.match(plain)
            rank = next((int(group) for group in label.groups() if group), None) if label else None
            lines.append(Line(number, rank, plain[label.end() :] if label else plain))
    return Log(path, tuple(lines))
