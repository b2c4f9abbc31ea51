"""A process that places problems: reads one task a line from standard input, writes answers a line each to its output.

While it works, it is told lower cutoffs, and the word to stop or the end of its input (the parent is gone) stops it
with the best so far. It is started by itself, never through the parent's main script, so a script without a guard is
safe.
"""

from __future__ import annotations

import os
import select
import signal
from collections import deque

STOP = b"stop\n"
_CUTOFF = b"cutoff "


def cutoff_line(cutoff_ms: float) -> bytes:
    """What tells a worker of a lower cutoff."""
    return _CUTOFF + repr(float(cutoff_ms)).encode() + b"\n"


class _Parent:
    """What the parent has written so far. `tasks` are lines that wait; `stop` and `cutoff_ms` were said since the last
    of them came, so they are meant for it: the parent sends none while one runs.
    """

    def __init__(self) -> None:
        self.tasks: deque[bytes] = deque()
        self.stop, self.gone, self.cutoff_ms = False, False, float("inf")
        self._pending = b""

    def listen(self) -> None:
        """Read what there is, or wait for some where there is nothing."""
        chunk = os.read(0, 1 << 20)
        self.gone = not chunk
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            if line + b"\n" == STOP:
                self.stop = True
            elif line.startswith(_CUTOFF):
                self.cutoff_ms = min(self.cutoff_ms, float(line[len(_CUTOFF) :]))
            else:
                self.tasks.append(line)
                self.stop, self.cutoff_ms = False, float("inf")

    def next_task(self) -> bytes | None:
        """The next task, waited for; None once the parent is gone."""
        while not self.tasks and not self.gone:
            self.listen()
        return self.tasks.popleft() if self.tasks else None

    def should_stop(self) -> bool:
        """Whether the running task should end; hears what was said meanwhile."""
        while not self.gone and select.select([0], [], [], 0.0)[0]:
            self.listen()
        return self.stop or self.gone


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever else prints must not mix with the answers

    from mm_autoparallel.pipeline.solve.known_paths import KnownPaths
    from mm_autoparallel.pipeline.solve.task import Answer, decode_task, encode, solve

    parent, known_paths = _Parent(), KnownPaths()

    def write(answer: Answer) -> None:
        view = memoryview(encode(answer))
        try:
            while view:
                view = view[os.write(answers, view) :]
        except BrokenPipeError:  # the parent left without a word
            parent.gone = True

    while (line := parent.next_task()) is not None:
        write(solve(decode_task(line), parent.should_stop, write, lambda: parent.cutoff_ms, known_paths))
