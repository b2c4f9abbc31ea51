"""Facts of a run that contradict its model, precision, attention or stack: refused with the rule, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job

LAYERS = {"num_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 16, "norm": "rms"}
ROUTED = LAYERS | {"experts": {"num_experts": 8, "top_k": 2, "ffn_size": 512}}
LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}


def document(
    layers: dict[str, Any] = LAYERS, device: str = "h100-80g", per_node: int = 8, **parts: Any
) -> dict[str, Any]:
    search = {"pp": [1], "tp": [1], "mbs": [1]} | parts.pop("search", {})
    return {
        "model": {"text": {"vocab_size": 32000, "layers": layers}},
        "cluster": {"num_nodes": 1, "devices_per_node": per_node, "device": device},
        "workload": {"global_batch_size": 16, "seq_length": 1024, **parts},
        "search": search,
    }


def job_of(layers: dict[str, Any] = LAYERS, **parts: Any) -> Job:
    return parse_job(document(layers, **parts), Path("job.yaml"))


@pytest.mark.parametrize(
    ("layers", "parts", "words"),
    [
        (LAYERS, {"facts": {"drops_tokens": True}}, "facts.drops_tokens is of layers with experts, and the model"),
        (LAYERS, {"facts": {"grouped_activation": True}}, "facts.grouped_activation is of layers with experts"),
        (
            ROUTED,
            {"facts": {"joined_heads": True}},
            "facts.joined_heads is of latent attention, and the model has none",
        ),
        (ROUTED, {"overlap_all_to_all": "shared_experts"}, "shared_experts, and the model has no shared expert"),
        (
            LAYERS,
            {"facts": {"attention": "torch"}},
            "attention is torch, which keeps whole scores",
        ),
        (
            LAYERS,
            {"facts": {"attention": "flash-2"}, "attention": "unfused"},
            "facts.attention is flash-2, which keeps no scores, and attention is unfused",
        ),
        (
            LAYERS,
            {"facts": {"fp8_attention": True}, "attention": "unfused", "precision": "fp8_current"},
            "facts.fp8_attention is of a fused kernel",
        ),
        (LAYERS, {"facts": {"low_first_last": False}}, "facts.low_first_last is of products of low precision"),
        (LAYERS, {"facts": {"fused_casts": True}}, "facts.fused_casts is of products of low precision"),
        (
            LAYERS,
            {"facts": {"tp_overlap": "asynchronous"}, "stack": "megatron-te"},
            "tp_overlap is asynchronous, PyTorch's (stack transformers), and stack is megatron-te",
        ),
        (
            LAYERS,
            {"facts": {"tp_overlap": "user_buffers"}, "stack": "transformers"},
            "tp_overlap is user_buffers, TransformerEngine's (stack megatron-te), and stack is transformers",
        ),
        (
            ROUTED,
            {"search": {"dispatcher": ["alltoall", "deepep"]}, "stack": "mindspeed"},
            "search.dispatcher: disp",
        ),
        (
            ROUTED,
            {"search": {"graphs": ["none", "full"]}, "stack": "mindspeed"},
            "search.graphs: graphs full",
        ),
    ],
)
def test_a_recipe_whose_facts_contradict(layers: dict[str, Any], parts: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=r"^job file job\.yaml: ") as caught:
        job_of(layers, **parts)
    assert words in str(caught.value)


def test_what_goes_together_is_read() -> None:
    job_of(LAYERS, facts={"drops_tokens": False, "joined_heads": False, "fused_casts": False, "low_first_last": True})
    job_of(LAYERS | {"latent": LATENT}, facts={"joined_heads": True})
    job_of(ROUTED, facts={"drops_tokens": True, "grouped_activation": True, "dispatcher": "hybridep"})
    job_of(LAYERS, facts={"attention": "torch"}, attention="unfused")
    job_of(search={"precision": ["bf16", "fp8_current"]}, facts={"low_first_last": False, "fused_casts": True})
    job_of(facts={"tp_overlap": "asynchronous"})  # a job that names no stack may look at any


@pytest.mark.parametrize(
    ("content", "law"),
    [
        (document(precision="mxfp8"), "scales blocks of 32 numbers, and device h100-80g"),
        (document(precision="fp8_current", tower_precision="nvfp4"), "device h100-80g has no fp4_flops_per_s"),
        (document(precision="fp8_current", stack="mindspeed-mm"), "none that workload.stack mindspeed-mm runs"),
        (document(ROUTED, search={"ep": [3]}), "EP 3 does not divide the experts of text, 8"),
        (document(ROUTED, stack="mindspeed", facts={"dispatcher": "deepep"}), "is none of workload.stack mindspeed"),
        (document(ROUTED, stack="mindspeed", facts={"graphs": "full"}), "graphs full is no mode of workload.stack"),
        (document(facts={"dispatcher": "deepep"}), "deepep is of the exchange of tokens with their experts"),
        (document(facts={"grouped_activation": True}), "is of layers with experts, and the model has none"),
        (document(per_node=72), "a node of 72 devices is asked for, and the node link of h100-80g joins at most 8"),
    ],
)
def test_the_command_says_the_law_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, Any], law: str
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(content))
    assert main(["plan", str(path), "--out", str(tmp_path), "--time-limit", "20"]) == 2
    assert law in " ".join(capsys.readouterr().err.split())
    assert [one.name for one in tmp_path.iterdir()] == ["job.json"]
    assert json.loads(path.read_text()) == content
