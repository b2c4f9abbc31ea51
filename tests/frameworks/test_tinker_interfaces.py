"""Every interface that is named beside Tinker's search, row by row: what a plan holds of it, and what is written.

Flags of ModelLink 1.0, of Megatron-LM and MindSpeed-LLM, DeepSpeed's configuration and Colossal-AI's plugin; and the
thirty variables of a plan.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from featured_plans import PLANS
from test_mindspeed_llm import LAYERS, SCRIPT

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import ImportResult, import_launch
from mm_autoparallel.integrations.mindspeed_llm.dialect import OLD
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.explain.variables import list_variables
from mm_autoparallel.planner.plan import Plan

THIRTY = (
    *("search.tp", "search.sequence_parallel", "search.pp", "search.max_vpp", "layer_placement", "search.schedule"),
    *("search.cp", "search.cp_kind", "search.ep", "search.etp", "search.dp", "search.mbs"),
    *("workload.global_batch_size", "search.zero", "search.reshard", "search.optimizer_offload", "search.modes"),
    *("layer_recompute", "workload.selective_operators", "layer_modes.swap_attention", "workload.attention"),
    *("search.tp_overlap", "workload.stack", "search.overlap_all_to_all", "search.overlap_grad_reduce"),
    *("search.overlap_param_gather", "search.overlap_p2p", "no key", "search.precision", "search.rank_order"),
)
"""Where each variable stands, of a job that may swap what attention keeps."""


def read(folder: Path, more: str, script: str = SCRIPT) -> ImportResult:
    path = folder / "pretrain.sh"
    path.write_text(script.replace(LAYERS, more))
    return import_launch(path, device="ascend-910b-64g")


def write(folder: Path, plan: Plan, framework: str) -> str:
    return "\n".join(export_plan(plan, None, framework, out=folder).exported.texts.values())


def test_tensor_sequence_and_pipeline_sizes(tmp_path: Path) -> None:
    plan = replace(PLANS["pipeline"], strategy=replace(PLANS["pipeline"].strategy, tp=2))
    for name in ("megatron-core", "mindspeed-llm"):
        text = write(tmp_path / name, plan, name)
        for flag in ("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 4", "--sequence-parallel"):
            assert flag in text


def test_chunks_and_transfers_in_the_open(tmp_path: Path) -> None:
    found = read(tmp_path, "--num-layers-per-virtual-pipeline-stage 3 --no-overlap-p2p-communication")
    assert found.estimate.plan.strategy.vpp == 2
    assert not found.job.workload.overlap_p2p
    assert "--num-layers-per-virtual-pipeline-stage 3" in write(tmp_path / "out", PLANS["chunks"], "mindspeed-llm")


@pytest.mark.parametrize("flag", ["--optimized-pipeline --manual-mbs [1,2]", "--fold-mode aiao"])
def test_flags_that_nothing_replaced_are_told(flag: str, tmp_path: Path) -> None:
    found = read(tmp_path, flag)
    for name in (word for word in flag.split() if word.startswith("--")):
        assert any(
            note.startswith(f"{name} is of ModelLink 1.0") and "nothing in its place" in note for note in found.notes
        )


def test_old_recompute_is_read_as_todays(tmp_path: Path) -> None:
    found = read(tmp_path, "--checkpoint-activations --checkpoint-policy custom --auto-recompute-profiling-step 10")
    plan = found.estimate.plan
    assert plan.recompute == plan.layers
    told = " ".join(found.notes)
    for name in ("--checkpoint-activations", "--checkpoint-policy", "--auto-recompute-profiling-step"):
        assert f"{name} is of ModelLink 1.0" in told
    text = write(tmp_path / "out", PLANS["recompute_all"], "mindspeed-llm")
    assert "--recompute-granularity full" in text


def test_zero_one_is_a_flag_and_two_and_three_are_deepspeeds(tmp_path: Path) -> None:
    assert "--use-distributed-optimizer" in write(tmp_path / "one", PLANS["zero_1"], "mindspeed-llm")
    for stage in (2, 3):
        export_plan(PLANS[f"zero_{stage}"], None, "deepspeed", out=tmp_path / str(stage))
        document = json.loads((tmp_path / str(stage) / "ds_config.json").read_text())
        assert document["zero_optimization"]["stage"] == stage


def test_old_flash_attention_is_read_as_todays(tmp_path: Path) -> None:
    without = SCRIPT.replace("    --use-flash-attn \\\n", "")
    assert read(tmp_path, LAYERS, without).job.workload.attention == "unfused"
    assert read(tmp_path, f"{LAYERS} --triangle-attn", without).job.workload.attention == "flash"


def test_old_memory_flags_are_told(tmp_path: Path) -> None:
    found = read(tmp_path, f"{LAYERS} --mlp-layer-fusion --release-fp32-grad --reuse-fp32-param")
    told = " ".join(found.notes)
    assert (
        "--release-fp32-grad is of ModelLink 1.0 and in no parser since; it has --reuse-fp32-param in its place" in told
    )
    assert "--mlp-layer-fusion is of ModelLink 1.0" in told
    assert "--reuse-fp32-param keeps no bf16 copy" in told


def test_old_flags_are_never_written(tmp_path: Path) -> None:
    for name, plan in PLANS.items():
        if name in ("pipeline", "chunks", "recompute_all", "zero_1", "uneven"):
            text = write(tmp_path / name, plan, "mindspeed-llm")
            assert not any(flag in text for flag in OLD)


def test_colossalais_plugin(tmp_path: Path) -> None:
    plan = replace(PLANS["pipeline"], strategy=replace(PLANS["pipeline"].strategy, tp=2))
    text = write(tmp_path, plan, "colossalai")
    for word in ("HybridParallelPlugin", '"tp_size": 2', '"pp_size": 4', "sequence_parallelism_mode", "zero_stage"):
        assert word in text


def test_thirty_variables_are_listed(tmp_path: Path) -> None:
    """Each with its range, and whether a search decides it."""
    imported = read(tmp_path, LAYERS)
    search: dict[str, Any] = {"modes": ["recompute", "swap_attention"], "max_vpp": 2, "tp_overlap": ["none", "mc2"]}
    document = {**imported.job_document, "search": search}
    job: Job = parse_job(document, tmp_path / "job.yaml")
    by_place = {one.where: one for one in list_variables(job)}
    assert len(THIRTY) == 30
    assert not set(THIRTY) - set(by_place)
    assert all(by_place[where].values for where in THIRTY)
    assert by_place["search.tp"].searched
    assert not by_place["workload.attention"].searched
