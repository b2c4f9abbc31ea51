"""Compilation of the numeric kernels: where the machine code is cached, and a word on screen when there is none yet.

numba caches beside the source file, in the user's cache where that folder is read-only, and nowhere if neither can be
written; then a temporary folder of this user serves until the machine restarts.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def cache_folder() -> Path:
    """The first writable of $NUMBA_CACHE_DIR, the user's cache folder, a folder of this user under the temporary one."""
    candidates = [Path(tempfile.gettempdir()) / f"mm-autoparallel-{os.getuid() if hasattr(os, 'getuid') else 'user'}"]
    try:
        candidates.insert(0, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mm-autoparallel")
    except RuntimeError:  # no home directory
        pass
    if os.environ.get("NUMBA_CACHE_DIR"):
        candidates.insert(0, Path(os.environ["NUMBA_CACHE_DIR"]))
    return next((folder for folder in candidates if _writable(folder)), candidates[-1])


_folder = cache_folder()
os.environ["NUMBA_CACHE_DIR"] = str(_folder)

import numba  # noqa: E402  (reads NUMBA_CACHE_DIR when imported)

numba.config.CACHE_DIR = str(_folder)


def kernel(function: F) -> F:
    """Compile `function` on its first call and cache the machine code."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


def announce_compilation() -> None:
    """Say on standard error, once, that the first run on a machine compiles."""
    if not any(_folder.rglob("*.nbi")):
        print("mm-autoparallel: compiling its kernels; once on each machine, some ten seconds", file=sys.stderr, flush=True)
