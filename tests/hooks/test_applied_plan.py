"""A plan as the stages of a script: what each holds, and refusals of what does not fit the processes or the model."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel import hooks
from mm_autoparallel.errors import PlanError
from mm_autoparallel.hooks.applied import Held, read_applied_plan

FIXTURES = Path(__file__).parent.parent / "fixtures" / "huggingface"


@pytest.fixture
def pretraining() -> hooks.Pretraining:
    """Qwen2.5-VL-7B: 32 vision layers of two kinds, of which every eighth attends over the whole image; 28 of text."""
    return hooks.Pretraining(
        model=FIXTURES / "qwen2_5_vl_7b.json",
        workload={"global_batch_size": 8, "seq_length": 4096, "image_tokens_per_sample": 1024},
        subject=None,  # type: ignore[arg-type]  (a plan is read without the live model)
    )


def write_plan(folder: Path, **changes: Any) -> Path:
    document = {
        "parallel_config": {"PP": 2, "TP": 1, "DP": 2, "MBS": 1},
        "layer_placement": {"vit_layer_placement": [32, 0], "llm_layer_placement": [4, 24]},
        "layer_recompute": {"vit_layer_recompute": [0], "llm_layer_recompute": [2, 5]},
    }
    path = folder / "plan.json"
    path.write_text(json.dumps(document | changes))
    return path


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


@pytest.mark.usefixtures("world")
def test_stages_hold_their_blocks_in_order(tmp_path: Path, pretraining: hooks.Pretraining) -> None:
    applied = read_applied_plan(write_plan(tmp_path), pretraining)
    first, second = applied.stages
    assert (first[0].kind, first[0].role, first[0].count) == ("vision_pre", "pre", 1)
    vision = [held for held in first if held.modality == "vision" and held.role == "layer"]
    assert sum(held.count for held in vision) == 32
    assert [held.first for held in vision] == [sum(other.count for other in vision[:k]) for k in range(len(vision))]
    assert len({held.kind for held in vision}) == 2
    assert [held.role for held in first if held.modality == "text"] == ["pre", "layer"]
    assert first[-1] == Held(first[-1].block, "text_layer", "text", "layer", first=0, count=4, recomputed=2)
    assert [(held.role, held.first, held.count, held.recomputed) for held in second] == [
        ("layer", 4, 24, 5),
        ("post", 0, 1, 0),
    ]


@pytest.mark.usefixtures("world")
def test_chunks_are_virtual_stages(tmp_path: Path, pretraining: hooks.Pretraining) -> None:
    path = write_plan(
        tmp_path,
        parallel_config={"PP": 2, "TP": 1, "DP": 2, "MBS": 1, "VPP": 2},
        layer_placement={"vit_layer_placement": [[20, 12], [0, 0]], "llm_layer_placement": [[0, 0], [14, 14]]},
        layer_recompute={"vit_layer_recompute": [[0, 0], [0, 0]], "llm_layer_recompute": [[0, 0], [1, 0]]},
    )
    stages = read_applied_plan(path, pretraining).stages
    assert [sum(held.count for held in stage if held.role == "layer") for stage in stages] == [20, 12, 14, 14]
    assert stages[1][-1].role == "post"
    assert [held.first for held in stages[3] if held.role == "layer"] == [14]


def test_the_world_must_be_the_plans(
    tmp_path: Path, pretraining: hooks.Pretraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(PlanError, match=r"is for 4 processes, and this is one; .*`torchrun --nproc-per-node 4`"):
        read_applied_plan(write_plan(tmp_path), pretraining)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(PlanError, match="is for 4 processes, and torchrun has started 8"):
        read_applied_plan(write_plan(tmp_path), pretraining)


def of_layout(kind: str, run: str, encoder: dict[str, int], decoder: dict[str, int]) -> dict[str, Any]:
    return {"layout": {"kind": kind, "encoder_run": run, "modules": {"vision": encoder, "llm": decoder}}}


@pytest.mark.usefixtures("world")
def test_an_encoder_in_phases_is_whole_on_each_device(tmp_path: Path, pretraining: hooks.Pretraining) -> None:
    layout = of_layout("colocated", "phases", {"PP": 1, "TP": 1, "DP": 4, "MBS": 2}, {"PP": 2, "TP": 1, "DP": 2})
    layout["layer_placement"] = {"vit_layer_placement": [0, 0], "llm_layer_placement": [4, 24]}
    applied = read_applied_plan(write_plan(tmp_path, **layout), pretraining)
    (encoder,) = applied.encoder
    assert {held.modality for held in encoder} == {"vision"}
    assert encoder[0].role == "pre"
    assert sum(held.count for held in encoder if held.role == "layer") == 32
    assert [held.first for held in encoder if held.role == "layer"][1] == encoder[1].count
    assert [[held.role for held in stage] for stage in applied.stages] == [["pre", "layer"], ["layer", "post"]]


@pytest.mark.usefixtures("world")
def test_an_encoder_on_ranks_of_its_own_has_its_own_stages(tmp_path: Path, pretraining: hooks.Pretraining) -> None:
    layout = of_layout(
        "disaggregated",
        "inline",
        {"PP": 2, "TP": 1, "DP": 1, "MBS": 1, "rank_offset": 2},
        {"PP": 2, "TP": 1, "DP": 1},
    )
    changes = {
        "parallel_config": {"PP": 4, "TP": 1, "DP": 1, "MBS": 1},
        "layer_placement": {"vit_layer_placement": [12, 20, 0, 0], "llm_layer_placement": [0, 0, 4, 24]},
        "layer_recompute": {"vit_layer_recompute": [0, 0, 0, 0], "llm_layer_recompute": [0, 0, 3, 5]},
    }
    applied = read_applied_plan(write_plan(tmp_path, **layout, **changes), pretraining)
    held = [
        [sum(one.count for one in stage if one.role == "layer") for stage in part]
        for part in (applied.encoder, applied.stages)
    ]
    assert held == [[12, 20], [4, 24]]
    assert [sum(one.recomputed for one in stage) for stage in applied.stages] == [3, 5]


def test_the_world_counts_an_encoders_own_ranks(
    tmp_path: Path, pretraining: hooks.Pretraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = of_layout(
        "disaggregated",
        "inline",
        {"PP": 1, "TP": 1, "DP": 2, "MBS": 1, "rank_offset": 4},
        {"PP": 2, "TP": 1, "DP": 2},
    )
    path = write_plan(tmp_path, **layout, parallel_config={"PP": 3, "TP": 1, "DP": 2, "MBS": 1})
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PlanError, match=r"DP 2 beside disaggregated, vision PP 1 TP 1 DP 2 is for 6 processes"):
        read_applied_plan(path, pretraining)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("run", ["bubbles", "cached"])
def test_a_way_to_run_an_encoder_that_scripts_do_not_have_is_refused(
    run: str, tmp_path: Path, pretraining: hooks.Pretraining
) -> None:
    encoder = {"PP": 1, "TP": 1, "DP": 2, "MBS": 1} if run == "cached" else {"PP": 1, "TP": 1, "DP": 4, "MBS": 2}
    layout = of_layout("colocated", run, encoder, {"PP": 2, "TP": 1, "DP": 2})
    layout["layer_placement"] = {"vit_layer_placement": [0, 0], "llm_layer_placement": [4, 24]}
    frozen = replace(pretraining, freeze={"vision": True})
    with pytest.raises(PlanError, match=rf"encoder_run is {run}, and training scripts are told of an encoder"):
        read_applied_plan(write_plan(tmp_path, **layout, order=[["0F0"], ["1F0"]]), frozen)


@pytest.mark.usefixtures("world")
def test_a_plan_of_another_model_is_refused(tmp_path: Path, pretraining: hooks.Pretraining) -> None:
    path = write_plan(tmp_path, layer_placement={"vit_layer_placement": [32, 0], "llm_layer_placement": [4, 20]})
    with pytest.raises(PlanError, match="llm_layer_placement sums to 24"):
        read_applied_plan(path, pretraining)
    path.write_text("{}")
    with pytest.raises(PlanError, match="parallel_config is missing"):
        read_applied_plan(path, pretraining)


@pytest.mark.usefixtures("world")
def test_a_mode_that_scripts_are_not_told_of_is_refused(tmp_path: Path, pretraining: hooks.Pretraining) -> None:
    path = write_plan(tmp_path, layer_modes={"offload": {"llm": [2, 3]}})
    with pytest.raises(PlanError, match=r"plan .*layer_modes\.offload runs 5 text layers so, and training scripts"):
        read_applied_plan(path, pretraining)


def test_a_script_ends_with_one_paragraph(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = Path(__file__).parent / "toy_pretrain.py"
    plan = write_plan(tmp_path)
    command = [sys.executable, str(script), "--auto-parallel-config", str(plan)]
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    environment["PYTHONPATH"] = str(script.parent.parent.parent)
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "is for 4 processes, and this is one" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_without_flags_nothing_happens(pretraining: hooks.Pretraining) -> None:
    arguments = argparse.Namespace(auto_parallel_mm=False, auto_parallel_config=None)
    hooks.auto_parallel(arguments, pretraining)
    assert hooks.applied_plan(arguments, pretraining) is None
