"""Clusters: levels of network, which of them a communicator crosses, parts of a cluster, the device catalog."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.cluster import Cluster, Device, Level, Link
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.ranks import Ranks
from mm_autoparallel.model.profiles.collectives import find_level

DEVICE = DEVICES["h100-80g"]


def cluster(num_nodes: int = 4, devices_per_node: int = 8, *levels: tuple[str, int], **more: object) -> Cluster:
    return Cluster(
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=DEVICE,
        levels=tuple(
            Level(name=name, num_devices=num_devices, bandwidth_bytes_per_s=1e9, latency_ms=0.01)
            for name, num_devices in levels
        ),
        **more,  # type: ignore[arg-type]
    )


THREE = cluster(16, 8, ("node", 8), ("rack", 32), ("cluster", 128))


@pytest.mark.parametrize(
    ("num_nodes", "devices_per_node", "names"),
    [(4, 8, ["node", "cluster"]), (1, 8, ["node"]), (4, 1, ["node", "cluster"]), (1, 1, ["node"])],
)
def test_levels_are_node_and_network_where_none_are_given(
    num_nodes: int, devices_per_node: int, names: list[str]
) -> None:
    made = cluster(num_nodes, devices_per_node)
    assert [level.name for level in made.levels] == names
    assert made.levels[-1].num_devices == made.num_devices
    assert made.levels[0].bandwidth_bytes_per_s == DEVICE.node_link.bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("size", "stride", "name"),
    [
        (8, 1, "node"),
        (4, 2, "node"),
        (4, 8, "rack"),
        (2, 16, "rack"),
        (16, 1, "rack"),
        (2, 64, "cluster"),
        (128, 1, "cluster"),
        (3, 1, "cluster"),  # threes straddle nodes, racks and all
        (256, 1, "cluster"),
    ],
)
def test_a_communicator_crosses_the_outermost_level_it_spans(size: int, stride: int, name: str) -> None:
    assert find_level(THREE.levels, Ranks(size, stride)).name == name


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ([("node", 8), ("rack", 8), ("cluster", 32)], "innermost first"),
        ([("rack", 16), ("node", 8), ("cluster", 32)], "innermost first"),
        ([("node", 8), ("rack", 12), ("cluster", 32)], "no multiple of the 8"),
        ([("node", 8), ("cluster", 64)], "its num_devices must be 32"),
        ([("node", 8)], "its num_devices must be 32"),
        ([("node", 8), ("node", 32)], 'two levels are called "node"'),
    ],
)
def test_levels_that_do_not_nest_are_refused(levels: list[tuple[str, int]], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        cluster(4, 8, *levels)


def test_tensor_parallel_stays_in_a_node_unless_a_level_says_otherwise() -> None:
    assert THREE.max_tensor_parallel == 8
    rack = THREE.levels[1].model_copy(update={"tensor_parallel": True})
    wide = THREE.model_copy(update={"levels": (THREE.levels[0], rack, THREE.levels[2])})
    assert wide.max_tensor_parallel == 32


@pytest.mark.parametrize(
    ("num_devices", "nodes", "sizes"),
    [(128, 16, [8, 32, 128]), (64, 8, [8, 32, 64]), (32, 4, [8, 32]), (16, 2, [8, 16]), (8, 1, [8]), (3, 1, [3])],
)
def test_a_part_of_a_cluster(num_devices: int, nodes: int, sizes: list[int]) -> None:
    part = THREE.resized(num_devices)
    assert (part.num_devices, part.num_nodes) == (num_devices, nodes)
    assert [level.num_devices for level in part.levels] == sizes
    assert part.device == THREE.device


@pytest.mark.parametrize(
    ("num_devices", "words"),
    [(256, "the cluster has 16 x 8 = 128"), (12, "no whole nodes of 8"), (40, "level rack, 32 each")],
)
def test_a_part_that_is_none_is_refused(num_devices: int, words: str) -> None:
    with pytest.raises(JobError, match=words):
        THREE.resized(num_devices)


def test_memory_that_a_plan_may_fill() -> None:
    assert cluster(memory_fraction=0.5).memory_limit_bytes == DEVICE.memory_bytes / 2


@pytest.mark.parametrize(("size", "expected"), [(2, 28e9), (4, 84e9), (8, 196e9), (16, 196e9)])
def test_devices_joined_in_pairs_get_more_from_larger_groups(size: int, expected: float) -> None:
    """HCCS: seven links of 28 GB/s one way; a group uses those between its members."""
    assert DEVICES["ascend-910b-64g"].node_link.group_bandwidth_bytes_per_s(size) == expected


@given(size=st.integers(1, 1024))
def test_a_switch_gives_every_group_the_same(size: int) -> None:
    assert Link(bandwidth_bytes_per_s=3.0, latency_ms=0.0).group_bandwidth_bytes_per_s(size) == 3.0


@pytest.mark.parametrize("name", list(DEVICES))
def test_every_figure_of_the_catalog_has_a_source(name: str) -> None:
    device = DEVICES[name]
    figures = set(Device.model_fields) - {"name", "sources"}
    assert set(device.sources) == figures
    assert all(len(source) > 20 for source in device.sources.values())


@pytest.mark.parametrize(
    ("name", "gigabytes", "teraflops", "terabytes_per_s"),
    [
        ("ascend-910b-64g", 64, 353.9, 1.6),
        ("a100-80g", 80, 312, 2.039),
        ("h100-80g", 80, 989.4, 3.35),
        ("h200-141g", 141, 989.4, 4.8),
        ("b200-192g", 192, 2250, 8),
    ],
)
def test_catalog_figures(name: str, gigabytes: float, teraflops: float, terabytes_per_s: float) -> None:
    device = DEVICES[name]
    assert device.bf16_flops_per_s == pytest.approx(teraflops * 1e12)
    assert device.memory_bytes_per_s == pytest.approx(terabytes_per_s * 1e12)
    assert 0.9 * gigabytes < device.memory_bytes / 1e9 < 1.08 * gigabytes
    assert device.node_link.bandwidth_bytes_per_s > device.network_link.bandwidth_bytes_per_s
