"""Problems of models without a class: GPT with learned positions, experts dealt to ranks, prediction modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import block_costs, build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import calibration_of
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.problem import ChainBlock
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan

GPT: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 1024,
    "padded_vocab_size": 51200,
}
EXPERTS = GPT | {
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "num_experts": 16,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "moe_layer_freq": "([0]*1+[1]*7)",
}
PER_PARAMETER_BYTES = 2 + 4 + 12


def make_job(model: dict[str, Any], **workload: Any) -> Job:
    content = {
        "model": model,
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": "a100-80g"},
        "workload": {"global_batch_size": 16, "seq_length": 1024} | workload,
    }
    return parse_job(content, Path("job.yaml"))


def blocks_of(job: Job, **sizes: int) -> dict[str, ChainBlock]:
    strategy = Strategy(**({"pp": 1, "tp": 1, "dp": 1, "mbs": 1, "zero": 0} | sizes))
    return {block.name: block for block in build_problem(job, strategy).chain}


def test_a_tied_head_copies_words_and_no_positions() -> None:
    blocks = blocks_of(make_job(GPT), pp=2)
    assert blocks["text_pre"].static_bytes == PER_PARAMETER_BYTES * (51200 + 1024) * 512
    assert blocks["text_post"].static_bytes == PER_PARAMETER_BYTES * (51200 + 2) * 512
    assert blocks_of(make_job(GPT))["text_post"].static_bytes == PER_PARAMETER_BYTES * 2 * 512


def test_prediction_modules_share_one_copy_of_the_embedding() -> None:
    job = make_job(EXPERTS | {"mtp_num_layers": 2})
    alone, apart = (blocks_of(job, pp=pp)["text_mtp"] for pp in (1, 2))
    assert apart.count == 2
    assert 2 * (apart.static_bytes - alone.static_bytes) == PER_PARAMETER_BYTES * 51200 * 512


def test_a_plan_with_prediction_modules_runs_them_on_the_last_stage() -> None:
    plain, more = (make_job(EXPERTS | {"mtp_num_layers": count}) for count in (0, 1))
    plan = Plan(Strategy(pp=2, tp=1, dp=1, mbs=1), {"text": (4, 4)}, {"text": (0, 0)}, 16)
    before, after = (evaluate(job, plan).peak_memory_bytes for job in (plain, more))
    assert after[0] == before[0]
    assert after[1] > before[1] + PER_PARAMETER_BYTES * 51200 * 512


@pytest.mark.parametrize(("ep", "etp", "tp"), [(4, 0, 1), (8, 0, 1), (4, 1, 2)])
def test_experts_are_dealt_and_their_optimizer_with_them(ep: int, etp: int, tp: int) -> None:
    """Whatever divides them: an expert's optimizer state is somewhere once, and all else's too."""
    job, ranks = make_job(EXPERTS), 8 // tp
    sizes = {"tp": tp, "dp": ranks, "zero": 1}
    whole, dealt = (blocks_of(job, **sizes, **extra)["text_expert_layer"] for extra in ({}, {"ep": ep, "etp": etp}))
    expert_count = 16 * 3 * 512 * 256
    held = expert_count / tp - expert_count / (ep * (etp or tp))
    assert whole.static_bytes - dealt.static_bytes == pytest.approx(6 * held)


def test_tokens_sent_to_their_experts_take_time() -> None:
    job = make_job(EXPERTS)
    alone, dealt = (block_costs(job, Strategy(pp=1, tp=1, dp=8, mbs=1, ep=ep))["text_expert_layer"] for ep in (1, 8))
    assert dealt.forward_ms > alone.forward_ms
    assert dealt.activation_bytes == alone.activation_bytes


def test_selective_recompute_trades_bytes_for_time() -> None:
    dropped = {"attention": "unfused", "hidden_dropout": True, "attention_dropout": True}
    kept, again = (
        blocks_of(make_job(GPT, **dropped, recompute_operators=names))["text_layer"] for names in ([], ["core_attn"])
    )
    assert kept.activation_bytes - again.activation_bytes == 5 * 8 * 1024**2
    assert again.backward_ms > kept.backward_ms
    assert again.forward_ms == kept.forward_ms
    for block in (kept, again):
        assert block.recompute is not None
    # recomputed whole, both run their forward once more and no more
    both = [block.backward_ms + block.recompute.extra_backward_ms for block in (kept, again) if block.recompute]
    assert both[0] == pytest.approx(both[1])


def test_without_sequence_parallelism_boundaries_are_whole() -> None:
    divided, whole = (blocks_of(make_job(GPT, sequence_parallel=flag), tp=4)["text_layer"] for flag in (True, False))
    assert divided.recompute is not None
    assert whole.recompute is not None
    assert whole.recompute.activation_bytes == 4 * divided.recompute.activation_bytes == 2 * 1024 * 512


def test_layers_with_experts_have_a_host_of_their_own() -> None:
    job = make_job(EXPERTS)
    own = calibration_of(job)
    figures = own.figures.model_copy(update={"layer_launch_ms": 50.0, "expert_launch_ms": 200.0})
    found = build_problem(
        CostModel(job, own.model_copy(update={"figures": figures})), Strategy(pp=1, tp=1, dp=1, mbs=1)
    )
    assert {block.name: block.forward_ms for block in found.chain if block.layer} == {
        "text_dense_layer": 50.0,
        "text_expert_layer": 200.0,
    }
