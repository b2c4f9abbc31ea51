"""ZeRO 3 whose shards stand in several copies (hybrid sharding): bytes, traffic and ranks by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.costs.communication import (
    Cover,
    Traffic,
    copies_group,
    data_group,
    expert_group,
    exposed_copies_ms,
)
from mm_autoparallel.model.costs.held_once import count_communicators
from mm_autoparallel.model.costs.memory import StaticBytes, sharded_over, static_bytes, step_bytes
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.costs.topology import place_groups
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.ranks import Ranks, group_ranks
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.job_file import parse_job

CLUSTER = Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["a100-80g"])
WHOLE = Strategy(pp=1, tp=1, dp=16, cp=2, mbs=1, zero=3)
HYBRID = replace(WHOLE, shard=8)
FSDP: dict[str, Any] = {"implementation": "transformers", "stack": "mindspeed-fsdp", "optimizer_bytes": 10.0}
WORKLOAD = Workload(global_batch_size=64, seq_length=4096, **FSDP)


def make_job(**model: Any) -> Job:
    layers = {"num_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 16, "norm": "rms"} | model
    content = {
        "model": {"text": {"vocab_size": 32000, "layers": layers}},
        "cluster": {"num_nodes": 4, "devices_per_node": 8, "device": "a100-80g"},
        "workload": {"global_batch_size": 64, "seq_length": 4096, "context_parallel": "all_to_all"} | FSDP,
        "search": {"zero": [3]},
    }
    return parse_job(content, Path("job.yaml"))


class TestRanks:
    def test_shards_lie_side_by_side_and_copies_across_them(self) -> None:
        assert group_ranks(HYBRID, "shard") == Ranks(8, 1)
        assert group_ranks(HYBRID, "copies") == Ranks(4, 8)
        assert (data_group(CLUSTER, HYBRID).num_ranks, copies_group(CLUSTER, HYBRID).num_ranks) == (8, 4)
        assert (data_group(CLUSTER, WHOLE).num_ranks, copies_group(CLUSTER, WHOLE).num_ranks) == (32, 1)

    def test_dealt_experts_are_held_once_and_others_follow_the_rest(self) -> None:
        assert expert_group(CLUSTER, replace(HYBRID, ep=4)).num_ranks == 8
        assert sharded_over(replace(HYBRID, ep=4), expert=True) == 32 // 4
        assert (sharded_over(HYBRID, expert=True), sharded_over(HYBRID)) == (8, 8)

    def test_groups_are_told_and_have_communicators(self) -> None:
        assert [place.name for place in place_groups(CLUSTER, HYBRID)] == ["CP", "shard", "copies"]
        assert [place.name for place in place_groups(CLUSTER, WHOLE)] == ["CP", "DP"]
        assert count_communicators(HYBRID, tied=False) == count_communicators(WHOLE, tied=False) + 2


class TestBytes:
    def test_each_copy_is_divided_among_its_own_ranks(self) -> None:
        found = static_bytes(8e6, True, WORKLOAD, HYBRID)
        assert found == StaticBytes(1e6 * 2, 1e6 * 4, 1e6 * 10, 1e6 * 8)
        assert static_bytes(8e6, True, WORKLOAD, WHOLE).total_bytes == found.total_bytes / 4

    def test_frozen_shards_are_fp32(self) -> None:
        assert static_bytes(8e6, False, WORKLOAD, HYBRID) == StaticBytes(1e6 * 4, 0.0, 0.0)
        kept = replace(HYBRID, reshard=False)
        assert static_bytes(8e6, False, WORKLOAD, kept) == StaticBytes(1e6 * 4 + 8e6 * 2, 0.0, 0.0)

    def test_the_optimizer_works_on_shards(self) -> None:
        job = make_job()
        block = next(b for b in build_problem(job, WHOLE).chain if b.layer)
        assert block.step_once_bytes > 0
        structure = next(b for b in expand(job.model).blocks if b.role == "layer")
        assert step_bytes(structure, 3.2e6, 0.0, WORKLOAD, WHOLE) == (0.0, 4 * 1e5)


class TestTraffic:
    TRAFFIC = Traffic(all_reduce_ms=12.0, reduce_ms=8.0, gather_ms=4.0)

    @pytest.mark.parametrize(
        ("cover_ms", "reshard", "hidden_ms"),
        [
            (0.0, True, 0.0),  # nothing hides
            (12.0, True, 0.0),  # the reduction and the gather take all of the cover
            (15.0, True, 3.0),
            (15.0, False, 7.0),  # no second gather
            (1e6, True, 1e6),
        ],
    )
    def test_the_sum_hides_behind_what_is_left(self, cover_ms: float, reshard: bool, hidden_ms: float) -> None:
        strategy = replace(HYBRID, reshard=reshard)
        group = copies_group(CLUSTER, strategy)
        sum_ms = group.all_reduce_ms(1e8 * 4)
        found = exposed_copies_ms(Cover(0.0, cover_ms), 1e8, self.TRAFFIC, group, WORKLOAD, strategy)
        assert found == pytest.approx(max(0.0, sum_ms - hidden_ms))

    def test_passes_and_tail_of_a_whole_problem(self) -> None:
        """Shards inside a node make each pass cheaper, and the sum over four nodes is paid once a step."""
        job = make_job()
        whole, hybrid = (
            next(block for block in build_problem(job, strategy).chain if block.layer) for strategy in (WHOLE, HYBRID)
        )
        assert hybrid.forward_ms <= whole.forward_ms
        assert hybrid.static_bytes == pytest.approx(4 * whole.static_bytes)
        assert hybrid.tail_ms > whole.tail_ms


def test_all_ranks_in_one_copy_are_the_usual_sharding() -> None:
    """A shard of all ranks costs what no shard does, so that the space needs one form of it."""
    job = make_job()
    usual = build_problem(job, WHOLE)
    named = build_problem(job, replace(WHOLE, shard=32))
    assert [block.static_bytes for block in usual.chain] == [block.static_bytes for block in named.chain]
    assert [block.tail_ms for block in usual.chain] == pytest.approx([block.tail_ms for block in named.chain])
