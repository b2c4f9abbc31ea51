"""Calls of tools: each in a thread, told how far it is, stopped when it is asked to, remembered for a while.

Searches take turns, and so do quick tools, so that a quick one is answered while a search runs. A call that the client
cancels is stopped as one that `stop` names: its search ends with the best so far, which is written where it was to be.
The protocol has no answer to a cancelled call; `status` then tells what was found.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.to_thread

from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.mcp.answers import Answer, CallAnswer, StatusAnswer
from mm_autoparallel.mcp.folder import Folder
from mm_autoparallel.streams import LOGGER, say
from mm_autoparallel.units import format_ms

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from mm_autoparallel.planner.search.candidate import Progress

    Told = Callable[[float, str], Awaitable[None]]

State = Literal["waits", "runs", "answered", "refused", "cancelled"]

PROGRESS_S = 0.5
"""How often progress is passed on. Assumed: as often as somebody reads it."""
MAX_ENDED = 10
"""Ended calls that are remembered. Assumed."""
MAX_WORDS = 300
"""Characters of how a call ended. Assumed."""
MAX_WAITING = 20
"""Calls that run or wait at once. Assumed."""


@dataclass(eq=False)
class Call:
    """One call of a tool. words: how far it is, or how it ended. remarks: what was said on the way, in its thread."""

    number: int
    tool: str
    folder: Folder
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    state: State = "waits"
    words: str = ""
    is_cancelled: bool = False
    remarks: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def elapsed_s(self) -> float:
        """Since it came, to now or to its end."""
        return (self.ended_s or time.monotonic()) - self.began_s

    def should_stop(self) -> bool:
        """Whether the search should end with the best so far."""
        return self.stop.is_set()

    def tell(self, progress: Progress) -> None:
        """How far a search is."""
        from mm_autoparallel.planner.search.candidate import progress_line

        self.words = progress_line(progress)

    def tell_step(self, step_ms: float) -> None:
        """The best step so far."""
        self.words = f"best so far {format_ms(step_ms)}"

    def end(self, state: State, words: str) -> None:
        """It is over."""
        self.state, self.words, self.ended_s = state, words, time.monotonic()

    def answer(self) -> CallAnswer:
        """What `status` tells of it."""
        return CallAnswer(
            number=self.number, tool=self.tool, elapsed_s=round(self.elapsed_s, 1), state=self.state, words=self.words
        )


class Bug(Exception):
    """What no input may cause, in words for the client."""


class Calls:
    """All calls of one server: those that run, and the last that have ended."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.running: dict[int, Call] = {}
        self.ended: deque[Call] = deque(maxlen=MAX_ENDED)
        self._number = 0
        self._turns = {"search": anyio.Lock(), "quick": anyio.Lock()}

    async def run(
        self, tool: str, turn: Literal["search", "quick"], work: Callable[[Call], Answer], tell: Told
    ) -> Answer:
        """What `work` answers, in its turn and a thread. tell: gets the seconds since, and how far it is, now and then.

        Raises PlannerError for the caller to answer with, Bug where anything else was raised.
        """
        if len(self.running) >= MAX_WAITING:
            raise JobError(f"{MAX_WAITING} calls run or wait already; wait for one, or end them by `stop`")
        self._number += 1
        call = Call(self._number, tool, self.folder)
        self.running[call.number] = call
        try:
            async with self._turns[turn]:
                call.state = "runs"
                async with anyio.create_task_group() as group:
                    group.start_soon(_stop_when_cancelled, call)
                    group.start_soon(_pass_on, call, tell)
                    # to its end even where it is cancelled: it is asked to stop, and what it found is not lost
                    outcome = await anyio.to_thread.run_sync(_attempt, call, work)
                    group.cancel_scope.cancel()
        finally:
            if call.ended_s is None:
                call.end("cancelled", "before its turn came")
            del self.running[call.number]
            self.ended.appendleft(call)
        if isinstance(outcome, Answer):
            return outcome
        raise outcome

    def stop(self, number: int | None = None) -> None:
        """End the searches of the calls that run, or of one, with the best so far."""
        for call in self.running.values():
            if number in (None, call.number):
                call.stop.set()

    def status(self) -> StatusAnswer:
        """Those that run, and the last that have ended."""
        calls = (*self.running.values(), *self.ended)
        return StatusAnswer(folder=str(self.folder.root), calls=tuple(call.answer() for call in calls))


def _attempt(call: Call, work: Callable[[Call], Answer]) -> Answer | PlannerError | Bug:
    """What `work` answers, or what stands against it: a value, since nobody may be left to raise it to."""
    with _collected(call):
        try:
            answer = work(call)
            first, *rest = answer.text().splitlines()
        except PlannerError as error:
            call.end("refused", str(error)[:MAX_WORDS])
            return error
        except Exception as failure:  # noqa: BLE001 - a bug shall not end the server
            words = " ".join(str(failure).split())[:MAX_WORDS]
            say(f"{call.tool} failed\n{traceback.format_exc()}")
            call.end("refused", f"a bug: {type(failure).__name__}")
            return Bug(
                f"{call.tool} failed by a bug of mm-autoparallel ({type(failure).__name__}: {words}); the traceback is "
                "on the server's standard error. Please report it with the input"
            )
    words = "; ".join([first, *rest[:1], *rest[1:][-1:]])
    call.end("cancelled" if call.is_cancelled else "answered", words[:MAX_WORDS])
    return answer


async def _stop_when_cancelled(call: Call) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        if call.ended_s is None:
            call.is_cancelled = True
            call.stop.set()


async def _pass_on(call: Call, tell: Told) -> None:
    """Tell how far `call` is where that is news."""
    told = ""
    while True:
        await anyio.sleep(PROGRESS_S)
        words = call.words or "works on it"
        if words != told:
            told = words
            await tell(call.elapsed_s, words)


class _Collector(logging.Handler):
    """Gives what is logged in the thread of a call to that call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call, self._thread = call, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self._call.words = record.getMessage()
            self._call.remarks.append(record.getMessage())


@contextmanager
def _collected(call: Call) -> Iterator[None]:
    """What is logged meanwhile in this thread goes to the remarks of `call` too."""
    collector = _Collector(call)
    LOGGER.addHandler(collector)
    try:
        yield
    finally:
        LOGGER.removeHandler(collector)


def remarks_of(call: Call) -> tuple[str, ...]:
    """What was said on the way, once each."""
    return tuple(dict.fromkeys(call.remarks))
