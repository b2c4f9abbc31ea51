"""Two launchers on this machine as two nodes: they work together, or both say why not."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.planner.plan import RESULT_FILE

pytestmark = pytest.mark.slow


def node(rank: int, port: int, *more: object) -> tuple[object, ...]:
    return ("--nnodes", 2, "--node-rank", rank, "--master-port", port, "--nproc-per-node", 1, *more)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A working directory for each node: they share no file system."""
    pair = tmp_path / "node0", tmp_path / "node1"
    for folder in pair:
        folder.mkdir()
    return pair


@pytest.mark.nightly
def test_two_nodes_profile_together(folders: tuple[Path, Path], launch: Callable, free_port: int) -> None:
    launchers = [launch(folders[rank], *node(rank, free_port)) for rank in (1, 0)]
    second, first = (launcher.wait() for launcher in launchers)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert "on 2 ranks" in first.stderr
    assert json.loads((folders[0] / RESULT_FILE).read_text())["world_size"] == 2
    (network,) = folders[0].glob("subgraph_profiles/*/network.json")
    assert {fit["num_ranks"] for fit in json.loads(network.read_text())["fits"]} == {2}
    assert not (folders[1] / RESULT_FILE).exists()
    assert list(folders[1].glob("subgraph_profiles/*/*/*.json")) == []


@pytest.mark.nightly
def test_a_port_in_use(tmp_path: Path, launch: Callable, one_rank: tuple) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags in (node(0, port), (*one_rank, "--master-port", port)):
            ended = launch(tmp_path, *flags).wait()
            assert ended.code == 2
            assert f"port {port} of node 0 is in use" in ended.stderr
            assert "--master-port" in ended.stderr
            assert ended.stderr.count("\n") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_node_never_joins(tmp_path: Path, launch: Callable, free_port: int, rank: int) -> None:
    began_s = time.monotonic()
    ended = launch(tmp_path, *node(rank, free_port, "--auto-parallel-join-timeout", 3)).wait()
    assert ended.code == 2
    assert "within 3 s (--auto-parallel-join-timeout)" in ended.stderr
    assert f"node {1 - rank}" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert time.monotonic() - began_s >= 3


@pytest.mark.nightly
def test_unequal_flags_end_both(folders: tuple[Path, Path], launch: Callable, free_port: int) -> None:
    launchers = [
        launch(folders[0], *node(0, free_port, "--seq-length", 32)),
        launch(folders[1], *node(1, free_port, "--seq-length", 64)),
    ]
    for launcher in launchers:
        ended = launcher.wait()
        assert ended.code == 2
        assert "--seq-length is 32 on node 0 and 64 on node 1" in ended.stderr
        assert "--node-rank" not in ended.stderr


@pytest.mark.nightly
def test_unequal_code_ends_both(folders: tuple[Path, Path], launch: Callable, free_port: int) -> None:
    script = Path(__file__).parent / "toy_pretrain.py"
    other = folders[1] / "toy_pretrain.py"
    other.write_text(script.read_text() + "\n# a change\n")
    launchers = [
        launch(folders[0], *node(0, free_port)),
        launch(folders[1], *node(1, free_port), script=other),
    ]
    for launcher in launchers:
        ended = launcher.wait()
        assert ended.code == 2
        assert "the code of toy_pretrain.py differs" in ended.stderr


@pytest.mark.nightly
def test_ranks_that_fail_on_one_node_end_both(folders: tuple[Path, Path], launch: Callable, free_port: int) -> None:
    launchers = [launch(folders[rank], *node(rank, free_port, "--fail", "kill1")) for rank in (0, 1)]
    for launcher in launchers:
        ended = launcher.wait()
        assert ended.code == 2
        assert "on node 1: rank 1 of the profile run was killed by the system" in ended.stderr


def test_a_node_that_dies_ends_the_other(folders: tuple[Path, Path], launch: Callable, free_port: int) -> None:
    first, second = [launch(folders[rank], *node(rank, free_port)) for rank in (0, 1)]
    second.wait_until(lambda: list(folders[1].glob("subgraph_profiles/logs/*/ranks/*/attempt_0/0/stderr.log")))
    assert first.listening() | second.listening() == {"0100007F"}  # a master on loopback: all are on this machine
    first.kill()
    ended = second.wait()
    assert ended.code == 2
    assert "node 1 lost its connection to node 0" in ended.stderr
    assert first.left_over() == []
