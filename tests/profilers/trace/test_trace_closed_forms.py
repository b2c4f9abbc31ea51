"""Traces at full size against what is known of a model without them: parameters, FLOPs, collectives, what is kept."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tracing_jobs import DOCUMENTS, job_of, trace_job  # noqa: E402

from mm_autoparallel.cli.profile import read_huggingface_job  # noqa: E402
from mm_autoparallel.model.blocks.expand import expand  # noqa: E402
from mm_autoparallel.model.blocks.parameters import count_chain_parameters, count_parameters  # noqa: E402
from mm_autoparallel.model.blocks.tokens import count_tokens  # noqa: E402
from mm_autoparallel.model.job.job import Job  # noqa: E402
from mm_autoparallel.model.job.strategy import Strategy  # noqa: E402
from mm_autoparallel.model.operators.ends import list_operators  # noqa: E402
from mm_autoparallel.model.operators.operators import form_share  # noqa: E402
from mm_autoparallel.model.profiles.store import stale_software  # noqa: E402
from mm_autoparallel.model.profiles.traced import SHIPPED, TracedEntry, read_traces  # noqa: E402
from mm_autoparallel.profilers.device import software_versions  # noqa: E402
from mm_autoparallel.profilers.huggingface import make_subject  # noqa: E402
from mm_autoparallel.profilers.trace.run import Configuration, trace_configuration  # noqa: E402

TEXT_SIZES = {
    "2b": (1536, 8960, 28, 12, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
    "72b": (8192, 29568, 80, 64, 8, 152064),
}
TEXT_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
PUBLISHED = {"2b": 2_208_985_600, "7b": 8_291_375_616, "72b": 73_405_560_320}
"""metadata.total_size of model.safetensors.index.json of Qwen/Qwen2-VL-{2B,7B,72B}-Instruct, over 2 bytes."""


def qwen2_vl(size: str) -> dict[str, Any]:
    """The sizes of Qwen/Qwen2-VL-*-Instruct/config.json."""
    text = dict(zip(TEXT_KEYS, TEXT_SIZES[size], strict=True))
    vision = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": text["hidden_size"]}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    return {
        **text,
        "model_type": "qwen2_vl",
        "tie_word_embeddings": size == "2b",
        "rope_parameters": rope,
        "vision_config": {**vision, "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    }


@cache
def traced(size: str, tp: int = 1, sequence_parallel: bool = False) -> tuple[Job, dict[str, TracedEntry]]:
    document = qwen2_vl(size)
    job = job_of(document, 4096, images=32, sequence_parallel=sequence_parallel)
    return job, trace_job(document, job, tp, recompute=False)


@pytest.mark.slow
def test_traced_parameters_and_flops_of_the_7b() -> None:
    """In one test, which traces once."""
    hold_parameters("7b")
    hold_flops("7b", 1)


@pytest.mark.nightly
@pytest.mark.slow
def test_traced_parameters_and_flops_of_other_sizes() -> None:
    hold_parameters("2b")
    hold_parameters("72b")
    hold_flops("72b", 2)


def hold_parameters(size: str) -> None:
    """Traced parameters are all that there are."""
    job, entries = traced(size)
    chain = expand(job.model)
    for block in chain.blocks:
        assert entries[block.kind].parameter_count == count_parameters(block.structure), block.kind
        assert entries[block.kind].parameter_bytes == 2 * count_parameters(block.structure)
    total = sum(block.count * entries[block.kind].parameter_count for block in chain.blocks)
    assert total == count_chain_parameters(chain) == PUBLISHED[size]


def hold_flops(size: str, tp: int) -> None:
    """Traced FLOPs are those of the sizes."""
    job, entries = traced(size, tp)
    tokens = {modality.name: count_tokens(modality, job.workload) for modality in job.model.modalities}
    share = form_share(Strategy(pp=1, tp=tp, dp=1, mbs=1), job.workload, statistics_bytes=4.0)
    for block in expand(job.model).blocks:
        entry, operators = entries[block.kind], list_operators(block.structure, tokens[block.modality], share)
        # this plan leaves the projector whole on every rank
        whole = tp if block.kind == "vision_post" else 1
        flops = whole * sum(product.flops for product in operators.products)
        assert entry.flops("forward", "matrix_product") == flops, block.kind
        assert entry.flops("backward_weight", "matrix_product") == flops
        assert entry.flops("backward_input", "matrix_product") == (0 if block.kind == "vision_pre" else flops)
        if operators.attention:
            assert entry.flops("forward", "attention") == operators.attention.forward_flops
            assert entry.flops("backward_input", "attention") == operators.attention.backward_flops


def collectives(entry: TracedEntry, phase: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in entry.operators:
        if one.kind == "collective" and one.phase == phase:
            found.setdefault(one.name, []).extend([one.moved_bytes] * one.num_calls)
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_a_divided_layer_sums_its_state_twice_each_way() -> None:
    _, entries = traced("7b", 2)
    state_bytes = 2 * 4096 * 3584
    for phase in ("forward", "backward_input"):
        assert collectives(entries["text_layer"], phase) == {"all_reduce": [state_bytes] * 2}
    assert collectives(entries["text_layer"], "backward_weight") == {}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_divided_sequence_is_gathered_and_scattered_twice_each_way() -> None:
    _, entries = traced("7b", 2, sequence_parallel=True)
    twice = [2 * 4096 * 3584] * 2
    for phase in ("forward", "backward_input"):
        assert collectives(entries["text_layer"], phase) == {"all_gather": twice, "reduce_scatter": twice}
    assert entries["text_layer"].checkpoint_bytes == entries["text_layer"].output_bytes == 4096 * 3584


def test_a_layer_of_llama_keeps_what_its_code_says() -> None:
    """transformers/models/llama/modeling_llama.py, read line by line; e bytes a number, n tokens of width h."""
    n, h, f, heads, groups, d, e = 64, 64, 160, 4, 2, 16, 2
    norm = 4 * n * h + 4 * n + e * n * h + e * n * h  # fp32 state, fp32 1/rms, bf16 normed, its product with the weight
    attention = e * n * (heads + 2 * groups) * d + e * n * heads * d + 4 * n * heads  # q, k, v, output, log-sum-exp
    feed_forward = 4 * e * n * f  # gate, its SiLU, up, their product
    entry = trace_job(DOCUMENTS["llama"], job_of(DOCUMENTS["llama"], n))["text_layer"]
    assert entry.activation_bytes == 2 * norm + attention + feed_forward
    assert entry.checkpoint_bytes == entry.output_bytes == e * n * h


def test_a_recomputed_layer_runs_again_what_its_backward_needs() -> None:
    """The last product of a layer is not run again: nothing of the backward needs its output."""
    entry = trace_job(DOCUMENTS["llama"], job_of(DOCUMENTS["llama"], 64))["text_layer"]
    last_flops = 2 * 64 * 160 * 64
    forward_flops = entry.flops("forward", "matrix_product")
    assert entry.flops("recompute", "matrix_product") == forward_flops - last_flops
    assert entry.flops("recompute", "attention") == entry.flops("forward", "attention")
    assert entry.recompute_transient_bytes is not None
    assert entry.recompute_transient_bytes > entry.activation_bytes - entry.checkpoint_bytes


@pytest.mark.nightly
@pytest.mark.slow
def test_more_samples_are_more_of_the_same() -> None:
    job = job_of(DOCUMENTS["llama"], 64)
    one, three = (trace_job(DOCUMENTS["llama"], job, mbs=mbs)["text_layer"] for mbs in (1, 3))
    assert three.activation_bytes == 3 * one.activation_bytes
    assert three.flops("backward_weight", "matrix_product") == 3 * one.flops("backward_weight", "matrix_product")
    assert three.parameter_bytes == three.gradient_bytes == one.parameter_bytes


def test_the_example_of_72b_has_these_sizes(repository: Path) -> None:
    document = json.loads((repository / "examples/qwen2vl_72b_h200/config.json").read_text(encoding="utf-8"))
    assert job_of(document, 4096, images=32).model.text == job_of(qwen2_vl("72b"), 4096, images=32).model.text


@pytest.mark.slow
def test_what_is_shipped_is_what_is_traced_now(repository: Path) -> None:
    """Where it is not: `mm-autoparallel trace` on the examples, and their folders into subgraph_profiles/shipped."""
    path = repository / "examples/qwen2vl_7b_h200/job.yaml"
    job, document, config = read_huggingface_job(path)
    traces = (trace for _, trace in read_traces([Path(SHIPPED)], job.model, job.workload))
    shipped = next(trace for trace in traces if (trace.entries[0].tp, trace.entries[0].mbs) == (2, 1))
    subject = make_subject(document, job.model, job.workload, config)
    found = trace_configuration(subject, job, Configuration(2, 1, job.workload), recompute=True)
    if stale_software(shipped.software, software_versions()):
        pytest.skip(f"shipped traces are of {shipped.software}")
    assert tuple(found) == shipped.entries
