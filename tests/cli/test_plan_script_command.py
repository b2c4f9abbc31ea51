"""`plan --script`: a launch script is planned, compared with its own plan, and written back beside the user's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mm_autoparallel.cli.main import main
from mm_autoparallel.integrations.mindspeed_mm.plan_files import read_plan_back

FILES = Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_models"
SCRIPT = r"""#!/bin/bash
NPUS_PER_NODE=8
NNODES=1
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
TP=1
PP=4
MBS=1
GRAD_ACC_STEP=16
DP=$(($WORLD_SIZE/$TP/$PP))
GBS=$(($MBS*$GRAD_ACC_STEP*$DP))
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --seq-length 1024 --bf16 --use-flash-attn --use-distributed-optimizer
"
torchrun --nproc_per_node $NPUS_PER_NODE --nnodes $NNODES pretrain_vlm.py $GPT_ARGS --mm-model ./model.json
"""
FLAGS = ["--device", "ascend-910b-64g", "--image-tokens", "256", "--time-limit", "20"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and the sizes of Qwen2-VL 7B, which is where commands run."""
    document = json.loads((FILES / "qwen2vl_7b.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps(document))
    (tmp_path / "train.sh").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_from_script_to_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["plan", "--script", "train.sh", *FLAGS]) == 0
    told = capsys.readouterr()
    assert "the script's own plan:" in told.out
    assert "the plan found:" in told.out
    assert "times as fast" in told.out
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    out = folder / "planned"
    result = json.loads((out / "auto_parallel_search_optimal_config.json").read_text())
    plan = read_plan_back(out / "model.json", out / "train.sh")
    assert plan.strategy.pp == result["parallel_config"]["PP"]
    assert plan.global_batch_size == 32
    assert subprocess.run(["bash", "-n", out / "train.sh"], check=False).returncode == 0
    assert "MODEL" not in (out / "train.sh").read_text()

    again = ["plan", "--script", "train.sh", *FLAGS]
    assert main(again) == 2
    assert "is there already; give another folder with --out, or --overwrite" in capsys.readouterr().err
    assert main([*again, "--overwrite", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["script"]["own_plan"]["e2e_time"] >= document["e2e_time"]
    assert len(document["script"]["files"]) == 3
    assert (
        main(["simulate", str(out / "job.json"), "--config", str(out / "auto_parallel_search_optimal_config.json")])
        == 0
    )


def test_sizes_of_a_config_and_weights_in_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model goes into the job whole; a plan of FSDP2 is written into the script and what says how it shards."""
    placeholders = {"num_layers": 999, "hidden_size": 999, "num_attention_heads": 999}
    document = {"model_id": "qwen3_vl_moe", "init_from_hf_path": "./none", "text_decoder": placeholders}
    (folder / "model.json").write_text(json.dumps(document))
    sharded = "--use-torch-fsdp2 --fsdp2-config-path sharded.yaml"
    (folder / "train.sh").write_text(SCRIPT.replace("--bf16", f"--bf16 {sharded}").replace("PP=4", "PP=1"))
    (folder / "sharded.yaml").write_text("sharding_size: auto\nparam_dtype: bf16\n")
    config = FILES.parent / "huggingface" / "qwen3_vl_30b_a3b.json"
    wanted = ["plan", "--script", "train.sh", *FLAGS, "--nnodes", "4"]
    assert main(wanted) == 2
    assert "with --model-config PATH (the model's page on the hub has it)" in capsys.readouterr().err
    assert main([*wanted, "--model-config", str(config)]) == 0
    told = capsys.readouterr()
    assert "the script's own plan: " in told.out
    assert "ZeRO 3" in told.out
    assert "planned/sharded.yaml" in (folder / "planned" / "train.sh").read_text()
    assert "sharding_size: auto" in (folder / "planned" / "sharded.yaml").read_text()
    assert main(["simulate", "planned/job.json", "--config", "planned/auto_parallel_search_optimal_config.json"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of the three: JOB, a job file, or --script FILE"),
        (["job.yaml", "--script", "train.sh"], "give one of the three"),
        (["job.yaml", "--device", "ascend-910b-64g"], "--device goes with --script"),
        (["--script", "none.sh", *FLAGS], "none.sh: there is no such file"),
        (["--script", "train.sh"], "--device is missing, or --cluster FILE; known devices are"),
        (
            ["--script", "train.sh", "--device", "ascend-1", "--image-tokens", "8"],
            'cluster.device is "ascend-1", which is not in the catalog',
        ),
        (["--script", "train.sh", *FLAGS, "--cluster", "c.yaml"], "both say what the cluster is"),
        (["--script", "train.sh", "--cluster", "model.json"], "cluster is nothing; the mapping that a job file has"),
        (["--script", "train.sh", "--device", "ascend-910b-64g"], "give --image-tokens"),
        (["--script", "model.json", *FLAGS], "is no file that starts a training"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "planned").exists()


def test_devices_that_only_the_machine_knows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SCRIPT.replace("NNODES=1", "NNODES=$(cat hosts | wc -l)").replace("NPUS_PER_NODE=8", "NPUS_PER_NODE=$1")
    (folder / "train.sh").write_text(text)
    assert main(["plan", "--script", "train.sh", *FLAGS]) == 2
    assert "known only on the machine; give --nnodes and --nproc-per-node" in capsys.readouterr().err
    (folder / "c.yaml").write_text("cluster: {num_nodes: 2, devices_per_node: 8, device: ascend-910b-64g}")
    wanted = ["--script", "train.sh", "--cluster", "c.yaml", "--image-tokens", "256", "--time-limit", "20"]
    assert main(["plan", *wanted]) == 0
    assert json.loads((folder / "planned" / "job.json").read_text())["workload"]["global_batch_size"] == 64
