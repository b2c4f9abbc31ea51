"""Ctrl-C and SIGTERM: they end what has no result yet, and ask a running search for the best so far.

A search is asked, not killed: what it has found by then is the result. It looks at the flag several times a second. The
next signal ends it too. What a process was started to ignore, as in the background of a shell, it goes on to ignore.

An interrupt is an exception, and machine code of libraries drops exceptions here and there (torch while it imports,
callbacks of ctypes). So one that nothing handles is raised again, until something does. Some machine code aborts the
process when one comes through (torch, wherever its operators call Python): around it an interrupt waits for a safe
point.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # as typing's, whose import would keep the first signals waiting
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

#: Signals within this time are one wish: `timeout` sends two, a hand that is in a hurry three. Assumed.
SAME_WISH_S = 0.5

#: An interrupt that is not being handled by then was dropped. Assumed.
HANDLED_WITHIN_S = 1.0

#: An interrupt that has found no safe point by then ends a process of this package's own. Assumed.
SAFE_WITHIN_S = 0.5

INTERRUPTED = 130
"""Exit code of a process that an interrupt has ended."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WORDS = b"\nmm-autoparallel: stopping with the best so far; once more ends at once\n"
_heard_s = [-SAME_WISH_S]
"""When the last wish was heard, by the clock of `time.monotonic`: of the whole process, as signals are."""
_INTERRUPTED_WORDS = b"mm-autoparallel: interrupted before there was a result\n"
_owns_process = [False]
"""Whether the whole process is this package's own, from its first line to its last."""
_open: list[object] = []
"""While an interrupt has been raised, or is to be, and has ended nothing yet: whose the alarm was before."""
_waits_depth = [0]
"""How many `interrupted_at_safe_points` the main thread is in."""


def interrupt_on_signal() -> None:
    """From now on a signal raises KeyboardInterrupt, in a process that is this package's own."""
    _owns_process[0] = True
    for number in _heeded():
        signal.signal(number, _interrupt)


def ignore_signals() -> None:
    """From now on no signal disturbs the end of the process."""
    for number in _heeded():
        signal.signal(number, signal.SIG_IGN)
    close_interrupt()


def close_interrupt() -> None:
    """The interrupt that was raised has ended what it was to end, and comes no more."""
    if _open and threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, _open.pop() or signal.SIG_DFL)  # type: ignore[arg-type]  # as signal gave it


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """A signal raises KeyboardInterrupt, SIGTERM too, so that whatever is running is ended in order.

    Raises it at the end where one was raised inside and dropped, also in the place of whatever broke because of that.
    Outside the main thread everything stays as it is.
    """
    with _handled_by(_interrupt):
        try:
            yield
        except Exception as failure:
            if _open:
                raise KeyboardInterrupt from failure
            raise
        if _open:
            raise KeyboardInterrupt


@contextmanager
def interrupted_at_safe_points() -> Iterator[None]:
    """Inside, what would raise KeyboardInterrupt anywhere raises it in `raise_interrupt`, or else at the end.

    Where neither comes within SAFE_WITHIN_S, a process of this package's own ends on the spot, with nothing cleaned up;
    so no file may be written inside. Any other process goes on until there is one, or until the next signal, which
    raises it anywhere. Outside the main thread everything stays as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _waits_depth[0] += 1
    try:
        yield
    finally:
        _waits_depth[0] -= 1
    raise_interrupt()


def interrupt_waits() -> bool:
    """Whether one has come and has ended nothing yet."""
    return bool(_open)


def raise_interrupt() -> None:
    """A safe point: raises the interrupt that waits, but not in what ends because of it."""
    if _open and threading.current_thread() is threading.main_thread() and not _is_handled():
        _raise_until_handled()


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yields an event that the first signal sets; the second raises KeyboardInterrupt.

    Outside the main thread the event is never set.
    """
    stop = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            _interrupt(number, frame)
        elif _is_new_wish():
            stop.set()
            _write(_WORDS)

    with _handled_by(ask):
        yield stop


@contextmanager
def forwarded_signals(pass_on: Callable[[int], object]) -> Iterator[None]:
    """A signal goes to `pass_on` by its number, each wish once, and disturbs nothing here."""

    def hand_over(number: int, _frame: FrameType | None) -> None:
        if _is_new_wish():
            pass_on(number)

    with _handled_by(hand_over):
        yield


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    if not _is_new_wish():
        return
    if _waits_depth[0] and not _open:
        _open.append(signal.signal(signal.SIGALRM, _look_again))
        signal.setitimer(signal.ITIMER_REAL, SAFE_WITHIN_S)
    else:
        _raise_until_handled()


def _raise_until_handled() -> None:
    if not _open:
        _open.append(signal.signal(signal.SIGALRM, _look_again))
    signal.setitimer(signal.ITIMER_REAL, HANDLED_WITHIN_S)
    raise KeyboardInterrupt


def _look_again(_number: int, _frame: FrameType | None) -> None:
    """Left alone is what ends things in order because of it, however long that takes."""
    handled = _is_handled()
    if _waits_depth[0] and not handled:
        if _owns_process[0]:
            _write(_INTERRUPTED_WORDS)
            os._exit(INTERRUPTED)
    elif not handled:
        _raise_until_handled()
    signal.setitimer(signal.ITIMER_REAL, HANDLED_WITHIN_S)


def _is_handled() -> bool:
    """Whether what runs now runs because of an interrupt."""
    handled = sys.exc_info()[1]
    while handled is not None and not isinstance(handled, KeyboardInterrupt):
        handled = handled.__context__
    return handled is not None


def _write(words: bytes) -> None:
    """To standard error, and not by print: the signal may have come in the middle of one."""
    if sys.__stderr__ is not None:  # else descriptor 2 is another file's
        with suppress(OSError):
            os.write(2, words)


def _is_new_wish() -> bool:
    now_s = time.monotonic()
    if now_s - _heard_s[0] < SAME_WISH_S:
        return False
    _heard_s[0] = now_s
    return True


def _heeded() -> list[signal.Signals]:
    """Signals that are not ignored, and whose handler Python knows and could put back; none outside the main thread,
    where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in _SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _heeded()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
        if before:
            close_interrupt()
