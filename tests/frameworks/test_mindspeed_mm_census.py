"""The census sees a wrong word: each change of a script that a plan does not ask for, and each that is missing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from mindspeed_mm_census import FLOORS, compare, count_release, unpack

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

SHIPPED = (
    "--nnodes 2 train.py --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --micro-batch-size 1 "
    "--global-batch-size 64 --bf16 --mm-model m.json --lr 1e-5"
)
RIGHT = (
    "--nnodes 2 train.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer "
    "--sequence-parallel --variable-seq-lengths --micro-batch-size 2 --global-batch-size 32 --bf16 --mm-model n.json "
    "--lr 1e-5"
)
PLAN = Plan(Strategy(pp=2, tp=2, dp=4, mbs=2), {"text": (4, 4)}, {"text": (0, 0)}, 32)


def test_right_words() -> None:
    assert compare(SHIPPED.split(), RIGHT.split(), PLAN, "n.json") == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--micro-batch-size 2", "--micro-batch-size 1"),
        ("--global-batch-size 32", "--global-batch-size"),
        ("--sequence-parallel", ""),
        ("--variable-seq-lengths", ""),
        ("--use-distributed-optimizer", ""),
        ("n.json", "m.json"),
        ("--bf16", ""),
        ("--lr 1e-5", "--lr 1e-4"),
        ("train.py", "other.py"),
        ("--bf16", "--bf16 --fp16"),
        (RIGHT, ""),
    ],
)
def test_a_wrong_word(old: str, new: str) -> None:
    assert compare(SHIPPED.split(), RIGHT.replace(old, new).split(), PLAN, "n.json")


def test_a_release_of_one_script(tmp_path: Path) -> None:
    """From a clone's history to counts, with bash and its stand-ins."""
    sizes = Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_models" / "qwen2vl_2b.json"
    folder = tmp_path / "clone" / "examples" / "small"
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(sizes.read_text())
    (folder / "finetune.sh").write_text(
        "NPUS_PER_NODE=8\nNNODES=1\nWORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))\nPP=2\nGBS=$((4*$WORLD_SIZE/$PP))\n"
        'ARGS="--pipeline-model-parallel-size $PP --micro-batch-size 1 --global-batch-size $GBS --seq-length 512"\n'
        "torchrun --nnodes $NNODES --nproc_per_node $NPUS_PER_NODE pretrain_vlm.py $ARGS "
        "--mm-model ./examples/small/model.json\n"
    )
    (folder / "evaluate.sh").write_text("torchrun evaluate_vlm.py\n")
    clone = folder.parents[1]
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "1"]):
        subprocess.run(["git", *command], cwd=clone, check=True, capture_output=True)
    unpack(clone, "HEAD", tmp_path / "unpacked")
    count = count_release(tmp_path / "unpacked", 2)
    assert (count.scripts, count.outcome["read with image tokens"]) == (1, 1)
    assert count.plans["wrong"] == 0
    assert sum(count.plans.values()) <= 2


def test_the_floors_stand() -> None:
    floors = json.loads(FLOORS.read_text())
    assert floors["master"]["scripts"] == 49
    assert all(release["plans wrong"] == 0 for release in floors.values())
