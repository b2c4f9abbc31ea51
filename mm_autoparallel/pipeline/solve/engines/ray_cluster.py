"""Tasks on an existing Ray cluster: one worker for each free CPU, started when needed.

Tasks and answers are the lines of JSON that local processes exchange, and a worker that is lost costs its task's time
alone: the task is given again. The cluster is looked at before any long work: whether it answers, runs this Ray and
this Python, and has this very code on every node.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.solve.engines.ray_worker import RayWorker
from mm_autoparallel.pipeline.solve.solver_code import solver_fingerprint
from mm_autoparallel.pipeline.solve.task import Answer, Task, decode_answer, encode, solve

#: How often a waiting search looks whether it should stop, and how often it exchanges news with each worker. Assumed.
POLL_S, EXCHANGE_S = 0.1, 0.5
#: How long stopped workers get for their last answer: a message there, and one back.
LAST_WORD_S = 2.0
#: How long an address gets to answer, and all nodes to say what they run. Assumed.
CONNECT_S, PROBE_S = 5.0, 60.0
#: How long CPUs may count as taken after what ran on them has ended. Assumed.
SETTLE_S = 3.0
_PREFACE, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), 4
#: A task whose worker is lost is given again this often: nodes come and go, but a task that kills them is given up.
MAX_DEATHS = 4


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process is connected to. num_workers: its free CPUs."""

    address: str
    num_workers: int

    def start(self, should_stop: Callable[[], bool]) -> RayWorkers:
        """The engine that places tasks there."""
        return RayWorkers(self.num_workers, should_stop)


def connect(address: str | None) -> RayCluster:
    """The cluster at `address`, by default at RAY_ADDRESS or on this machine.

    Raises JobError where Ray is not installed, nothing answers there, or a node runs another Ray, Python or code.
    """
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    told = f"--engine ray: the cluster at {where}" if where != "auto" else "--engine ray: a cluster on this machine"
    try:
        import ray
    except ImportError:
        raise JobError(
            '--engine ray needs Ray, which is not installed here; pip install "mm-autoparallel[ray]" installs it'
        ) from None
    if not ray.is_initialized():
        _check_port(where, told)
        try:
            with _in_root():
                ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            mismatch = "ersion" in str(error)
            what = f"cannot be joined: {' '.join(str(error).split())}" if mismatch else f"does not answer: {first}"
            hint = (
                "install the versions it runs" if mismatch else "name it by --ray-address HOST:PORT, or start one there"
            )
            raise JobError(f"{told} {what}; {hint}") from None
    _check_nodes(told)
    num_free, num_cpus = _count_cpus()
    if num_free < 1:
        raise JobError(f"{told} has no free CPU: it has {num_cpus}, and all are taken; wait for others, or add a node")
    return RayCluster(where, num_free)


@contextmanager
def _in_root() -> Iterator[None]:
    """The current folder is the root meanwhile: Ray has its workers import from the one it is started in."""
    here = os.open(".", os.O_RDONLY)
    os.chdir("/")
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def _check_port(where: str, told: str) -> None:
    """Ray itself waits for minutes where nothing listens, or something else does. Its servers speak HTTP/2, and answer
    the preface of a connection with a frame of settings (RFC 9113, section 3.4).
    """
    if where == "auto":
        return
    host, _, port = where.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise JobError(f"{told} is none that can be found: {where!r} is no HOST:PORT of a cluster that runs")
    hint = "check the address, and that `ray status` works there"
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S) as connection:
            connection.sendall(_PREFACE)
            answer = connection.recv(9, socket.MSG_WAITALL)
    except OSError as error:
        raise JobError(f"{told} does not answer: {error.strerror or error}; {hint}") from None
    if len(answer) < 9 or answer[3] != _SETTINGS:
        raise JobError(f"{told} is none: what listens there is not Ray; {hint}")


def _check_nodes(told: str) -> None:
    """Ask every node that has CPUs for its code."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def tell_code() -> str:
        # sent by value, for it must run where the package is missing
        try:
            from mm_autoparallel.pipeline.solve.solver_code import solver_fingerprint
        except ImportError as error:
            return f"missing: {error}"
        return solver_fingerprint()

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    asked = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(tell_code)
        asked.append((node["NodeManagerAddress"], remote.remote()))
    deadline = time.monotonic() + PROBE_S
    for name, answer in asked:
        try:
            found = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            raise JobError(f"{told}: node {name} does not say what it runs: {reason}") from None
        if found.startswith("missing"):
            raise JobError(
                f"{told}: node {name} cannot import mm_autoparallel ({found.removeprefix('missing: ')}); install this "
                f"version of it there, for the Python that Ray runs"
            )
        if found != solver_fingerprint():
            raise JobError(
                f"{told}: node {name} runs other code of mm_autoparallel or OR-Tools (fingerprint {found}, here "
                f"{solver_fingerprint()}), and their bounds must not be mixed; install the same version on every node"
            )


def _count_cpus() -> tuple[int, int]:
    """(free, all) of the cluster. The cluster hears late of what has ended, so fewer than all are counted again."""
    import ray

    ends_s = time.monotonic() + SETTLE_S
    while True:
        num_free, num_cpus = (
            int(found.get("CPU", 0)) for found in (ray.available_resources(), ray.cluster_resources())
        )
        if num_free >= num_cpus or time.monotonic() > ends_s:
            return num_free, num_cpus
        time.sleep(POLL_S)


@dataclass(eq=False)
class _Worker:
    """An actor, what it works on, and the calls that are under way."""

    actor: Any
    task: Task | None = None
    serial: int = 0
    answer: Any = None
    exchange: Any = None
    exchanged_s: float = 0.0


class RayWorkers:
    """`num_workers` actors of a CPU each. A task whose worker is lost is given again."""

    def __init__(self, num_workers: int, should_stop: Callable[[], bool]) -> None:
        self._num_workers, self._should_stop = num_workers, should_stop
        self._workers: list[_Worker] = []
        self._waiting: deque[Task] = deque()
        self._arrived: deque[Answer] = deque()
        self._deaths: dict[int, int] = {}
        self._cutoff_ms, self._last_s, self._stopping, self._num_given = np.inf, np.inf, False, 0
        self._looked_s = 0.0
        self._losses: list[str] = []

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self._losses:
            return ()
        return (f"{len(self._losses)} workers that place problems were lost; the last one thus: {self._losses[-1]}",)

    @property
    def free(self) -> int:
        return self._num_workers - len(self._waiting) - sum(worker.task is not None for worker in self._workers)

    def give(self, task: Task) -> None:
        """Send the task to an idle worker, or to a new one."""
        self._waiting.append(task)
        self._hand_out()

    def tell_cutoff(self, cutoff_ms: float) -> None:
        """Passed on with the next exchange."""
        self._cutoff_ms = min(self._cutoff_ms, cutoff_ms)

    def wait(self) -> Answer | None:
        """The next answer. After the word to stop: those that come within LAST_WORD_S of it, then None."""

        while self._arrived or self._waiting or any(worker.task for worker in self._workers):
            if self._arrived:
                return self._arrived.popleft()
            if self._should_stop() and self._last_s == np.inf:
                self._last_s = time.monotonic() + LAST_WORD_S
                self._waiting.clear()
                self._stopping = True
            if time.monotonic() > self._last_s:
                return None
            self._hand_out()
            if self._waiting and not self._workers:  # every node is lost: go on here
                return solve(self._waiting.popleft(), self._should_stop)
            self._look(POLL_S)
        return None

    def has_answer(self) -> bool:
        """Whether one has arrived, as far as was looked lately."""
        if not self._arrived and self._workers and time.monotonic() > self._looked_s + POLL_S:
            self._look(0.0)
        return bool(self._arrived)

    def _look(self, timeout_s: float) -> None:
        import ray

        self._exchange()
        calls = [call for worker in self._workers for call in (worker.answer, worker.exchange) if call is not None]
        for call in ray.wait(calls, num_returns=1, timeout=timeout_s)[0] if calls else ():
            self._read(call)
        self._looked_s = time.monotonic()

    def close(self) -> None:
        """End all workers at once, whatever they do. The cluster goes on."""
        import ray

        for worker in self._workers:
            ray.kill(worker.actor)
        self._workers.clear()

    def _hand_out(self) -> None:
        """Give waiting tasks to idle workers, and to new ones while there is room."""
        import ray

        while self._waiting:
            worker = next((worker for worker in self._workers if worker.task is None), None)
            if worker is None and len(self._workers) < self._num_workers:
                worker = _Worker(ray.remote(num_cpus=1, max_concurrency=2)(RayWorker).remote())
                self._workers.append(worker)
            if worker is None:
                return
            task = self._waiting.popleft()
            self._num_given += 1
            worker.task, worker.serial, worker.exchanged_s = task, self._num_given, time.monotonic()
            line = encode(replace(task, cutoff_ms=min(task.cutoff_ms, self._cutoff_ms)))
            worker.answer = worker.actor.solve.remote(worker.serial, line)

    def _exchange(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.task and worker.exchange is None and (self._stopping or now > worker.exchanged_s + EXCHANGE_S):
                worker.exchanged_s = now
                worker.exchange = worker.actor.exchange.remote(worker.serial, self._cutoff_ms, self._stopping)

    def _read(self, call: Any) -> None:
        """Take an answer, news, or a worker's end."""
        import ray

        worker = next(worker for worker in self._workers if call in (worker.answer, worker.exchange))
        try:
            line = ray.get(call)
        except ray.exceptions.RayError as error:
            self._mourn(worker, str(error).strip().splitlines()[0])
            return
        if call == worker.exchange:
            worker.exchange = None
        else:
            worker.answer, worker.task = None, None
        if line is not None:
            self._arrived.append(decode_answer(line))

    def _mourn(self, worker: _Worker, how: str) -> None:
        import ray

        self._losses.append(how)
        self._workers.remove(worker)
        ray.kill(worker.actor)
        self._num_workers = min(self._num_workers, int(ray.cluster_resources().get("CPU", 0)))
        task = worker.task
        if task is None:
            return
        self._deaths[task.number] = self._deaths.get(task.number, 0) + 1
        if self._deaths[task.number] < MAX_DEATHS:
            self._waiting.append(task)
            return
        reason = f"{MAX_DEATHS} workers that placed it were lost, the last one thus: {how}"
        self._arrived.append(Answer(task.number, None, np.inf, 0.0, 0.0, reason=reason))
