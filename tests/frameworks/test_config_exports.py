"""Plans in people's own configurations of accelerate, DeepSpeed, Colossal-AI, and those that say no plan."""

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
from mm_autoparallel.api.linted import lint_files
from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.integrations.accelerate.written import spell
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.python_text import read_lists
from mm_autoparallel.planner.plan import Plan

ACCELERATE = """# written by accelerate config
compute_environment: LOCAL_MACHINE
distributed_type: FSDP   # ours
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_activation_checkpointing: true  # slow
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_dp_shard_size: 8
use_cpu: false
"""
DEEPSPEED = """{
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": true},   "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": true
    }
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    left_out = ("seq-length", "hidden-dropout", "attention-dropout")
    sizes = {key: value for key, value in DENSE.items() if key not in left_out}
    path.write_text(json.dumps(sizes | {"padded-vocab-size": 512}))
    return path


def given(model: Path, **more: Any) -> Given:
    return Given(model, seq_length=256, **{"micro_batch_size": 1, "global_batch_size": 16, "world_size": 8} | more)


# ----------------------------------------------------------------------------------------------------------- accelerate


def test_a_configuration_is_a_job_and_a_plan(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(ACCELERATE)
    found = import_launch(path, device="h100-80g", given=given(model, world_size=None))
    strategy = found.estimate.plan.strategy
    assert found.framework == "accelerate"
    assert (strategy.dp, strategy.zero, strategy.reshard, found.estimate.plan.recompute["text"]) == (8, 3, True, (24,))
    assert found.job.workload.stack == "transformers"


def test_only_decided_keys_change_in_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(ACCELERATE)
    plan = PLANS["kept_weights"]
    export_plan(plan, None, "accelerate", into=(path,))
    text = path.read_text()
    for kept in ("# written by accelerate config\n", "FSDP   # ours\n", "downcast_bf16: 'no'\n", "  # slow\n"):
        assert kept in text
    document = yaml.safe_load(text)
    assert document["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert document["num_processes"] == 2
    assert document["fsdp_config"]["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"


def test_a_configuration_changes_its_kind_with_zero(tmp_path: Path, model: Path) -> None:
    """FSDP2's sections go where the plan is Megatron-LM's, and the plan comes back."""
    path = tmp_path / "config.yaml"
    path.write_text(ACCELERATE)
    plan = PLANS["pipeline"]
    export_plan(plan, None, "accelerate", into=(path,))
    assert not yaml.safe_load(path.read_text())["fsdp_config"]
    _, kind = find_kind(path, "accelerate")
    again = kind.read_plan(path, given(model, world_size=None))
    assert (again.layers, again.strategy.pp) == (plan.layers, 4)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "parallelism_config_dp_shard_size",
            "parallelism_config_dp_shared_size",
            'not known .*"parallelism_config_dp_shard',
        ),
        ("dp_shard_size: 8", "dp_shard_size: 4", "multiplies to 4 and num_processes is 8"),
        ("dp_shard_size: 8", "dp_shard_size: eight", "a whole number of at least 1"),
        ("distributed_type: FSDP", "distributed_type: XLA", "planned are MEGATRON_LM"),
        ("mixed_precision: bf16", "mixed_precision: fp8", "bf16 or fp16 is planned"),
        ("fsdp_version: 2", "fsdp_version: 2\n  fsdp_offload_params: true", "keeps weights on the host"),
    ],
)
def test_what_no_plan_says_is_named(old: str, new: str, told: str, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "config.yaml"
    assert old in ACCELERATE
    path.write_text(ACCELERATE.replace(old, new))
    with pytest.raises(PlannerError, match=told):
        import_launch(path, framework="accelerate", device="h100-80g", given=given(model, world_size=None))


ENGINE = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_dp_shard_size: 4
  parallelism_config_sp_size: 2
"""


def test_keys_of_deepspeed_in_a_configuration_of_accelerate_are_a_plan(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(ENGINE)
    plan = import_launch(path, device="h100-80g", given=given(model, world_size=None)).estimate.plan
    strategy = plan.strategy
    assert (strategy.dp, strategy.cp, strategy.cp_kind, strategy.zero) == (4, 2, "all_to_all", 3)
    assert strategy.optimizer_offload
    assert plan.num_microbatches == 4
    path.write_text(ENGINE.replace("zero_stage: 3", "gradient_accumulation_steps: 2").replace(": cpu", ": none"))
    _, kind = find_kind(path, None)
    plan = kind.read_plan(path, given(model, world_size=None, global_batch_size=None))
    assert (plan.strategy.zero, plan.strategy.optimizer_offload, plan.global_batch_size) == (2, False, 8)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("zero_stage: 3", "zero_stages: 3", 'zero_stages is not known there.*"zero_stage"'),
        ("zero_stage: 3", "zero_stage: 4", "stage is 4; 0 to 3 are known"),
        ("zero_stage: 3", "deepspeed_config_file: ds.json", 'is "ds.json", which says the rest; import that file'),
        ("zero_stage: 3", "gradient_accumulation_steps: 8", "refuses to start"),
        ("offload_param_device: none", "offload_param_device: cpu", "weights on the host"),
        ("offload_optimizer_device: cpu", "offload_optimizer_device: nvme", 'is "nvme"; none and cpu are planned'),
        ("dp_shard_size: 4", "dp_shard_size: 8", "multiplies to 16 and num_processes is 8"),
        ("_sp_size: 2", "_cp_size: 2", "parallelism_config_cp_size is FSDP's"),
    ],
)
def test_what_no_plan_says_of_deepspeed_is_named(old: str, new: str, told: str, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "config.yaml"
    assert old in ENGINE
    path.write_text(ENGINE.replace(old, new))
    with pytest.raises(PlannerError, match=told):
        import_launch(path, device="h100-80g", given=given(model, world_size=None))


def test_lint_looks_at_keys_of_deepspeed_and_mends_them_by_no_other_kind(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(ENGINE.replace("zero3_init_flag", "zero3_init_flags"))
    (found,) = lint_files([path], given=given(model, world_size=None, global_batch_size=None)).findings[:1]
    assert (found.rule.key, found.line, found.mend) == ("misspelt-flag", 6, "zero3_init_flag")
    for text, told in ((ENGINE, ""), (ACCELERATE, "fsdp_config.fsdp_activation_checkpointing: false")):
        path.write_text(text)
        found = import_launch(path, device="h100-80g", given=given(model, world_size=None))
        plan = replace(PLANS["kept_weights"], layers={"text": (24,)})
        again, none = (replace(plan, recompute={"text": (count,)}) for count in (24, 0))
        assert spell(path, again, none, found.job) == told


def test_a_plan_takes_the_keys_of_deepspeed_out(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(ENGINE)
    export_plan(PLANS["kept_weights"], None, "accelerate", into=(path,))
    document = yaml.safe_load(path.read_text())
    assert (document["distributed_type"], document["deepspeed_config"]) == ("FSDP", {})


# ------------------------------------------------------------------------------------------------------------ DeepSpeed


def test_comments_of_people_are_no_keys(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(DEEPSPEED.replace("{", '{\n    "_comment": "ours",', 1))
    assert import_launch(path, device="h100-80g", given=given(model)).estimate.plan.strategy.zero == 3


def test_a_micro_batch_that_the_code_sets_is_asked_for(model: Path, tmp_path: Path) -> None:
    """With the whole batch in one micro-batch the peak would be another run's."""
    path = tmp_path / "ds_config.json"
    path.write_text(DEEPSPEED.replace('_gpu": 2', '_gpu": "auto"'))
    with pytest.raises(JobError, match="leaves train_micro_batch_size_per_gpu to the training's code; say it with"):
        import_launch(path, device="h100-80g", given=given(model, micro_batch_size=None))
    found = import_launch(path, device="h100-80g", given=given(model, micro_batch_size=4))
    assert (found.estimate.plan.strategy.mbs, found.estimate.plan.num_microbatches) == (4, 2)


def test_a_configuration_of_deepspeed_is_read_without_its_layers(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(DEEPSPEED)
    found = import_launch(path, device="h100-80g", given=given(model, micro_batch_size=None, global_batch_size=None))
    plan = found.estimate.plan
    assert found.framework == "deepspeed"
    assert (plan.strategy.zero, plan.strategy.dp, plan.strategy.mbs, plan.num_microbatches) == (3, 8, 2, 4)
    assert any("planned_layers.py is not beside it" in note for note in found.notes)


def test_only_decided_keys_change_in_ds_config(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(DEEPSPEED)
    plan = PLANS["recompute_stages"]
    result = export_plan(plan, None, "deepspeed", into=(path,))
    assert set(result.files) == {path, tmp_path / "planned_layers.py"}
    text = path.read_text()
    assert '"bf16": {"enabled": true},   "gradient_clipping": 1.0,\n' in text
    assert json.loads(text)["zero_optimization"] == {
        "stage": 1,
        "overlap_comm": True,
        "offload_optimizer": {"device": "none"},
    }
    assert read_lists(tmp_path / "planned_layers.py") == (plan.layers, plan.recompute)
    _, kind = find_kind(path, "deepspeed")
    again = kind.read_plan(path, given(model, micro_batch_size=None, global_batch_size=None))
    assert (again.layers, again.recompute) == (plan.layers, plan.recompute)


def test_layers_of_somebody_else_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(DEEPSPEED)
    (tmp_path / "planned_layers.py").write_text("mine = True\n")
    with pytest.raises(JobError, match=r"planned_layers\.py is there already"):
        export_plan(PLANS["pipeline"], None, "deepspeed", into=(path,))
    assert (tmp_path / "planned_layers.py").read_text() == "mine = True\n"
    assert path.read_text() == DEEPSPEED


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"train_batch_sise": 8}, 'not known .*"train_batch_size"'),
        ({"train_batch_size": 60}, "is not train_micro_batch_size_per_gpu 2"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4; 0 to 3"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "a second copy of weights"),
        ({"tensor_parallel": {"autotp_size": 3}}, "does not divide 8 devices"),
    ],
)
def test_what_deepspeed_would_pass_over_is_named(
    change: dict[str, Any], told: str, tmp_path: Path, model: Path
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(json.loads(DEEPSPEED) | change))
    _, kind = find_kind(path, "deepspeed")
    with pytest.raises(PlannerError, match=told):
        kind.read_plan(path, given(model, micro_batch_size=None, global_batch_size=None))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("PLAN = make()\n", "line 1 gives PLAN no plain value"),
        ("PLAN = {\n", "no Python that can be read"),
        ("LAYERS = [1]\n", "assigns nothing to PLAN"),
        ('PLAN = {"text": {"layers": [24.5], "recompute": [0]}}\n', "no list of whole numbers under layers"),
        ('PLAN = {"text": {"layers": [23], "recompute": [0]}}\n', "places other layers than the model has"),
    ],
)
def test_layers_that_cannot_be_read_are_named(code: str, told: str, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(DEEPSPEED)
    (tmp_path / "planned_layers.py").write_text(code)
    _, kind = find_kind(path, "deepspeed")
    with pytest.raises(PlannerError, match=told):
        kind.read_plan(path, given(model, micro_batch_size=None, global_batch_size=None))


# ---------------------------------------------------------------------------------------------------------- Colossal-AI

PLUGIN = """{
    "tp_size": 1, "pp_size": 1,
    "precision": "bf16",    "max_norm": 1.0,
    "zero_stage": 2, "dp_outside": true
}
"""
CALLING = """
import torch
from colossalai.booster.plugin import HybridParallelPlugin, PipelineGradientCheckpointConfig

plugin = HybridParallelPlugin(
    tp_size=1, pp_size=4, microbatch_size=1, zero_stage=1, dp_outside=False,
    num_layers_per_stage=[3, 7, 8, 6],
    gradient_checkpoint_config=PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[3, 1, 0, 2]),
)
"""


def test_only_decided_keywords_change(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "plugin.json"
    path.write_text(PLUGIN)
    plan = replace(PLANS["recompute_stages"], layers={"text": (3, 7, 8, 6)})
    export_plan(plan, None, "colossalai", into=(path,))
    assert '"precision": "bf16",    "max_norm": 1.0,\n' in path.read_text()
    found = json.loads(path.read_text())
    assert found["num_layers_per_stage"] == [3, 7, 8, 6]
    assert found["gradient_checkpoint_config"] == {"num_ckpt_layers_per_stage": [3, 1, 0, 2]}
    assert found["dp_outside"] is False
    _, kind = find_kind(path, "colossalai")
    again = kind.read_plan(path, given(model))
    assert (again.layers, again.recompute) == (plan.layers, plan.recompute)


def test_checkpoints_are_flat_by_chunks(tmp_path: Path) -> None:
    recompute = (3, 1, 0, 2, 0, 2, 1, 3)
    plan = replace(PLANS["chunks"], recompute={"text": recompute})
    result = export_plan(plan, None, "colossalai", out=tmp_path / "new")
    said = json.loads(result.files[0].read_text())
    assert said["gradient_checkpoint_config"]["num_ckpt_layers_per_stage"] == [*recompute]
    assert (said["pp_style"], said["num_model_chunks"]) == ("interleaved", 2)
    assert f"num_ckpt_layers_per_stage={[*recompute]}" in result.files[1].read_text()
    compile(result.files[1].read_text(), "planned_plugin.py", "exec")


def test_a_call_of_the_plugin_is_read_and_not_run(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(CALLING)
    found = import_launch(path, device="h100-80g", given=given(model, world_size=16))
    plan = found.estimate.plan
    assert found.framework == "colossalai"
    assert (plan.strategy.pp, plan.strategy.dp, plan.layers["text"]) == (4, 4, (3, 7, 8, 6))
    assert plan.recompute["text"] == (3, 1, 0, 2)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("tp_size=1", "tp_size=args.tp", "line 6, tp_size is known only when the file runs"),
        ("tp_size=1", "tp_sise=1", 'tp_sise is not known .*"tp_size"'),
        ("[3, 7, 8, 6]", "[3, 7, 8]", "4 whole numbers are expected"),
        ("[3, 7, 8, 6]", "[3, 7, 8, 7]", "holds 25 layers, and the model has 24"),
        ("[3, 1, 0, 2]", "[4, 1, 0, 2]", "more than the layers there"),
        ("zero_stage=1", "zero_stage=2", "0 and 1 are known"),
        ("pp_size=4", "pp_size=4, num_model_chunks=2", "which Colossal-AI refuses"),
        ("zero_stage=1", "zero_stage=1, **more", "known only when the file runs"),
    ],
)
def test_what_the_plugin_cannot_run_is_named(old: str, new: str, told: str, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(CALLING.replace(old, new))
    _, kind = find_kind(path, "colossalai")
    with pytest.raises(PlannerError, match=told):
        kind.read_plan(path, given(model, world_size=16))


# -------------------------------------------------------------------------------------------------------------- by verb


def test_a_written_configuration_is_imported_again(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way: export, import of what was written, and its job simulated."""
    plan: Plan = replace(PLANS["zero_3"], global_batch_size=8)
    export_plan(plan, None, "deepspeed", out=tmp_path / "exported")
    words = ["import", str(tmp_path / "exported" / "ds_config.json"), "--world-size", "2", "--model", str(model)]
    words += ["--seq-length", "256", "--device", "h100-80g", "--out", str(tmp_path / "imported")]
    assert main(words) == 0
    assert "deepspeed: PP 1" in capsys.readouterr().out
    job, found = tmp_path / "imported" / "job.yaml", tmp_path / "imported" / "plan.json"
    assert main(["simulate", str(job), "--config", str(found)]) == 0


def test_what_a_file_says_by_itself_is_not_said_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text("torchrun pretrain_gpt.py --num-layers 4\n")
    assert main(["import", str(script), "--from", "megatron-core", "--seq-length", "256", "--device", "h100-80g"]) == 2
    assert "--seq-length 256" in capsys.readouterr().err


def test_lint_spells_what_mends_in_the_files_own_keys(tmp_path: Path, model: Path) -> None:
    """Recompute that memory does not need: by line and key of each framework."""
    accelerate = tmp_path / "c.yaml"
    accelerate.write_text(ACCELERATE)
    export_plan(replace(PLANS["zero_3"], recompute={"text": (5,)}), None, "deepspeed", out=tmp_path / "ds")
    deepspeed = tmp_path / "ds" / "ds_config.json"
    export_plan(PLANS["recompute_stages"], None, "colossalai", out=tmp_path / "co")
    colossal = tmp_path / "co" / "plugin.json"
    found = {}
    for path, more in (
        (accelerate, {"world_size": None, "global_batch_size": 64}),
        (deepspeed, {"world_size": 2, "global_batch_size": None, "micro_batch_size": None}),
        (colossal, {}),
    ):
        said = given(model, **more)
        result = lint_files([path], device="h100-80g", given=said)
        found[path.name] = next(one for one in result.findings if one.rule.key == "needless-recompute")
    assert found["c.yaml"].mend == "fsdp_config.fsdp_activation_checkpointing: false"
    assert found["c.yaml"].line == 7
    assert found["ds_config.json"].mend == "planned_layers.py.text.recompute: [0]"
    assert found["plugin.json"].mend == "without gradient_checkpoint_config.num_ckpt_layers_per_stage"
