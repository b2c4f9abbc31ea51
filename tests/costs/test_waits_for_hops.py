"""Stacks whose compute stands still while they send and receive: one tensor after the other, or both at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.measurements.gpt import gpt_model
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.problem import Problem

UNKNOWN = assume_calibration("a100-80g")


def build(pp: int, vpp: int = 1, **facts: Any) -> Problem:
    document = {
        "model": gpt_model("GPT", 4096, 32, 16, 2048, 51200),
        "cluster": {"num_nodes": 4, "devices_per_node": 8, "device": "a100-80g"},
        "workload": {"global_batch_size": 64, "seq_length": 2048, "facts": facts},
    }
    job = parse_job(document, Path("job.yaml"))
    return build_problem(CostModel(job, UNKNOWN), Strategy(pp=pp, tp=1, dp=32 // pp, mbs=1, vpp=vpp))


@pytest.mark.parametrize(
    ("fact", "pp", "hops_a_pass"),
    [
        ("waits_for_hops", 2, 1),
        ("waits_for_hops", 4, 2),
        ("waits_for_hops", 8, 2),
        ("exchanges_hops", 2, 0.5),
        ("exchanges_hops", 8, 1),
    ],
)
def test_a_stage_stands_still_for_each_hop_in_each_pass(fact: str, pp: int, hops_a_pass: float) -> None:
    beside, before = build(pp), build(pp, **{fact: True})
    (start_ms, *_), (ms_per_byte, *_) = beside.p2p_ms, beside.p2p_ms_per_byte
    hop_ms = sum(beside.p2p_ms) / len(beside.p2p_ms)
    hop_ms += sum(beside.p2p_ms_per_byte) / len(beside.p2p_ms) * 2 * 2048 * 4096
    assert start_ms > 0 < ms_per_byte
    layers, waiting = beside.chain[1], before.chain[1]
    assert waiting.forward_ms - layers.forward_ms == pytest.approx(hops_a_pass * hop_ms * pp / 16, rel=1e-6)
    assert waiting.backward_ms - layers.backward_ms == pytest.approx(hops_a_pass * hop_ms * pp / 16, rel=1e-6)
    # and the order of work does not wait for them once more
    assert not any(before.p2p_ms + before.p2p_ms_per_byte)


def test_a_stack_that_does_not_wait_stays_as_it_is() -> None:
    assert build(4) == build(4, waits_for_hops=False, exchanges_hops=False)
    assert build(1) == build(1, waits_for_hops=True, exchanges_hops=True)


def test_chunks_move_their_hops_beside_compute() -> None:
    assert build(4, vpp=2) == build(4, vpp=2, exchanges_hops=True)
