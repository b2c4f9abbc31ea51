"""Where tasks are solved: in this process, or in several processes of this machine.

Both have the same four verbs: `free` (how many tasks can be given), `give`, `wait` (for the next answer), `close`.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from mm_autoparallel.search.task import Answer, Task, decode_answer, encode, solve
from mm_autoparallel.search.worker import STOP

#: How often a waiting parent looks whether it should stop, and how long stopped workers get for their last answer.
POLL_S, LAST_WORD_S = 0.1, 1.0
#: A task whose process dies is given to another one once: memory may have been short for a moment.
MAX_DEATHS = 2


class Engine(Protocol):
    """What the planner asks of either."""

    @property
    def free(self) -> int:
        """How many more tasks can be given now."""

    def give(self, task: Task) -> None:
        """Take a task; only while `free`."""

    def wait(self) -> Answer | None:
        """The next answer; None where none is under way, or none came after the word to stop."""

    def close(self) -> None:
        """End all processes."""


class InProcess:
    """One task at a time, in this process."""

    def __init__(self, should_stop: Callable[[], bool], on_better: Callable[[float], None] = lambda _: None) -> None:
        self._should_stop, self._on_better = should_stop, on_better
        self._task: Task | None = None

    @property
    def free(self) -> int:
        return 0 if self._task else 1

    def give(self, task: Task) -> None:
        """Keep the task until `wait`."""
        self._task = task

    def wait(self) -> Answer | None:
        """Solve it."""
        task, self._task = self._task, None
        if task is None:
            return None
        return solve(task, self._should_stop, self._on_better)

    def close(self) -> None:
        """Nothing to end."""


@dataclass(eq=False)
class _Worker:
    """A process, the task it works on, and what it has written of its answer."""

    process: subprocess.Popen[bytes]
    task: Task | None = None
    written: bytearray = field(default_factory=bytearray)


class LocalProcesses:
    """`num_workers` processes of this machine, started when needed. A task whose process dies is tried again once."""

    def __init__(self, num_workers: int, should_stop: Callable[[], bool]) -> None:
        self._num_workers, self._should_stop = num_workers, should_stop
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._again: deque[Task] = deque()
        self._deaths: dict[int, int] = {}

    @property
    def free(self) -> int:
        return self._num_workers - len(self._again) - sum(worker.task is not None for worker in self._workers)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the workers that run."""
        return tuple(worker.process.pid for worker in self._workers)

    def give(self, task: Task) -> None:
        """Send the task to an idle worker, or to a new one."""
        worker = next((worker for worker in self._workers if worker.task is None), None) or self._start()
        worker.task = task
        self._send(worker, encode(task))

    def wait(self) -> Answer | None:
        """The next answer. After the word to stop: those that come within LAST_WORD_S, then None."""
        last_s = np.inf
        while any(worker.task for worker in self._workers) or self._again:
            if self._should_stop() and last_s == np.inf:
                last_s = time.monotonic() + LAST_WORD_S
                self._again.clear()
                for worker in self._workers:
                    if worker.task:
                        self._send(worker, STOP)
            if time.monotonic() > last_s:
                return None
            while self._again and last_s == np.inf:
                self.give(self._again.popleft())
            for key, _ in self._selector.select(timeout=POLL_S):
                answer = self._read(key.data)
                if answer is not None:
                    return answer
        return None

    def close(self) -> None:
        """End all workers at once, whatever they do."""
        for worker in list(self._workers):
            worker.process.kill()
            self._bury(worker)
        self._selector.close()

    def _start(self) -> _Worker:
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "mm_autoparallel.search.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        worker = _Worker(process)
        self._workers.append(worker)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _send(self, worker: _Worker, line: bytes) -> None:
        assert worker.process.stdin is not None
        try:
            view = memoryview(line)
            while view:
                view = view[worker.process.stdin.write(view) or 0 :]
        except BrokenPipeError:
            worker.written.clear()  # it is dead, and the end of its output will say so

    def _read(self, worker: _Worker) -> Answer | None:
        """What arrived from a worker: part of an answer, an answer, or its end."""
        assert worker.process.stdout is not None
        chunk = os.read(worker.process.stdout.fileno(), 1 << 20)
        if not chunk:
            return self._mourn(worker)
        worker.written += chunk
        if not worker.written.endswith(b"\n"):
            return None
        answer = decode_answer(bytes(worker.written))
        worker.written.clear()
        worker.task = None
        return answer

    def _mourn(self, worker: _Worker) -> Answer | None:
        self._bury(worker)
        task = worker.task
        if task is None:
            return None
        self._deaths[task.number] = self._deaths.get(task.number, 0) + 1
        if self._deaths[task.number] < MAX_DEATHS:
            self._again.append(task)
            return None
        code = worker.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason = f"the process that placed it {how}, and the one before ended likewise"
        return Answer(task.number, None, np.inf, 0.0, 0.0, reason=reason)

    def _bury(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        assert worker.process.stdin is not None
        self._selector.unregister(worker.process.stdout)
        worker.process.stdout.close()
        worker.process.stdin.close()
        worker.process.wait()
        self._workers.remove(worker)


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
