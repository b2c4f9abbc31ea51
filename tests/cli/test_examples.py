"""Every example runs: its job is planned, and the plan that comes out is simulated to the same step."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import read_plan

Run = Callable[..., subprocess.CompletedProcess[str]]

REPOSITORY = Path(__file__).parents[2]
JOBS = sorted((REPOSITORY / "examples").glob("*/job.yaml"))
PROBLEMS = sorted((REPOSITORY / "examples").glob("*/problem*.json"))


def test_there_are_examples() -> None:
    assert JOBS
    assert PROBLEMS


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.parent.name)
def test_a_job_is_planned_and_its_plan_simulates_the_same(run_cli: Run, tmp_path: Path, job: Path) -> None:
    planned = run_cli("plan", job, "--time-limit", "5", "--json", timeout_s=300)
    assert planned.returncode == 0, planned.stderr
    path = tmp_path / "auto_parallel_search_optimal_config.json"
    document = json.loads(path.read_text())
    assert json.loads(planned.stdout)["e2e_time"] == document["e2e_time"]
    read = read_job(job)
    again = evaluate(read, read_plan(path, read))
    assert again.step_ms == pytest.approx(document["e2e_time"], rel=1e-12)
    assert again.peak_memory_bytes == pytest.approx(document["peak_memory_bytes"], abs=1.0)
    assert max(document["peak_memory_bytes"]) <= document["memory_limit_bytes"]
    assert document["lower_bound_ms"] <= document["e2e_time"]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda path: path.parent.name)
def test_a_problem_is_placed_and_its_certificate_holds(run_cli: Run, problem: Path) -> None:
    placed = run_cli("place", problem, "--certificate", "certificate.json", "--json")
    assert placed.returncode == 0, placed.stderr
    assert json.loads(placed.stdout)["status"] == "optimal"
    verified = run_cli("verify", "certificate.json")
    assert verified.returncode == 0, verified.stderr
