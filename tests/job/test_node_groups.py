"""Clusters of several kinds of nodes, with slow devices and shared cards: what they mean, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.readers.job_file import parse_job

MODEL = {
    "name": "small",
    "text": {
        "vocab_size": 32000,
        "layers": {"num_layers": 8, "hidden_size": 512, "ffn_size": 2048, "num_heads": 8, "norm": "rms"},
    },
}
NODE = {"name": "node", "num_devices": 8, "bandwidth_bytes_per_s": 300e9, "latency_ms": 0.01}
NETWORK = {"name": "cluster", "num_devices": 32, "bandwidth_bytes_per_s": 25e9, "latency_ms": 0.02}
PLAIN = {"num_nodes": 4, "devices_per_node": 8, "device": "a100-80g"}
MIXED = [{"num_nodes": 2}, {"num_nodes": 2, "device": "h100-80g", "time_factor": 1.05}]


def job(**cluster: Any) -> Job:
    workload = {"global_batch_size": 64, "seq_length": 4096}
    return parse_job({"model": MODEL, "cluster": PLAIN | cluster, "workload": workload}, Path("job.yaml"))


def cluster(**keys: Any) -> Cluster:
    return job(**keys).cluster


def test_what_a_kind_leaves_out_is_the_clusters() -> None:
    plain, fast = cluster(node_groups=MIXED).kinds
    assert (plain.ranks, plain.devices_per_node, plain.device.name, plain.time_factor) == (range(16), 8, "a100-80g", 1)
    assert (fast.ranks, fast.devices_per_node, fast.device.name, fast.time_factor) == (
        range(16, 32),
        8,
        "h100-80g",
        1.05,
    )


def test_a_kinds_device_may_be_based_on_the_catalogs() -> None:
    bigger = {"based_on": "a100-80g", "name": "a100-96g", "memory_bytes": 96e9}
    made = cluster(node_groups=[{"num_nodes": 4, "device": bigger}])
    assert made.kinds[0].device.memory_bytes == 96e9


def test_nodes_of_several_sizes_hold_together_what_divides_all_of_them() -> None:
    made = cluster(num_nodes=3, node_groups=[{"num_nodes": 2, "devices_per_node": 12}, {"num_nodes": 1}])
    assert (made.num_devices, made.node_sizes, made.node_span) == (32, (12, 12, 8), 4)
    assert [(level.name, level.num_devices) for level in made.levels] == [("node", 4), ("cluster", 32)]
    assert made.max_tensor_parallel == 4
    assert [made.uneven_reason(n) for n in (4, 12, 24, 32)] == [None] * 4
    assert made.uneven_reason(16) == "16 devices are no whole nodes of 12 or 8"
    assert made.uneven_reason(6) == "6 devices are no whole groups of level node, 4 each"


def test_slow_devices_are_ranks_or_whole_nodes() -> None:
    slow = [{"rank": 5, "time_factor": 1.2}, {"node": 2, "time_factor": 1.5}]
    made = cluster(
        num_nodes=3, node_groups=[{"num_nodes": 2, "devices_per_node": 12}, {"num_nodes": 1}], slow_devices=slow
    )
    assert made.slow_ranks() == ((range(5, 6), 1.2), (range(24, 32), 1.5))


def test_a_part_of_a_mixed_cluster_is_its_first_nodes() -> None:
    slow = [{"rank": 20, "time_factor": 1.2}, {"node": 3, "time_factor": 1.5}]
    whole = cluster(node_groups=MIXED, slow_devices=slow, device_time_spread_fraction=0.02)
    part = whole.resized(24)
    assert [kind.ranks for kind in part.kinds] == [range(16), range(16, 24)]
    assert (part.num_nodes, part.slow_devices, part.device_time_spread_fraction) == (3, whole.slow_devices[:1], 0.02)
    assert [kind.ranks for kind in whole.resized(4).kinds] == [range(4)]
    assert whole.resized(4).slow_devices == ()
    with pytest.raises(JobError, match=r"20 devices are no whole nodes of 8; .* whole nodes of the 2 x 8 \+ 2 x 8"):
        whole.resized(20)


def test_cards_of_a_part_of_a_node_are_shared_by_what_is_there() -> None:
    made = cluster(levels=[NODE | {"devices_per_card": 4}, NETWORK | {"devices_per_card": 4}])
    assert [level.devices_per_card for level in made.resized(16).levels] == [4, 4]
    assert [level.devices_per_card for level in made.resized(2).levels] == [2]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"node_groups": [{"num_nodes": 4}, {"num_nodes": 2}]},
            r"node_groups hold 4 \+ 2 = 6 nodes and num_nodes is 4",
        ),
        (
            {"node_groups": [{"num_nodes": 4, "time_factor": 0}]},
            r"node_groups\[0\].time_factor is 0; it must be above 0",
        ),
        (
            {"node_groups": [{"num_nodes": 4, "device": "h1000"}]},
            r"cluster.node_groups\[0\].device is .h1000., .* mean .h100-80g",
        ),
        ({"node_groups": [{"num_nodes": 4, "device": {"based_on": 3}}]}, r"node_groups\[0\].device.based_on is 3"),
        ({"node_groups": [{"nodes": 4}]}, "nodes is not a key known here"),
        ({"node_groups": [4]}, r"node_groups\[0\] is 4"),
        (
            {"slow_devices": [{"rank": 32, "time_factor": 1.1}]},
            r"slow_devices\[0\] names rank 32, .* ranks are 0 to 31",
        ),
        ({"slow_devices": [{"node": 4, "time_factor": 1.1}]}, r"slow_devices\[0\] names node 4, .* nodes are 0 to 3"),
        ({"slow_devices": [{"node": 1, "time_factor": -1.0}]}, r"time_factor is -1.0; it must be above 0"),
        ({"slow_devices": [{"time_factor": 1.1}]}, "give one of the two"),
        ({"slow_devices": [{"rank": 1, "node": 1, "time_factor": 1.1}]}, "give one of the two"),
        ({"device_time_spread_fraction": 1.0}, "must be below 1"),
        (
            {"levels": [NODE, NETWORK | {"devices_per_card": 3}]},
            "level cluster has devices_per_card 3, .* the 8 devices",
        ),
        ({"levels": [NODE, NETWORK | {"num_devices": 64}]}, "the cluster has 4 x 8; its num_devices must be 32"),
        (
            {"node_groups": [{"num_nodes": 3}, {"num_nodes": 1, "devices_per_node": 16}], "levels": [NODE, NETWORK]},
            r"the cluster has 3 x 8 \+ 1 x 16; its num_devices must be 40",
        ),
    ],
)
def test_what_does_not_fit_is_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        job(**keys)


def test_a_job_without_such_keys_keeps_its_hash() -> None:
    """Keys that change nothing are no part of it, said or not; those that do are."""
    plain = job()
    assert job(node_groups=[], slow_devices=[], device_time_spread_fraction=0.0).sha256 == plain.sha256
    levels = [NODE, NETWORK]
    said = [NODE | {"devices_per_card": 1}, NETWORK | {"devices_per_card": 1}]
    assert job(levels=said).sha256 == job(levels=levels).sha256
    others = [
        job(levels=[NODE, NETWORK | {"devices_per_card": 2}]),
        job(node_groups=MIXED),
        job(node_groups=[MIXED[0], MIXED[1] | {"time_factor": 1.1}]),
        job(slow_devices=[{"node": 1, "time_factor": 1.1}]),
        job(device_time_spread_fraction=0.01),
    ]
    assert len({plain.sha256, *(other.sha256 for other in others)}) == 6
    renamed = {"based_on": "h100-80g", "name": "another"}
    assert job(node_groups=[MIXED[0], MIXED[1] | {"device": renamed}]).sha256 == others[1].sha256


class TestStagesLieInOneKind:
    def reason(self, job: Job, order: str = "tp-cp-ep-dp-pp", **sizes: int) -> str | None:
        strategy = Strategy(**{"tp": 2, "mbs": 1} | sizes, rank_order=order)
        return unlawful_reason(job.model, job.cluster, job.workload, strategy)

    @pytest.mark.parametrize(("pp", "dp"), [(2, 8), (4, 4), (8, 2)])
    def test_stages_that_end_where_a_kind_ends(self, pp: int, dp: int) -> None:
        assert self.reason(job(node_groups=MIXED), pp=pp, dp=dp) is None

    def test_a_stage_over_the_boundary(self) -> None:
        mixed = job(node_groups=[{"num_nodes": 3}, {"num_nodes": 1, "time_factor": 1.1}])
        words = (
            r"stage 1 has its ranks 16 to 31 on nodes of different kinds, .* node_groups\[0\] and of node_groups\[1\]"
        )
        assert_matches(self.reason(mixed, pp=2, dp=8), words)
        assert self.reason(mixed, pp=4, dp=4) is None

    def test_pipelines_side_by_side_need_the_kinds_they_repeat_over(self) -> None:
        order = "tp-cp-ep-pp-dp"
        assert_matches(self.reason(job(node_groups=MIXED), order, pp=4, dp=4), "stage 0 has its ranks 0 to 25")
        turns = [{"num_nodes": 1}, {"num_nodes": 1, "device": "h100-80g"}] * 2
        assert self.reason(job(node_groups=turns), order, pp=8, dp=2) is None
        assert self.reason(job(node_groups=turns), pp=8, dp=2) is None
        assert_matches(self.reason(job(node_groups=turns), pp=2, dp=8), "stage 0 has its ranks 0 to 15")

    def test_equal_groups_are_one_kind(self) -> None:
        assert self.reason(job(node_groups=[{"num_nodes": 1}] * 4), pp=1, dp=16) is None


def assert_matches(reason: str | None, words: str) -> None:
    assert reason is not None
    with pytest.raises(JobError, match=words):
        raise JobError(reason)
