"""Runs: a task carried out by the ranks of all nodes, each node's launcher watching its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mm_autoparallel.hooks.documents import EndStep, Outcome, TaskStep
from mm_autoparallel.hooks.rendezvous import Rendezvous, is_loopback, resolve
from mm_autoparallel.hooks.task import Task, Trained, write_task
from mm_autoparallel.integrations.auto_tuning.flags import without_flags
from mm_autoparallel.integrations.megatron_core.flags import set_flags
from mm_autoparallel.measurements.logs.log import read_log
from mm_autoparallel.measurements.logs.progress import read_peaks, read_steps
from mm_autoparallel.profilers.launch import TASK, Launch, RankFailure, find_free_port, find_logs, run_ranks
from mm_autoparallel.reports.terminal import say, writing

PROGRESS_FILE = "progress.txt"
"""Beside a task's file: rank 0 adds a line for each thing that it has measured."""

GRACE_S = 3.0
"""Assumed: how much later than the ranks that only lost a peer the one with the reason may be heard."""

KEPT_S = 86400.0
"""Assumed: how long logs of runs that ended badly are of interest."""


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that say over which network ranks of a CPU and of a GPU find each other."""

MARK = "made-by-mm-autoparallel"
"""In a run's folder, from its first moment: what bears it, and a run's name, may be removed by another run."""

_RUN = re.compile(r"[0-9]{8}-[0-9]{6}-node[0-9]+-.{8}")


@dataclass(frozen=True)
class Site:
    """Where ranks are started, and as what.

    program: argument vector of a rank. processes_per_node: ranks of each node. host, port: where they meet; port None
    for any that is free. rendezvous: of the nodes; None where there is one. root: the store, which keeps the logs too.
    """

    program: tuple[str, ...]
    processes_per_node: int
    on_cpu: bool
    root: Path
    host: str = "localhost"
    port: int | None = None
    rendezvous: Rendezvous | None = None

    @property
    def num_ranks(self) -> int:
        return self.processes_per_node * (self.rendezvous.num_nodes if self.rendezvous else 1)


class _Elsewhere(Exception):
    """Ranks of this node are to end because of what happened on another."""


@dataclass
class _Failures:
    """What went wrong with a task, by node."""

    by_node: dict[int, RankFailure] = field(default_factory=dict)

    def raise_cause(self) -> None:
        """Raise the failure that says most, if there is one; of equals that of the lowest node."""
        if self.by_node:
            raise self.by_node[max(self.by_node, key=lambda node: (self.by_node[node].weight, -node))]


def run_task(site: Site, task: Task) -> Trained:
    """On node 0: have all nodes carry out `task`; what it told where it was a training.

    Raises RankFailure with the cause where ranks failed, BackendError where a node is lost. No rank is left either way.
    """
    rendezvous, failures = site.rendezvous, _Failures()
    if rendezvous is None:
        return _run_here(site, task, site.port or 0, lambda: None)
    port = find_free_port()
    rendezvous.lead(TaskStep(task=task, port=port))
    first_s: list[float] = []
    trained = Trained()

    def look() -> None:
        rendezvous.beat()
        failures.by_node |= _failed(rendezvous.outcomes())
        if failures.by_node and not first_s:
            first_s.append(time.monotonic())
        if first_s and time.monotonic() - first_s[0] > GRACE_S:
            raise _Elsewhere

    try:
        trained = _run_here(site, task, port, look)
        while len(rendezvous.outcomes()) < rendezvous.num_nodes - 1:
            look()
            time.sleep(0.1)
    except RankFailure as failure:
        failures.by_node[0] = failure
        ends_s = time.monotonic() + GRACE_S
        while len(rendezvous.outcomes()) < rendezvous.num_nodes - 1 and time.monotonic() < ends_s:
            time.sleep(0.1)
    except _Elsewhere:
        pass_on = failures.by_node
        say(f"ranks failed on node {', '.join(map(str, sorted(pass_on)))}; those here are ended")
    failures.by_node |= _failed(rendezvous.outcomes())
    failures.raise_cause()
    return _join([trained, *(outcome.trained for outcome in rendezvous.outcomes().values())])


def serve_tasks(site: Site) -> tuple[int, str]:
    """On other nodes: carry out what node 0 says until it says the end; its exit code and message.

    Raises BackendError where node 0 is lost.
    """
    rendezvous = site.rendezvous
    assert rendezvous is not None

    def look() -> None:
        if rendezvous.is_over():
            raise _Elsewhere

    while True:
        step = rendezvous.follow()
        if isinstance(step, EndStep):
            rendezvous.leave()
            return step.code, step.message
        try:
            rendezvous.say_done(Outcome(trained=_run_here(site, step.task, step.port, look)))
        except RankFailure as failure:
            rendezvous.say_done(Outcome(failure=str(failure), told=failure.told, killed=failure.killed))
        except _Elsewhere:
            say("node 0 has ended this run; the ranks here are ended")


def _failed(outcomes: Mapping[int, Outcome]) -> dict[int, RankFailure]:
    return {
        node: RankFailure(f"on node {node}: {outcome.failure}", outcome.told, outcome.killed)
        for node, outcome in outcomes.items()
        if outcome.failure is not None
    }


def _run_here(site: Site, task: Task, port: int, on_poll: Callable[[], None]) -> Trained:
    """The ranks of this node. Their logs stay where one failed, and go otherwise."""
    rendezvous = site.rendezvous
    folder = _make_folder(site.root / "logs", rendezvous.node_rank if rendezvous else 0)
    with writing(folder):
        path = write_task(folder, task)
    launch = Launch(
        program=site.program if task.training is None else _training(site, task.training),
        num_processes=site.processes_per_node,
        folder=folder,
        master=(resolve(site.host), port),
        num_nodes=rendezvous.num_nodes if rendezvous else 1,
        node_rank=rendezvous.node_rank if rendezvous else 0,
        environment=_environment(site) | ({TASK: str(path)} if task.training is None else {}),
    )
    shown = _Shown(folder / PROGRESS_FILE)

    def poll() -> None:
        shown.update()
        on_poll()

    keep = False
    try:
        run_ranks(launch, poll)
        shown.update()
        return Trained() if task.training is None else _join([*map(_read_trained, find_logs(folder))])
    except RankFailure:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _training(site: Site, flags: Mapping[str, tuple[str, ...] | None]) -> tuple[str, ...]:
    """This script as it trains under `flags`."""
    interpreter, *words = site.program
    return (interpreter, *set_flags(without_flags(tuple(words)), flags))


def _read_trained(path: Path) -> Trained:
    """What the log of one rank tells as Megatron-LM prints it."""
    log = read_log(path)
    peaks, _ = read_peaks(log)
    steps_ms = tuple(step.step_ms for step in read_steps(log))
    return Trained(steps_ms=steps_ms, peak_bytes=round(max(peaks.values(), default=0)))


def _join(told: Sequence[Trained]) -> Trained:
    """Of ranks of one training: the first that told steps, and the highest peak of all."""
    steps_ms = next((one.steps_ms for one in told if one.steps_ms), ())
    return Trained(steps_ms=steps_ms, peak_bytes=max((one.peak_bytes for one in told), default=0))


def _environment(site: Site) -> dict[str, str]:
    """One thread a process where a device is a core; ranks of one machine speak over loopback, whatever its name."""
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if site.on_cpu else {}
    if (site.rendezvous is None or is_loopback(site.host)) and Path("/sys/class/net/lo").exists():
        environment |= {name: "lo" for name in INTERFACES if name not in os.environ}
    return environment


def _make_folder(logs: Path, node_rank: int) -> Path:
    """A new folder for one run. Those of runs that ended badly are removed a day after their last word."""
    with writing(logs):
        logs.mkdir(parents=True, exist_ok=True)
        for old in logs.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another run has just ended, and its folder with it
                if _is_run(old) and time.time() - _last_word_s(old) > KEPT_S:
                    shutil.rmtree(old, ignore_errors=True)
        prefix = f"{time.strftime('%Y%m%d-%H%M%S')}-node{node_rank}-"
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=logs.resolve()))
        (folder / MARK).touch()
        return folder


def _is_run(folder: Path) -> bool:
    """Whether a run made `folder`: PROFILES/logs may hold other people's too, and links to them."""
    mark = folder / MARK
    is_own = _RUN.fullmatch(folder.name) and not folder.is_symlink() and not mark.is_symlink()
    return bool(is_own) and mark.is_file()


def _last_word_s(folder: Path) -> float:
    """When something in `folder`, or itself, was last written."""
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))


class _Shown:
    """The lines of a progress file, each told once."""

    def __init__(self, path: Path) -> None:
        self._path, self._told = path, 0

    def update(self) -> None:
        """Tell what is new; of a line that is still being written nothing."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        for line in lines[self._told :]:
            if not line.endswith("\n"):
                break
            self._told += 1
            say(line.rstrip("\n"))
