"""Compilation of the numeric kernels: where the machine code is cached, and a word on screen when there is none yet.

The cache lies in the user's cache folder, so a read-only package is no matter; where that cannot be written either, a
temporary folder of this user serves until the machine restarts. What others can write to is left alone: numba unpickles
what it finds. The settings of the process are left alone too: only these kernels are cached there.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import inspect
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numba
from llvmlite.binding import get_host_cpu_name
from numba.core.caching import CompileResultCacheImpl, FunctionCache

from mm_autoparallel.child_process import hand_on
from mm_autoparallel.files import hash_sources
from mm_autoparallel.private import NAME, make_private, private_folders
from mm_autoparallel.streams import say

F = TypeVar("F", bound=Callable[..., Any])

#: Where kernels are, and what they call.
SOURCES = ("pipeline/schedules", "pipeline/simulate", "pipeline/placement", "pipeline/balance")

# A folder for each installation, version of its kernels and kind of machine: numba compiles anew for every path, but
# goes on with the code of a kernel that calls another file's, where only that one was changed.
_machine = f"{sys.implementation.cache_tag}, numba {numba.__version__}, {get_host_cpu_name()}"
_told = f"{Path(__file__).resolve()}, {hash_sources(SOURCES)}, {_machine}"
_installation = hashlib.sha256(_told.encode()).hexdigest()[:12]


def open_cache() -> Path:
    """This installation's folder in the first of $NUMBA_CACHE_DIR, the user's cache folder and the user's folder under
    the temporary one that is private to this user; numba runs the code that it finds there. Where none is, in a fresh
    one that this process removes when it ends. That another one than the variable's serves, or a fresh one, is said.
    """
    named = os.environ.get("NUMBA_CACHE_DIR")
    candidates = [*([Path(named)] if named else []), *private_folders()]
    for number, folder in enumerate(candidates):
        # Processes that this one starts may be handed the folder itself.
        own = folder if folder.name == _installation else folder / _installation
        if make_private(folder) and make_private(own):
            if named and number:
                _tell_refused(candidates[:1], f"lie in {json.dumps(str(own))}")
            return own
    fresh = Path(tempfile.mkdtemp(prefix=f"{NAME}-"))
    atexit.register(_remove, fresh, os.getpid())
    _tell_refused(candidates, "are compiled for this run alone")
    own = fresh / _installation
    own.mkdir(mode=0o700)
    hand_on("NUMBA_CACHE_DIR", str(own))
    return own


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


class _Locator:
    """Where the machine code of one function lies: what numba asks of its own locators."""

    def __init__(self, file: str, line: int) -> None:
        self._py_file, self._line = file, line  # numba names the file where it warns

    def get_cache_path(self) -> str:
        """A folder for each of the package's."""
        folder = Path(self._py_file).resolve().parent
        return str(_folder / f"{folder.name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}")

    def ensure_cache_path(self) -> None:
        """Make the folder, for this user alone. Raises OSError."""
        Path(self.get_cache_path()).mkdir(mode=0o700, exist_ok=True)

    def get_source_stamp(self) -> tuple[int, int]:
        """Changes with the file."""
        found = Path(self._py_file).stat()
        return found.st_mtime_ns, found.st_size

    def get_disambiguator(self) -> str:
        """Of functions of one name in one file."""
        return str(self._line)


class _OwnPlace(CompileResultCacheImpl):
    """numba's way to keep compiled functions, in this package's folder in place of the one that the process has set."""

    def __init__(self, function: Callable[..., Any]) -> None:
        file, self._lineno = inspect.getfile(function), function.__code__.co_firstlineno
        self._locator = _Locator(file, self._lineno)
        name = f"{Path(file).stem}.{function.__qualname__}"
        abi = getattr(sys, "abiflags", "")
        self._filename_base = self.get_filename_base(name, abi)  # type: ignore[no-untyped-call]


class _OwnCache(FunctionCache):
    _impl_class = _OwnPlace

    def save_overload(self, sig: Any, data: Any) -> None:
        """As numba's, by one process at a time: two that number a kernel's variants at once give both one file."""
        with one_at_a_time("save"):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


def kernel(function: F) -> F:
    """Compile `function` on its first call and cache the machine code."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    if compiled is not function:  # as it is where NUMBA_DISABLE_JIT says so
        compiled._cache = _OwnCache(function)  # type: ignore[no-untyped-call]  # as its enable_caching does
    kernel_like: F = compiled
    return kernel_like


def kernel_folder() -> Path:
    """Where this installation's machine code lies."""
    return _folder


def announce_compilation(kernel: str) -> bool:
    """Say on standard error that kernels, `kernel` (module.function) among them, are compiled first; whether that is
    so."""
    first = not any(_folder.rglob(f"{kernel}-*.nbi"))
    if first:
        say_compiling()
    return first


def say_compiling() -> None:
    """Say on standard error why nothing else happens."""
    say("compiling its kernels, once on this machine: up to a minute")


@contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Processes that come while another does `what` wait for it."""
    with (_folder / f"{what}.turn").open("a") as turn:
        with suppress(OSError):  # a file system without locks: every process for itself
            fcntl.flock(turn, fcntl.LOCK_EX)
        yield
