"""What runs on a Ray cluster: places problems in one thread, and hears and tells news in another."""

from __future__ import annotations

from collections import defaultdict

from mm_autoparallel.pipeline.solve.known_paths import KnownPaths
from mm_autoparallel.pipeline.solve.task import Answer, decode_task, encode, solve


class RayWorker:
    """An actor of two threads. `serial` names a piece of work, so that news of an earlier one is not mistaken."""

    def __init__(self) -> None:
        self._cutoff_ms: defaultdict[int, float] = defaultdict(lambda: float("inf"))
        self._stopped: set[int] = set()
        self._better: dict[int, bytes] = {}
        self._known_paths = KnownPaths()

    def solve(self, serial: int, line: bytes) -> bytes:
        """The answer to the task that `line` holds."""

        def keep(answer: Answer) -> None:
            self._better[serial] = encode(answer)

        task = decode_task(line)
        news = (lambda: serial in self._stopped), keep, (lambda: self._cutoff_ms[serial])
        return encode(solve(task, *news, self._known_paths))

    def exchange(self, serial: int, cutoff_ms: float, stop: bool) -> bytes | None:
        """Hear the cutoff and whether to stop; tell the best placement on the way, once."""
        self._cutoff_ms[serial] = min(self._cutoff_ms[serial], cutoff_ms)
        if stop:
            self._stopped.add(serial)
        return self._better.pop(serial, None)
