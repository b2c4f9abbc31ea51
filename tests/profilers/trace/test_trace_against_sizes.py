"""What sizes alone say of transformers' layers (`implementation: transformers`) is what their code keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tracing_jobs import DOCUMENTS, SMALL, TEXT, WHOLE_DOCUMENTS, job_of, trace_job  # noqa: E402

from mm_autoparallel.model.blocks.expand import expand  # noqa: E402
from mm_autoparallel.model.costs.stage import block_costs  # noqa: E402
from mm_autoparallel.model.job.job import Job  # noqa: E402
from mm_autoparallel.model.job.strategy import Strategy  # noqa: E402

GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 64, "n_head": 4, "n_layer": 3}
"""Its class drops out a tenth unless its config.json says otherwise."""

_WIDE: dict[str, Any] = {
    **TEXT,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
}
WIDE: dict[str, dict[str, Any]] = {
    "llama": {**_WIDE, "model_type": "llama"},
    "qwen3_moe": {
        **_WIDE,
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
    },
    "deepseek_v3": {
        **_WIDE,
        **WHOLE_DOCUMENTS["deepseek_v3"],
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "n_routed_experts": 16,
        "moe_intermediate_size": 384,
    },
}
"""Wide enough for weight gradients and inner tensors to decide what passes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "mbs", "workload"),
    [
        pytest.param(1, 1, {}, marks=pytest.mark.nightly),
        pytest.param(1, 2, {"attention": "unfused"}, marks=pytest.mark.nightly),
        pytest.param(2, 1, {}, marks=pytest.mark.nightly),
        (2, 2, {"sequence_parallel": True}),
        pytest.param(2, 1, {"attention": "unfused", "sequence_parallel": True}, marks=pytest.mark.nightly),
    ],
)
def test_kept_bytes_agree(tp: int, mbs: int, workload: dict[str, Any]) -> None:
    job = job_of(SMALL, 160, implementation="transformers", **workload)
    entries = trace_job(SMALL, job, tp, mbs, recompute=False)
    costs = block_costs(job, Strategy(pp=1, tp=tp, dp=1, mbs=mbs))
    for kind, entry in entries.items():
        cost = costs[kind]
        assert cost.parameter_count == entry.parameter_count, kind
        assert cost.activation_bytes == pytest.approx(entry.activation_bytes, rel=0.01), kind
        if kind.endswith("_layer"):
            assert cost.checkpoint_bytes == pytest.approx(entry.checkpoint_bytes, rel=0.01), kind
            assert cost.output_bytes == entry.output_bytes, kind


def check_layers(document: dict[str, Any], job: Job) -> None:
    entries = trace_job(document, job, recompute=False)
    costs = block_costs(job, Strategy(pp=1, tp=1, dp=1, mbs=1))
    for block in (block for block in expand(job.model).blocks if block.role == "layer"):
        traced_bytes = entries[block.kind].activation_bytes
        assert costs[block.name].activation_bytes == pytest.approx(traced_bytes, rel=0.01), block.name


BY_DAY = ("qwen2_5_vl", "llama", "qwen3_moe", "deepseek_v3")
"""Families that are compared by day, one of each kind; the others by night."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly)
        for name in DOCUMENTS | WHOLE_DOCUMENTS
        if name != "qwen2_vl"
    ],
)
def test_layers_of_every_family_agree(model_type: str) -> None:
    document = copy.deepcopy((DOCUMENTS | WHOLE_DOCUMENTS)[model_type])
    check_layers(document, job_of(document, 64, implementation="transformers"))


def test_layers_with_dropout_agree() -> None:
    check_layers(GPT2, job_of(GPT2, 64, implementation="transformers", hidden_dropout=True, attention_dropout=True))


@pytest.mark.parametrize("stated", [{}, {"cross_entropy": "fused"}, {"stack": "mindspeed"}])
def test_implementation_decides_what_is_not_stated(stated: dict[str, Any]) -> None:
    workload = job_of(SMALL, 160, implementation="transformers", **stated).workload
    assert workload.cross_entropy == stated.get("cross_entropy", "transformers")
    assert workload.stack == stated.get("stack", "transformers")


@pytest.mark.nightly
def test_latent_attention_divided_by_heads_keeps_what_its_sizes_say() -> None:
    """Compressed vectors are whole on every rank: what sizes miss of one device they miss of each of two."""
    document = WHOLE_DOCUMENTS["deepseek_v3"]
    missed_bytes: dict[tuple[int, bool], list[float]] = {}
    for tp, divided in ((1, False), (2, False), (2, True)):
        job = job_of(document, 512, implementation="transformers", sequence_parallel=divided)
        entries = trace_job(document, job, tp, recompute=False)
        costs = block_costs(job, Strategy(pp=1, tp=tp, dp=1, mbs=1))
        layers = [block for block in expand(job.model).blocks if block.role == "layer"]
        missed_bytes[tp, divided] = [
            entries[block.kind].activation_bytes - costs[block.name].activation_bytes for block in layers
        ]
        gathered = {
            sum(one.moved_bytes * one.num_calls for one in entries[block.kind].operators if one.name == "all_gather")
            for block in layers
        }
        assert (gathered != {0}) == divided
    assert missed_bytes[2, False] == missed_bytes[1, False]
    # keys' norm sees the other rank's tokens too: their fp32 copies, and a number each
    other_bytes = 256 * 4 * (document["kv_lora_rank"] + 1)
    assert missed_bytes[2, True] == [missed + other_bytes for missed in missed_bytes[1, False]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "workload"),
    [
        pytest.param("qwen2_vl", 1, {}, marks=pytest.mark.nightly),
        ("qwen2_vl", 2, {"sequence_parallel": True}),
        pytest.param("llama", 1, {}, marks=pytest.mark.nightly),
        pytest.param("llama", 2, {}, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", 1, {}, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", 2, {}, marks=pytest.mark.nightly),
        ("qwen3_moe", 2, {"sequence_parallel": True}),
        pytest.param("deepseek_v3", 1, {}, marks=pytest.mark.nightly),
    ],
)
def test_working_sets_of_layers_and_of_the_loss_agree(name: str, tp: int, workload: dict[str, Any]) -> None:
    """A traced backward begins with the gradient of its output, which it does not count; sizes alone count it."""
    document = SMALL if name == "qwen2_vl" else WIDE[name]
    job = job_of(document, 512, implementation="transformers", **workload)
    entries = trace_job(document, job, tp, recompute=False)
    costs = block_costs(job, Strategy(pp=1, tp=tp, dp=1, mbs=1))
    for block in expand(job.model).blocks:
        entry, cost = entries[block.kind], costs[block.name]
        if block.role == "layer":
            assert entry.output_bytes
            assert entry.backward_transient_bytes >= entry.forward_transient_bytes
            traced_bytes = entry.backward_transient_bytes + entry.output_bytes
            assert cost.transient_bytes == pytest.approx(traced_bytes, rel=0.01), block.name
        elif block.kind == "text_post":
            assert cost.transient_bytes == pytest.approx(entry.transient_bytes, rel=0.02)
