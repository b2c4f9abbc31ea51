"""A Ray cluster of two nodes: the answer of this process, nothing lost with a node, and what is said where none is."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.solve.engines import ray_cluster
from mm_autoparallel.pipeline.solve.engines.ray_cluster import RayWorkers, connect
from mm_autoparallel.pipeline.solve.task import Answer, Task
from mm_autoparallel.planner.search.planner import search

ray = pytest.importorskip("ray", reason="Ray is not installed: the extra [ray] brings it")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def two_nodes(repository: Path) -> Iterator[Any]:
    """Two raylets of one CPU each on this machine, which end with the tests."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for limit in ("CONNECT_S", "PROBE_S", "SETTLE_S"):  # no test fails for being slow on a busy machine
            patch.setattr(f"mm_autoparallel.pipeline.solve.engines.ray_cluster.{limit}", 240.0)
        size = {"num_cpus": 1, "object_store_memory": 80_000_000}
        cluster = Cluster(initialize_head=True, head_node_args=size | {"include_dashboard": False})
        cluster.add_node(**size)
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_an_address_where_nothing_listens_is_2(run_cli: Run, repository: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    job = repository / "examples" / "qwen2vl_72b" / "job.yaml"
    result = run_cli("plan", job, "--engine", "ray", "--ray-address", address)
    assert result.returncode == 2
    assert f"the cluster at {address} does not answer" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_is_not_ray_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(JobError, match="what listens there is not Ray"):
            connect(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("address", ["nonsense", "local", "host:", "10.0.0.1:port"])
def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(JobError, match="is no HOST:PORT"):
        connect(address)


@pytest.mark.nightly
@pytest.mark.slow
def test_workers_import_nothing_from_the_current_folder(two_nodes: Any, tmp_path: Path, monkeypatch) -> None:
    ray.shutdown()
    monkeypatch.chdir(tmp_path)
    connect(two_nodes.address)
    assert Path.cwd() == tmp_path
    paths = ray.get(ray.remote(lambda: __import__("sys").path).remote())
    assert str(tmp_path) not in paths


@pytest.mark.nightly
@pytest.mark.slow
def test_a_cpu_whose_work_has_just_ended_is_free(two_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()
    connect(two_nodes.address)

    class Holder:
        def answer(self) -> bool:
            return True

    holder = ray.remote(num_cpus=1)(Holder).remote()
    assert ray.get(holder.answer.remote())
    while ray.available_resources().get("CPU", 0) > 1:
        time.sleep(0.05)

    def check_and_end(told: str) -> None:
        check_nodes(told)
        ray.kill(holder)

    check_nodes = ray_cluster._check_nodes
    monkeypatch.setattr(ray_cluster, "_check_nodes", check_and_end)
    assert connect(two_nodes.address).num_workers == 2


@pytest.mark.slow
def test_the_answer_is_that_of_this_process(two_nodes: Any, make_job, spread_at_once: None, monkeypatch) -> None:
    """Though a worker is killed in the middle."""
    killed = []

    class Losing(RayWorkers):
        def wait(self) -> Answer | None:
            if not killed:
                killed.append(self._workers[0].actor)
                ray.kill(killed[0])
            return super().wait()

    monkeypatch.setattr("mm_autoparallel.pipeline.solve.engines.ray_cluster.RayWorkers", Losing)
    job = make_job(memory_bytes=5e9, num_layers=8, max_vpp=2, tp=(1,), cp=(1,))
    cluster = connect(two_nodes.address)
    assert cluster.num_workers == 2
    here, there = search(job, num_workers=1), search(job, cluster=cluster)
    assert killed
    assert (here.plan, here.figures) == (there.plan, there.figures)


@pytest.mark.slow
def test_other_code_on_a_node_is_said_before_any_work(two_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mm_autoparallel.pipeline.solve.engines.ray_cluster.solver_fingerprint", lambda: "of today")
    with pytest.raises(JobError, match=r"runs other code of mm_autoparallel or OR-Tools .*, here of today"):
        connect(two_nodes.address)


@pytest.mark.nightly
def test_a_task_whose_node_is_lost_is_done_elsewhere(two_nodes: Any, hard_problem) -> None:
    """The last test of the cluster: it leaves one node."""
    engine = connect(two_nodes.address).start(lambda: False)
    last = {}
    try:
        for number in range(2):
            engine.give(Task(number, hard_problem, np.inf, 0.0, time_limit_s=3.0))
        assert engine.free == 0
        first = engine.wait()  # both nodes work by then
        two_nodes.remove_node(two_nodes.worker_nodes.copy().pop())
        while (answer := engine.wait()) is not None:
            last |= {answer.number: answer} if answer.is_last else {}
    finally:
        engine.close()
    assert first is not None
    assert sorted(last | ({first.number: first} if first.is_last else {})) == [0, 1]
    assert all(answer.reason == "" for answer in last.values())


def test_another_version_of_ray_is_said(two_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()
    monkeypatch.setattr(ray, "__version__", "2.0.0")
    with pytest.raises(JobError, match=r"cannot be joined: .*[Vv]ersion"):
        connect(two_nodes.address)
    ray.shutdown()
