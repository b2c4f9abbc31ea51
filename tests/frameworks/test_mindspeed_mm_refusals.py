"""What is not planned is told before anything is profiled or trained: one paragraph, exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.frameworks.mindspeed_mm.arguments import find_switch
from mm_autoparallel.frameworks.mindspeed_mm.refusals import (
    check_dispatcher,
    check_entry,
    check_flags,
    check_lora,
    find_dispatcher,
)
from mm_autoparallel.job.strategy import Strategy

REPOSITORY = Path(__file__).parents[2]

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


@pytest.mark.parametrize("what", TRAINS)
def test_a_training_that_does_not_come_by_is_stopped(tmp_path: Path, what: str) -> None:
    done = run(tmp_path, TRAINS[what], "--auto-parallel-mm")
    assert done.returncode == 2, done.stderr
    assert f"train.py: it makes {what} to train and has not called mindspeed_mm.training.pretrain" in done.stderr
    assert "pretrain_vlm.py and its like" in done.stderr
    assert "Traceback" not in done.stderr
    assert "trained" not in done.stdout


def test_a_script_that_ends_without_coming_by(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--auto-parallel-mm", module=False)
    assert (done.returncode, done.stdout) == (2, "trained\n")
    assert "train.py: it ended and has not called mindspeed_mm.training.pretrain" in done.stderr


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


def test_adapters() -> None:
    check_lora(["--lora-r", "8"])
    with pytest.raises(JobError, match="--lora-target-modules trains adapters"):
        check_lora(["--lora-target-modules", "linear_qkv", "linear_proj"])


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
