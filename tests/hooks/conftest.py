"""The toy script started as a person would start it, and what it leaves behind: files, words, processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "toy_pretrain.py"
REPOSITORY = Path(__file__).parent.parent.parent
MARK = "TOY_PRETRAIN_MARK"
TIMEOUT_S = 240
ONE_RANK = ("--nproc-per-node", 1, "--simulated-nproc-per-node", 2)


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


class Launcher:
    """A started script; every process that descends from it carries its mark in the environment."""

    def __init__(self, folder: Path, *flags: object, script: Path = SCRIPT) -> None:
        self.mark = uuid.uuid4().hex
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MM_AUTO", "PYTEST"))}
        self.process = subprocess.Popen(
            [sys.executable, str(script), *map(str, flags)],
            cwd=folder,
            env=inherited | {"PYTHONPATH": str(REPOSITORY), MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> Ended:
        try:
            stdout, stderr = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return Ended(self.process.returncode, stdout, stderr)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def processes(self) -> list[int]:
        """Of this launch, the launcher included, that run now."""
        return [pid for path in Path("/proc").glob("[0-9]*") if self._is_own(pid := int(path.name))]

    def left_over(self, patience_s: float = 10.0) -> list[str]:
        """What still runs after the launcher has ended and the kernel has had time to end the rest."""
        ends_s = time.monotonic() + patience_s
        while (pids := self.processes()) and time.monotonic() < ends_s:
            time.sleep(0.05)
        return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]

    def _is_own(self, pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            return state not in "ZX" and f"{MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def wait_until(self, what: Callable[[], object], timeout_s: float = 120.0) -> None:
        ends_s = time.monotonic() + timeout_s
        while not what():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < ends_s
            time.sleep(0.02)


@pytest.fixture
def launch() -> Iterator[Callable[..., Launcher]]:
    """Starts the toy script with --auto-parallel-mm and other flags; at the end nothing of it may be left."""
    pytest.importorskip("torch")
    started: list[Launcher] = []

    def start(folder: Path, *flags: object, script: Path = SCRIPT) -> Launcher:
        started.append(Launcher(folder, "--auto-parallel-mm", *flags, script=script))
        return started[-1]

    yield start
    left = []
    for launcher in started:
        if launcher.process.poll() is None:
            launcher.kill()
        left += launcher.left_over()
        for pid in launcher.processes():
            os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the toy was profiled on one rank and planned for one node of two devices."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("profiled")
    launcher = Launcher(folder, "--auto-parallel-mm", *ONE_RANK)
    ended = launcher.wait()
    assert ended.code == 0, ended.stderr
    assert launcher.left_over() == []
    return folder


@pytest.fixture
def one_rank() -> tuple[object, ...]:
    """The flags of `profiled`."""
    return ONE_RANK


@pytest.fixture
def copied(profiled: Path, tmp_path: Path) -> Path:
    """A copy of what `profiled` left, without its result."""
    shutil.copytree(profiled / "subgraph_profiles", tmp_path / "subgraph_profiles")
    return tmp_path


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def entries() -> Callable[[Path], set[tuple[object, ...]]]:
    """Which blocks were profiled at which division, of all profiles in the store of a folder."""

    def find(folder: Path) -> set[tuple[object, ...]]:
        return {
            (path.name, entry["kind"], entry["tp"], entry["mbs"], entry["tokens"])
            for path in folder.glob("subgraph_profiles/*/*/tp*.json")
            for entry in json.loads(path.read_text())["entries"]
        }

    return find
