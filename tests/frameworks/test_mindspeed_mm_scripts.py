"""Launch scripts with the files that they name: what is trained, on how many devices, and why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.catalog import find_launch
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.launch_script import find_broken_arithmetic, find_world_size, read_launch_script
from mm_autoparallel.integrations.mindspeed_mm.launch import describe_arguments
from mm_autoparallel.integrations.mindspeed_mm.launch_script import set_sizes
from mm_autoparallel.integrations.mindspeed_mm.plan_files import read_plan_back, write_plan
from mm_autoparallel.integrations.mindspeed_mm.script_files import (
    describe_script,
    read_launch,
)
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.planner.plan import Plan

NUMBERS = (
    "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size $GBS "
    "--mm-model m.json"
)
CONFIGS = Path(__file__).parents[1] / "fixtures" / "huggingface"


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_what_a_script_trains(checkout: Path, launch_script: Path) -> None:
    described = find_launch(launch_script).describe(launch_script, Given(image_tokens=64))
    assert described.model == checkout / "examples" / "tiny" / "model.json"
    assert described.workload["global_batch_size"] == 1 * 96 * (16 // 4 // 2)
    assert described.workload["seq_length"] == 1024
    assert described.workload["image_tokens_per_sample"] == 64
    assert described.world_size == 16
    assert find_launch(launch_script).find_devices(launch_script) == (2, 8)


def test_the_batch_is_that_of_the_devices_that_are_meant(launch_script: Path) -> None:
    described = describe_script(launch_script, Given(image_tokens=64, world_size=64))
    assert described.workload["global_batch_size"] == 96 * 8


def test_files_are_found_from_anywhere(launch_script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert describe_script(launch_script, Given(image_tokens=64)).world_size == 16


@pytest.mark.parametrize(
    ("data", "tokens", "images", "reason"),
    [
        ({"preprocess_parameters": {"image_max_pixels": 262144}}, 262144 // 784, 1, "image_max_pixels 262144 allows"),
        ({"preprocess_parameters": {"image_resolution": 28 * 28 * 5}}, 5, 1, "image_resolution 3920 allows"),
        ({"preprocess_parameters": {"image_max_pixels": 28 * 28 * 5000}}, 1024, 1, "cut to seq-length 1024"),
        (
            {"patch_size": 14, "image_size": 224, "down_sample_ratio": 0.5, "max_dynamic_patch": 12},
            64 * 13,
            13,
            "13 tiles of 64 each, the most that max_dynamic_patch 12 allows",
        ),
        (
            {"patch_size": 14, "image_size": 448, "down_sample_ratio": 0.5, "max_dynamic_patch": 12},
            256 * 4,
            4,
            "cut to seq-length 1024",
        ),
        (
            {
                "patch_size": 14,
                "image_size": 448,
                "down_sample_ratio": 0.5,
                "max_dynamic_patch": 3,
                "use_thumbnail": False,
            },
            256 * 3,
            3,
            "3 tiles",
        ),
    ],
)
def test_image_tokens_of_the_data_file(
    data: dict[str, Any], tokens: int, images: int, reason: str, checkout: Path, launch_script: Path
) -> None:
    (checkout / "examples" / "tiny" / "data.json").write_text(json.dumps({"dataset_param": data}))
    change(launch_script, "--bf16", "--bf16 --mm-data ./examples/tiny/data.json")
    described = describe_script(launch_script, Given())
    assert described.workload["image_tokens_per_sample"] == tokens
    assert described.workload["images_per_sample"] == images
    (note,) = described.notes
    assert reason in note
    assert "--image-tokens and --images say otherwise" in note


def test_image_tokens_that_nobody_says(launch_script: Path) -> None:
    with pytest.raises(JobError, match="cannot be told from the data file; give --image-tokens"):
        describe_script(launch_script, Given())


HOSTS = "HOSTS=./hosts\nCARDS=8\nNODES=$(wc -l $HOSTS)\nWORLD_SIZE=$(($CARDS*$NODES))\n"
NAMED_ELSE = "NPUS=8\nNODES=2\nWORLD_SIZE=$(($GPUS*$NODES))\n"


@pytest.mark.parametrize(
    ("lines", "launcher", "reason"),
    [
        (
            NAMED_ELSE,
            "--nnodes $NODES --nproc_per_node $NPUS",
            "line 3 works WORLD_SIZE out from GPUS, which is assigned",
        ),
        (HOSTS, "--nnodes $NODES --nproc_per_node $CARDS", "line 3 gives NODES a number with the name of the file"),
    ],
)
def test_arithmetic_that_the_shell_cannot_do(lines: str, launcher: str, reason: str, tiny_plan: Plan) -> None:
    """The number itself goes behind the flag's variable, and is read back where it stands."""
    text = f"{lines}DP=$((WORLD_SIZE/8))\nGBS=$((8*DP))\ntorchrun {launcher} x.py {NUMBERS}\n"
    script = LaunchScript(Path("train.sh"), text)
    assert reason in str(find_broken_arithmetic(script))
    assert "\nGBS=64\n" in set_sizes(script, tiny_plan, frozen_stage=False).text


@pytest.mark.parametrize(
    "lines",
    [
        "NODES=$(wc -l < hosts)\nWORLD_SIZE=$((8*NODES))\n",
        "NODES=$(cat hosts | wc -l)\nWORLD_SIZE=$((8*NODES))\n",
        "WORLD_SIZE=$((8*NODES))\n",
        "WORLD_SIZE=$(cat hosts | wc -l)\n",
        "NODES=${NODES:-2}\nWORLD_SIZE=$((8*NODES))\n",
    ],
)
def test_arithmetic_that_a_person_can_set(lines: str, tiny_plan: Plan) -> None:
    text = f"{lines}GBS=$((8*WORLD_SIZE/4))\ntorchrun --nnodes $NODES --nproc_per_node 8 x.py {NUMBERS}\n"
    script = LaunchScript(Path("train.sh"), text)
    assert find_broken_arithmetic(script) is None
    plan = set_sizes(script, tiny_plan, frozen_stage=False).text
    assert "GBS=64\n" in plan or "GBS=$((8*WORLD_SIZE/4))\n" in plan


def test_a_world_that_is_a_number_is_no_nodes_to_set(tiny_plan: Plan) -> None:
    text = f"WORLD_SIZE=8\nGBS=$((8*WORLD_SIZE/2))\ntorchrun --nnodes 1 --nproc_per_node 8 x.py {NUMBERS}\n"
    assert "\nGBS=64\n" in set_sizes(LaunchScript(Path("x.sh"), text), tiny_plan, frozen_stage=False).text


def test_broken_arithmetic_is_told_when_a_plan_is_written(
    model_json: Path, launch_script: Path, tiny_plan: Plan, tmp_path: Path
) -> None:
    change(launch_script, "$(($NPUS_PER_NODE*$NNODES))", "$(($GPUS_PER_NODE*$NNODES))")
    export = write_plan(tiny_plan, model_json, launch_script, tmp_path / "out")
    (told,) = export.approximations[-1:]
    assert "line 5 works WORLD_SIZE out from GPUS_PER_NODE, which is assigned nowhere" in told
    assert read_plan_back(*export.files, world_size=16) == tiny_plan
    notes = describe_script(launch_script, Given(image_tokens=64)).notes
    assert "the global batch is taken as meant, 192" in notes[-1]


def test_msrun(launch_script: Path) -> None:
    change(launch_script, "--nproc_per_node $NPUS_PER_NODE", "--local_worker_num $NPUS_PER_NODE")
    change(launch_script, "--nnodes $NNODES", "--worker_num $WORLD_SIZE")
    change(launch_script, "torchrun", "msrun")
    script = read_launch_script(launch_script)
    assert find_world_size(script) == 16
    assert find_launch(launch_script).find_devices(launch_script) == (2, 8)
    assert describe_script(launch_script, Given(image_tokens=64)).world_size == 16


def test_adapters(launch_script: Path) -> None:
    change(launch_script, "--bf16", "--bf16 --lora-r 4 --lora-target-modules linear_qkv linear_fc2")
    described = describe_script(launch_script, Given(image_tokens=64))
    assert described.adapters is not None
    assert (described.adapters["rank"], described.adapters["targets"]) == (4, ["qkv", "fc2"])


def test_no_processes_a_node_are_no_world() -> None:
    script = LaunchScript(Path("x.sh"), "msrun --worker_num 8 --local_worker_num 0 x.py")
    assert find_world_size(script) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("torchrun $DISTRIBUTED_ARGS pretrain_vlm.py", "echo", "starts no Python file"),
        (
            "pretrain_vlm.py",
            "posttrain_qwen2vl_dpo.py",
            "starts posttrain_qwen2vl_dpo.py, which trains after pretraining",
        ),
        ("pretrain_vlm.py", "pretrain_sora.py", "makes videos or images; planned are pretrain_vlm.py"),
        ("pretrain_vlm.py", "mindspeed_mm/fsdp/train/trainer.py x.yaml", "trains by FSDP from a YAML"),
        ("--bf16", "--bf16 --lora-target-modules q_proj", "--lora-target-modules names q_proj"),
        ("--mm-model $MM_MODEL", "", "neither --mm-model nor a YAML is behind it"),
        ("./examples/tiny/model.json", "<path>/model.json", 'it names "<path>/model.json", which is no path until'),
        ("./examples/tiny/model.json", "./none.json", "there is no such file"),
        ("--seq-length 1024", "--seq-length $LENGTH", "--seq-length is \\$LENGTH"),
        ("GRAD_ACC_STEP=96", "GRAD_ACC_STEP=$1", "gives --global-batch-size the value \\${GBS}, whose number"),
    ],
)
def test_scripts_that_are_not_planned(old: str, new: str, message: str, launch_script: Path) -> None:
    change(launch_script, old, new)
    with pytest.raises(JobError, match=message):
        describe_script(launch_script, Given(image_tokens=64))


def test_a_folder_that_is_no_checkout(checkout: Path, launch_script: Path) -> None:
    (checkout / "pretrain_vlm.py").touch()
    with pytest.raises(JobError, match="no folder mindspeed_mm is beside it: that is no checkout"):
        read_launch(launch_script, None)
    (checkout / "mindspeed_mm").mkdir()
    assert read_launch(launch_script, None).entry == "pretrain_vlm.py"


def test_a_file_that_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no file that starts a training; known are .*a launch script of MindSpeed-MM"):
        find_launch(tmp_path / "notes.txt")


@pytest.fixture
def placeholders(checkout: Path, model_json: Path) -> Path:
    """A model.json whose sizes are placeholders: those of a folder count."""
    model_json.write_text(
        json.dumps(
            {
                "model_id": "qwen3_vl_moe",
                "init_from_hf_path": "./weights/a3b",
                "image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": True}},
                "text_decoder": {"num_layers": 999, "hidden_size": 999, "num_attention_heads": 999},
            }
        )
    )
    return model_json


def test_sizes_are_those_of_the_folder(checkout: Path, placeholders: Path, launch_script: Path) -> None:
    given = Given(image_tokens=64)
    with pytest.raises(JobError, match=r"placeholders\. Put it there, or give it .* with --model-config PATH"):
        describe_script(launch_script, given)
    config = CONFIGS / "qwen3_vl_30b_a3b.json"
    by_flag = describe_script(launch_script, Given(model_config=config, image_tokens=64)).model
    (checkout / "weights" / "a3b").mkdir(parents=True)
    (checkout / "weights" / "a3b" / "config.json").write_text(config.read_text())
    model = describe_script(launch_script, given).model
    assert isinstance(model, Model)
    assert isinstance(by_flag, Model)
    assert model.text.layers.num_layers == 48
    assert (model.encoders[0].freeze, model.encoders[0].projector.freeze, model.text.freeze) == (False, True, False)
    assert by_flag.text == model.text


def test_sizes_of_another_model(checkout: Path, placeholders: Path, launch_script: Path) -> None:
    with pytest.raises(JobError, match=r'model_type is "qwen2_vl", and .* trains the model_id qwen3_vl_moe'):
        describe_script(launch_script, Given(model_config=CONFIGS / "qwen2_vl_7b.json", image_tokens=64))
    with pytest.raises(JobError, match="there is no such file; give the model's own config"):
        describe_script(launch_script, Given(model_config=checkout / "none.json", image_tokens=64))


def test_a_config_that_has_no_say(launch_script: Path) -> None:
    with pytest.raises(JobError, match=r"has no init_from_hf_path.* leave that out"):
        describe_script(launch_script, Given(model_config=CONFIGS / "qwen2_vl_7b.json", image_tokens=64))


YAML = """
MM_TOOL_PATH: ./tools.json
gpt_args:
  micro_batch_size: 1
  global_batch_size: 16
  seq_length: 1024
  use_torch_fsdp2: true
  fsdp2_config_path: examples/tiny/fsdp2_config.yaml
  use_flash_attn: true
  bf16: false
  spec: [a, b]
data:
  dataset_param:
    preprocess_parameters: {image_max_pixels: 262144}
model:
  model_id: qwen3_vl_moe
  init_from_hf_path: ./weights/a3b
  text_decoder: {num_layers: 999, hidden_size: 999, num_attention_heads: 999}
"""


def test_arguments_in_a_yaml(checkout: Path, launch_script: Path) -> None:
    """As pretrain_transformers.py reads them: the model, its data and all arguments in one file."""
    (checkout / "examples" / "tiny" / "all.yaml").write_text(YAML)
    (checkout / "examples" / "tiny" / "fsdp2_config.yaml").write_text("sharding_size: auto\nparam_dtype: bf16\n")
    change(launch_script, "pretrain_vlm.py", "pretrain_transformers.py examples/tiny/all.yaml")
    launch = read_launch(launch_script, None)
    arguments = " ".join(launch.arguments)
    assert "--micro-batch-size 1 --global-batch-size 16 --seq-length 1024 --use-torch-fsdp2" in arguments
    assert "--spec a --spec b" in arguments
    assert "--bf16" not in arguments
    described = describe_script(launch_script, Given(model_config=CONFIGS / "qwen3_vl_30b_a3b.json"))
    assert described.workload["image_tokens_per_sample"] == 262144 // 32**2
    assert described.search["zero"] == (3,)
    (checkout / "examples" / "tiny" / "all.yaml").write_text("model: {}")
    with pytest.raises(JobError, match="gpt_args is nothing; a mapping of Megatron's arguments"):
        read_launch(launch_script, None)


def test_adapters_by_the_names_of_transformers(checkout: Path, launch_script: Path) -> None:
    """Beside attention alone: experts are no matrices there."""
    path = checkout / "examples" / "tiny" / "all.yaml"
    path.with_name("fsdp2_config.yaml").write_text("sharding_size: auto\nparam_dtype: bf16\n")
    frozen = "\n  image_encoder: {vision_encoder: {freeze: true}, vision_projector: {freeze: true}}\n  text_decoder:"
    lora = "lora_args: {lora_r: 4, lora_target_modules: 'v_proj,o_proj'}\n"
    path.write_text(YAML.replace("\n  text_decoder:", frozen) + lora)
    change(launch_script, "pretrain_vlm.py", "pretrain_transformers.py examples/tiny/all.yaml")
    given = Given(model_config=CONFIGS / "qwen3_vl_30b_a3b.json", world_size=8)
    described = describe_script(launch_script, given)
    assert described.adapters == {"rank": 4, "targets": ["v", "proj"], "dropout": False}
    assert described.workload["weight_bytes"] == 2.0
    change(path, "v_proj,o_proj", "v_proj,down_proj")
    with pytest.raises(JobError, match="text has experts, beside which such adapters are not understood"):
        describe_script(launch_script, given)
    change(path, "v_proj,down_proj", "linear_qkv")
    with pytest.raises(JobError, match=r"names linear_qkv \(known are q_proj"):
        describe_script(launch_script, given)


def test_a_part_that_does_not_say_its_layers(
    model_json: Path, launch_script: Path, tiny_plan: Plan, tmp_path: Path
) -> None:
    """DeepSeek-VL2 of 2.1: the tower's layers stand behind its name alone."""
    document = json.loads(model_json.read_text())
    tower = {"model_id": "SigLip", "image_size": 384}
    projector = {"model_id": "DeepSeekVL2MLP", "input_dim": 1152, "n_embed": 64}
    document["image_encoder"] = {"vision_encoder": tower, "vision_projector": projector}
    model_json.write_text(json.dumps(document))
    plan = replace(tiny_plan, layers=dict(tiny_plan.layers) | {"vision": (27, 0)})
    with pytest.raises(JobError, match=r"vision_encoder has no num_layers, .* add it \(27 here\)"):
        write_plan(plan, model_json, launch_script, tmp_path / "out")


def test_the_hook_describes_with_the_same_function(model_json: Path) -> None:
    flags = f"--mm-model {model_json} --seq-length 32 --global-batch-size 8 --bf16".split()
    described = describe_arguments(flags, Given(image_tokens=8))
    assert described.model == model_json
    assert "optimizer_bytes" not in described.workload
    assert describe_arguments([*flags, "--reuse-fp32-param"], Given(image_tokens=8)).workload["optimizer_bytes"] == 10.0
    assert describe_arguments(flags[:-1], Given(image_tokens=8)).workload["weight_bytes"] == 4.0
