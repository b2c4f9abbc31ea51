"""From one call on this process opens files of people below one folder alone: for a server whose clients name files.

A job names further files, so it is not the names in a request that are checked but every file as it is opened (files.py
opens through this file). Each folder on the way is opened by itself, below the one before, and none may be a link: what
is swapped for a link meanwhile is refused as well. So is what is hidden, where people and programs keep their secrets.
Other files are the package's own: what it ships, and folders that the caller names, such as its cache.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PACKAGE = Path(__file__).parent
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC if hasattr(os, "O_PATH") else 0
_root: list[tuple[Path, int]] = []
"""The folder and its descriptor, once there is one."""
_own: list[Path] = []


class Refused(PermissionError):
    """A file outside, or behind a link."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EACCES, reason)


def confine(folder: Path, own: Sequence[Path] = ()) -> None:
    """Open files below `folder` alone from now on, in all threads; `own` are folders of the package beside it.

    Raises OSError where `folder` is no folder, or is a link.
    """
    release()
    root = Path(os.path.abspath(folder))  # noqa: PTH100 - links stay, to be refused
    _root.append((root, os.open(root, _FOLDER)))
    _own[:] = [Path(os.path.abspath(one)) for one in own]  # noqa: PTH100


def release() -> None:
    """Open files anywhere again."""
    while _root:
        os.close(_root.pop()[1])
    _own.clear()


def open_file(path: Path, flags: int) -> int:
    """`os.open(path, flags)`. Raises OSError, Refused where the file is none that may be opened."""
    parts = _parts_below(path)
    if parts is None:
        return os.open(path, flags)
    with _opened_folder(parts[:-1], make=False) as folder:
        name = parts[-1] if parts else "."
        try:
            return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as failure:
            if failure.errno == errno.ELOOP:
                raise _is_link(name) from None
            raise


@contextmanager
def pinned(path: Path) -> Iterator[Path]:
    """A path that means `path` whatever its folders are swapped for, to write it; missing folders are made.

    Raises OSError, Refused where it may not be written.
    """
    parts = _parts_below(path)
    if parts is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        return
    if not parts:
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    with _opened_folder(parts[:-1], make=True) as folder:
        with suppress(FileNotFoundError):
            found = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                raise _is_link(parts[-1])
            if not stat.S_ISREG(found.st_mode):
                raise Refused(f"{parts[-1]} is there, and is no regular file")
        yield Path("/proc/self/fd", str(folder), parts[-1])


def is_there(path: Path) -> bool:
    """Whether something lies at `path`. Path.exists raises where no file could be called so, as by a long mistake."""
    return _find_kind(path) != 0 if _root else os.path.exists(path)  # noqa: PTH110


def is_folder(path: Path) -> bool:
    """Whether a folder lies at `path`; see is_there."""
    return stat.S_ISDIR(_find_kind(path)) if _root else os.path.isdir(path)  # noqa: PTH112


def _parts_below(path: Path) -> tuple[str, ...] | None:
    """The names that lead from the folder to `path`; None where `path` is opened as ever. Raises Refused outside.

    Of `..` its meaning in text is taken, which is that of the file system where no link is.
    """
    if not _root:
        return None
    named, root = Path(os.path.abspath(path)), _root[0][0]  # noqa: PTH100
    if any(named.is_relative_to(own) for own in _own):
        return None
    if named.is_relative_to(root):
        parts = named.relative_to(root).parts
        for part in parts:
            if part.startswith("."):
                raise Refused(f"{part} begins with a dot, and what is hidden is not opened here")
        return parts
    if named.is_relative_to(_PACKAGE):
        return None
    raise Refused(f"it lies outside {root}, and nothing else is read or written here")


@contextmanager
def _opened_folder(parts: tuple[str, ...], make: bool) -> Iterator[int]:
    folder = os.dup(_root[0][1])
    try:
        for part in parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            inner = _open_folder(part, folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _open_folder(name: str, folder: int) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except NotADirectoryError:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            raise _is_link(name) from None
        raise


def _find_kind(path: Path) -> int:
    """The mode of what lies at `path`; 0 where nothing does, or what may not be opened."""
    try:
        found = open_file(path, os.O_PATH)
    except (OSError, ValueError):
        return 0
    try:
        mode = os.fstat(found).st_mode
        return 0 if stat.S_ISLNK(mode) else mode
    finally:
        os.close(found)


def _is_link(name: str) -> Refused:
    return Refused(f"{name} is a link, and links are not followed here")
