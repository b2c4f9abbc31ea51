"""Kernels by rooms: each is compiled before any clock runs, by processes that work at the same time, once on a machine.

numba compiles with one thread, so several processes share the work; this one then takes the code from the cache.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from mm_autoparallel.child_process import python_command
from mm_autoparallel.pipeline.simulate.compiled import kernel_folder, one_at_a_time, say_compiling
from mm_autoparallel.signals import interrupted_by_signals

Room = Callable[[], None]
"""Runs every kernel of its room: a function of a module, which another process finds by its name."""


def compile_rooms(rooms: Sequence[Room]) -> None:
    """Compile those that this machine has no code of, each in a process of its own, or wait for a process that does;
    standard error says why."""
    if all(_mark(room).exists() for room in rooms):
        return
    with interrupted_by_signals(), one_at_a_time("rooms"):
        missing = [room for room in rooms if not _mark(room).exists()]
        if missing:
            say_compiling()
        with ExitStack() as running:
            for room in missing[1:]:
                running.enter_context(_Apart(room))
            for room in missing[:1]:
                room()
        for room in missing[1:]:  # as their processes left them, or here where one could not
            room()
        for room in missing:
            _mark(room).touch()


def main(module: str, room: str) -> None:
    """Run a room: what another process does."""
    getattr(import_module(module), room)()


class _Apart(subprocess.Popen[bytes]):
    """A process that runs a room; what leaves it early ends it."""

    def __init__(self, room: Room) -> None:
        command = python_command(__name__, room.__module__, room.__qualname__)
        nowhere = subprocess.DEVNULL
        super().__init__(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)  # type: ignore[arg-type]


def _mark(room: Room) -> Path:
    return kernel_folder() / f"{room.__module__}.{room.__qualname__}.compiled"
