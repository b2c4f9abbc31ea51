"""Trainings on Megatron's pretrain that shard by torch FSDP2: their files read, planned, written and read back."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.mindspeed_mm.fsdp2_config import read_sharding
from mm_autoparallel.integrations.mindspeed_mm.script_files import (
    describe_script,
    planned_files,
    read_script_plan,
    write_script_plan,
)
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

CONFIGS = Path(__file__).parents[1] / "fixtures" / "huggingface"
SHARDING = """# what is sharded
sharding_size: auto
sub_modules_to_wrap:
  - text_decoder.embedding
  - text_decoder.decoder.layers.{*}
param_dtype: bf16
ignored_modules:
  - image_encoder
recompute_modules:  # all of them
  - text_decoder.embedding
  - text_decoder.decoder.layers.{*}
"""
YAML = """
gpt_args:
  micro_batch_size: 1
  global_batch_size: 16
  seq_length: 1024  # of a sample
  use_torch_fsdp2: true
  fsdp2_config_path: examples/tiny/fsdp2_config.yaml
data:
  dataset_param:
    preprocess_parameters: {image_max_pixels: 262144}
model:
  model_id: qwen3_vl_moe
  init_from_hf_path: ./weights/a3b
"""
GIVEN = Given(image_tokens=64)
TINY = {"vision": (6,), "text": (10,)}


@pytest.fixture
def sharded(launch_script: Path) -> Path:
    """The tiny checkout's script, sharded by FSDP2."""
    text = launch_script.read_text().replace("TP=4", "TP=1").replace("PP=2", "PP=1")
    config = "--use-torch-fsdp2 --fsdp2-config-path ./examples/tiny/fsdp2_config.yaml"
    launch_script.write_text(text.replace("--use-distributed-optimizer", config))
    launch_script.with_name("fsdp2_config.yaml").write_text(SHARDING)
    return launch_script


def form_plan(text: int = 10, batch: int = 96 * 16, **sizes: object) -> Plan:
    strategy = Strategy(**({"pp": 1, "tp": 1, "dp": 16, "mbs": 1, "zero": 3} | sizes))  # type: ignore[arg-type]
    return Plan(strategy, TINY, {"vision": (0,), "text": (text,)}, batch)


def changed(before: str, after: str) -> list[str]:
    """Lines that are in one of the two alone, each behind its sign; what is gone comes first."""
    lines = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    return [line[0] + line[2:].strip() for sign in "-+" for line in lines if line[0] == sign]


def test_the_job(sharded: Path) -> None:
    described = describe_script(sharded, GIVEN)
    assert described.search["zero"] == (3,)
    assert described.search["reshard"] == (True, False)
    assert described.workload["weight_bytes"] == 2.0
    assert any("ignored_modules names image_encoder" in note for note in described.notes)
    sharded.with_name("fsdp2_config.yaml").write_text(SHARDING.replace("param_dtype: bf16\n", ""))
    assert describe_script(sharded, GIVEN).workload["weight_bytes"] == 4.0


def test_the_plan_that_is_there(sharded: Path) -> None:
    assert read_script_plan(sharded, GIVEN) == form_plan()
    path = sharded.with_name("fsdp2_config.yaml")
    path.write_text(SHARDING.replace("layers.{*}\n", "layers.{0-2,4, 7-99}\n") + "reshard_after_forward: False\n")
    assert read_script_plan(sharded, replace(GIVEN, world_size=8)) == form_plan(7, 96 * 8, dp=8, reshard=False)


def test_nothing_but_a_name_changes_under_the_plan_that_is_there(sharded: Path, checkout: Path) -> None:
    out = checkout / "planned"
    done = write_script_plan(form_plan(), sharded, out, GIVEN, False)
    assert done.files == planned_files(sharded, out, GIVEN) == (out / "train.sh", out / "fsdp2_config.yaml")
    assert done.approximations == ()
    assert done.files[1].read_text() == SHARDING
    (gone, new) = changed(sharded.read_text(), done.files[0].read_text())
    assert new[1:] == gone[1:].replace("./examples/tiny/fsdp2_config.yaml", "./planned/fsdp2_config.yaml")
    assert done.files[0].stat().st_mode == sharded.stat().st_mode


def test_only_what_the_plan_decides_changes(sharded: Path, checkout: Path) -> None:
    before, out = sharded.read_text(), checkout / "planned"
    plan = form_plan(3, 64, mbs=2, dp=8, cp=2, reshard=False)
    done = write_script_plan(plan, sharded, out, GIVEN, False)
    script, sharding = (path.read_text() for path in done.files)
    assert changed(before.replace("examples/tiny/fsdp2", "planned/fsdp2"), script) == [
        "-CP=1",
        "-MBS=1   # samples",
        "-GRAD_ACC_STEP=96",
        "---micro-batch-size ${MBS} \\",
        "+CP=2",
        "+MBS=2   # samples",
        "+GRAD_ACC_STEP=4",
        "+--micro-batch-size ${MBS} --context-parallel-algo ulysses_cp_algo \\",
    ]
    document = yaml.safe_load(SHARDING) | {"reshard_after_forward": False}
    document["recompute_modules"] = ["text_decoder.embedding", "text_decoder.decoder.layers.{0-2}"]
    assert yaml.safe_load(sharding) == document
    assert "# what is sharded" in sharding
    assert sharded.read_text() == before
    assert sharded.with_name("fsdp2_config.yaml").read_text() == SHARDING
    moved = sharded.with_name("planned.sh")
    moved.write_text(script)
    assert read_script_plan(moved, GIVEN) == plan


def test_files_that_are_there_are_kept(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "fsdp2_config.yaml").write_text("kept: true\n")
    with pytest.raises(JobError, match="is there already"):
        write_script_plan(form_plan(1), sharded, tmp_path, GIVEN, False)
    assert (tmp_path / "fsdp2_config.yaml").read_text() == "kept: true\n"
    assert not (tmp_path / "train.sh").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("sharding_size: auto\n", "", "sharding_size is missing, and every device then keeps a whole copy"),
        ("sharding_size: auto", "sharding_size: 4", "sharding_size is 4; copies of the weights that fewer devices"),
        ("# what is sharded", "expert_parallel_size: 2", "expert_parallel_size is 2; experts dealt out beside FSDP2"),
        ("# what is sharded", "offload_to_cpu: true", "offload_to_cpu is true; weights and optimizer on the host"),
        ("# what is sharded", "reshard_after_forward: 2", "reshard_after_forward is 2; true or false is expected"),
        ("  - image_encoder", "  - 3", "ignored_modules is a list of 1; a list of names of modules"),
        ("param_dtype: bf16", "param_dtype: [", "fsdp2_config.yaml"),
    ],
)
def test_what_no_plan_can_speak_for(sharded: Path, old: str, new: str, words: str) -> None:
    sharded.with_name("fsdp2_config.yaml").write_text(SHARDING.replace(old, new))
    with pytest.raises(JobError) as failure:
        describe_script(sharded, GIVEN)
    assert words in str(failure.value)


def test_what_fsdp2_does_not_run(sharded: Path, tmp_path: Path) -> None:
    for sizes in ({"tp": 2, "dp": 8}, {"zero": 1}, {"ep": 2}, {"shard": 8}, {"dispatcher": "alltoall"}):
        with pytest.raises(PlanError, match="FSDP2 shards weights among all devices"):
            write_script_plan(form_plan(**sizes), sharded, tmp_path, GIVEN, False)
    sharded.write_text(sharded.read_text().replace("TP=1", "TP=2"))
    with pytest.raises(PlanError, match="it trains with TP 2 beside FSDP2"):
        read_script_plan(sharded, GIVEN)
    sharded.write_text(sharded.read_text().replace("--fsdp2-config-path ./examples/tiny/fsdp2_config.yaml", ""))
    with pytest.raises(JobError, match="--fsdp2-config-path is missing beside --use-torch-fsdp2"):
        describe_script(sharded, GIVEN)


def test_files_that_name_classes(sharded: Path, tmp_path: Path) -> None:
    """Of 2.2, whose reader is MindSpeed's own: all layers of a class recompute, and all devices share the weights."""
    layer = "megatron.core.transformer.transformer_layer.TransformerLayer"
    text = f"sub_modules_to_wrap:\n  - {layer}\nrecompute_modules:\n  - {layer}\n"
    path = sharded.with_name("fsdp2_config.yaml")
    path.write_text(text)
    assert read_script_plan(sharded, GIVEN) == form_plan(10)
    (told,) = write_script_plan(form_plan(3), sharded, tmp_path, GIVEN, False).approximations
    assert told.startswith("the plan recomputes not all layers of text, and this model recomputes all of them")
    path.write_text(f"sub_modules_to_wrap: [{layer}]\n")
    assert read_sharding(path, None, 8).all_or_none is False
    (told,) = write_script_plan(form_plan(3), sharded, tmp_path / "none", GIVEN, False).approximations
    assert told.endswith("names classes, none of which recomputes")


def test_layers_that_no_pattern_names(sharded: Path, tmp_path: Path) -> None:
    path = sharded.with_name("fsdp2_config.yaml")
    path.write_text("sharding_size: auto\n")
    described = describe_script(sharded, GIVEN)
    assert described.search["modes"] == ()
    assert any("names the layers of text, so that none is planned to recompute" in note for note in described.notes)
    with pytest.raises(PlanError, match="put it into sub_modules_to_wrap, as in text"):
        write_script_plan(form_plan(3), sharded, tmp_path, GIVEN, False)
    path.write_text(
        SHARDING.replace("  - text_decoder.decoder.layers.{*}\n", "  - text_decoder.decoder.layers.{*}.mlp\n")
    )
    sharding = path.read_text().replace("layers.{*}.mlp\nparam", "layers.{*}\nparam")
    path.write_text(sharding)
    done = write_script_plan(form_plan(3), sharded, tmp_path, GIVEN, False)
    assert "recompute_modules named text_decoder.decoder.layers.{*}.mlp, no whole layers" in done.approximations[0]
    written = yaml.safe_load(done.files[1].read_text())["recompute_modules"]
    assert written == ["text_decoder.embedding", "text_decoder.decoder.layers.{0-2}"]


def test_a_plan_into_the_yaml(checkout: Path, launch_script: Path, tmp_path: Path) -> None:
    """Where the model recomputes every layer whatever files say, a plan with less is told."""
    path = checkout / "examples" / "tiny" / "all.yaml"
    path.write_text(YAML)
    path.with_name("fsdp2_config.yaml").write_text("sharding_size: auto\nparam_dtype: bf16\n")
    text = launch_script.read_text()
    launch_script.write_text(text.replace("pretrain_vlm.py", "pretrain_transformers.py examples/tiny/all.yaml"))
    given = Given(model_config=CONFIGS / "qwen3_vl_30b_a3b.json")
    layers = {"vision": (27,), "text": (48,)}
    plan = Plan(Strategy(pp=1, tp=1, dp=8, mbs=2, cp=2, zero=3), layers, {"vision": (27,), "text": (48,)}, 32)
    assert read_script_plan(launch_script, given).recompute == plan.recompute
    done = write_script_plan(plan, launch_script, tmp_path, given, False)
    assert done.files == planned_files(launch_script, tmp_path, given)
    expected = yaml.safe_load(YAML)
    expected["gpt_args"] |= {"micro_batch_size": 2, "global_batch_size": 32, "context_parallel_size": 2}
    expected["gpt_args"]["fsdp2_config_path"] = str(tmp_path / "fsdp2_config.yaml")
    assert yaml.safe_load(done.files[0].read_text()) == expected
    assert "# of a sample" in done.files[0].read_text()
    assert len(done.approximations) == 1
    lighter = replace(plan, recompute={"vision": (27,), "text": (7,)})
    told = write_script_plan(lighter, launch_script, tmp_path, given, False).approximations
    assert told[0].startswith("the plan recomputes not all layers of text")
