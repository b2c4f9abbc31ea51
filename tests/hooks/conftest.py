"""The toy script started as a person would start it, and what it leaves behind: files, words, processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from started import Started

SCRIPT = Path(__file__).parent / "toy_pretrain.py"
ONE_RANK = ("--nproc-per-node", 1, "--simulated-nproc-per-node", 2)


class Launcher(Started):
    """A started script."""

    def __init__(self, folder: Path, *flags: object, script: Path = SCRIPT) -> None:
        super().__init__([sys.executable, script, *flags], folder)


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
