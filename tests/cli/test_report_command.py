"""`report` and `plan --report` as a user runs them: a page is written, or one sentence says why not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def job(repository: Path) -> Path:
    return repository / "examples" / "qwen2vl_72b" / "job.yaml"


def test_a_page_of_a_plan_and_one_of_its_search(run_cli: Run, job: Path, tmp_path: Path) -> None:
    found = run_cli("plan", job, "--out", tmp_path, "--report", tmp_path / "found.html")
    assert found.returncode == 0, found.stderr
    assert f"wrote {tmp_path / 'found.html'}" in found.stderr
    plan = tmp_path / "auto_parallel_search_optimal_config.json"
    given = run_cli("report", job, "--config", plan, "--no-search", "--out", tmp_path / "given.html")
    assert given.returncode == 0, given.stderr
    for name in ("found.html", "given.html"):
        assert (tmp_path / name).stat().st_size < 3e6
        assert "<title>job.yaml: PP 2, TP 8" in (tmp_path / name).read_text()


def test_what_cannot_be_shown_is_one_sentence(run_cli: Run, job: Path, tmp_path: Path) -> None:
    for words, message in (
        (("--no-search",), "--no-search leaves nothing to show"),
        (("--out", tmp_path), "is a directory"),
        (("--config", tmp_path / "none.json"), "none.json"),
    ):
        done = run_cli("report", job, *words)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
