"""Static bytes per parameter, by what trains, what ZeRO shards and where a tied table stands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mm_autoparallel.model.blocks.chain import (
    Attention,
    Block,
    Experts,
    FeedForward,
    OutputHead,
    Projector,
    Structure,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.costs.memory import (
    StaticBytes,
    count_held_parameters,
    count_largest_weight,
    count_scattered,
    list_whole,
    static_bytes,
    step_bytes,
)
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload

WORKLOAD = Workload(global_batch_size=64, seq_length=4096)


@pytest.mark.parametrize(
    ("zero", "dp", "cp", "expected"),
    [
        (0, 1, 1, 18),
        (0, 8, 2, 18),
        (1, 1, 1, 18),
        (1, 8, 1, 6 + 12 / 8),
        (1, 4, 2, 6 + 12 / 8),
        (2, 4, 2, 2 + (4 + 12) / 8),
        (3, 4, 2, (2 + 4 + 12) / 8),
        (3, 1, 1, 18),
    ],
)
def test_bytes_of_a_parameter_that_trains(zero: int, dp: int, cp: int, expected: float) -> None:
    """2 + 4 + 12 by parts, of which each stage divides one more: ZeRO (arXiv:1910.02054), with gradients in fp32."""
    strategy = Strategy(pp=1, tp=1, dp=dp, mbs=1, cp=cp, zero=zero)
    assert static_bytes(1e6, True, WORKLOAD, strategy).total_bytes == pytest.approx(1e6 * expected)


def test_a_frozen_parameter_is_a_weight() -> None:
    assert static_bytes(1e6, False, WORKLOAD, Strategy(pp=1, tp=1, dp=8, mbs=1)) == StaticBytes(2e6, 0.0, 0.0)


def test_weights_that_are_kept_are_whole_beside_their_shards() -> None:
    kept = Strategy(pp=1, tp=1, dp=8, mbs=1, zero=3, reshard=False)
    assert static_bytes(8e6, True, WORKLOAD, kept).weight_bytes == 2 * (8e6 + 1e6)
    assert static_bytes(8e6, False, WORKLOAD, replace(kept, reshard=True)) == StaticBytes(2e6, 0.0, 0.0)
    alone = replace(kept, dp=1)
    assert static_bytes(8e6, True, WORKLOAD, alone).weight_bytes == 2 * 8e6  # nobody holds another part


def test_states_on_the_host_take_nothing_here() -> None:
    strategy = Strategy(pp=1, tp=1, dp=8, mbs=1, zero=2, optimizer_offload=True)
    on_host = (12 + 4 + 2) * 1e6  # states, and gradients and weights on their way there and back
    assert static_bytes(8e6, True, WORKLOAD, strategy) == StaticBytes(16e6, 4e6, 0.0, host_bytes=on_host)


class TestWhole:
    """What a stage holds whole while it works: a block and its larger neighbour."""

    BLOCKS = (
        Block("pre", "pre", "text", "pre", OutputHead(8, 8, "rms")),
        Block("layer", "layer", "text", "layer", OutputHead(8, 8, "rms"), count=4),
        Block("post", "post", "text", "post", OutputHead(8, 8, "rms"), trainable=False),
    )

    def list_whole(self, zero: int, reshard: bool = True, dp: int = 8) -> list[dict[str, float]]:
        strategy = Strategy(pp=1, tp=1, dp=dp, mbs=1, zero=zero, reshard=reshard)
        counts = [count_scattered(count, 0.0, strategy) for count in (30.0, 10.0, 50.0)]
        return [dict(held) for held in list_whole(self.BLOCKS, counts, WORKLOAD, strategy)]

    def test_weights_and_gradients(self) -> None:
        gathered = [2 * count for count in (30 + 10, 10 + 50, 50 + 10)]
        pre, layer, post = self.list_whole(3)
        assert [held["gathered weights"] for held in (pre, layer, post)] == gathered
        assert (pre["gradients being reduced"], layer["gradients being reduced"]) == (4 * 40, 4 * (10 + 30))
        assert "gradients being reduced" not in post  # frozen
        assert [list(held) for held in self.list_whole(2)[:2]] == [["gradients being reduced"]] * 2

    def test_nothing_where_nothing_is_gathered(self) -> None:
        assert self.list_whole(1) == [{}, {}, {}]
        assert "gathered weights" not in self.list_whole(3, reshard=False)[0]
        assert set(self.list_whole(3, dp=1)[0].values()) == {0.0}


def test_bytes_per_parameter_are_the_workloads() -> None:
    workload = Workload(
        global_batch_size=64, seq_length=4096, weight_bytes=4.0, gradient_bytes=2.0, optimizer_bytes=10.0
    )
    assert static_bytes(1.0, True, workload, Strategy(pp=1, tp=1, dp=2, mbs=1)) == StaticBytes(4.0, 2.0, 10 / 2, 8 / 2)


@pytest.mark.parametrize(("ep", "etp", "num_copies"), [(1, 0, 8), (4, 1, 4), (8, 1, 2), (2, 2, 4)])
def test_experts_shard_over_the_ranks_that_hold_the_same_part(ep: int, etp: int, num_copies: int) -> None:
    """dp · cp · tp ranks, of which ep · etp hold different experts or parts of them."""
    strategy = Strategy(pp=1, tp=2, dp=4, mbs=1, cp=2, ep=ep, etp=etp)
    found = static_bytes(100.0, True, WORKLOAD, strategy, expert_count=60.0)
    assert found.optimizer_bytes == pytest.approx(12 * (40 / 8 + 60 / num_copies))
    assert static_bytes(100.0, True, WORKLOAD, replace(strategy, zero=0), 60.0).optimizer_bytes == 1200.0
    all_sharded = static_bytes(100.0, True, WORKLOAD, replace(strategy, zero=3), 60.0)
    assert all_sharded.total_bytes == pytest.approx(18 * (40 / 8 + 60 / num_copies))


@pytest.mark.parametrize("tp", [1, 4])
def test_a_tied_table_stands_twice_with_stages_and_once_without(tp: int) -> None:
    tied, untied = (OutputHead(32000, 2048, "rms", tied=tied) for tied in (True, False))
    own_count = float(count_parameters(tied, tp))
    for pp, expected in ((1, own_count), (2, float(count_parameters(untied, tp)))):
        block = Block("text_post", "text_post", "text", "post", tied)
        assert count_held_parameters(block, own_count, Strategy(pp=pp, tp=tp, dp=1, mbs=1)) == expected


MOE = Experts(8, 2, FeedForward(1024), shared=FeedForward(512))


class TestLargestWeight:
    """Of one rank: TP divides tables and feed-forwards, ETP experts."""

    @pytest.mark.parametrize(
        ("structure", "tp", "expert_tp", "expected"),
        [
            (OutputHead(32000, 64, "rms"), 4, 4, 32000 * 64 / 4),
            (TransformerLayer(64, "rms", Attention(4, 4, 16), FeedForward(256)), 2, 2, 64 * 2 * 256 / 2),
            (TransformerLayer(64, "rms", Attention(4, 4, 16), FeedForward(256, gated=False)), 1, 1, 64 * 256),
            (TransformerLayer(64, "rms", Attention(4, 4, 16), MOE), 4, 1, 64 * 2 * 1024),
            (TransformerLayer(64, "rms", Attention(4, 4, 16), MOE), 1, 4, 64 * 2 * 512),
            (Projector(None, 0, 1, (64, 128), bias=False), 2, 2, 64 * 128 / 2),
        ],
    )
    def test_of_each_kind_of_block(self, structure: Structure, tp: int, expert_tp: int, expected: float) -> None:
        assert count_largest_weight(structure, tp, expert_tp) == expected


@pytest.mark.parametrize(("optimizer_bytes", "moment_bytes"), [(12.0, 8.0), (10.0, 8.0), (8.0, 4.0)])
def test_moments_are_what_the_first_step_makes(optimizer_bytes: float, moment_bytes: float) -> None:
    workload = Workload(global_batch_size=64, seq_length=4096, optimizer_bytes=optimizer_bytes)
    found = static_bytes(10.0, True, workload, Strategy(pp=1, tp=1, dp=2, mbs=1))
    assert (found.optimizer_bytes, found.moment_bytes) == (10 * optimizer_bytes / 2, 10 * moment_bytes / 2)


def test_an_optimizer_of_one_weight_after_the_other_holds_the_roots_of_one() -> None:
    """Of 8 million parameters on 8 ranks: 4 bytes of each shard, of all blocks together or of the largest alone."""
    sharded = Strategy(pp=1, tp=1, dp=8, mbs=1, zero=3)
    workload = Workload(global_batch_size=64, seq_length=4096, implementation="transformers")
    structure = TransformerLayer(64, "rms", Attention(4, 4, 16), FeedForward(256, gated=True))
    layer = Block("text_layer", "text_layer", "text", "layer", structure)
    assert step_bytes(layer, 8e6, 0.0, workload.run_by("fsdp"), sharded) == (4e6, 0.0)
    assert step_bytes(layer, 8e6, 0.0, workload.run_by("llm-foundry"), sharded) == (0.0, 4e6)
