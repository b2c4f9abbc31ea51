"""`mm-autoparallel profile`: what the owner of one device runs, and that a plan can stand on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_qwen2vl import CLUSTER, CONFIG

from mm_autoparallel.planner.plan import RESULT_FILE

WORKLOAD = {"global_batch_size": 4, "seq_length": 32, "image_tokens_per_sample": 8, "weight_bytes": 4}


def write_job(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    job = {"model": "config.json", "cluster": CLUSTER, "workload": WORKLOAD, "search": {"cp": [1], "mbs": [1, 2]}}
    path = folder / "job.json"
    path.write_text(json.dumps(job | changes))
    return path


@pytest.mark.nightly
def test_measured_once_and_planned_with(tmp_path: Path, run_cli: Callable) -> None:
    pytest.importorskip("transformers")
    job = write_job(tmp_path)
    arguments = ("profile", job, "--device", "cpu", "--tp", 1, "--mbs", 1, "--seq-lengths", 16, 32)
    first = run_cli(*arguments, timeout_s=400)
    assert first.returncode == 0, first.stderr
    assert "what is measured here holds for cpu-" in first.stderr  # the job's devices are others
    folder = tmp_path / first.stdout.strip()
    assert {path.name.split("-seq")[1].split("-")[0] for path in folder.iterdir()} == {"16", "32"}

    second = run_cli(*arguments)
    assert second.returncode == 0
    assert "everything was measured before: TP 1 MBS 1" in second.stderr
    assert second.stdout == first.stdout

    device = json.loads((folder.parent / "device.json").read_text())
    search = {"cp": [1], "tp": [1], "mbs": [1]}
    write_job(tmp_path, cluster=CLUSTER | {"device": device}, search=search, profiles=[first.stdout.strip()])
    planned = run_cli("plan", job)
    assert planned.returncode == 0, planned.stderr
    provenance = json.loads((tmp_path / RESULT_FILE).read_text())["provenance"]
    assert {block["time"] for block in provenance["blocks"].values()} == {"measured"}


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"model": {"text": {"vocab_size": 64, "layers": {}}}}, (), "text.layers"),
        ({"model": "own.json"}, (), "is no Hugging Face config.json"),
        ({}, ("--tp", 64), "none of its lawful strategies has a TP of [64]"),
        ({}, ("--device", "npu"), "--device is npu, and PyTorch finds"),
        ({"workload": WORKLOAD | {"weight_bytes": 1}}, (), "workload.weight_bytes is 1"),
    ],
)
def test_what_cannot_be_profiled_is_told(
    tmp_path: Path, run_cli: Callable, changes: dict[str, Any], options: tuple[object, ...], words: str
) -> None:
    pytest.importorskip("transformers")
    layers = {"num_layers": 2, "hidden_size": 8, "ffn_size": 8, "num_heads": 2, "norm": "rms"}
    (tmp_path / "own.json").write_text(json.dumps({"text": {"vocab_size": 64, "layers": layers}}))
    if "own.json" in str(changes):
        changes = changes | {"workload": WORKLOAD | {"image_tokens_per_sample": 0}}
    result = run_cli("profile", write_job(tmp_path, **changes), *options)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
