"""Tasks in several processes of this machine."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from mm_autoparallel.child_process import python_command
from mm_autoparallel.pipeline.solve.engines.worker import STOP, cutoff_line
from mm_autoparallel.pipeline.solve.task import Answer, Task, decode_answer, encode

#: How often a waiting parent looks whether it should stop, and how long stopped workers get for their last answer.
POLL_S, LAST_WORD_S = 0.1, 0.6
#: A task whose process dies is given to another one once: memory may have been short for a moment.
MAX_DEATHS = 2
#: What is kept of a process's standard error: a message repeats its last words if it dies.
LAST_BYTES = 4096


@dataclass(eq=False)
class _Worker:
    """A process, the task it works on, what it has written of its answer, and the end of its standard error."""

    process: subprocess.Popen[bytes]
    task: Task | None = None
    written: bytearray = field(default_factory=bytearray)
    said: bytes = b""

    def listen(self) -> None:
        """Take what there is of its standard error."""
        assert self.process.stderr is not None
        self.said = (self.said + (self.process.stderr.read(1 << 20) or b""))[-LAST_BYTES:]

    @property
    def last_line(self) -> str:
        lines = self.said.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class LocalProcesses:
    """`num_workers` processes of this machine, started when needed. A task whose process dies is tried again once."""

    def __init__(self, num_workers: int, should_stop: Callable[[], bool]) -> None:
        self._num_workers, self._should_stop = num_workers, should_stop
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._again: deque[Task] = deque()
        self._deaths: dict[int, int] = {}
        self._arrived: deque[Answer] = deque()
        self._cutoff_ms, self._last_s = np.inf, np.inf
        self._num_started, self._ends = 0, list[str]()

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self._ends:
            return ()
        number = "all" if len(self._ends) == self._num_started else f"{len(self._ends)} of"
        return (f"{number} {self._num_started} processes that place problems died; the last one {self._ends[-1]}",)

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
        self._send(worker, encode(replace(task, cutoff_ms=min(task.cutoff_ms, self._cutoff_ms))))

    def tell_cutoff(self, cutoff_ms: float) -> None:
        """Pass it on where it is news."""
        if cutoff_ms >= self._cutoff_ms:
            return
        self._cutoff_ms = cutoff_ms
        for worker in self._workers:
            if worker.task:
                self._send(worker, cutoff_line(cutoff_ms))

    def wait(self) -> Answer | None:
        """The next answer. After the word to stop: those that come within LAST_WORD_S of it, then None."""
        while self._arrived or any(worker.task for worker in self._workers) or self._again:
            if self._arrived:
                return self._arrived.popleft()
            if self._should_stop() and self._last_s == np.inf:
                self._last_s = time.monotonic() + LAST_WORD_S
                self._again.clear()
                for worker in self._workers:
                    if worker.task:
                        self._send(worker, STOP)
            if time.monotonic() > self._last_s:
                return None
            while self._again and self._last_s == np.inf:
                self.give(self._again.popleft())
            self._look(POLL_S)
        return None

    def has_answer(self) -> bool:
        """Whether one has arrived."""
        self._look(0.0)
        return bool(self._arrived)

    def _look(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout=timeout_s):
            worker, take = key.data
            take(worker)

    def close(self) -> None:
        """End all workers at once, whatever they do."""
        for worker in list(self._workers):
            worker.process.kill()
            self._bury(worker)
        self._selector.close()

    def _start(self) -> _Worker:
        process = subprocess.Popen(
            python_command("mm_autoparallel.pipeline.solve.engines.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        worker = _Worker(process)
        self._num_started += 1
        self._workers.append(worker)
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, (worker, self._read))
        self._selector.register(process.stderr, selectors.EVENT_READ, (worker, self._listen))
        return worker

    def _send(self, worker: _Worker, line: bytes) -> None:
        assert worker.process.stdin is not None
        try:
            view = memoryview(line)
            while view:
                view = view[worker.process.stdin.write(view) or 0 :]
        except BrokenPipeError:
            worker.written.clear()  # it is dead, and the end of its output will say so

    def _listen(self, worker: _Worker) -> None:
        if worker in self._workers:  # it may have been buried since this was seen
            worker.listen()

    def _read(self, worker: _Worker) -> None:
        """Take what arrived from a worker: parts of answers, answers, or its end."""
        assert worker.process.stdout is not None
        chunk = os.read(worker.process.stdout.fileno(), 1 << 20)
        if not chunk:
            self._mourn(worker)
        worker.written += chunk
        *lines, rest = worker.written.split(b"\n")
        worker.written = rest
        for line in lines:
            answer = decode_answer(bytes(line))
            self._arrived.append(answer)
            if answer.is_last:
                worker.task = None

    def _mourn(self, worker: _Worker) -> None:
        worker.process.wait()
        worker.listen()
        self._bury(worker)
        code = worker.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._ends.append(f"{how}, and its last words were: {worker.last_line}")
        task = worker.task
        if task is None:
            return
        self._deaths[task.number] = self._deaths.get(task.number, 0) + 1
        if self._deaths[task.number] < MAX_DEATHS:
            self._again.append(task)
            return
        reason = f"the process that placed it {how}, and the one before ended likewise"
        self._arrived.append(Answer(task.number, None, np.inf, 0.0, 0.0, reason=reason))

    def _bury(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        assert worker.process.stderr is not None
        assert worker.process.stdin is not None
        for stream in (worker.process.stdout, worker.process.stderr):
            self._selector.unregister(stream)
            stream.close()
        worker.process.stdin.close()
        worker.process.wait()
        self._workers.remove(worker)


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
