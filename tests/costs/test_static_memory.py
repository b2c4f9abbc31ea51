"""Static bytes per parameter, by what trains, what ZeRO shards and where a tied table stands."""

from __future__ import annotations

import pytest

from mm_autoparallel.blocks.chain import Block, OutputHead
from mm_autoparallel.blocks.parameters import count_parameters
from mm_autoparallel.costs.memory import count_held_parameters, static_bytes
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
    assert static_bytes(1e6, True, WORKLOAD, strategy) == pytest.approx(1e6 * expected)


def test_a_frozen_parameter_is_a_weight() -> None:
    assert static_bytes(1e6, False, WORKLOAD, Strategy(pp=1, tp=1, dp=8, mbs=1)) == 2e6


def test_bytes_per_parameter_are_the_workloads() -> None:
    workload = Workload(
        global_batch_size=64, seq_length=4096, weight_bytes=4.0, gradient_bytes=2.0, optimizer_bytes=10.0
    )
    assert static_bytes(1.0, True, workload, Strategy(pp=1, tp=1, dp=2, mbs=1)) == 4 + 2 + 10 / 2


@pytest.mark.parametrize("tp", [1, 4])
def test_a_tied_table_stands_twice_with_stages_and_once_without(tp: int) -> None:
    tied, untied = (OutputHead(32000, 2048, "rms", tied=tied) for tied in (True, False))
    own_count = float(count_parameters(tied, tp))
    for pp, expected in ((1, own_count), (2, float(count_parameters(untied, tp)))):
        block = Block("text_post", "text_post", "text", "post", tied)
        assert count_held_parameters(block, own_count, Strategy(pp=pp, tp=tp, dp=1, mbs=1)) == expected
