"""`simulate` on the published result file and on edits of it, as a user runs it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.cli.main import main

Run = Callable[..., subprocess.CompletedProcess[str]]

# MindSpeed-MM, docs of its auto_parallel_mm feature: the result for Qwen2-VL-72B, as printed.
REFERENCE = """{
    "parallel_config": {
        "PP": 8,
        "TP": 2,
        "DP": 4,
        "MBS": 1
    },
    "layer_placement": {
        "vit_layer_placement": [32, 0, 0, 0, 0, 0, 0, 0],
        "llm_layer_placement": [5, 11, 11, 11, 11, 11, 11, 9]
    },
    "layer_recompute": {
        "vit_layer_recompute": [0, 0, 0, 0, 0, 0, 0],
        "llm_layer_recompute": [0, 10, 9, 9, 9, 7, 4]
    },
    "e2e_time": 8992.0,
    "throughput": 761.58192090395477
}
"""


@pytest.fixture
def job(repository: Path) -> Path:
    return repository / "examples" / "qwen2vl_72b" / "job.yaml"


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Writes the reference plan with `edit` done to it."""

    def write(edit: Callable[[dict[str, Any]], object] = lambda document: None) -> Path:
        document = json.loads(REFERENCE)
        edit(document)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(document))
        return path

    return write


def test_the_published_file_simulates_exactly_as_printed(run_cli: Run, job: Path, tmp_path: Path) -> None:
    path = tmp_path / "auto_parallel_search_optimal_config.json"
    path.write_text(REFERENCE)
    result = run_cli("simulate", job, "--config", path, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["layer_placement"] == json.loads(REFERENCE)["layer_placement"]
    assert document["layer_recompute"]["llm_layer_recompute"] == [0, 10, 9, 9, 9, 7, 4, 0]
    assert document["e2e_time"] > 0
    assert document["world_size"] == 64
    tokens = 512 * 8192
    assert document["throughput"] == pytest.approx(tokens / (document["e2e_time"] / 1e3) / 64)
    assert len(document["stages"]) == len(document["peak_memory_bytes"]) == 8
    assert sum(document["time_ms"].values()) == pytest.approx(document["e2e_time"])
    assert "64 of the cluster's 128 devices" in result.stderr


def test_people_get_tables_and_a_trace(run_cli: Run, job: Path, config: Callable[..., Path], tmp_path: Path) -> None:
    result = run_cli("simulate", job, "--config", config(), "--trace", "trace.json")
    assert result.returncode == 0, result.stderr
    for word in ("where the step goes", "vision", "text", "recomputed", "bubble", "limit, GiB", "tokens/s"):
        assert word in result.stdout
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(8))


def test_a_plan_beyond_its_memory_is_simulated_and_marked(run_cli: Run, job: Path, config: Callable[..., Path]) -> None:
    def keep_everything(document: dict[str, Any]) -> None:
        document["layer_recompute"]["llm_layer_recompute"] = [0] * 8

    result = run_cli("simulate", job, "--config", config(keep_everything))
    assert result.returncode == 0, result.stderr
    assert "OVER" in result.stdout
    assert "stage 0 peaks at" in result.stderr


def test_more_recompute_is_slower_and_smaller(run_cli: Run, job: Path, config: Callable[..., Path]) -> None:
    def recompute_everything(document: dict[str, Any]) -> None:
        document["layer_recompute"]["llm_layer_recompute"] = document["layer_placement"]["llm_layer_placement"]

    def simulated(path: Path) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(run_cli("simulate", job, "--config", path, "--json").stdout)
        return document

    some, all_of_it = simulated(config()), simulated(config(recompute_everything))
    assert all_of_it["e2e_time"] > some["e2e_time"]
    assert max(all_of_it["peak_memory_bytes"]) < max(some["peak_memory_bytes"])


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["layer_placement"].update(llm_layer_placement=[80]), ("llm_layer_placement", "PP is 8")),
        (lambda d: d["parallel_config"].update(TP=3), ("TP 3",)),
        (lambda d: d["parallel_config"].update(DP=32), ("512 devices", "128")),
        (lambda d: d["layer_recompute"].update(llm_layer_recompute=[6, 0, 0, 0, 0, 0, 0]), ("stage 0", "holds 5")),
        (lambda d: d["layer_recompute"].update(vit_layer_recompute=[4, 0, 0, 0, 0, 0, 0]), ("stage 0", "vision")),
    ],
)
def test_a_wrong_edit_is_2(
    run_cli: Run, job: Path, config: Callable[..., Path], edit: Callable[[Any], object], words: tuple[str, ...]
) -> None:
    result = run_cli("simulate", job, "--config", config(edit), "--json")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (told,) = [line for line in result.stderr.splitlines() if line.startswith("mm-autoparallel: ") and "plan" in line]
    for word in words:
        assert word in told


def test_a_truncated_plan_and_a_missing_job_are_2(run_cli: Run, job: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(REFERENCE[:200])
    for arguments in ((job, "--config", "plan.json"), ("nowhere.yaml", "--config", "plan.json")):
        result = run_cli("simulate", *arguments)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def test_a_trace_has_a_file_of_its_own(
    job: Path, config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(job), "--config", str(config()), "--trace", "/"]) == 2
    assert "/ cannot be written: it is a directory" in capsys.readouterr().err
