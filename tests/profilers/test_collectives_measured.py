"""The network between real gloo processes: a whole and lawful file; figures are not judged on a busy machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked_ranks import ForkedRanks

pytest.importorskip("torch")

from mm_autoparallel.model.profiles.collectives import OPERATIONS
from mm_autoparallel.model.profiles.network import NetworkProfile, hidden_part, moved_bytes, network_path, read_network
from mm_autoparallel.profilers.collectives import Shape, list_shapes
from mm_autoparallel.profilers.device import identify_device

CHILD = Path(__file__).with_name("network_child.py")


def measure(ranks: ForkedRanks, root: Path, num_ranks: int, num_per_node: int) -> str:
    """What the ranks print."""
    return ranks.run(CHILD, [str(root), str(num_per_node)], num_ranks, root.parent, [], 180)


def read(root: Path) -> NetworkProfile:
    name = identify_device().name
    found = read_network([network_path(root, name)], name)
    assert found
    return found[1]


@pytest.mark.parametrize(
    ("num_ranks", "num_per_node", "expected"),
    [
        (2, 2, [Shape("node", 2, 1)]),
        (2, 1, [Shape("cluster", 2, 1)]),
        (8, 8, [Shape("node", 2, 1), Shape("node", 4, 1), Shape("node", 8, 1)]),
        (6, 6, [Shape("node", 2, 1), Shape("node", 6, 1)]),
        (4, 2, [Shape("node", 2, 1), Shape("cluster", 2, 2), Shape("cluster", 4, 1, inside=2)]),
        (
            32,
            8,
            [
                Shape("node", 2, 1),
                Shape("node", 4, 1),
                Shape("node", 8, 1),
                Shape("cluster", 2, 8),
                Shape("cluster", 4, 8),
                Shape("cluster", 32, 1, inside=8),
            ],
        ),
        (1, 8, []),
    ],
)
def test_shapes_of_every_level(num_ranks: int, num_per_node: int, expected: list[Shape]) -> None:
    assert list(list_shapes(num_ranks, num_per_node)) == expected


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, forked_ranks: ForkedRanks) -> Path:
    """A store that two ranks of one node have measured."""
    root = tmp_path_factory.mktemp("measured") / "store"
    printed = measure(forked_ranks, root, 2, 2)
    assert printed.count("network.json") == 2
    return root


def test_two_ranks_write_a_whole_lawful_file(measured: Path) -> None:
    network = read(measured)
    assert [fit.operation for fit in network.fits] == list(OPERATIONS)
    for fit in network.fits:
        assert (fit.num_ranks, fit.level, fit.inside) == (2, "node", 1)
        assert [sample.size_bytes for sample in fit.samples] == [1 << 12, 1 << 18]
        assert all(sample.time_ms.median_ms > 0 for sample in fit.samples)
        # two sizes are met exactly, unless the larger one was quicker
        first, last = (sample.time_ms.median_ms for sample in fit.samples)
        line_ms = fit.latency_ms + moved_bytes(fit.operation, 2, 1 << 18) / fit.bandwidth_bytes_per_s * 1e3
        assert last < first or fit.latency_ms == 0 or line_ms == pytest.approx(last, rel=1e-6)
    assert [(one.operation, one.num_ranks) for one in network.overlaps] == [("all_reduce", 2), ("all_to_all", 2)]
    for one in network.overlaps:
        assert min(one.compute_ms.median_ms, one.traffic_ms.median_ms, one.together_ms.median_ms) > 0
        traffic_ms, compute_ms = one.traffic_ms.median_ms, one.compute_ms.median_ms
        assert one.hidden_fraction == hidden_part(traffic_ms, compute_ms, one.together_ms.median_ms)
    assert network.command == "python pretrain.py"
    assert set(network.software) <= {"torch", "cuda"}
    assert [path.name for path in network_path(measured, network.device).parent.iterdir()] == ["network.json"]


@pytest.mark.slow
def test_what_is_there_is_not_measured_again(measured: Path, forked_ranks: ForkedRanks) -> None:
    path = network_path(measured, read(measured).device)
    before = path.stat()
    assert measure(forked_ranks, measured, 2, 2).count(str(path)) == 2
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_stale_file_is_refused_by_all_ranks(measured: Path, tmp_path: Path, forked_ranks: ForkedRanks) -> None:
    network = read(measured)
    path = network_path(tmp_path / "store", network.device)
    path.parent.mkdir(parents=True)
    document = json.loads(network_path(measured, network.device).read_text())
    path.write_text(json.dumps(document | {"software": {"torch": "1.0.0"}}))
    printed = measure(forked_ranks, tmp_path / "store", 2, 2)
    assert f"rank 0 refused: profile file {path}: it was measured with torch 1.0.0" in printed
    assert "`python pretrain.py`" in printed
    assert "rank 1 refused: measuring the network: ranks 0 stopped" in printed


@pytest.mark.nightly
def test_two_nodes_of_two_add_their_levels(measured: Path, tmp_path: Path, forked_ranks: ForkedRanks) -> None:
    """And what others have measured before them stays."""
    device = read(measured).device
    path = network_path(tmp_path / "store", device)
    path.parent.mkdir(parents=True)
    document = json.loads(network_path(measured, device).read_text())
    for fit in document["fits"]:
        fit["num_ranks"] = 16
    path.write_text(json.dumps(document))
    assert measure(forked_ranks, tmp_path / "store", 4, 2).count(str(path)) == 4
    fits = read(tmp_path / "store").fits
    keys = {(fit.level, fit.num_ranks, fit.inside) for fit in fits}
    assert keys == {("node", 2, 1), ("cluster", 2, 1), ("cluster", 4, 2), ("node", 16, 1)}
    hops = [(fit.level, fit.num_ranks) for fit in fits if fit.operation == "send_recv"]
    assert hops == [("node", 2), ("cluster", 2), ("node", 16)]
