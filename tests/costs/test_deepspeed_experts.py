"""DeepSpeed's layer with experts (workload.ep_kind), with and without token rearrangement: its costs and its laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.stage import block_costs
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.search.planner import search

EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_size": 4096}
SIZES = {"num_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 16, "norm": "rms"}
TOKENS, COPIES, WIDTH = 4096, 2, 1024
DEALT = Strategy(pp=1, tp=1, dp=8, mbs=1, ep=8)


def job_of(experts: dict[str, Any] | None = EXPERTS, **said: Any) -> Job:
    layers = SIZES | ({"experts": experts} if experts else {})
    limits = {"pp": [1], "tp": [1, 2], "cp": [1], "mbs": [1], "ep": [8], "etp": [0, 1]} if experts else {}
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": layers}},
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": "ascend-910b-64g"},
        "workload": {"global_batch_size": 16, "seq_length": TOKENS, "stack": "mindspeed", **said},
        "search": limits,
    }
    return parse_job(document, Path("job.json"))


def layer(**said: Any) -> BlockCost:
    return next(cost for name, cost in block_costs(job_of(**said), DEALT).items() if "layer" in name)


def test_masks_are_products_and_memory_that_rearranged_tokens_spare() -> None:
    by_masks, rearranged = (layer(ep_kind="deepspeed", token_rearrange=value) for value in (False, True))
    mask_bytes = 2 * TOKENS * TOKENS * COPIES
    assert by_masks.activation_bytes - rearranged.activation_bytes == 2 * mask_bytes
    flops = 2 * 2 * TOKENS * (TOKENS * COPIES) * WIDTH
    slower_ms = by_masks.forward_ms - rearranged.forward_ms
    # at what the device reaches of its peak, without what the permute takes
    device = job_of().cluster.device
    assert 0.5 * flops / device.bf16_flops_per_s * 1e3 < slower_ms < 4 * flops / device.bf16_flops_per_s * 1e3
    assert by_masks.backward_weight_ms > rearranged.backward_weight_ms
    assert by_masks.parameter_count == rearranged.parameter_count == layer().parameter_count


def test_what_is_beyond_an_experts_share_is_dropped() -> None:
    even, uneven = (layer(ep_kind="deepspeed", expert_imbalance_factor=factor) for factor in (1.0, 3.0))
    assert even == uneven
    assert layer(expert_imbalance_factor=3.0).forward_ms > layer().forward_ms


def test_a_job_that_does_not_ask_keeps_its_hash_and_its_space() -> None:
    plain, asking = job_of(), job_of(ep_kind="deepspeed")
    assert plain.sha256 == job_of(ep_kind="megatron", token_rearrange=False).sha256
    assert plain.sha256 != asking.sha256
    whole = Strategy(pp=1, tp=2, dp=4, mbs=1, ep=8, etp=1)
    assert unlawful_reason(plain.model, plain.cluster, plain.workload, whole) is None
    reason = unlawful_reason(asking.model, asking.cluster, asking.workload, whole)
    assert reason is not None
    assert "ETP 1 beside TP 2: DeepSpeed's layer" in reason


def test_its_expert_groups_lie_in_replicas() -> None:
    """EP over DP · CP: experts divided by TP 2 leave 4 ranks of 8 to deal them to."""
    asking = job_of(ep_kind="deepspeed")
    reason = unlawful_reason(asking.model, asking.cluster, asking.workload, Strategy(pp=1, tp=2, dp=4, mbs=1, ep=8))
    assert reason is not None
    assert "EP 8 x ETP 2 = 16 does not divide the 8 ranks" in reason
    assert search(asking, num_workers=1).plan.strategy.expert_tp == 1


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"token_rearrange": True}, "token_rearrange is of DeepSpeed's layer with experts, and ep_kind is megatron"),
        ({"ep_kind": "deepspeed", "stack": "megatron-te"}, r"ep_kind deepspeed is MindSpeed's \(stack mindspeed\)"),
        ({"ep_kind": "deepspeed", "overlap_all_to_all": "micro_batches"}, "hides its exchange behind nothing"),
        ({"ep_kind": "deepspeed", "experts": None}, r"workload\.ep_kind is deepspeed, and the model has no experts"),
    ],
)
def test_elsewhere_they_are_refused_by_name(said: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        job_of(**said)
