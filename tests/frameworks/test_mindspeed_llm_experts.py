"""Experts in MindSpeed-LLM's launch scripts: DeepSpeed's layer with its flags, and what of them no job says."""

from __future__ import annotations

from pathlib import Path

import pytest
from featured_plans import PLANS

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import ImportResult, import_launch
from mm_autoparallel.errors import PlannerError

SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \\
    --transformer-impl local \\
    --use-legacy-models \\
    --num-layers 8 \\
    --hidden-size 4096 \\
    --ffn-hidden-size 8192 \\
    --num-attention-heads 32 \\
    --vocab-size 32000 \\
    --seq-length 4096 \\
    --tensor-model-parallel-size 2 \\
    --expert-model-parallel-size 4 \\
    --num-experts 8 \\
    --moe-router-topk 2 \\
    --moe-model-type deepspeed_moe \\
    --sequence-parallel \\
    --micro-batch-size 1 \\
    --global-batch-size 16 \\
    --hidden-dropout 0.0 \\
    --attention-dropout 0.0 \\
    --swiglu \\
    --disable-bias-linear \\
    --normalization RMSNorm \\
    --bf16
"""
KIND, LEGACY = "--moe-model-type deepspeed_moe", "    --use-legacy-models \\\n"


def found(tmp_path: Path, new: str = "", old: str = "") -> ImportResult:
    """`SCRIPT` imported with `new` in the place of `old`, or added."""
    path = tmp_path / "pretrain_llm.sh"
    path.write_text(SCRIPT.replace(old, new) if old else SCRIPT.replace("--bf16", f"--bf16 \\\n    {new}"))
    return import_launch(path, device="ascend-910b-64g")


def test_its_layer_is_the_workloads(tmp_path: Path) -> None:
    plain = found(tmp_path, "--noisy-gate-policy RSample --no-use-rts")
    assert plain.framework == "mindspeed-llm"
    workload = plain.job.workload
    assert (workload.ep_kind, workload.token_rearrange, workload.expert_capacity_factor) == ("deepspeed", False, 1.0)
    strategy = plain.estimate.plan.strategy
    assert (strategy.ep, strategy.expert_tp, strategy.dp) == (4, 2, 8)
    more = found(tmp_path, "--enable-token-rearrange-opt --moe-train-capacity-factor 1.5").job.workload
    assert (more.token_rearrange, more.expert_capacity_factor) == (True, 1.5)
    megatron = found(tmp_path, "--moe-model-type megatron_moe", KIND).job.workload
    assert (megatron.ep_kind, megatron.expert_capacity_factor) == ("megatron", 1.0)


def test_every_flag_of_it_changes_what_a_step_takes(tmp_path: Path) -> None:
    def figures(new: str = "", old: str = "") -> tuple[float, float]:
        estimate = found(tmp_path, new, old).estimate
        return estimate.step_ms, max(estimate.peak_memory_bytes)

    plain = figures()
    wide, narrow, fewer = (
        figures(flags)
        for flags in ("--moe-train-capacity-factor 2", "--enable-token-rearrange-opt", "--expert-interval 2")
    )
    assert all(more > own for more, own in zip(wide, plain, strict=True))
    assert all(less < own for less, own in zip(narrow, plain, strict=True))
    assert all(less < own for less, own in zip(fewer, plain, strict=True))


def test_every_other_layer_has_experts_from_the_second_on(tmp_path: Path) -> None:
    model = found(tmp_path, "--expert-interval 3").job.model
    experts = model.text.layers.experts
    assert experts is not None
    assert experts.dense_layers == (0, 1, 3, 4, 6, 7)


def test_sequences_are_shared_by_heads_where_nothing_is_said(tmp_path: Path) -> None:
    """The default of releases that have this layer; of those that have it no more, it is the ring."""
    context = "--context-parallel-size 2"
    workload = found(tmp_path, context).job.workload
    assert (workload.context_parallel, workload.known_facts.repeated_groups) == ("all_to_all", "always")
    ring = found(tmp_path, f"{context} --context-parallel-algo megatron_cp_algo").job.workload
    assert ring.context_parallel == "ring"


def test_an_exchange_in_parts_is_told(tmp_path: Path) -> None:
    parts = "--use-pipe-experts --pipe-experts-multi-data 4 --pipe-experts-multi-stream"
    notes = found(tmp_path, parts).notes
    assert any(note.startswith("--use-pipe-experts computes experts beside") for note in notes)


@pytest.mark.parametrize(
    ("new", "old", "told"),
    [
        ("", LEGACY, "deepspeed_moe needs --use-legacy-models, as MindSpeed's parser says"),
        ("--moe-model-type tutel", KIND, "--moe-model-type is tutel; deepspeed_moe or megatron_moe is expected"),
        ("--moe-no-drop", "", "--moe-no-drop gives each expert room for the fullest one's tokens"),
        ("--moe-no-drop", KIND, "--moe-no-drop is of DeepSpeed's layer with experts"),
        ("--enable-token-rearrange-opt", KIND, "--enable-token-rearrange-opt is of DeepSpeed's layer with experts"),
        ("--moe-router-topk 3", "--moe-router-topk 2", "sends a token to one or two experts"),
        ("--moe-train-capacity-factor 0", "", "--moe-train-capacity-factor is '0'; a number above 0"),
        ("--use-nanopipe", "", "--use-nanopipe parts backwards in an order of its own"),
        ("--enable-zero3", "", "--enable-zero3 shards weights"),
        ("--ampipe-degree 2", "", "--ampipe-degree runs attention and experts of parts"),
    ],
)
def test_what_no_job_says_is_named(new: str, old: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=told):
        found(tmp_path, new, old)


def test_no_plan_is_written_into_its_script(tmp_path: Path) -> None:
    """Its parser lacks flags that plans are written in, and without a job nobody else would notice."""
    path = tmp_path / "pretrain_llm.sh"
    path.write_text(SCRIPT)
    with pytest.raises(PlannerError, match="its experts run in DeepSpeed's layer"):
        export_plan(PLANS["experts"], None, "mindspeed-llm", into=(path,))
    assert path.read_text() == SCRIPT
