"""Ctrl-C and SIGTERM ask a running search for the best so far; a second one ends the program at once.

A search is asked, not killed: what it has found by then is the result. It looks at the flag several times a second.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WORDS = b"\nmm-autoparallel: stopping with the best so far; once more ends at once\n"


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yields an event that the first signal sets. Handlers are put back at the end, and after the first signal.

    Outside the main thread, where Python allows no handlers, the event is never set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        restore()
        os.write(sys.stderr.fileno(), _WORDS)  # not print: the signal may have come in the middle of one

    for number in _SIGNALS:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()
