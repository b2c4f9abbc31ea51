"""What is not planned is told before anything is profiled or trained: one paragraph, exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.hooks.mindspeed_mm import describe_pretraining, read_request
from mm_autoparallel.hooks.pretraining import Pretraining
from mm_autoparallel.integrations.mindspeed_mm.adapters import find_adapters
from mm_autoparallel.integrations.mindspeed_mm.arguments import find_switch
from mm_autoparallel.integrations.mindspeed_mm.model_json import read_model_json
from mm_autoparallel.integrations.mindspeed_mm.refusals import (
    check_dispatcher,
    check_entry,
    check_flags,
    find_dispatcher,
)
from mm_autoparallel.model.job.strategy import Strategy

REPOSITORY = Path(__file__).parents[2]
MODELS = REPOSITORY / "tests" / "fixtures" / "mindspeed_mm_models"

TRAINS = {
    "a process group": "import torch.distributed as dist\ndist.init_process_group('gloo', rank=0, world_size=1)\n",
    "an optimizer": "import torch\ntorch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])\n",
}


def run(folder: Path, script: str, *flags: str, module: bool = True) -> subprocess.CompletedProcess[str]:
    """A script that is no training of MindSpeed-MM's, under the hook."""
    path = folder / "train.py"
    line = "" if module else "import mm_autoparallel.hooks.mindspeed_mm as planner; planner.install()\n"
    path.write_text(f"{line}{script}print('trained')\n")
    hook = ["-m", "mm_autoparallel.hooks.mindspeed_mm"] if module else []
    return subprocess.run(
        [sys.executable, *hook, "train.py", *flags],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", TRAINS)
def test_a_training_that_does_not_come_by_is_stopped(tmp_path: Path, what: str) -> None:
    done = run(tmp_path, TRAINS[what], "--auto-parallel-mm")
    assert done.returncode == 2, done.stderr
    assert f"train.py: it makes {what} to train and has not called mindspeed_mm.training.pretrain" in done.stderr
    assert "pretrain_vlm.py and its like" in done.stderr
    assert "Traceback" not in done.stderr
    assert "trained" not in done.stdout


@pytest.mark.slow
def test_a_script_that_ends_without_coming_by(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--auto-parallel-mm", module=False)
    assert (done.returncode, done.stdout) == (2, "trained\n")
    assert "train.py: it ended and has not called mindspeed_mm.training.pretrain" in done.stderr


@pytest.mark.slow
def test_an_error_of_its_own_stays(tmp_path: Path) -> None:
    done = run(tmp_path, "raise ValueError('mine')\n", "--auto-parallel-mm")
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert "has not called" not in done.stderr


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("posttrain_qwen2vl_dpo.py", "it trains after pretraining"),
        ("pretrain_videoalign.py", "it trains a reward model"),
        ("mindspeed_mm/fsdp/train/trainer.py", "it trains by FSDP from a YAML"),
        ("pretrain_sora.py", "makes videos"),
        ("pretrain_vlm.py", ""),
        ("train/trainer.py", ""),
    ],
)
def test_entries(script: str, words: str) -> None:
    if not words:
        check_entry(script)
        return
    with pytest.raises(JobError, match=f"{words}.*is not planned; planned are scripts that train one model"):
        check_entry(script)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--use-torch-fsdp2"], "passes --use-torch-fsdp2, which shards the model without a pipeline"),
        (["--fsdp2-config-path", "a.yaml"], "passes --fsdp2-config-path"),
        (["--hetero-parallel"], "passes --hetero-parallel"),
        (["--dpo-beta=0.1"], "passes --dpo-beta, which belongs to preference training"),
        (["--dist-train"], "passes --dist-train"),
    ],
)
def test_flags(arguments: list[str], message: str) -> None:
    with pytest.raises(JobError, match=message):
        check_flags(lambda flag: find_switch(arguments, flag), None, "the command line")


def test_frameworks() -> None:
    check_flags(lambda _: False, "pytorch", "the command line")
    with pytest.raises(JobError, match="--ai-framework is mindspore, and blocks are profiled by torch"):
        check_flags(lambda _: False, "mindspore", "the command line")


VL = MODELS / "qwen2.5vl_7b.json"


def adapters(*arguments: str, **changes: Any) -> dict[str, Any] | None:
    model = read_model_json(VL).with_freeze(changes.pop("freeze", {}))
    return find_adapters(arguments, json.loads(VL.read_text()) | changes, model)


def test_adapters_of_a_script() -> None:
    assert adapters("--lora-r", "8") is None
    everything = ("--lora-target-modules", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert adapters(*everything, "--lora-r", "16", "--lora-alpha", "32", "--lora-dropout", "0.1") == {
        "rank": 16,
        "targets": ["qkv", "proj", "fc1", "fc2"],
        "dropout": True,
    }
    assert adapters("--lora-target-modules=linear_qkv,linear_proj") == {
        "rank": 8,
        "targets": ["qkv", "proj"],
        "dropout": False,
    }


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (["linear_q"], {}, "names linear_q .known are linear_qkv"),
        (["linear_qkv", "--lora-mixed-training", "true"], {}, "trains some parts whole"),
        (["linear_qkv"], {"lora_mixed_training": True}, "trains some parts whole"),
        (["linear_fc1"], {"freeze": {"vision_projector": False}}, "the projector of vision is not frozen"),
        (["linear_qkv"], {"freeze": {"text": True}}, "every part is frozen"),
        (["linear_qkv", "--lora-target-parameters", "x"], {}, "beside parameters that are no matrices"),
        (["linear_qkv", "--lora-dropout", "much"], {}, "--lora-dropout is much; a number"),
        (["linear_qkv", "--lora-r", "0"], {}, "--lora-r is 0; a whole number"),
    ],
)
def test_adapters_that_are_not_planned(arguments: list[str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        adapters("--lora-target-modules", *arguments, **changes)


def test_dispatchers() -> None:
    """Megatron's default takes no micro-batches of changing length, so no pipeline."""
    experts = {"text_decoder": {"num_moe_experts": 8}}
    assert find_dispatcher(experts, None) == "allgather"
    assert find_dispatcher(experts, "alltoall") is None
    assert find_dispatcher({"text_decoder": {}}, None) is None
    own = {"text_decoder": {"num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall_seq"}}
    assert find_dispatcher(own, "alltoall") == "alltoall_seq"
    check_dispatcher(own, None, Strategy(pp=1, tp=1, dp=1, mbs=1))
    with pytest.raises(PlanError, match="PP 2 with experts: their token dispatcher is alltoall_seq"):
        check_dispatcher(own, None, Strategy(pp=2, tp=1, dp=1, mbs=1))


FLAGS = (
    "--mm-model",
    str(VL),
    "--seq-length",
    "1024",
    "--global-batch-size",
    "8",
    "--auto-parallel-image-tokens",
    "64",
)


def described(*arguments: str) -> Pretraining:
    """What a script's arguments say before anything is profiled."""
    return describe_pretraining(read_request([*FLAGS, *arguments]), subject=None)


@pytest.mark.usefixtures("told_on_terminal")
def test_before_anything_is_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match="the command line: it passes --use-torch-fsdp2"):
        described("--auto-parallel-mm", "--use-torch-fsdp2")
    with pytest.raises(JobError, match="--ai-framework is mindspore"):
        described("--auto-parallel-mm", "--ai-framework", "mindspore")
    found = described("--auto-parallel-mm", "--lora-target-modules", "linear_qkv", "--auto-parallel-max-vpp", "2")
    assert found.adapters == {"rank": 8, "targets": ["qkv"], "dropout": False}
    assert found.search["max_vpp"] == 2
    assert isinstance(found.workload, dict)
    assert found.workload["stack"] == "mindspeed-mm"
    assert "not searched: MBS other than 1, 2, 4, 8; CP above 1" in capsys.readouterr().err
