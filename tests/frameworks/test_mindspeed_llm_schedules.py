"""DualPipeV and exchanges beside other micro-batches in MindSpeed-LLM's scripts: read, written, and read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import ImportResult, import_launch
from mm_autoparallel.api.linted import lint_files
from mm_autoparallel.errors import PlannerError

SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \\
    --use-mcore-models \\
    --transformer-impl local \\
    --use-flash-attn \\
    --num-layers 16 \\
    --hidden-size 8192 \\
    --ffn-hidden-size 8192 \\
    --num-attention-heads 64 \\
    --num-experts 8 \\
    --moe-router-topk 2 \\
    --moe-grouped-gemm \\
    --moe-token-dispatcher-type alltoall \\
    --vocab-size 32000 \\
    --untie-embeddings-and-output-weights \\
    --seq-length 4096 \\
    --pipeline-model-parallel-size 4 \\
    --expert-model-parallel-size 2 \\
    --expert-tensor-parallel-size 1 \\
    --schedules-method dualpipev \\
    --moe-fb-overlap \\
    --recompute-granularity full \\
    --recompute-method block \\
    --recompute-num-layers 1 \\
    --micro-batch-size 1 \\
    --global-batch-size 64 \\
    --hidden-dropout 0.0 \\
    --attention-dropout 0.0 \\
    --swiglu \\
    --disable-bias-linear \\
    --normalization RMSNorm \\
    --bf16
"""
METHOD, BESIDE = "--schedules-method dualpipev", "--moe-fb-overlap"
CHUNKS = "--num-layers-per-virtual-pipeline-stage 2"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "pretrain_llm.sh"


def found(script: Path, old: str = "", new: str = "") -> ImportResult:
    """`SCRIPT` imported with `new` in the place of `old`."""
    assert old in SCRIPT
    script.write_text(SCRIPT.replace(old, new) if old else SCRIPT)
    return import_launch(script, device="ascend-910b-64g")


def test_its_order_is_dualpipev_whose_last_backwards_are_whole(script: Path) -> None:
    whole = found(script)
    plan = whole.estimate.plan
    assert whole.framework == "mindspeed-llm"
    assert (plan.strategy.schedule, plan.strategy.vpp, plan.layers["text"]) == ("dualpipev_whole", 2, (2,) * 8)
    assert plan.recompute["text"] == (1,) * 8
    assert whole.job.workload.overlap_all_to_all == "micro_batches"
    parted = found(script, METHOD, f"{METHOD} --dualpipev-dw-detach")
    assert parted.estimate.plan.strategy.schedule == "dualpipev"
    assert parted.estimate.step_ms < whole.estimate.step_ms
    other = found(script, METHOD, CHUNKS)
    assert other.estimate.plan.strategy.schedule == "interleaved_1f1b"
    assert any(note.startswith(f"{BESIDE} runs one forward more ahead") for note in other.notes)


def test_layers_that_do_nothing_lie_where_the_v_ends(script: Path) -> None:
    """Chunks are numbered there and back, so that the last layers are those of the first stage's second chunk."""
    plan = found(script, "--num-layers 16", "--num-layers 16 --noop-layers 7,15").estimate.plan
    assert plan.layers["text"] == (2, 2, 2, 1, 2, 2, 2, 1)


def test_the_order_alone_leaves_the_exchange_in_the_open(script: Path) -> None:
    alone = found(script, f"    {BESIDE} \\\n")
    assert alone.job.workload.overlap_all_to_all == "none"
    assert alone.estimate.plan.strategy.schedule == "dualpipev_whole"
    assert any("runs pairs one after the other" in note for note in alone.notes)


def test_a_plan_goes_into_the_script_and_comes_back(script: Path) -> None:
    done = found(script)
    plan = replace(done.estimate.plan, recompute={"text": (2,) * 8})
    parted = replace(plan, strategy=replace(plan.strategy, schedule="dualpipev"))
    chunks = replace(plan, strategy=replace(plan.strategy, schedule="interleaved_1f1b"))
    for chosen, flags in ((plan, {METHOD}), (parted, {METHOD, "--dualpipev-dw-detach"}), (chunks, {CHUNKS})):
        script.write_text(SCRIPT)
        export_plan(chosen, done.job, "mindspeed-llm", into=(script,))
        text = script.read_text()
        assert {flag for flag in (METHOD, "--dualpipev-dw-detach", CHUNKS) if flag in text} == flags
        assert BESIDE in text
        again = import_launch(script, device="ascend-910b-64g").estimate.plan
        assert (again.strategy, again.layers, again.recompute) == (chosen.strategy, chosen.layers, chosen.recompute)


def test_new_files_say_it_too(script: Path, tmp_path: Path) -> None:
    done = found(script)
    texts = export_plan(done.estimate.plan, done.job, "mindspeed-llm", out=tmp_path / "new").exported.texts
    assert all(METHOD in text and BESIDE in text and "--num-virtual" not in text for text in texts.values())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": {"text": (1, 3, 2, 2, 2, 2, 2, 2)}}, "MindSpeed's DualPipeV gives each as many"),
        ({"strategy": {"tp": 2, "dp": 2, "etp": 2}}, "with ETP 2, and MindSpeed asks for whole experts beside it"),
        ({"strategy": {"cp": 2, "dp": 2, "cp_kind": "ring"}}, "CP 2 under dualpipev_whole, which MindSpeed refuses"),
    ],
)
def test_what_mindspeed_cannot_run_is_refused(change: dict, told: str, script: Path) -> None:
    done = found(script)
    plan = done.estimate.plan
    strategy = replace(plan.strategy, **change.pop("strategy", {}))
    with pytest.raises(PlannerError, match=told):
        export_plan(replace(plan, strategy=strategy, **change), done.job, "mindspeed-llm", into=(script,))
    assert script.read_text() == SCRIPT


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (METHOD, f"{METHOD} --context-parallel-size 2", "asks for --context-parallel-size 1, and it is 2"),
        ("--pipeline-model-parallel-size 4", "", "asks for --pipeline-model-parallel-size above 1, and it is 1"),
        (METHOD, f"{METHOD} --overlap-grad-reduce", "--schedules-method goes with gradients that are reduced after"),
        (METHOD, f"{CHUNKS} --overlap-grad-reduce", "--moe-fb-overlap goes with gradients that are reduced after"),
        (METHOD, f"{METHOD} {CHUNKS}", "divides layers by itself; take --num-layers-per-virtual-pipeline-stage out"),
        ("--num-layers 16", "--num-layers 20", "5 layers of a stage cannot be divided among 2 chunks"),
        ("--num-layers 16", "--num-layers 20 --noop-layers 19", "20 layers with --noop-layers are not dealt evenly"),
        (METHOD, "--schedules-method zbv", "--schedules-method is zbv; dualpipev is expected"),
    ],
)
def test_what_its_parser_refuses_is_named(old: str, new: str, told: str, script: Path) -> None:
    with pytest.raises(PlannerError, match=told):
        found(script, old, new)
    findings = lint_files([script], framework="mindspeed-llm", device="ascend-910b-64g").findings
    assert any(told in one.message for one in findings)


def test_seven_micro_batches_do_not_fill_four_stages(script: Path) -> None:
    with pytest.raises(PlannerError, match="needs 8 micro-batches or more, and there are 7"):
        found(script, "--global-batch-size 64", "--global-batch-size 28")
