"""Compilation of the numeric kernels: where the machine code is cached, and a word on screen when there is none yet.

The cache lies in the user's cache folder, so a read-only package is no matter; where that cannot be written either, a
temporary folder of this user serves until the machine restarts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from mm_autoparallel.files import hash_sources
from mm_autoparallel.streams import say

F = TypeVar("F", bound=Callable[..., Any])


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def cache_folder() -> Path:
    """The first writable of $NUMBA_CACHE_DIR, the user's cache folder, this user's folder under the temporary one."""
    candidates = [Path(tempfile.gettempdir()) / f"mm-autoparallel-{os.getuid() if hasattr(os, 'getuid') else 'user'}"]
    with suppress(RuntimeError):  # no home directory
        candidates.insert(0, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mm-autoparallel")
    if os.environ.get("NUMBA_CACHE_DIR"):
        candidates.insert(0, Path(os.environ["NUMBA_CACHE_DIR"]))
    return next((folder for folder in candidates if _writable(folder)), candidates[-1])


#: Where kernels are, and what they call.
SOURCES = ("schedules", "simulate", "placement", "search/bounds")

# A folder for each installation and version of its kernels: numba compiles anew for every path, but goes on with the
# code of a kernel that calls another file's, where only that one was changed. Processes that this one starts inherit
# the variable, and with it the folder itself.
_told = f"{Path(__file__).resolve()}, {hash_sources(SOURCES)}"
_installation = hashlib.sha256(_told.encode()).hexdigest()[:12]
_folder = cache_folder()
if _folder.name != _installation:
    _folder = _folder / _installation
_folder.mkdir(parents=True, exist_ok=True)
os.environ["NUMBA_CACHE_DIR"] = str(_folder)

import numba  # noqa: E402  (reads NUMBA_CACHE_DIR when imported)

numba.config.CACHE_DIR = str(_folder)  # type: ignore[attr-defined]


def kernel(function: F) -> F:
    """Compile `function` on its first call and cache the machine code."""
    compiled: F = numba.njit(cache=True, nogil=True, error_model="numpy")(function)  # type: ignore[assignment]
    return compiled


def announce_compilation(kernel: str) -> bool:
    """Say on standard error that kernels, `kernel` (module.function) among them, are compiled first; whether that is
    so."""
    first = not any(_folder.rglob(f"{kernel}-*.nbi"))
    if first:
        say("compiling its kernels, once on this machine: up to a minute")
    return first


@contextmanager
def first_compilation(kernel: str) -> Iterator[bool]:
    """`announce_compilation` by one process at a time: those that come while another compiles wait for it."""
    with (_folder / "turn").open("a") as turn:
        with suppress(OSError):  # a file system without locks: every process compiles for itself
            fcntl.flock(turn, fcntl.LOCK_EX)
        yield announce_compilation(kernel)
