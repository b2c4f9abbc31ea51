"""Waiting until one of some files is saved: by looking, which works on every file system and with every editor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

POLL_S = 0.25
"""How often files are looked at. Assumed: too short for a person to wait for, too long to be noticed by a machine."""

Look = tuple[tuple[int, ...] | None, ...]
"""What a look at files tells, one by one: whether it differs says whether a file was saved. None: it is not there."""


def look_at(paths: Sequence[Path]) -> Look:
    """What `wait_for_save` compares; a file that was put into the place of another differs from it too."""
    return tuple(map(_look_at, paths))


def _look_at(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def wait_for_save(paths: Sequence[Path], seen: Look) -> Look:
    """Wait until the files differ from `seen` and have stayed as they are for POLL_S: editors write in several steps,
    or take a file away before its new version comes."""
    before = seen
    while True:
        time.sleep(POLL_S)
        now = look_at(paths)
        if now == before != seen:
            return now
        before = now
