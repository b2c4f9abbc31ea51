"""torchtitan: published forms of TOMLs and registries, what changes in a TOML, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from drawn_decoder_plans import DENSE
from featured_plans import PLANS

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import find_kind, import_launch
from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.toml_text import parse_toml, set_toml_values
from mm_autoparallel.planner.plan import Plan

TOML = """# a preset for 64 devices

[model]
name = "llama3"   # ours
flavor = "8B"

[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0  # grad norm clipping

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2  # 2-way TP
pipeline_parallel_degree = 1
module_fqns_per_model_part = [
    ["tok_embeddings"],
]

[activation_checkpoint]
mode = "full" # ["none", "selective", "full"]

[quantize.linear.float8]
filter_fqns = ["output"]
"""
REGISTRY = """
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer


def small() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(local_batch_size=4, seq_len=2048),
        parallelism=ParallelismConfig(pipeline_parallel_degree=4, pipeline_parallel_schedule="Interleaved1F1B"),
        activation_checkpoint=FullAC.Config(),
    )


def large() -> Trainer.Config:
    config = small()
    config.model_spec = model_registry("70B")
    config.parallelism.tensor_parallel_degree = 2
    config.training.local_batch_size = 8
    config.activation_checkpoint = None
    return config
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    left_out = ("seq-length", "hidden-dropout", "attention-dropout")
    sizes = {key: value for key, value in DENSE.items() if key not in left_out}
    path.write_text(json.dumps(sizes | {"padded-vocab-size": 512}))
    return path


def read(path: Path, model: Path, world_size: int = 8, entry: str | None = None) -> Plan:
    _, kind = find_kind(path, "torchtitan")
    return kind.read_plan(path, Given(model, world_size=world_size, entry=entry))


# ---------------------------------------------------------------------------------------------------------------- TOML


def test_a_toml_is_a_job_and_a_plan(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "llama3_8b.toml"
    path.write_text(TOML)
    found = import_launch(path, device="h100-80g", given=Given(model, world_size=8))
    plan = found.estimate.plan
    assert found.framework == "torchtitan"
    assert (plan.strategy.tp, plan.strategy.dp, plan.strategy.zero, plan.strategy.reshard) == (2, 4, 3, True)
    assert (plan.strategy.mbs, plan.global_batch_size, plan.recompute["text"]) == (2, 8, (24,))
    assert found.job.workload.seq_length == 8192


def test_only_decided_keys_change_in_a_toml(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(TOML)
    plan = replace(PLANS["uneven_chunks"], strategy=replace(PLANS["uneven_chunks"].strategy, zero=3))
    with pytest.raises(JobError, match=r"say --target-version 0\.2"):
        export_plan(plan, None, "torchtitan", into=(path,))
    export_plan(plan, None, "torchtitan", into=(path,), version="0.2")
    text = path.read_text()
    for kept in (
        "# a preset for 64 devices\n",
        'name = "llama3"   # ours\n',
        "  # grad norm clipping\n",
        "  # 2-way TP\n",
    ):
        assert kept in text
    assert 'mode = "none" # ["none", "selective", "full"]\n' in text
    assert "[quantize.linear.float8]\nfilter_fqns" in text
    again = read(path, model)
    assert (again.layers, again.strategy.vpp, again.strategy.schedule) == (plan.layers, 2, "interleaved_1f1b")


def test_layers_are_dealt_as_torchtitan_deals_them(tmp_path: Path, model: Path) -> None:
    """The embedding and the head count as one layer each: 26 on four stages are 7, 7, 6, 6."""
    path = tmp_path / "plan.toml"
    path.write_text("[training]\nlocal_batch_size = 8\n[parallelism]\npipeline_parallel_degree = 4\n")
    assert read(path, model).layers == {"text": (6, 7, 6, 5)}
    path.write_text(
        path.read_text() + "pipeline_parallel_layers_per_stage = 3\npipeline_parallel_schedule = 'interleaved1f1b'\n"
    )
    with pytest.raises(PlanError, match=r"not dealt to 9 parts"):
        read(path, model)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("tensor_parallel_degree = 2", "tensor_parallel_degre = 2", 'not known there .*"tensor_parallel_degree"'),
        ("tensor_parallel_degree = 2", 'tensor_parallel_degree = "two"', "a whole number of at least 1"),
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 3", "is not 8 devices"),
        ("seq_len = 8192", "seq_len = 8192\nglobal_batch_size = 12", "no multiple of local_batch_size 2"),
        ("seq_len = 8192", "enable_cpu_offload = true", "keeps weights on the host"),
        ("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 2", "does not hold layers.0 to layers.23"),
        ('mode = "full"', 'mode = "memory_budget"', "none and full are planned"),
        ("[training]", "[training", "no TOML that can be read"),
    ],
)
def test_what_no_plan_says_is_named(old: str, new: str, told: str, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "plan.toml"
    assert old in TOML
    path.write_text(TOML.replace(old, new, 1))
    _, kind = find_kind(path, "torchtitan") if "no TOML" not in told else ("", None)
    with pytest.raises(PlannerError, match=told):
        kind.read_plan(path, Given(model, world_size=8)) if kind else parse_toml(path.read_text(), str(path))


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("", {("a", "x"): 1}, "\n[a]\nx = 1\n"),
        ("[a]\nx = 1", {("a", "x"): [["b"]]}, '[a]\nx = [["b"]]'),
        (
            "[a]\r\nx = '#'  # c\r\n\r\n[b]\r\n",
            {("a", "x"): True, ("a", "y"): 2},
            "[a]\r\nx = true  # c\r\ny = 2\r\n\r\n[b]\r\n",
        ),
        ("[a]\nx = [\n  [1], # [b]\n]\ny = 3\n", {("a", "x"): None}, "[a]\ny = 3\n"),
    ],
)
def test_edits_of_toml(text: str, changes: dict[tuple[str, str], object], expected: str) -> None:
    assert set_toml_values(text, changes, "f.toml") == expected


def test_values_in_other_forms_are_not_edited() -> None:
    with pytest.raises(JobError, match="not written as"):
        set_toml_values("a.x = 1\n", {("a", "x"): 2}, "f.toml")


# ------------------------------------------------------------------------------------------------------------ registry


def test_a_registry_is_followed_and_not_run(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(REGISTRY)
    with pytest.raises(JobError, match=r"2 functions return a Trainer\.Config: small, large; say which with --entry"):
        read(path, model, 4)
    small, large = read(path, model, 4, "small"), read(path, model, 8, "large")
    assert (small.strategy.pp, small.strategy.vpp, small.num_microbatches) == (4, 2, 4)
    assert (large.strategy.tp, large.num_microbatches) == (2, 8)
    assert sum(small.recompute["text"]) == 24
    assert sum(large.recompute["text"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("degree = 2", "degree = SIZE", "tensor_parallel_degree is known only when the file runs"),
        ("config = small()", "config = other()", "large calls no Trainer.Config|returns is known only"),
        ("config = small()", "config = large()", "small|large → large"),
        ("return config", "return change(config)", "what large returns is known only"),
        ("tensor_parallel_degree", "tensor_parallel_degre", 'did you mean "tensor_parallel_degree"'),
    ],
)
def test_what_a_registry_leaves_to_its_run_is_named(old: str, new: str, told: str, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(REGISTRY.replace(old, new))
    with pytest.raises(PlannerError, match=told):
        read(path, model, 8, "large")


def test_a_remainder_runs_by_a_csv(tmp_path: Path, model: Path) -> None:
    plan = replace(PLANS["partial_group"], strategy=replace(PLANS["partial_group"].strategy, zero=0))
    result = export_plan(plan, None, "torchtitan", out=tmp_path / "new")
    assert {path.name for path in result.files} == {"planned.py", "schedule.csv"}
    again = read(tmp_path / "new" / "planned.py", model)
    assert (again.layers, again.strategy.schedule) == (plan.layers, "interleaved_1f1b")
    (tmp_path / "new" / "schedule.csv").write_text("0F0\n")
    with pytest.raises(PlanError, match="PipelineScheduleMulti"):
        read(tmp_path / "new" / "planned.py", model)
