"""Which framework runs which ZeRO stage, kind of context parallelism and step on the host; what a job may ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.readers.job_file import parse_job

DENSE: dict[str, Any] = {
    "text": {
        "vocab_size": 1024,
        "layers": {
            "num_layers": 8,
            "hidden_size": 512,
            "ffn_size": 1024,
            "num_heads": 16,
            "num_kv_groups": 4,
            "norm": "rms",
        },
    }
}
ROUTED: dict[str, Any] = {
    "text": DENSE["text"]
    | {"layers": DENSE["text"]["layers"] | {"experts": {"num_experts": 8, "top_k": 2, "ffn_size": 256}}}
}


def make_job(model: dict[str, Any] = DENSE, search: dict[str, Any] | None = None, **workload: Any) -> Job:
    content = {
        "model": model,
        "cluster": {"num_nodes": 2, "devices_per_node": 8, "device": "a100-80g"},
        "workload": {"global_batch_size": 64, "seq_length": 4096} | workload,
        "search": search or {},
    }
    return parse_job(content, Path("job.yaml"))


def reason(model: dict[str, Any] = DENSE, workload: dict[str, Any] | None = None, **sizes: Any) -> str | None:
    given = workload or {}
    job = make_job(model, {"zero": [3]} if given.get("stack") == "mindspeed-fsdp" else None, **given)
    strategy = Strategy(**({"pp": 1, "tp": 1, "dp": 1, "mbs": 1} | sizes))
    return unlawful_reason(job.model, job.cluster, job.workload, strategy)


PIPELINE = {"pp": 2, "dp": 8}


@pytest.mark.parametrize(
    ("stack", "sizes", "words"),
    [
        ("megatron-te", {"zero": 2, "tp": 2, "cp": 2, "dp": 4}, None),
        ("megatron-local", {"zero": 3, "dp": 8}, None),
        (
            "megatron-te",
            {"zero": 2} | PIPELINE,
            "ZeRO 2 with PP 2: it is Megatron-FSDP, which is known to run with PP 1",
        ),
        ("transformers", {"zero": 2} | PIPELINE, None),
        ("megatron-te", {"zero": 3, "reshard": False, "dp": 8}, None),
        ("megatron-te", {"zero": 3, "reshard": False} | PIPELINE, "ZeRO 3 with reshard false with PP 2 and EP 1"),
        ("megatron-deepspeed", {"zero": 3, "dp": 8}, None),
        ("megatron-deepspeed", {"zero": 1} | PIPELINE, None),
        ("megatron-deepspeed", {"zero": 2} | PIPELINE, "ZeRO 2 with PP 2: DeepSpeed's pipeline engine runs ZeRO 0 and"),
        ("megatron-deepspeed", {"zero": 3, "reshard": False, "dp": 8}, "reshard false: DeepSpeed has no switch"),
        ("mindspeed", {"zero": 2, "dp": 8}, "ZeRO 2: MindSpeed has ZeRO 1"),
        ("mindspeed", {"zero": 3, "dp": 8, "reshard": False}, None),
        ("mindspeed", {"zero": 3} | PIPELINE, "ZeRO 3 with PP 2 and EP 1: it is torch FSDP2 there"),
        ("transformers", {"zero": 3, "reshard": False} | PIPELINE, None),
        ("transformers", {"zero": 2, "reshard": False, "dp": 8}, "weights are kept from forward to backward"),
        ("transformers", {"zero": 4}, "ZeRO 4 is not understood; known are 0, 1, 2, 3"),
        ("megatron-te", {"optimizer_offload": True, "dp": 8}, None),
        (
            "megatron-te",
            {"optimizer_offload": True, "dp": 8, "zero": 0},
            "the optimizer's states go to the host by shar",
        ),
        ("mindspeed", {"optimizer_offload": True, "dp": 8}, "MindSpeed has no step on the host"),
        ("mindspeed-fsdp", {"zero": 3, "dp": 8}, None),
        ("mindspeed-fsdp", {"zero": 3, "dp": 8, "cp": 2, "shard": 4, "reshard": False}, None),
        ("mindspeed-fsdp", {"zero": 1, "dp": 8}, "ZeRO 1: MindSpeed-MM's FSDP trainer shards weights too"),
        ("mindspeed-fsdp", {"zero": 3} | PIPELINE, "PP 2: MindSpeed-MM's FSDP trainer has no pipeline"),
        ("mindspeed-fsdp", {"zero": 3, "tp": 2, "dp": 8}, "TP 2: MindSpeed-MM's FSDP trainer has no tensor"),
        ("mindspeed-fsdp", {"zero": 3, "dp": 8, "optimizer_offload": True}, "MindSpeed-MM's FSDP trainer is planned"),
        (
            "mindspeed-fsdp",
            {"zero": 3, "dp": 8, "shard": 3},
            "shards of 3 ranks must be a multiple of CP 1 and divide the 8",
        ),
        ("mindspeed-fsdp", {"zero": 3, "dp": 4, "cp": 4, "shard": 2}, "shards of 2 ranks must be a multiple of CP 4"),
        ("transformers", {"zero": 3, "dp": 8, "shard": 4}, None),
        ("transformers", {"zero": 1, "dp": 8, "shard": 4}, "shards of 4 ranks are a choice of ZeRO 3 with PP 1"),
        ("transformers", {"zero": 3, "shard": 4} | PIPELINE, "shards of 4 ranks are a choice of ZeRO 3 with PP 1"),
        ("megatron-te", {"zero": 3, "dp": 8, "shard": 4}, "shards of 4 ranks are torch FSDP2's hybrid sharding"),
    ],
)
def test_what_a_framework_shards(stack: str, sizes: dict[str, Any], words: str | None) -> None:
    found = reason(workload={"stack": stack}, **sizes)
    assert found is None if words is None else str(found).startswith(words)


def test_experts_under_zero_3() -> None:
    dealt = {"dp": 8, "ep": 4, "zero": 3}
    assert reason(ROUTED, **dealt) is None
    assert reason(ROUTED, {"stack": "mindspeed-fsdp"}, **dealt) is None
    kept = dealt | {"reshard": False}
    assert str(reason(ROUTED, {"stack": "mindspeed-fsdp"}, **kept)).startswith("reshard false with EP 4 and 2 ranks")
    assert reason(ROUTED, {"stack": "mindspeed-fsdp"}, **kept | {"ep": 8}) is None
    for stack, words in (
        ("megatron-deepspeed", "ZeRO 3 with experts: DeepSpeed"),
        ("mindspeed", "ZeRO 3 with PP 1 and"),
    ):
        assert str(reason(ROUTED, {"stack": stack}, **dealt)).startswith(words)


def test_a_host_that_nobody_described_keeps_nothing() -> None:
    job = make_job()
    device = job.cluster.device.model_copy(update={"host_link_bytes_per_s": None})
    cluster = job.cluster.model_copy(update={"device": device})
    found = unlawful_reason(job.model, cluster, job.workload, Strategy(1, 1, 8, 1, optimizer_offload=True))
    assert "cluster.device.host_link_bytes_per_s of a100-80g is not known" in str(found)


@pytest.mark.parametrize(
    ("workload", "sizes", "words"),
    [
        ({}, {"cp": 4, "cp_kind": "all_to_all"}, None),
        ({}, {"cp": 8, "cp_kind": "ring"}, None),
        ({}, {"cp": 8, "cp_kind": "all_to_all"}, "CP 8 by all_to_all deals whole heads, and TP 1 x CP 8 does not"),
        ({}, {"cp": 4, "tp": 2, "cp_kind": "all_to_all"}, "CP 4 by all_to_all deals whole heads, and TP 2 x CP 4 does"),
        ({"context_parallel": "all_to_all"}, {"cp": 8}, "CP 8 by all_to_all deals whole heads"),
        ({"context_parallel": "all_to_all"}, {"cp": 8, "cp_kind": "ring"}, None),
        ({}, {"cp_kind": "ring"}, "CP by ring divides attention among context parallel ranks, and CP is 1"),
        ({}, {"cp": 2, "cp_kind": "ulysses"}, "CP by ulysses is not understood; known are ring, all_to_all"),
        ({"seq_length": 4098}, {"cp": 2, "cp_kind": "all_to_all"}, "seq_length 4098 is no multiple of 4, two pieces"),
        ({"seq_length": 4098, "stack": "mindspeed"}, {"cp": 2, "cp_kind": "all_to_all"}, None),
        ({"seq_length": 4098, "stack": "mindspeed"}, {"cp": 2}, "seq_length 4098 is no multiple of 4, two pieces"),
    ],
)
def test_context_parallelism_by_its_kind(workload: dict[str, Any], sizes: dict[str, Any], words: str | None) -> None:
    found = reason(workload=workload, **sizes)
    assert found is None if words is None else str(found).startswith(words)


def test_exchanges_behind_another_micro_batch_ask_for_chunks() -> None:
    behind = {"overlap_all_to_all": "micro_batches"}
    assert "several chunks a stage" in str(reason(ROUTED, behind, pp=2, dp=8, ep=4))
    assert reason(ROUTED, behind, pp=2, dp=8, ep=4, vpp=2) is None
    assert reason(ROUTED, behind, pp=2, dp=8) is None


@pytest.mark.parametrize(
    ("search", "workload", "words"),
    [
        ({"ep": [1, 4]}, {}, "search.ep is [1, 4], and the model has no experts"),
        ({"etp": [1]}, {}, "search.etp is [1], and the model has no experts"),
        (
            {"zero": [1, 2]},
            {"stack": "mindspeed"},
            "search.zero 2 cannot be run within the limits of search: ZeRO 2: Mind",
        ),
        ({"zero": [3], "pp": [2, 4]}, {"stack": "megatron-deepspeed"}, "search.zero 3 cannot be run within the limits"),
        ({"zero": [5]}, {}, "search.zero: ZeRO 5 is not understood; known are 0, 1, 2, 3"),
        ({"reshard": [True, False]}, {}, "search.reshard names false, which is a choice of ZeRO 3"),
        ({"shard": [0, 8]}, {}, "search.shard is [0, 8], which is a choice of ZeRO 3"),
        ({"optimizer_offload": [True], "zero": [0]}, {}, "search.optimizer_offload is true and cannot be run"),
        (
            {"cp_kind": ["ulysses"]},
            {},
            "search.cp_kind[0] is \"ulysses\"; one of 'ring', 'all_to_all', 'all_gather' or 'hierarchical' is expected",
        ),
        ({}, {"overlap_all_to_all": "all"}, 'workload.overlap_all_to_all is "all"'),
        ({}, {"expert_imbalance_factor": 0.5}, "workload.expert_imbalance_factor is 0.5; it must be at least 1"),
        ({}, {"expert_imbalance_factor": 1.5}, "workload.expert_imbalance_factor is 1.5, and the model has no experts"),
        ({}, {"fused_matmul_fraction": 2}, "workload.fused_matmul_fraction is 2; it must be at most 1"),
    ],
)
def test_what_no_strategy_could_meet_is_said_at_once(
    search: dict[str, Any], workload: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobError) as caught:
        make_job(search=search, **workload)
    assert words in str(caught.value)


def test_limits_that_some_strategies_meet_are_left_to_the_law() -> None:
    assert make_job(search={"zero": [1, 3]}, stack="megatron-deepspeed").search.zero == (1, 3)
    assert make_job(search={"zero": [1, 3], "reshard": [False]}, stack="transformers").search.reshard == (False,)


def test_newer_keys_count_where_they_say_something() -> None:
    plain = make_job()
    assert make_job(fused_matmul_fraction=0.0).sha256 == plain.sha256
    assert make_job(fused_matmul_fraction=0.5).sha256 != plain.sha256
    assert make_job(grad_bucket_parameters=40_000_000).sha256 != plain.sha256
