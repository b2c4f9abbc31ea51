"""Compilation of the numeric kernels: where the machine code is cached, and a word on screen when there is none yet.

The cache lies in the user's cache folder, so a read-only package is no matter; where that cannot be written either, a
temporary folder of this user serves until the machine restarts. What others can write to is left alone: numba unpickles
what it finds.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from mm_autoparallel.files import hash_sources
from mm_autoparallel.private import NAME, make_private, private_folders
from mm_autoparallel.streams import say

F = TypeVar("F", bound=Callable[..., Any])

#: Where kernels are, and what they call.
SOURCES = ("pipeline/schedules", "pipeline/simulate", "pipeline/placement")

# A folder for each installation and version of its kernels: numba compiles anew for every path, but goes on with the
# code of a kernel that calls another file's, where only that one was changed.
_told = f"{Path(__file__).resolve()}, {hash_sources(SOURCES)}"
_installation = hashlib.sha256(_told.encode()).hexdigest()[:12]


def open_cache() -> Path:
    """This installation's folder in the first of $NUMBA_CACHE_DIR, the user's cache folder and the user's folder under
    the temporary one that is private to this user; numba runs the code that it finds there. Where none is, in a fresh
    one that this process removes when it ends. That another one than the variable's serves, or a fresh one, is said.
    """
    named = os.environ.get("NUMBA_CACHE_DIR")
    candidates = [*([Path(named)] if named else []), *private_folders()]
    for number, folder in enumerate(candidates):
        # Processes that this one starts inherit the variable, and with it the folder itself.
        own = folder if folder.name == _installation else folder / _installation
        if make_private(folder) and make_private(own):
            if named and number:
                _tell_refused(candidates[:1], f"lie in {json.dumps(str(own))}")
            return own
    fresh = Path(tempfile.mkdtemp(prefix=f"{NAME}-"))
    atexit.register(_remove, fresh, os.getpid())
    _tell_refused(candidates, "are compiled for this run alone")
    (fresh / _installation).mkdir(mode=0o700)
    return fresh / _installation


def _tell_refused(folders: list[Path], instead: str) -> None:
    listed = " and ".join(json.dumps(str(folder)) for folder in folders)
    say(
        f"its kernels {instead}: what {listed} holds could be run only if it were a folder of this "
        "user, to be written by nobody else; remove it, or name another in NUMBA_CACHE_DIR"
    )


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:  # no fork of it
        shutil.rmtree(folder, ignore_errors=True)


_folder = open_cache()
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
