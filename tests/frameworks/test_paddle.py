"""Arguments of PaddleFormers and PaddleNLP: what published ones say, what changes in them, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from drawn_decoder_plans import DENSE
from featured_plans import PLANS

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import find_kind, import_launch
from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.planner.plan import Plan

FORMERS = """### model
max_seq_len: 8192   # tokens
per_device_train_batch_size: 1
gradient_accumulation_steps: 4

# performance
tensor_model_parallel_size: 2
pipeline_model_parallel_size: 2
partial_send_recv: false
sequence_parallel: true
sharding: stage1
recompute_granularity: full
recompute_method: uniform
recompute_num_layers: 1
bf16: true
"""
NLP = """{
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 16,   "per_device_eval_batch_size": 2,
    "tensor_parallel_degree": 2,
    "pipeline_parallel_degree": 1,
    "sharding": "stage2",
    "virtual_pp_degree": 1,
    "sequence_parallel": 0,
    "max_seq_length": 4096,
    "recompute": false,
    "recompute_granularity": "full"
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    left_out = ("seq-length", "hidden-dropout", "attention-dropout")
    sizes = {key: value for key, value in DENSE.items() if key not in left_out}
    path.write_text(json.dumps(sizes | {"padded-vocab-size": 512}))
    return path


def read(path: Path, model: Path, world_size: int = 8) -> Plan:
    _, kind = find_kind(path, "paddle")
    return kind.read_plan(path, Given(model, world_size=world_size))


def test_arguments_are_a_job_and_a_plan(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "full_tp_pp.yaml"
    path.write_text(FORMERS)
    found = import_launch(path, device="h100-80g", given=Given(model, world_size=8))
    plan = found.estimate.plan
    assert found.framework == "paddle"
    assert (plan.strategy.tp, plan.strategy.pp, plan.strategy.dp, plan.strategy.zero) == (2, 2, 2, 1)
    assert (plan.strategy.rank_order, plan.global_batch_size) == ("tp-cp-ep-pp-dp", 8)
    assert plan.recompute == plan.layers == {"text": (12, 12)}
    assert found.job.workload.seq_length == 8192


def test_arguments_of_paddlenlp_are_read(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "pretrain_argument.json"
    path.write_text(NLP)
    plan = read(path, model)
    assert (plan.strategy.tp, plan.strategy.dp, plan.strategy.zero, plan.num_microbatches) == (2, 4, 2, 16)
    assert not plan.strategy.sequence_parallel
    assert plan.recompute == {"text": (0,)}


def test_only_decided_keys_change(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "full.yaml"
    path.write_text(FORMERS)
    export_plan(PLANS["uneven_stages"], None, "paddle", into=(path,))
    text = path.read_text()
    for kept in ("### model\n", "max_seq_len: 8192   # tokens\n", "# performance\n", "partial_send_recv: false\n"):
        assert kept in text
    document = yaml.safe_load(text)
    assert document["pp_seg_method"] == "[0, 4, 11, 19]"
    assert document["recompute_granularity"] is None
    assert read(path, model).layers == {"text": (3, 7, 8, 6)}


def test_a_plan_goes_into_paddlenlp_by_its_own_keys(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "pretrain_argument.json"
    path.write_text(NLP)
    with pytest.raises(JobError, match=r"say --target-version 3\.0"):
        export_plan(PLANS["chunks"], None, "paddle", into=(path,))
    export_plan(PLANS["chunks"], None, "paddle", into=(path,), version="3.0")
    assert '"gradient_accumulation_steps": 8,   "per_device_eval_batch_size": 2,\n' in path.read_text()
    found = json.loads(path.read_text())
    assert (found["virtual_pp_degree"], found["pipeline_parallel_degree"], found["recompute"]) == (2, 4, False)
    again = read(path, model)
    assert (again.layers, again.strategy) == (PLANS["chunks"].layers, PLANS["chunks"].strategy)
    with pytest.raises(PlanError, match="cut themselves evenly"):
        export_plan(PLANS["uneven_stages"], None, "paddle", into=(path,), version="3.0")


def test_replicas_that_share_nothing_lie_outermost(tmp_path: Path) -> None:
    plan = PLANS["pipeline"]
    plain = replace(plan, strategy=replace(plan.strategy, zero=0))
    with pytest.raises(PlanError, match=r"search\.rank_order \[tp-cp-ep-pp-dp\]"):
        export_plan(plain, None, "paddle", out=tmp_path / "inside")
    outside = replace(plain, strategy=replace(plain.strategy, rank_order="tp-cp-ep-pp-dp"))
    result = export_plan(outside, None, "paddle", out=tmp_path / "outside")
    assert yaml.safe_load(result.files[0].read_text())["sharding"] == ""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("sharding: stage1", "sharding: stage4", "stage1, stage2 and stage3 are planned"),
        ("sharding: stage1", "sharding: stage2", "stage2 with PP 2, which the trainer refuses"),
        ("sharding: stage1", "sharding: stage1\nsharding_parallel_size: 1", "is 1 of 2 replicas"),
        ("sequence_parallel: true", "sequence_paralel: true", 'not known .*"sequence_parallel"'),
        ("bf16: true", "tensor_parallel_degree: 2", "keep one"),
        ("bf16: true", "use_dualpipev: true", "another order of the pipeline"),
        ("bf16: true", "pipeline_parallel_config: use_dualpipev", "another order of the pipeline"),
        ("bf16: true", "context_parallel_size: 2", "sep_parallel_size alone is planned"),
        ("bf16: true", "pp_seg_method: '[0, 26]'", r"gives \[25, -1\] of 24 layers"),
        ("bf16: true", "pp_seg_method: '[0, 5, 9, 25]'", "it begins with 0 and has 2 entries"),
        ("bf16: true", "pp_seg_method: uniform", "layer:... or a list of numbers is expected"),
        ("recompute_num_layers: 1", "recompute_num_layers: 3", "planned is full, uniform, 1"),
        ("tensor_model_parallel_size: 2", "tensor_model_parallel_size: 3", "does not divide 8 devices"),
        ("tensor_model_parallel_size: 2", "tensor_model_parallel_size: two", "a whole number of at least 1"),
        ("sequence_parallel: true", "sequence_parallel: maybe", "true or false is expected"),
    ],
)
def test_what_no_plan_says_is_named(old: str, new: str, told: str, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "full.yaml"
    assert old in FORMERS
    path.write_text(FORMERS.replace(old, new))
    with pytest.raises(PlannerError, match=told):
        read(path, model)


@pytest.mark.parametrize("said", [{"no_recompute_layers": [1, 2]}, {"refined_recompute": "flash_attn:-1"}])
def test_a_part_of_the_layers_is_named(said: dict[str, Any], tmp_path: Path, model: Path) -> None:
    path = tmp_path / "sft.json"
    path.write_text(json.dumps(json.loads(NLP) | {"recompute": True} | said))
    with pytest.raises(PlanError, match=f"{next(iter(said))} is .* which no plan says"):
        read(path, model)
