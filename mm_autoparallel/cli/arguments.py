"""Values that options take, checked while the command line is read."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.units import MIB

_LONGEST_S = 1e9
"""Thirty years; what waits for a time is told it in whole nanoseconds."""

_LARGEST_MB = 1e9
"""A petabyte. Assumed."""


def seconds(text: str) -> float:
    """A time limit: a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, at most {_LONGEST_S:g}")
    return value


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch("0*[1-9][0-9]{0,14}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1 and at most 15 digits")
    return int(text)


def fraction(text: str) -> float:
    """A part of a whole, from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def megabytes(text: str) -> float:
    """Bytes of so many MB, as MindFormers counts them (2^20 bytes), from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _LARGEST_MB:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of MB from 0 to {_LARGEST_MB:g}")
    return value * MIB


_WRITTEN = ("out", "trace", "svg", "certificate", "log_bounds", "report")
"""Arguments that name what a verb writes; all other paths are read, or edited by their own verb."""


def check_written(arguments: argparse.Namespace) -> None:
    """Raises JobError where a file that is to be written is one that is read, or is written twice."""
    named: list[tuple[str, Path]] = []
    for name, value in vars(arguments).items():
        paths = value if isinstance(value, (list, tuple)) else [value]
        named += [(name, path) for path in paths if isinstance(path, Path)]
    for index, (name, path) in enumerate(named):
        for other, second in named[index + 1 :]:
            if (name in _WRITTEN or other in _WRITTEN) and _is_same_file(path, second):
                flag = (other if other in _WRITTEN else name).replace("_", "-")
                raise JobError(f"--{flag} names {path}, which this command uses for something else; name another file")


def _is_same_file(path: Path, other: Path) -> bool:
    """Whether both name one file, there or not; folders are written into, not over."""
    try:
        if path.is_dir() or other.is_dir():
            return False
        return path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that no file can have: its reader says so
        return False
