"""The shipped jobs of models with experts: parameters, memory and exchanges by published sizes and formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.costs.stage import block_costs, build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import calibration_of
from mm_autoparallel.model.profiles.collectives import form_group
from mm_autoparallel.model.readers.job_file import read_job

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def deepseek() -> Job:
    return read_job(EXAMPLES / "deepseek_v3" / "job.yaml")


@pytest.fixture(scope="module")
def qwen3vl() -> Job:
    return read_job(EXAMPLES / "qwen3vl_30b_a3b" / "job.yaml")


def count_text(job: Job, *left_out: str) -> int:
    return sum(
        block.count * count_parameters(block.structure)
        for block in expand(job.model).blocks
        if block.modality == "text" and block.name not in left_out
    )


def test_deepseek_v3_has_671_billion_and_a_module(deepseek: Job) -> None:
    """arXiv:2412.19437, section 4.2: 671 B; the module is a layer and what joins two vectors."""
    assert count_text(deepseek, "text_mtp") == pytest.approx(671.0e9, rel=1e-4)
    layer, module = (
        next(block for block in expand(deepseek.model).blocks if block.name == name)
        for name in ("text_expert_layer", "text_mtp")
    )
    joining = 3 * 7168 + 2 * 7168 * 7168
    assert count_parameters(module.structure) == count_parameters(layer.structure) + joining


def test_qwen3_30b_a3b_has_30_and_a_half_billion(qwen3vl: Job) -> None:
    """Model card of Qwen/Qwen3-30B-A3B: 30.5 B, 29.9 B without embeddings."""
    assert count_text(qwen3vl) == pytest.approx(30.5e9, rel=2e-3)
    assert count_text(qwen3vl, "text_pre", "text_post") == pytest.approx(29.9e9, rel=1e-3)


@pytest.mark.parametrize(("ep", "zero"), [(1, 1), (8, 1), (64, 1), (8, 2), (8, 3)])
def test_bytes_of_an_expert_layer(deepseek: Job, ep: int, zero: int) -> None:
    """2 + 4 + 8 bytes (its moments are bf16), of which ZeRO divides more and more, experts among fewer ranks."""
    strategy = Strategy(pp=1, tp=1, dp=128, mbs=1, ep=ep, zero=zero)
    problem = build_problem(deepseek, strategy)
    layer = next(block for block in problem.chain if block.name == "text_expert_layer")
    expert_count = 256 * 3 * 7168 * 2048
    shared = 3 * 7168 * 2048 + 256 * 7168
    heads = 1536 * 7168 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512
    rest_count = shared + heads + 2 * 7168

    def held_bytes(count: float, num_ranks: int) -> float:
        whole_bytes = {1: 2 + 4, 2: 2, 3: 0}[zero]
        return count * (whole_bytes + (2 + 4 + 8 - whole_bytes) / num_ranks)

    assert layer.static_bytes == pytest.approx(held_bytes(rest_count, 128) + held_bytes(expert_count / ep, 128 // ep))


@pytest.mark.parametrize("ep", [8, 64])
def test_exchanges_of_an_expert_layer(deepseek: Job, ep: int) -> None:
    """Two all-to-alls each way of tokens · top_k · hidden · bytes · (ep − 1)/ep."""
    strategy = Strategy(pp=16, tp=1, dp=128, mbs=1, ep=ep, etp=1)
    open_workload = deepseek.workload.model_copy(update={"overlap_all_to_all": "none"})
    fast = tuple(
        level.model_copy(update={"bandwidth_bytes_per_s": 1e30, "latency_ms": 0.0}) for level in deepseek.cluster.levels
    )
    still_cluster = deepseek.cluster.model_copy(update={"levels": fast})
    hidden, bare, still = (
        block_costs(job, strategy)["text_expert_layer"]
        for job in (
            deepseek,
            replace(deepseek, workload=open_workload),
            replace(deepseek, workload=open_workload, cluster=still_cluster),
        )
    )
    group = form_group(calibration_of(deepseek).reached(deepseek.cluster).levels, ep, 1)
    assert group.exchange_bytes_per_s
    moved_bytes = 4096 * 8 * 7168 * 2 * (ep - 1) / ep
    assumed_ms = calibration_of(deepseek).figures.node_latency_ms or 0.0  # also where the cluster states none
    exchanges_ms = 2 * (moved_bytes / group.exchange_bytes_per_s * 1e3 + group.latency_ms - assumed_ms)
    assert bare.forward_ms - still.forward_ms == pytest.approx(exchanges_ms)
    assert bare.backward_input_ms - still.backward_input_ms == pytest.approx(exchanges_ms)
    assert 0 < bare.forward_ms - hidden.forward_ms <= exchanges_ms
    assert bare.activation_bytes == still.activation_bytes == hidden.activation_bytes


def test_layers_whose_exchanges_hide_behind_other_micro_batches_are_not_recomputed(deepseek: Job) -> None:
    workload = deepseek.workload.model_copy(update={"overlap_all_to_all": "micro_batches"})
    job = replace(deepseek, workload=workload)
    for ep, recomputable in ((1, True), (8, False)):
        strategy = Strategy(pp=16, tp=1, dp=128, mbs=1, ep=ep, etp=1, vpp=2)
        chain = build_problem(job, strategy).chain
        assert all((block.recompute is not None) is recomputable for block in chain if block.layer)
