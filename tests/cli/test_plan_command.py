"""`plan` as a user runs it: the result file, what is printed, and what is said of a job that is wrong or cannot fit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_autoparallel.planner.plan import RESULT_FILE

Run = Callable[..., subprocess.CompletedProcess[str]]
Edit = Callable[[dict[str, Any]], object]

KEYS = [
    "parallel_config",
    "layer_placement",
    "layer_recompute",
    "e2e_time",
    "throughput",
    "schema",
    "schedule",
    "num_microbatches",
    "global_batch_size",
    "world_size",
    "lower_bound_ms",
    "gap_fraction",
    "proven",
    "peak_memory_bytes",
    "memory_limit_bytes",
    "bubble_fraction",
    "provenance",
    "job_sha256",
    "objective",
]


@pytest.fixture
def edited(repository: Path, tmp_path: Path) -> Callable[..., Path]:
    """The job of README's first quick start with `edit` done to it, beside its model file."""

    def write(edit: Edit = lambda document: None) -> Path:
        example = repository / "examples" / "qwen2vl_72b"
        document = yaml.safe_load((example / "job.yaml").read_text())
        edit(document)
        (tmp_path / "model_72b.json").write_bytes((example / "model_72b.json").read_bytes())
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


def assert_one_paragraph(result: subprocess.CompletedProcess[str], exit_code: int, *words: str) -> None:
    assert result.returncode == exit_code, result.stderr
    assert result.stdout == ""
    told = [line for line in result.stderr.splitlines() if "compiling its kernels" not in line]
    assert len(told) == 1, result.stderr
    for word in words:
        assert word in told[0]


def test_the_job_of_readme_without_torch_leaves_a_plan_and_its_gap(
    run_cli: Run, repository: Path, tmp_path: Path
) -> None:
    result = run_cli("plan", repository / "examples" / "qwen2vl_72b" / "job.yaml")
    assert result.returncode == 0, result.stderr
    document = json.loads((tmp_path / RESULT_FILE).read_text())
    assert list(document) == KEYS
    assert document["gap_fraction"] < 0.01  # of what plans are ranked by; the step alone is proven without a price
    assert sum(document["layer_placement"]["vit_layer_placement"]) == 32
    assert sum(document["layer_placement"]["llm_layer_placement"]) == 80
    assert max(document["peak_memory_bytes"]) <= document["memory_limit_bytes"]
    sizes = document["parallel_config"]
    assert sizes["PP"] * sizes["TP"] * sizes["CP"] * sizes["DP"] == document["world_size"] == 128
    assert document["throughput"] == pytest.approx(512 * 8192 / (document["e2e_time"] / 1e3) / 128)
    for word in ("where the step goes", "vision", "text", "proven", "strategies"):
        assert word in result.stdout
    assert RESULT_FILE in result.stderr


def test_json_tells_the_best_and_the_end_of_every_candidate(run_cli: Run, edited: Callable[..., Path]) -> None:
    job = edited(lambda d: d["search"].update(pp=[4, 8], tp=[8], mbs=[1]))
    result = run_cli("plan", job, "--out", "results/today", "--top-k", "2", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert list(document)[: len(KEYS)] == KEYS
    assert document["stopped"] == "finished"
    first, second = document["best"]
    assert first["e2e_time"] == document["e2e_time"] <= second["e2e_time"]
    assert all(candidate["reason"] for candidate in document["candidates"])
    written = json.loads((job.parent / "results" / "today" / RESULT_FILE).read_text())
    assert written == {key: document[key] for key in KEYS}


def test_nothing_feasible_is_3_and_leaves_the_old_file(
    run_cli: Run, edited: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / RESULT_FILE).write_text("the plan of yesterday")
    small = {"based_on": "ascend-910b-64g", "memory_bytes": 12e9}
    job = edited(lambda d: (d["cluster"].update(device=small), d["search"].update(pp=[1, 2])))
    assert_one_paragraph(run_cli("plan", job, "--json"), 3, "job.yaml", "fits", "would do")
    assert (tmp_path / RESULT_FILE).read_text() == "the plan of yesterday"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.pop("workload"), ("workload is missing",)),
        (lambda d: d["workload"].update(seq_lenght=1), ("workload.seq_lenght", "seq_length")),
        (lambda d: d["workload"].update(global_batch_size=-512), ("workload.global_batch_size is -512",)),
        (lambda d: d["workload"].update(global_batch_size="512"), ('workload.global_batch_size is "512"',)),
        (lambda d: (d["workload"].update(global_batch_size=510), d["search"].update(dp=[4])), ("510", "DP 4")),
        (lambda d: d["cluster"].update(device="ascend-910bb"), ("cluster.device", "ascend-910b-64g")),
        (lambda d: d["cluster"].update(num_nodes=0), ("cluster.num_nodes is 0",)),
        (lambda d: d.update(model="model_27b.json"), ("model_27b.json",)),
        (lambda d: d["search"].update(tp=[3]), ("search.tp [3]",)),
        (lambda d: d["search"].update(pp=[128]), ("128",)),
        (lambda d: d["search"].update(ep=[1, 4]), ("search.ep is [1, 4]", "no experts")),
        (
            lambda d: (d["workload"].update(stack="megatron-deepspeed"), d["search"].update(pp=[2, 4], zero=[1, 3])),
            ("search.zero 3", "DeepSpeed's pipeline engine"),
        ),
        (lambda d: d["search"].update(schedule="zigzag"), ("search.schedule", "zigzag")),
        (lambda d: d["search"].update(tp=[16]), ("TP 16 does not divide the key and value groups",)),
    ],
)
def test_a_wrong_job_is_2(run_cli: Run, edited: Callable[..., Path], edit: Edit, words: tuple[str, ...]) -> None:
    assert_one_paragraph(run_cli("plan", edited(edit)), 2, "job.yaml", *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", ("binary",)),
        (b"model: a.json\n" * 1_500_000, ("MB",)),
        (b"model: a.json\nmodel: b.json\n", ("model", "twice")),
        (b"cluster: [1, 2\n", ("YAML",)),
        (b"workload: {seq_length: .nan}\n", ("finite",)),
        (b"", ("empty",)),
        (b"- 1\n- 2\n", ("mapping",)),
    ],
    ids=["binary", "20 MB", "key twice", "broken", "NaN", "empty", "list"],
)
def test_what_is_no_job_is_2(run_cli: Run, tmp_path: Path, content: bytes, words: tuple[str, ...]) -> None:
    (tmp_path / "job.yaml").write_bytes(content)
    assert_one_paragraph(run_cli("plan", "job.yaml"), 2, "job.yaml", *words)


def test_a_folder_that_cannot_be_written_is_2(run_cli: Run, edited: Callable[..., Path]) -> None:
    job = edited(lambda d: d["search"].update(pp=[4], tp=[8], mbs=[1]))
    assert_one_paragraph(run_cli("plan", job, "--out", "/proc/nowhere"), 2, "/proc/nowhere", "cannot be written")


def test_a_log_that_cannot_be_written_is_told_before_the_search(
    run_cli: Run, edited: Callable[..., Path], tmp_path: Path
) -> None:
    result = run_cli("plan", edited(), "--out", tmp_path, "--log-bounds", tmp_path)
    assert_one_paragraph(result, 2, f"{tmp_path} cannot be written: it is a directory")
    assert not (tmp_path / RESULT_FILE).exists()


def test_a_time_limit_ends_with_the_best_so_far_or_says_so(run_cli: Run, edited: Callable[..., Path]) -> None:
    result = run_cli("plan", edited(lambda d: d["search"].update(max_vpp=4)), "--time-limit", "2", "--json")
    if result.returncode == 124:  # a slow machine
        assert "came to its time limit before it" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert 0.0 <= document["gap_fraction"] < 1.0
    assert document["lower_bound_ms"] <= document["e2e_time"]
    assert document["stopped"] in ("finished", "time limit")


def to_a_few(document: dict[str, Any]) -> None:
    document["search"].update(pp=[2, 4], tp=[8], mbs=[1])


def test_a_cache_spares_the_second_run_its_solver(run_cli: Run, edited: Callable[..., Path], tmp_path: Path) -> None:
    # at a price the fills tried in between are placed again: they bound nothing, and are not kept
    job = edited(lambda d: (to_a_few(d), d["search"].update(failure_price=0.0)))
    folder = tmp_path / "solved"
    first, second = (json.loads(run_cli("plan", job, "--cache", folder, "--json").stdout) for _ in range(2))
    assert first["e2e_time"] == second["e2e_time"]
    assert first["layer_placement"] == second["layer_placement"]
    assert sum(candidate["solve_s"] for candidate in second["candidates"]) == 0.0
    (ours,) = folder.iterdir()
    ours.rename(folder / "solved-by-others")
    third = run_cli("plan", job, "--cache", folder, "--json")
    assert "was solved by other code (solved-by-others) and is not used" in third.stderr
    assert json.loads(third.stdout)["e2e_time"] == first["e2e_time"]


def test_bounds_are_logged_and_what_they_eliminated_is_checked(run_cli: Run, edited: Callable[..., Path]) -> None:
    job = edited(to_a_few)
    log = job.parent / "logs" / "bounds.jsonl"
    result = run_cli("plan", job, "--log-bounds", log, "--check-eliminated", "3", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    lawful = [candidate for candidate in document["candidates"] if candidate["status"] != "unlawful"]
    assert [row["parallel_config"] for row in rows] == [candidate["parallel_config"] for candidate in lawful]
    assert all(row["by"] and row["reason"] for row in rows)
    assert document["check"]["num_checked"] == 3
    assert document["check"]["mistakes"] == []
    assert "0 contradict a bound" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ray-address", "127.0.0.1:6379"], ("--ray-address", "--engine ray")),
        (["--cache", "job.yaml"], ("--cache job.yaml", "cannot be used as a folder")),
    ],
)
def test_a_wrong_option_is_2(
    run_cli: Run, edited: Callable[..., Path], options: list[str], words: tuple[str, ...]
) -> None:
    assert_one_paragraph(run_cli("plan", edited(), *options), 2, *words)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_is_said_how_to_get_it(run_cli: Run, edited: Callable[..., Path]) -> None:
    assert_one_paragraph(
        run_cli("plan", edited(), "--engine", "ray"), 2, "needs Ray", 'pip install "mm-autoparallel[ray]"'
    )
