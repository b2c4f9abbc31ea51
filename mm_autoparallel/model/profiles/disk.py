"""Files of the store on disk: whole or not at all, nothing left behind, and plain words where a disk says no."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import is_folder, is_temporary, is_there, read_document, write_text_atomically

T = TypeVar("T")

STRAY_S = 3600.0
"""A temporary file this old belongs to a run that was killed: a write takes seconds. Assumed."""

MOST_KEPT = 512
"""Files of which `read_once` keeps what it read."""
_kept: dict[tuple[int, int, Callable[[Path], Any]], tuple[tuple[int, int, int], Any]] = {}


def read_once(path: Path, read: Callable[[Path], T]) -> T:
    """What `read` makes of the file at `path`, made again where the file has changed since; who gets it leaves it as it
    is. A search asks for the same costs dozens of times. Raises what `read` does.
    """
    try:
        found = path.stat()
    except OSError:
        return read(path)  # which says what is wrong
    key, stamp = (found.st_dev, found.st_ino, read), (found.st_mtime_ns, found.st_ctime_ns, found.st_size)
    if _kept.get(key, (None,))[0] != stamp:
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[key] = stamp, read(path)
    made: T = _kept[key][1]
    return made


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a file of profiles, traces or the network. Raises ProfileError where there is none."""
    return read_document(path, "profile file", ProfileError)


def write_measurements(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a file of the store, whole or not at all. Raises ProfileError where that is not possible, and why."""
    write_file(path, json.dumps(document, indent=1))


def write_file(path: Path, text: str) -> None:
    """Writes lines of `text` to a file of the store, as write_measurements does."""
    try:
        write_text_atomically(path, text + "\n")
    except OSError as failure:
        raise _unwritable(f"profile file {path}", failure.strerror or str(failure)) from None


def check_writable(folder: Path) -> None:
    """Raises ProfileError where `folder` cannot be made or written, so that nothing is measured in vain."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if is_there(place))
    if not is_folder(nearest):
        raise _unwritable(f"profile folder {folder}", f"{nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _unwritable(f"profile folder {folder}", f"no permission in {nearest}")


def _unwritable(what: str, reason: str) -> ProfileError:
    return ProfileError(
        f"{what} cannot be written ({reason}); make room or give write permission there, or name another folder for "
        "profiles. What was measured before is kept, and the same command continues after it"
    )


def clear_strays(folder: Path) -> None:
    """Removes temporary files that killed runs of this program left in `folder`; fresh ones, and what has other names,
    are left alone.
    """
    for stray in folder.glob(".*.tmp"):
        if is_temporary(stray):
            _clear_stray(stray)


def _clear_stray(stray: Path) -> None:
    try:
        found = stray.lstat()
        if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > STRAY_S:
            stray.unlink()
    except FileNotFoundError:
        return  # another run was quicker
    except OSError as failure:
        raise ProfileError(
            f"the temporary file {stray.name} of a killed run cannot be removed "
            f"({failure.strerror or failure}); remove it, or name another folder for profiles",
            where=f"profile folder {stray.parent}",
        ) from None
