"""Starts the ranks of one node through torchrun, watches them, and tells how they failed; none is left over.

launcher ── agent (torch.distributed.run) ── ranks. Each dies with the one before it, so even a launcher that is killed
leaves no process; one that ends otherwise kills them all and waits until they are gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.child_process import python_command
from mm_autoparallel.errors import BackendError, PlannerError
from mm_autoparallel.files import read_document, write_text_atomically

TASK = "MM_AUTOPARALLEL_TASK"
"""Environment variable: the file that tells a rank what to do; a program without it was started by a person."""

PEER_FAILED = 4
"""Exit code of a rank that ends only because another one failed."""

POLL_S = 0.1
END_S = 10.0
"""Assumed: how long killed processes may take to be gone (a large address space is taken apart page by page)."""

_OF_A_RANK = re.compile(r"(?:GROUP_|ROLE_|LOCAL_)?(?:RANK|WORLD_SIZE)|ROLE_NAME|TORCHELASTIC_\w+")
"""Environment variables that torchrun sets for each rank (its elastic/agent/server/local_elastic_agent.py); MASTER_ADDR
and MASTER_PORT, which it sets too, may be a person's."""

LAST_LINES = 12
"""Assumed: enough for the end of a traceback, few enough to be read."""


class RankFailure(BackendError):
    """Ranks of a launched run failed. `told`: a rank gave the reason itself, in a paragraph for the person."""

    def __init__(self, message: str, told: bool = False, killed: bool = False) -> None:
        super().__init__(message)
        self.told, self.killed = told, killed

    @property
    def weight(self) -> int:
        """Which of several nodes' failures is the cause: ranks that lose a peer fail as well, but can say least."""
        return 2 * self.told + self.killed


@dataclass(frozen=True)
class Launch:
    """One run of `program` (argument vector) on `num_processes` ranks of this node, one of `num_nodes`.

    master: host and port where the ranks of all nodes meet; with one node that is loopback, on any port that is free
    where port is 0. folder: of this run's logs and records; the file that TASK names and what the program reports lie
    there too. environment: over this process's own.
    """

    program: tuple[str, ...]
    num_processes: int
    folder: Path
    master: tuple[str, int]
    num_nodes: int = 1
    node_rank: int = 0
    environment: Mapping[str, str] | None = None


def find_free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def run_ranks(launch: Launch, on_poll: Callable[[], None] = lambda: None) -> None:
    """Run until all ranks of this node have ended well; `on_poll` is called several times a second.

    Raises RankFailure where one failed, naming rank, last lines and log. Whatever ends this (what on_poll raises and
    Ctrl-C included), no process of the run is left.
    """
    report = launch.folder / "failures.json"
    with (launch.folder / "torchrun.log").open("wb") as log:
        agent = subprocess.Popen(
            python_command("mm_autoparallel.profilers.agent", str(report), *_options(launch)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=make_environment(launch),
            start_new_session=True,  # Ctrl-C is the launcher's alone
        )
        try:
            while agent.poll() is None:
                on_poll()
                time.sleep(POLL_S)
        finally:
            _end(agent)
    if agent.returncode != 0:
        raise _failure(launch, report, agent.returncode)


def report_error(folder: Path, rank: int, error: PlannerError) -> None:
    """What a rank does with an error that it can tell: leave its paragraph where the launcher looks."""
    write_text_atomically(folder / f"error-{rank}.txt", str(error))


def find_logs(folder: Path) -> list[Path]:
    """What the ranks of this node printed on standard output in a run whose folder that is, by rank."""
    return sorted(folder.glob("ranks/*/attempt_0/*/stdout.log"), key=lambda path: int(path.parent.name))


def make_environment(launch: Launch) -> dict[str, str]:
    """This process's own, without what a torchrun around it says of this process's rank, and the launch's over it."""
    own = {name: value for name, value in os.environ.items() if not _OF_A_RANK.fullmatch(name)}
    return {**own, **(launch.environment or {})}


def _options(launch: Launch) -> list[str]:
    host, port = launch.master
    return [
        f"--nnodes={launch.num_nodes}",
        f"--nproc-per-node={launch.num_processes}",
        f"--node-rank={launch.node_rank}",
        f"--master-addr={host}",
        f"--master-port={port}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={launch.folder / 'ranks'}",
        "--redirects=3",
        "--no-python",
        *launch.program,
    ]


def _end(agent: subprocess.Popen[bytes]) -> None:
    """Kill the agent and all its descendants, and wait until they are gone."""
    pids = [agent.pid, *_descendants(agent.pid)] if agent.poll() is None else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()
    ends_s = time.monotonic() + END_S
    while any(_runs(pid) for pid in pids) and time.monotonic() < ends_s:
        time.sleep(0.02)


def _descendants(pid: int) -> list[int]:
    """Of the process `pid`, all generations, from the system's process table; none where it has no /proc."""
    children: dict[int, list[int]] = {}
    for child, parent, _ in _process_table():
        children.setdefault(parent, []).append(child)
    found, pending = [], [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _process_table() -> Iterator[tuple[int, int, str]]:
    """(process, parent, state) of every process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            yield int(folder.name), int(fields[1]), fields[0]


def _runs(pid: int) -> bool:
    return any(process == pid and state not in "ZX" for process, _, state in _process_table())


def _failure(launch: Launch, report: Path, exit_code: int) -> RankFailure:
    """The cause: a rank's own paragraph, else a rank that the system killed, else the first that failed."""
    for told in sorted(launch.folder.glob("error-*.txt")):
        return RankFailure(told.read_text(encoding="utf-8"), told=True)
    if not report.exists():
        log = launch.folder / "torchrun.log"
        return RankFailure(
            f"torch.distributed.run ended with exit code {exit_code} before its ranks did; its last lines (all of them "
            f"in {log}):\n{_last_lines([log])}"
        )
    failures = read_document(report, "report of a launched run", BackendError)["failures"]
    failure = min(failures, key=_by_cause)
    logs = sorted((launch.folder / "ranks").glob(f"*/attempt_0/{failure['local_rank']}/std*.log"))
    code, rank = failure["exit_code"], failure["rank"]
    how = f"was killed by signal {-code} ({_signal_name(-code)})" if code < 0 else f"failed with exit code {code}"
    if code == -signal.SIGKILL:
        how = (
            "was killed by the system, most likely for memory (signal 9): fewer processes on this machine "
            "(--nproc-per-node), a smaller model, sequence or micro-batch need less"
        )
    where = logs[0].parent if logs else launch.folder
    last = _last_lines(logs)
    lines = f"its last lines:\n{last}" if last else "it had printed nothing"
    return RankFailure(f"rank {rank} of the profile run {how}; log: {where}; {lines}", killed=code == -signal.SIGKILL)


def _by_cause(failure: dict[str, int]) -> tuple[int, ...]:
    """What the system killed comes first, what others took along last, and the earlier one before the later one."""
    code = failure["exit_code"]
    return (code != -signal.SIGKILL, code in (PEER_FAILED, -signal.SIGTERM), failure["time_s"], failure["rank"])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _last_lines(logs: Sequence[Path]) -> str:
    """Of standard error, or of standard output where that is empty."""
    for log in sorted(logs, key=lambda path: path.name != "stderr.log"):
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        if lines:
            return "\n".join(f"    {line}" for line in lines[-LAST_LINES:])
    return ""
