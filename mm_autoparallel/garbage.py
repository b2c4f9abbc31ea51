"""When Python looks for garbage: rarely while a search makes many small things, and never while a training step waits.

The process is its user's, so every setting is put back.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

#: Objects that come up between two looks (Python's own 700), in `collection_is_rare`: at most some ten megabytes wait.
MANY_OBJECTS = 50_000

_lock = Lock()
_held: list[tuple[int, int, int]] = []
"""What was set before the first of those who are in `collection_is_rare`, once for each of them."""


@contextmanager
def collection_waits() -> Iterator[None]:
    """Python looks for no garbage meanwhile: a step waits for a dealing, and a look through the whole process takes
    several times as long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def collection_is_rare() -> Iterator[None]:
    """Python looks for garbage once in MANY_OBJECTS new ones, or as rarely as it did: a tenth of a search is spent on
    looking otherwise. Threads may be in it at once."""
    with _lock:
        _held.append(_held[0] if _held else gc.get_threshold())
        often, *rest = _held[0]
        gc.set_threshold(max(often, MANY_OBJECTS) if often else 0, *rest)
    try:
        yield
    finally:
        with _lock:
            before = _held.pop()
            if not _held:
                gc.set_threshold(*before)
