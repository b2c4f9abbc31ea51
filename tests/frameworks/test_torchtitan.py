"""torchtitan: published forms of TOMLs and registries, what changes in a TOML, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from drawn_decoder_plans import DENSE, make_job
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


NEWEST = """
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer


def small() -> Trainer.Config:
    length = 2048
    return Trainer.Config(
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * length, max_context_length=length),
        parallelism=ParallelismConfig(pipeline_parallel_degree=4, num_pp_microbatches=8),
        activation_checkpoint=FullAC.Config(),
    )
"""
RECIPES = """
from torchtitan.trainer import Trainer
from somewhere.config_registry import small


def _prepare(config, *, checks):
    config.parallelism.spmd_backend = "spmd_types"
    if checks:
        config.activation_checkpoint = None


def tp2() -> Trainer.Config:
    config = small()
    _prepare(config, checks=True)
    config.parallelism.tensor_parallel_degree = 2
    return config
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    left_out = ("seq-length", "hidden-dropout", "attention-dropout")
    sizes = {key: value for key, value in DENSE.items() if key not in left_out}
    path.write_text(json.dumps(sizes | {"padded-vocab-size": 512}))
    return path


def read(path: Path, model: Path, world_size: int = 8, entry: str | None = None, beside: tuple[Path, ...] = ()) -> Plan:
    _, kind = find_kind(path, "torchtitan")
    return kind.read_plan(path, Given(model, world_size=world_size, entry=entry, beside=beside))


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


@pytest.mark.parametrize("version", ["0.2", "0.3"])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_1f1b_low_memory"])
def test_an_interleaved_schedule_of_one_part_a_rank_is_refused_before_files_are_made(
    schedule: str, version: str, tmp_path: Path
) -> None:
    plan = PLANS["uneven_chunks"]
    one = replace(plan.strategy, vpp=1, schedule=schedule, zero=3)
    layers = {"text": (sum(plan.layers["text"]) // one.pp,) * one.pp}
    plan = replace(plan, strategy=one, layers=layers, recompute={"text": (0,) * one.pp})
    with pytest.raises(PlanError) as caught:
        export_plan(plan, None, "torchtitan", out=tmp_path, version=version)
    assert str(caught.value) == (
        f"plan: schedule {schedule} with VPP 1, and torchtitan runs ranks of one part of the model under 1f1b or "
        "gpipe; plan with search.schedule [1f1b], or with search.max_vpp 2"
    )
    assert not [*tmp_path.iterdir()]


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


def test_the_newest_code_counts_tokens(tmp_path: Path, model: Path) -> None:
    """Its keys in samples: 4,096 tokens of 2,048 are micro-batches of 2, eight of them a replica."""
    path = tmp_path / "config_registry.py"
    path.write_text(NEWEST)
    plan = read(path, model)
    assert (plan.strategy.mbs, plan.num_microbatches, plan.global_batch_size) == (2, 8, 32)
    path.write_text(NEWEST.replace("2 * length", "3000"))
    with pytest.raises(PlanError, match="3000 is no multiple of max_context_length 2048; plans hold whole samples"):
        read(path, model)
    path.write_text(NEWEST.replace("num_pp_microbatches=8", "pipeline_parallel_microbatch_size=1"))
    with pytest.raises(JobError, match="pipeline_parallel_microbatch_size is not known there"):
        read(path, model)


def test_recipes_begin_with_functions_of_files_beside_them(tmp_path: Path, model: Path) -> None:
    path, base = tmp_path / "recipes.py", tmp_path / "config_registry.py"
    path.write_text(RECIPES)
    base.write_text(NEWEST)
    with pytest.raises(JobError, match=r"line 16: what tp2 returns is known only .*; give the file of small beside"):
        read(path, model)
    plan = read(path, model, beside=(base,))
    assert (plan.strategy.pp, plan.strategy.tp, sum(plan.recompute["text"])) == (4, 2, 0)
    path.write_text(RECIPES.replace("if checks:", "if shape(checks):"))
    with pytest.raises(JobError, match=r"activation_checkpoint stands in a branch or a loop that only a run decides"):
        read(path, model, beside=(base,))


@pytest.mark.parametrize(
    ("new", "told"),
    [
        ("    for size in (2, 4):\n        config.parallelism.tensor_parallel_degree = size\n", "branch or a loop"),
        ("    change(config)\n", "what change sets is known only when the file runs"),
        ("    sizes = config.parallelism\n", "sizes is another name for config.parallelism"),
    ],
)
def test_what_changes_a_configuration_unseen_is_refused(new: str, told: str, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(REGISTRY.replace("    config.training.local", f"{new}    config.training.local"))
    with pytest.raises(JobError, match=told):
        read(path, model, 8, "large")


def test_a_section_that_is_made_anew_says_nothing_of_before(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "config_registry.py"
    made = "    config.parallelism = ParallelismConfig(tensor_parallel_degree=2)\n"
    path.write_text(REGISTRY.replace("    config.parallelism.tensor_parallel_degree = 2\n", made))
    assert (read(path, model, 8, "large").strategy.pp, read(path, model, 8, "large").strategy.tp) == (1, 2)


def test_a_script_that_starts_a_registry_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("MODULE=llama3 CONFIG=llama3_8b ./run_train.sh --parallelism.tensor_parallel_degree 2\n")
    with pytest.raises(JobError, match="starts torchtitan with a function of a registry, which is in another file"):
        read(path, model)


@pytest.mark.parametrize("feature", ["uneven_chunks", "zero_3", "zero_3_pipeline"])
def test_a_plan_for_the_newest_code_comes_back(feature: str, tmp_path: Path, model: Path) -> None:
    plan = replace(PLANS[feature], strategy=replace(PLANS[feature].strategy, zero=3))
    with pytest.raises(PlanError, match="counts tokens, and the plan's file has no sequence length; give --job"):
        export_plan(plan, None, "torchtitan", out=tmp_path, version="main")
    export_plan(plan, make_job(DENSE, plan), "torchtitan", out=tmp_path, version="main")
    text = (tmp_path / "planned.py").read_text()
    assert f"'max_context_length': {DENSE['seq-length']}" in text
    assert "local_batch_size" not in text
    again = read(tmp_path / "planned.py", model, plan.strategy.world_size)
    assert (again.layers, again.global_batch_size, again.strategy.mbs) == (plan.layers, plan.global_batch_size, 1)
