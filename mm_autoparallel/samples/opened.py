"""Data sets opened, to be read piece by piece: they may be far larger than memory, unlike what files.py reads."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from mm_autoparallel.confinement import open_file
from mm_autoparallel.errors import JobError
from mm_autoparallel.samples.record import KNOWN

MOST_RECORD = 64 << 20
"""Characters of one record, and bytes of a member that is read whole. Assumed: far more than a conversation has."""


def name_file(path: Path) -> str:
    """How messages call it."""
    return f"sample file {path}"


def open_samples(path: Path) -> BinaryIO:
    """The regular file at `path`. Raises JobError where there is none, or it cannot be read or is empty."""
    where = name_file(path)
    try:
        # Without O_NONBLOCK the opening of a pipe waits for a writer; a regular file does not know the difference.
        descriptor = open_file(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        raise JobError("there is no such file", where=where) from None
    except (OSError, ValueError) as failure:  # ValueError: a path with a character that no path can have
        raise JobError(f"it cannot be read ({getattr(failure, 'strerror', None) or failure})", where=where) from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size:
        return open(descriptor, "rb")  # noqa: PTH123 - of a descriptor
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise JobError("it is empty; a record for each sample is expected", where=where)
    raise JobError("it is no regular file; the path of a file is expected", where=where)


def broken(path: Path, place: str, reason: str) -> JobError:
    """What is wrong at a place of a file."""
    return JobError(f"{place}: {reason}", where=name_file(path))


def parse_record(text: str, path: Path, place: str) -> dict[str, Any]:
    """One JSON mapping. Raises JobError."""
    try:
        found = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as failure:
        reason = getattr(failure, "msg", str(failure))
        raise broken(path, place, f"it is no valid JSON ({reason}); a mapping with {KNOWN[0]}, … is right") from None
    if not isinstance(found, dict):
        raise broken(path, place, f"it is no mapping; one with some of {', '.join(KNOWN)} is right")
    return found


def refuse_constant(name: str) -> object:
    """For JSON's decoders: NaN and Infinity are no numbers. Raises ValueError."""
    raise ValueError(f"{name} is no number")
