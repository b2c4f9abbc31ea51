"""Layouts as Megatron-Bridge's MIMO has them: written, read back, and refused by the name of the law."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import find_kind, import_launch
from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_bridge.config import read_fields
from mm_autoparallel.integrations.megatron_bridge.mimo import SECTION
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.overlaps import Overlaps
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import Plan

BRIDGE = "megatron-bridge"
LAYERS = {"hidden_size": 512, "ffn_size": 2048, "num_heads": 8}
MODEL = {
    "text": {"vocab_size": 4096, "layers": LAYERS | {"num_layers": 12, "norm": "rms"}},
    "encoders": [
        {
            "name": "vision",
            "stem": {"type": "patches", "in_features": 588},
            "layers": LAYERS | {"num_layers": 4, "norm": "layer"},
            "projector": {"norm": "layer", "norm_size": 512, "merge_tokens": 4, "layer_sizes": [2048, 512]},
        }
    ],
}


def make_plan(**changed: Any) -> Plan:
    """The published layout: the decoder on TP 4, PP 2, DP 2, an image rank of its own behind its 16."""
    encoder = {"pp": 1, "tp": 1, "dp": 1, "mbs": 2, "rank_offset": 16} | changed.pop("encoder", {})
    arrangement = changed.pop("arrangement", Arrangement("disaggregated", "inline", ModuleLayout("vision", **encoder)))
    sizes = {"pp": 3, "tp": 4, "dp": 2, "mbs": 1, "zero": 1, "arrangement": arrangement}
    strategy = Strategy(
        **(sizes | {key: changed.pop(key) for key in [*changed] if key in Strategy.__dataclass_fields__})
    )
    plan = Plan(strategy, {"vision": (4, 0, 0), "text": (0, 5, 7)}, {"vision": (0, 0, 0), "text": (0, 0, 0)}, 32)
    return replace(plan, **changed)


def make_job() -> Job:
    """Whose plan that may be."""
    content = {
        "model": MODEL,
        "cluster": {"num_nodes": 3, "devices_per_node": 8, "device": "h100-80g"},
        "workload": {
            "global_batch_size": 32,
            "seq_length": 1024,
            "image_tokens_per_sample": 256,
            "stack": "megatron-te",
            "hidden_dropout": False,
        },
        "search": {"layouts": "all", "devices": [17]},
    }
    return parse_job(content, Path("job.yaml"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model's own file."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL))
    return path


def export(plan: Plan, out: Path, job: Job | None = None, **more: Any) -> Plan:
    """What the files written to `out` run."""
    return export_plan(plan, job, BRIDGE, out=out, version="0.6", **more).exported.plan


@pytest.mark.parametrize("with_job", [True, False])
@pytest.mark.parametrize("name", ["planned.yaml", "overrides.txt"])
def test_a_layout_comes_back(name: str, with_job: bool, tmp_path: Path, model: Path) -> None:
    plan, out = make_plan(), tmp_path / "out"
    assert export(plan, out, make_job() if with_job else None) == plan
    given = Given(model, world_size=17, seq_length=1024, image_tokens=256)
    found, kind = find_kind(out / name, None)
    assert found == BRIDGE
    again = kind.read_plan(out / name, given)
    assert (again.layers, again.recompute, again.global_batch_size) == (plan.layers, plan.recompute, 32)
    assert again.strategy.arrangement == plan.strategy.arrangement
    assert again.strategy.of_decoder().world_size == 16


def test_an_imported_layout_is_simulated_as_the_plan(tmp_path: Path, model: Path) -> None:
    from mm_autoparallel.planner.evaluate import evaluate

    export(make_plan(), tmp_path / "out", make_job())
    cluster = {"num_nodes": 3, "devices_per_node": 8, "device": "h100-80g"}
    given = Given(model, world_size=17, seq_length=1024, image_tokens=256)
    found = import_launch(tmp_path / "out" / "planned.yaml", cluster=cluster, given=given)
    assert found.estimate.step_ms == pytest.approx(evaluate(make_job(), make_plan()).step_ms)


def test_modules_are_said_as_mimo_has_them(tmp_path: Path) -> None:
    export(make_plan(), tmp_path / "out")
    document = yaml.safe_load((tmp_path / "out" / "planned.yaml").read_text())
    section = document["model"]["megatron_mimo_parallelism_config"]
    assert section["_target_"].endswith("MegatronMIMOParallelismConfig")
    sizes = {name: [*of.values()][1:] for name, of in section["module_parallelisms"].items()}
    assert sizes == {"language": [4, 2, 1, 1, 1, 2, 0], "images": [1, 1, 1, 1, 1, 1, 16]}
    assert document["train"] == {"micro_batch_size": 2, "global_batch_size": 32}
    assert document["model"]["standard_provider"]["num_layers_in_first_pipeline_stage"] == 5
    assert "tensor_model_parallel_size" not in document["model"]["standard_provider"]


def test_overlaps_are_switched_as_a_plan_chooses(tmp_path: Path) -> None:
    for reduces in (True, False):
        out = tmp_path / str(reduces)
        export(make_plan(overlaps=Overlaps(reduces, reduces)), out, make_job())
        ddp = yaml.safe_load((out / "planned.yaml").read_text())["ddp"]
        assert (ddp["overlap_grad_reduce"], ddp["overlap_param_gather"]) == (reduces, reduces)


def test_one_number_of_recomputed_layers_for_both_modules(tmp_path: Path, model: Path) -> None:
    plan = make_plan(recompute={"vision": (1, 0, 0), "text": (0, 3, 0)})
    run = export_plan(plan, make_job(), BRIDGE, out=tmp_path / "out", version="0.6").exported
    assert run.plan.recompute == {"vision": (3, 0, 0), "text": (0, 3, 3)}
    assert "9 layers in place of 4" in run.approximations[0]
    again = find_kind(tmp_path / "out" / "planned.yaml", None)[1].read_plan(
        tmp_path / "out" / "planned.yaml", Given(model, world_size=17, seq_length=1024)
    )
    assert again.recompute == run.plan.recompute


COLOCATED = Arrangement("colocated", "phases", ModuleLayout("vision", 1, 1, 16, 2))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"arrangement": COLOCATED, "pp": 2}, ["one module", "disaggregated"]),
        ({"tp": 3, "encoder": {"rank_offset": 12}}, ["TP 3", "powers of two"]),
        ({"dp": 3, "encoder": {"dp": 2, "mbs": 3, "rank_offset": 24}}, ["2 and 3", "divide"]),
        ({"encoder": {"mbs": 1}}, ["1 x 1 samples of vision and 1 x 2"]),
        ({"encoder": {"rank_offset": 17}}, ["rank 17", "at 16"]),
        ({"encoder": {"cp": 2}}, ["CP 2", "whole on a rank"]),
        ({"encoder": {"tp": 2}}, ["TP 2 with sequence parallelism"]),
        ({"zero": 2}, ["ZeRO 2", "no FSDP"]),
        ({"rank_order": "tp-cp-ep-pp-dp"}, ["MIMO's grids"]),
        ({"pp": 5, "layers": {"vision": (4, *(0,) * 4), "text": (0, 2, 4, 3, 3)}, "encoder": {"rank_offset": 32},
          "recompute": {"vision": (0,) * 5, "text": (0,) * 5}}, ["[2, 4, 3, 3]", "the first and the last"]),
        ({"modes": {"text": {"selective": (0, 5, 7)}}}, ["recompute_granularity", "search.modes [recompute]"]),
    ],
)  # fmt: skip
def test_what_mimo_cannot_run_is_refused_by_name(changed: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(PlanError) as failure:
        export(make_plan(**changed), tmp_path / "out")
    assert all(word in str(failure.value) for word in words)
    assert not (tmp_path / "out").exists()


def test_other_versions_and_frameworks_refuse_layouts_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="give --target-version"):
        export_plan(make_plan(), None, BRIDGE, out=tmp_path / "out")
    others = [name for name, one in frameworks().items() if one.exporter and one.exporter().write and name != BRIDGE]
    assert len(others) > 8
    for name in others:
        with pytest.raises(PlanError, match="disaggregated, vision PP 1 TP 1 DP 1"):
            export_plan(make_plan(), None, name, out=tmp_path / "out")


def _break(model: Path, text: str, tmp_path: Path) -> str:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(PlannerError) as failure:
        find_kind(path, BRIDGE)[1].read_plan(path, Given(model, world_size=17, seq_length=1024))
    return str(failure.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("micro_batch_size: 2", "micro_batch_size: 3", ["all replicas", "language"]),
        ("rank_offset: 16", "rank_offset: 18", ["begins at rank 18"]),
        ("rank_offset: 16", "rank_offsett: 16", ["rank_offsett", "did you mean"]),
        ("rank_offset: 16", "rank_offset: -1", ["at least 0"]),
        ("      language:", "      text:", ["text", "language and one encoder"]),
        ("      images:", "      audios:", ["audio", "vision"]),
        ("data_parallel_size: 2", "data_parallel_size: null", ["has no data_parallel_size"]),
        ("pipeline_model_parallel_size: 1", "pipeline_model_parallel_size: 2", ["PP 2", "whole on a rank"]),
        ("tensor_model_parallel_size: 1", "tensor_model_parallel_size: two", ["two", "whole number"]),
        ("expert_model_parallel_size: 1\n        expert_tensor_parallel_size: 1\n        data_parallel_size: 1",
         "expert_model_parallel_size: 2\n        expert_tensor_parallel_size: 1\n        data_parallel_size: 1",
         ["no experts"]),
        ("virtual_pipeline_model_parallel_size: null", "virtual_pipeline_model_parallel_size: 2", ["cannot run"]),
    ],
)  # fmt: skip
def test_a_broken_section_is_named(old: str, new: str, words: list[str], tmp_path: Path, model: Path) -> None:
    export(make_plan(), tmp_path / "out")
    text = (tmp_path / "out" / "planned.yaml").read_text()
    assert old in text
    told = _break(model, text.replace(old, new, 1), tmp_path)
    assert all(word in told for word in words), told


def test_ranks_and_model_are_asked_for(tmp_path: Path, model: Path) -> None:
    export(make_plan(), tmp_path / "out")
    path = tmp_path / "out" / "planned.yaml"
    read = find_kind(path, BRIDGE)[1].read_plan
    with pytest.raises(PlanError, match="16 and 1 ranks, and it is started on 24"):
        read(path, Given(model, world_size=24, seq_length=1024))
    with pytest.raises(JobError, match="--model"):
        read(path, Given(world_size=17, seq_length=1024))


def test_a_person_s_mimo_file_changes_where_the_plan_decides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    export(make_plan(dp=1, encoder={"mbs": 1, "rank_offset": 8}), tmp_path / "out")
    before = "# ours\n" + (tmp_path / "out" / "planned.yaml").read_text() + "scheduler:\n  lr_warmup_iters: 5 # few\n"
    path.write_text(before)
    export(make_plan(), tmp_path / "into", into=(path,))
    after = (tmp_path / "into" / "run.yaml").read_text()
    assert after.startswith("# ours\n")
    assert "lr_warmup_iters: 5 # few" in after
    fields = read_fields(tmp_path / "into" / "run.yaml", Given())
    assert fields[f"{SECTION}.module_parallelisms.images.rank_offset"] == 16
    chain = Plan(Strategy(2, 4, 2, 1, zero=1), {"text": (6, 6)}, {"text": (0, 0)}, 32)
    with pytest.raises(PlanError, match="ranks of their own, and the plan is one pipeline"):
        export(chain, tmp_path / "chain", into=(path,))


SCRIPT = """#!/bin/bash
LANGUAGE_TP="${LANGUAGE_TP:-4}"
MBS=2
RUN=$(cat <<'EOF'
cmd=(
    uv run --no-sync python
    examples/megatron_mimo/qwen35_vl/finetune_qwen35_vl.py
    --global-batch-size 32
    --micro-batch-size "${MBS}"
    --component "language=tp=${LANGUAGE_TP},pp=2,cp=1,dp=2,rank_offset=0"
    --component "images=tp=1,dp=1,rank_offset=16"
)
"${cmd[@]}"
EOF
)
"""


def test_a_launch_script_s_components_are_a_layout(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "sft.sh"
    path.write_text(SCRIPT)
    found, kind = find_kind(path, None)
    assert found == BRIDGE
    plan = kind.read_plan(path, Given(model, world_size=17))
    assert plan.strategy.arrangement == make_plan().strategy.arrangement
    assert (plan.strategy.pp, plan.strategy.mbs, plan.strategy.zero, plan.global_batch_size) == (3, 1, 1, 32)
    assert plan.layers == {"vision": (4, 0, 0), "text": (0, 6, 6)}
    path.write_text(SCRIPT.replace("dp=1", "pd=1"))
    with pytest.raises(JobError, match="line 11: --component images"):
        kind.read_plan(path, Given(model, world_size=17))
