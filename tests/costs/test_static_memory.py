"""Static bytes per parameter, by what trains, what ZeRO shards and where a tied table stands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mm_autoparallel.blocks.chain import (
    Attention,
    Block,
    Experts,
    FeedForward,
    OutputHead,
    Projector,
    Structure,
    TransformerLayer,
)
from mm_autoparallel.blocks.parameters import count_parameters
from mm_autoparallel.costs.memory import StaticBytes, count_held_parameters, count_largest_weight, static_bytes
from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.job.workload import Workload

WORKLOAD = Workload(global_batch_size=64, seq_length=4096)


@pytest.mark.parametrize(
    ("zero", "dp", "cp", "expected"),
    [(0, 1, 1, 18), (0, 8, 2, 18), (1, 1, 1, 18), (1, 8, 1, 6 + 12 / 8), (1, 4, 2, 6 + 12 / 8)],
)
def test_bytes_of_a_parameter_that_trains(zero: int, dp: int, cp: int, expected: float) -> None:
    """2 + 4 + 12 and 2 + 4 + 12/z: ZeRO (arXiv:1910.02054), with gradients in fp32."""
    strategy = Strategy(pp=1, tp=1, dp=dp, mbs=1, cp=cp, zero=zero)
    assert static_bytes(1e6, True, WORKLOAD, strategy).total_bytes == pytest.approx(1e6 * expected)


def test_a_frozen_parameter_is_a_weight() -> None:
    assert static_bytes(1e6, False, WORKLOAD, Strategy(pp=1, tp=1, dp=8, mbs=1)) == StaticBytes(2e6, 0.0, 0.0)


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
