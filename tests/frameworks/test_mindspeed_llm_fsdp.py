"""MindSpeed-LLM's FSDP trainer: its script and YAML to a job, a plan into the YAML and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mm_autoparallel.api.imported import ImportResult, import_launch
from mm_autoparallel.api.linted import lint_files
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.measurements.models import find_model
from mm_autoparallel.planner.plan import Plan

SCRIPT = """NPUS_PER_NODE=8
NNODES=2
torchrun --nproc_per_node $NPUS_PER_NODE --nnodes $NNODES train_fsdp2.py trainer.yaml | tee train.log
"""
TRAINER = """# as MindSpeed-LLM's trainer takes it
model:
  model_id: qwen3_moe
  model_name_or_path: ./weights/some-moe/
data:
  cutoff_len: 4096
parallel:
  fsdp_size: 16  # all
  fsdp_modules:
    - model.layers.{*}
    - lm_head
  ep_size: 4
  ep_fsdp_size: 4
  recompute: True
  recompute_modules:
    - model.layers.{0-3}
training:
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 4
optimization:
  chunk_loss_size: 1024
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "trainer.yaml").write_text(TRAINER)
    (tmp_path / "model.json").write_text(json.dumps(find_model("qwen3-30b-a3b", 8)))
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def given(script: Path) -> Given:
    return Given(script.with_name("model.json"))


def found(script: Path, old: str = "", new: str = "") -> ImportResult:
    """The script imported, its YAML with `new` in the place of `old`."""
    assert old in TRAINER
    script.with_name("trainer.yaml").write_text(TRAINER.replace(old, new) if old else TRAINER)
    return import_launch(script, device="ascend-910b-64g", given=given(script))


def test_its_yaml_is_a_job_and_a_plan(script: Path) -> None:
    done = found(script)
    plan, workload = done.estimate.plan, done.job.workload
    strategy = plan.strategy
    assert (strategy.dp, strategy.mbs, strategy.zero, strategy.ep, strategy.shard) == (16, 2, 3, 4, 0)
    assert (plan.recompute["text"], plan.global_batch_size) == ((4,), 2 * 4 * 16)
    assert (workload.stack, workload.seq_length, workload.loss_chunk_tokens) == ("mindspeed-fsdp", 4096, 1024)
    assert (workload.weight_bytes, workload.gradient_bytes, workload.optimizer_bytes) == (2.0, 4.0, 10.0)
    assert found(script, "recompute: True", "recompute: False").estimate.plan.recompute["text"] == (0,)


def test_a_model_of_the_hub_is_that_which_was_downloaded(
    script: Path, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = TRAINER.replace("./weights/some-moe/", "some-lab/some-moe")
    script.with_name("trainer.yaml").write_text(named)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(PlannerError, match="model_name_or_path"):
        import_launch(script, device="ascend-910b-64g", given=Given())
    commit = tmp_path / "hub" / "models--some-lab--some-moe" / "snapshots" / "c0"
    commit.mkdir(parents=True)
    (commit.parents[1] / "refs").mkdir()
    (commit.parents[1] / "refs" / "main").write_text("c0\n")
    whole = json.loads((repository / "tests" / "fixtures" / "huggingface" / "qwen3_vl_30b_a3b.json").read_text())
    text = whole["text_config"] | {"model_type": "qwen3_moe", "num_hidden_layers": 8, "tie_word_embeddings": False}
    (commit / "config.json").write_text(json.dumps(text))
    assert import_launch(script, device="ascend-910b-64g", given=Given()).job.model.name == "qwen3_moe-some-moe"


def test_what_it_leaves_out_is_as_its_trainer_has_it(script: Path) -> None:
    plain = found(script, "  per_device_train_batch_size: 2\n", "").estimate.plan
    assert plain.strategy.mbs == 8
    whole = found(script, "  recompute_modules:\n    - model.layers.{0-3}\n", "").estimate.plan
    assert whole.recompute["text"] == (8,)
    assert found(script, "cutoff_len: 4096", "overwrite_cache: True").job.workload.seq_length == 2048


def test_groups_are_repeated_whatever_ranks_share_heads(script: Path) -> None:
    """Four groups among eight ranks; a ring passes them on as they are."""
    ulysses = found(script, "ep_size: 4", "cp_size: 8\n  ep_size: 4")
    assert ulysses.estimate.plan.strategy.cp == 8
    assert ulysses.job.workload.context_parallel == "all_to_all"
    assert ulysses.job.workload.known_facts.repeated_groups == "always"
    ring = found(script, "ep_size: 4", "cp_size: 8\n  cp_type: ring\n  ep_size: 4").job.workload
    assert (ring.context_parallel, ring.known_facts.repeated_groups) == ("ring", "never")


def written(script: Path, plan: Plan) -> str:
    kind = next(kind for kind in frameworks()["mindspeed-mm-fsdp"].launches() if kind.is_one(script))
    kind.write_plan(plan, script, script.parent / "out", given(script), False)
    return (script.parent / "out" / "trainer.yaml").read_text()


def test_a_plan_is_written_in_its_own_keys(script: Path) -> None:
    plan = found(script).estimate.plan
    chosen = replace(plan, strategy=replace(plan.strategy, ep=8, mbs=1, reshard=False), recompute={"text": (8,)})
    text = written(script, replace(chosen, global_batch_size=64))
    parallel, training = (yaml.safe_load(text)[name] for name in ("parallel", "training"))
    assert (parallel["fsdp_size"], parallel["ep_size"], parallel["ep_fsdp_size"]) == (16, 8, 2)
    assert (parallel["reshard_after_forward"], parallel["recompute_modules"]) == (False, ["model.layers.{*}"])
    assert (training["per_device_train_batch_size"], training["gradient_accumulation_steps"]) == (1, 4)
    assert text.startswith("# as MindSpeed-LLM's trainer takes it\n")
    assert "fsdp_size: 16  # all" in text


def test_a_plan_that_shares_sequences_otherwise_is_refused(script: Path) -> None:
    plan = found(script).estimate.plan
    shared = replace(plan, strategy=replace(plan.strategy, cp=2, dp=8, cp_kind="all_to_all"))
    with pytest.raises(PlannerError, match="how a sequence is shared stays as"):
        written(script, shared)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("fsdp_size: 16", "fsdp_size: 8", "fsdp_size is 8, and MindSpeed-LLM's trainer asks that all 16 devices share"),
        ("fsdp_size: 16", "fsdp_size: 16\n  tp_size: 2", "matrices divided by DTensor beside FSDP2 are not planned"),
        ("ep_fsdp_size: 4", "ep_fsdp_size: 2", "sums no gradients over further copies of experts"),
        ("qwen3_moe", "mamba3", "mamba3, layers that are state spaces, which is not planned"),
        ("model_id", "quant_recipe_name: mxfp8\n  model_id", "training in fewer bits is not planned"),
        ("ep_size: 4", "cp_size: 2\n  cp_type: both\n  ep_size: 4", "ulysses or ring is expected"),
    ],
)
def test_what_is_not_planned_is_named(old: str, new: str, told: str, script: Path) -> None:
    with pytest.raises(PlannerError, match=told):
        found(script, old, new)
    findings = lint_files([script], device="ascend-910b-64g", given=given(script)).findings
    assert any(one.rule.severity == "error" for one in findings)


@pytest.mark.parametrize("behind", ["--parallel.fsdp_size 8", "$QUANT_ARGS", '"${MORE[@]}"'])
def test_values_behind_the_yaml_count_more_than_it(behind: str, script: Path) -> None:
    script.write_text(SCRIPT.replace("trainer.yaml", f"trainer.yaml {behind}"))
    with pytest.raises(PlannerError, match="behind the YAML, which counts more than it"):
        import_launch(script, device="ascend-910b-64g", given=given(script))


def test_misspelt_keys_are_found(script: Path) -> None:
    script.with_name("trainer.yaml").write_text(TRAINER.replace("ep_fsdp_size", "ep_fsdp_sizes"))
    findings = lint_files([script], device="ascend-910b-64g", given=given(script)).findings
    assert any("ep_fsdp_sizes" in one.message for one in findings)
