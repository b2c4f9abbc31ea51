"""Folders and files that no other user of this machine can have written to: what lies there may be run and believed."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

NAME = "mm-autoparallel"


def is_private(path: Path) -> bool:
    """Whether `path` is a file or folder, no link, of this user, which group and others cannot write to."""
    try:
        found = path.lstat()
    except OSError:
        return False
    is_own = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    is_plain = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    return is_own and is_plain and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make_private(folder: Path) -> bool:
    """Make `folder` for this user alone, where it is not there; whether it is private then, and can be written to."""
    try:
        for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)  # whatever the umask: a parent that others write to is no better
        if not folder.is_dir() or not is_private(folder) or _anyone_renames(folder.parent.stat().st_mode):
            return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _anyone_renames(mode: int) -> bool:
    """Whether everybody may put something else in the place of what lies in a folder of this mode."""
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def private_folders() -> Iterator[Path]:
    """Where this user's own things may lie, best first: the user's cache folder, one under the temporary folder."""
    with suppress(RuntimeError):  # no home directory
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME
    yield Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
