"""The hook on stand-ins for Megatron and MindSpeed-MM: it profiles, searches, and trains under what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from mm_autoparallel.planner.plan import Plan, plan_document

STANDIN = Path(__file__).parent / "standin"
REPOSITORY = Path(__file__).parents[2]
HOOK = ["-m", "mm_autoparallel.hooks.mindspeed_mm"]
FLAGS = [
    *("--seq-length", "32", "--global-batch-size", "8", "--micro-batch-size", "1", "--mm-model", "model.json"),
    *("--pipeline-model-parallel-size", "1", "--use-distributed-optimizer", "--use-flash-attn"),
]


@pytest.fixture
def workplace(tmp_path: Path, model_json: Path) -> Path:
    """A folder with model.json, to run a script from."""
    document = json.loads(model_json.read_text())
    document["img_context_token_id"], document["vision_start_token_id"] = 500, 501
    (tmp_path / "model.json").write_text(json.dumps(document))
    return tmp_path


def run(workplace: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=workplace,
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join([str(STANDIN), str(REPOSITORY)]),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )


def write_result(path: Path, plan: Plan) -> None:
    """The plan as a result file with the keys alone that decide."""
    from mm_autoparallel.planner.plan import Figures

    figures = Figures(1.0, 1.0, 1.0, 0.0, (0.0,) * plan.strategy.pp, 1.0, 0.0, {}, "")
    document = plan_document(plan, figures)
    del document["job_sha256"]
    path.write_text(json.dumps(document))


def trained(workplace: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(workplace.glob("trained-*.json"))]


def test_without_its_flags_the_script_trains_as_ever(workplace: Path) -> None:
    done = run(
        workplace,
        *HOOK,
        str(STANDIN / "pretrain_vlm.py"),
        *FLAGS,
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
        RANK="0",
        WORLD_SIZE="1",
    )
    assert done.returncode == 0, done.stderr
    ((record,),) = [trained(workplace)]
    assert record["at_import"][1:] == FLAGS
    assert record["chunks"][0]["recompute"]["text"] == ["full", "uniform", 1]


@pytest.mark.parametrize("vpp", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_training_under_a_plan(workplace: Path, tiny_plan: Plan, vpp: int) -> None:
    """Two ranks, each of which builds its own stage with its own recompute, and sees the plan before imports."""
    from dataclasses import replace

    strategy = replace(tiny_plan.strategy, tp=1, dp=1, mbs=1, vpp=vpp, schedule="")
    layers = {"vision": (6, 0), "text": (4, 6)} if vpp == 1 else {"vision": (5, 1, 0, 0), "text": (0, 3, 3, 4)}
    recompute = {"vision": (0, 0), "text": (4, 1)} if vpp == 1 else {"vision": (0,) * 4, "text": (0, 3, 2, 1)}
    write_result(workplace / "plan.json", Plan(strategy, layers, recompute, 8))
    done = run(
        workplace, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", "--module", HOOK[1], str(STANDIN / "pretrain_vlm.py"), *FLAGS,
        "--auto_parallel_config", "plan.json", "--auto-parallel-image-tokens", "8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = trained(workplace)
    for rank, record in enumerate((first, second)):
        assert record["sizes"]["pipeline_model_parallel_size"] == 2
        assert record["sizes"]["virtual_pipeline_model_parallel_size"] == vpp
        assert record["sizes"]["mm_model"] == "plan.model.json"
        assert "--auto_parallel_config" not in record["at_import"]
        assert "plan.model.json" in record["at_import"]
        assert "--enable-dummy-optimizer" not in record["at_import"]  # both stages hold text layers, which train
        for chunk, built in enumerate(record["chunks"]):
            count = recompute["text"][2 * chunk + rank]
            assert built["stage"] == rank
            assert built["recompute"]["text"] == (["full", "block", count] if count else [None] * 3)
            assert built["recompute"]["vision"] == [None] * 3
    placed = json.loads((workplace / "plan.model.json").read_text())
    assert placed["text_decoder"]["pipeline_num_layers"] == ([4, 6] if vpp == 1 else [[0, 3], [3, 4]])


def test_a_plan_for_other_processes_ends_with_a_paragraph(workplace: Path, tiny_plan: Plan) -> None:
    write_result(workplace / "plan.json", tiny_plan)
    done = run(
        workplace,
        *HOOK,
        str(STANDIN / "pretrain_vlm.py"),
        *FLAGS,
        "--auto-parallel-config",
        "plan.json",
        "--auto-parallel-image-tokens",
        "8",
    )
    assert done.returncode == 2
    assert "is for 16 processes, and this is one" in done.stderr
    assert "Traceback" not in done.stderr
    assert not trained(workplace)


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        pytest.param("--mm-model", "--mm-model is missing", marks=pytest.mark.nightly),
        pytest.param("--seq-length", "--seq-length is missing; a whole number", marks=pytest.mark.nightly),
        ("--auto-parallel-image-tokens", "give --auto-parallel-image-tokens"),
    ],
)
def test_a_search_without_what_it_needs_to_know(workplace: Path, drop: str, message: str) -> None:
    flags = [*FLAGS, "--auto-parallel-mm", "--auto-parallel-image-tokens", "8"]
    at = flags.index(drop)
    done = run(workplace, *HOOK, str(STANDIN / "pretrain_vlm.py"), *flags[:at], *flags[at + 2 :])
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_is_not_there(workplace: Path) -> None:
    done = run(workplace, *HOOK, "none.py")
    assert done.returncode == 2
    assert "give the script that trains" in done.stderr


@pytest.mark.nightly
def test_search_then_train(workplace: Path) -> None:
    """The whole way: profile on one core, search for two devices, train on two ranks under the result."""
    (workplace / "data.json").write_text(
        json.dumps({"dataset_param": {"preprocess_parameters": {"image_max_pixels": 8 * 28 * 28}}})
    )
    flags = [*FLAGS, "--mm-data", "data.json"]
    script = workplace / "pretrain_vlm.py"
    line = "import mm_autoparallel.hooks.mindspeed_mm as planner; planner.install()\n"
    script.write_text(line + (STANDIN / "pretrain_vlm.py").read_text())
    search = run(
        workplace,
        script.name,
        *flags,
        "--auto-parallel-mm",
        "--nproc-per-node",
        "1",
        "--simulated-nproc-per-node",
        "2",
        "--auto-parallel-time-limit",
        "20",
    )
    assert search.returncode == 0, search.stderr
    assert "assumed: 1 image(s) of 8 tokens" in search.stderr
    plan = json.loads((workplace / "auto_parallel_search_optimal_config.json").read_text())
    assert plan["world_size"] <= 2
    train = run(
        workplace, "-m", "torch.distributed.run", f"--nproc-per-node={plan['world_size']}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", script.name, *flags, "--auto-parallel-config",
        "auto_parallel_search_optimal_config.json",
    )  # fmt: skip
    assert train.returncode == 0, train.stderr
    assert len(trained(workplace)) == plan["world_size"]
    assert all(
        record["sizes"]["pipeline_model_parallel_size"] == plan["parallel_config"]["PP"]
        for record in trained(workplace)
    )
