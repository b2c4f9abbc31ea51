"""`place` and its errors as a user meets them: real processes, exit codes, one paragraph, one JSON document."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until_used

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def example(repository: Path) -> Path:
    return repository / "examples" / "place" / "problem.json"


@pytest.fixture
def edited(example: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the example with some top-level keys changed."""

    def edit(**changes: Any) -> Path:
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(json.loads(example.read_text()) | changes))
        return path

    return edit


def assert_one_paragraph(result: subprocess.CompletedProcess[str], exit_code: int, *words: str) -> None:
    assert result.returncode == exit_code, result.stderr
    told = [line for line in result.stderr.splitlines() if "compiling its kernels" not in line]
    assert len(told) == 1, result.stderr
    for word in words:
        assert word in told[0]


def test_modes_are_counted_by_block_and_name(run_cli: Run, edited: Callable[..., Path], example: Path) -> None:
    """The host link of two stages hides nothing: there layers recompute."""
    chain = json.loads(example.read_text())["chain"]
    for block in chain:
        if block.get("recompute"):
            kept = {"activation_bytes": block["recompute"]["activation_bytes"]}
            offload = {"name": "offload", **kept, "host_bytes": block["activation_bytes"]}
            block["modes"] = [{"name": "recompute", **block.pop("recompute")}, offload]
    link = [1e-10, 1e-3, 1e-10, 1e-3]
    result = run_cli("place", edited(chain=chain, host_ms_per_byte=link, memory_limit_bytes=40e9), "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["status"] == "optimal"
    assert document["modes"].keys() == {block["name"] for block in chain if "modes" in block}
    for name, counts in document["modes"].items():
        assert counts["recompute"] == document["recompute"][name]
        assert [counts["offload"][1], counts["offload"][3]] == [0, 0]
    assert sum(counts["offload"][0] for counts in document["modes"].values()) > 0
    assert sum(counts["recompute"][1] for counts in document["modes"].values()) > 0


def test_json_is_the_whole_of_standard_output(run_cli: Run, example: Path) -> None:
    result = run_cli("place", example, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "mm-autoparallel/placement/1"
    assert document["status"] == "optimal"
    assert document["gap_fraction"] <= 1e-5
    assert document["lower_bound_ms"] <= document["step_ms"]
    assert {name: sum(counts) for name, counts in document["layers"].items()} == {"dense": 3, "moe": 29, "head": 1}
    assert document["layers"]["head"] == [0, 0, 0, 1]
    assert all(
        recomputed <= held
        for name in document["layers"]
        for recomputed, held in zip(document["recompute"][name], document["layers"][name], strict=True)
    )
    assert len(document["peak_memory_bytes"]) == 4
    assert max(document["peak_memory_bytes"]) <= 60e9
    assert document["solve_s"] >= 0
    assert document["num_cuts"] >= 0


def test_people_get_tables(run_cli: Run, example: Path) -> None:
    result = run_cli("place", example)
    assert result.returncode == 0, result.stderr
    for word in ("where the step goes", "recompute", "dense", "moe", "peak, GiB", "optimal:"):
        assert word in result.stdout
    assert "\x1b" not in result.stdout + result.stderr


def test_chunks_nest(run_cli: Run, edited: Callable[..., Path]) -> None:
    problem = edited(num_chunks=2, schedule="interleaved_1f1b", memory_limit_bytes=90e9)
    document = json.loads(run_cli("place", problem, "--json").stdout)
    chunks = document["layers"]["moe"]
    assert [len(chunk) for chunk in chunks] == [4, 4]
    assert sum(map(sum, chunks)) == 29
    assert document["layers"]["head"] == [[0, 0, 0, 0], [0, 0, 0, 1]]


def test_nothing_feasible_is_3_with_a_reason(run_cli: Run, edited: Callable[..., Path]) -> None:
    problem = edited(memory_limit_bytes=20e9)
    result = run_cli("place", problem, "--json")
    assert result.returncode == 3
    document = json.loads(result.stdout)
    assert document["status"] == "infeasible"
    assert document["step_ms"] is None
    assert document["layers"] is None
    assert "memory" in document["reason"]
    assert_one_paragraph(run_cli("place", problem), 3, "nothing feasible", "memory")


def test_too_few_layers_is_3(run_cli: Run, edited: Callable[..., Path]) -> None:
    assert_one_paragraph(run_cli("place", edited(num_stages=33, memory_limit_bytes=60e9)), 3, "32")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_stagse": 3}, ("num_stagse", "num_stages", "edited.json")),
        ({"schedule": "1f1bb"}, ("1f1bb", "1f1b")),
        ({"num_chunks": 2}, ("num_chunks is 2",)),
        ({"memory_limit_bytes": [1, 2]}, ("memory_limit_bytes has 2 entries",)),
        ({"p2p_ms": -1}, ("p2p_ms is -1",)),
        ({"chain": 3}, ("chain is 3",)),
    ],
)
def test_wrong_input_is_2(
    run_cli: Run, edited: Callable[..., Path], changes: dict[str, Any], words: tuple[str]
) -> None:
    assert_one_paragraph(run_cli("place", edited(**changes)), 2, *words)


def test_a_missing_or_foreign_file_is_2(run_cli: Run, tmp_path: Path) -> None:
    assert_one_paragraph(run_cli("place", "nowhere.json"), 2, "nowhere.json", "no such file")
    (tmp_path / "bytes.json").write_bytes(bytes(range(256)))
    assert_one_paragraph(run_cli("place", "bytes.json"), 2, "binary")
    assert_one_paragraph(run_cli("place", tmp_path), 2, "directory")


def test_a_certificate_that_cannot_be_written_is_2(run_cli: Run, example: Path) -> None:
    assert_one_paragraph(run_cli("place", example, "--certificate", "/proc/nowhere/c.json"), 2, "/proc/nowhere")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("VERB",)),
        (("plase",), ("plase",)),
        (("place",), ("PROBLEM.json",)),
        (("place", "p.json", "--time-limit", "-3"), ("--time-limit", "-3")),
        (("place", "p.json", "--time-limit", "soon"), ("soon",)),
        (("place", "p.json", "--time", "3"), ("--time",)),
        (("plan", "job.yaml", "--top-k", "0"), ("--top-k", "0")),
        (("plan", "job.yaml", "--engine", "slurm"), ("--engine", "slurm")),
        (("simulate", "job.yaml"), ("--config",)),
    ],
)
def test_a_mistyped_command_is_2(run_cli: Run, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_one_paragraph(run_cli(*arguments), 2, "--help", *words)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("place", "--help"), ("plan", "--help")])
def test_help_is_quick(run_cli: Run, arguments: tuple[str, ...]) -> None:
    began = time.monotonic()
    result = run_cli(*arguments)
    took_s = time.monotonic() - began
    assert result.returncode == 0
    assert result.stdout
    assert result.stderr == ""
    print(f"{' '.join(arguments)}: {took_s:.2f} s")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_signal_ends_with_the_best_so_far(
    run_cli: Run, example: Path, repository: Path, tmp_path: Path, number: int
) -> None:
    """A problem that nobody has proven: it runs until it is told to stop, and then has a plan."""
    assert run_cli("place", example).returncode == 0  # so that kernels are compiled before the clock runs
    layer = {"modality": "text", "forward_ms": 1.0, "backward_ms": 2.0, "static_bytes": 1e9, "activation_bytes": 3e8}
    recompute = {"extra_backward_ms": 1.0, "activation_bytes": 3e7}
    problem = {
        "num_stages": 16,
        "num_chunks": 2,
        "num_microbatches": 128,
        "schedule": "interleaved_1f1b",
        "memory_limit_bytes": 22e9,
        "chain": [
            {"name": "dense", "count": 7, **layer, "forward_ms": 0.71, "recompute": recompute},
            {"name": "moe", "count": 93, **layer, "recompute": recompute},
            {"name": "head", "count": 1, **layer, "layer": False, "pinned": "last", "forward_ms": 1.9},
        ],
    }
    path = tmp_path / "open.json"
    path.write_text(json.dumps(problem))
    process = subprocess.Popen(
        [sys.executable, "-m", "mm_autoparallel.cli.main", "place", str(path), "--json", "--time-limit", "100"],
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until_used(process, 5.0)
    process.send_signal(number)
    told = time.monotonic()
    output, errors = process.communicate(timeout=60)
    took_s = time.monotonic() - told
    assert process.returncode == 0, errors
    assert "stopping with the best so far" in errors
    document = json.loads(output)
    assert document["status"] == "feasible"
    assert sum(map(sum, document["layers"]["moe"])) == 93
    print(f"ended {took_s:.2f} s after the signal")
