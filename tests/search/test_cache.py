"""Solved problems are found again by content; what other code wrote, or what is not true, is not used."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_problems import random_problem

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.pipeline.solve.cache import SolvedCache
from mm_autoparallel.pipeline.solve.task import Answer
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.result import SearchResult


@pytest.fixture(scope="module")
def job(make_job: Callable[..., Job], no_clock: None) -> Job:
    """It has pipelines that are solved, others that cannot beat them, and some that do not fit."""
    return make_job(memory_bytes=5e9, max_vpp=2, tp=(1,), cp=(1,), freeze_vision=False)


def run(job: Job, folder: Path) -> SearchResult:
    return search(job, num_workers=1, cache=SolvedCache(folder))


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("solved-*/*.json"))


def spent_s(result: SearchResult) -> float:
    return sum(candidate.solve_s for candidate in result.candidates)


def test_a_second_search_solves_nothing_and_says_the_same(job: Job, tmp_path: Path) -> None:
    plain = search(job, num_workers=1)
    first, second = run(job, tmp_path), run(job, tmp_path)
    assert entries(tmp_path)
    assert spent_s(first) > 0.0 == spent_s(second)
    for result in (first, second):
        assert (result.plan, result.figures, result.warnings) == (plain.plan, plain.figures, plain.warnings)
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_does_not_fit_is_remembered_too(tmp_path: Path) -> None:
    answer = Answer(0, None, np.inf, np.inf, 2.5, infeasible=True, reason="no room", overflow_bytes=1e9)
    SolvedCache(tmp_path).keep("a" * 64, answer)
    assert SolvedCache(tmp_path).find("a" * 64, random_problem(1)) == answer


def test_what_was_only_bounded_keeps_its_bound(tmp_path: Path) -> None:
    answer = Answer(0, None, np.inf, 12.5, 0.1)
    SolvedCache(tmp_path).keep("b" * 64, answer)
    assert SolvedCache(tmp_path).find("b" * 64, random_problem(1)) == answer


def lie_about_the_step(entry: dict[str, Any]) -> None:
    entry["step_ms"] = entry["step_ms"] * 0.5


def lie_about_the_bound(entry: dict[str, Any]) -> None:
    entry["lower_bound_ms"] = entry["step_ms"] * 2.0


def swap_layers(entry: dict[str, Any]) -> None:
    entry["placement"]["layers"] = [[1]]


def name_no_placement(entry: dict[str, Any]) -> None:
    entry["placement"] = {"layers": 3}


def rename_key(entry: dict[str, Any]) -> None:
    entry["key"] = "0" * 64


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lie_about_the_step, "step_ms is"),
        (lie_about_the_bound, "above the step"),
        (lambda entry: entry.update(infeasible=True), "a placement or a bound stands beside it"),
        (swap_layers, "none of this problem"),
        (name_no_placement, "placement.layers is 3; a list is expected"),
        (lambda entry: entry["placement"]["layers"].insert(0, [[1]]), "placement.layers[0][0]"),
        (lambda entry: entry["placement"].update(layers=[[1.0]]), "placement.layers[0][0]"),
        (lambda entry: entry.update(placement=entry["placement"]["layers"]), "placement is a list"),
        (rename_key, "of another problem or other code"),
        (lambda entry: entry.clear(), "missing"),
    ],
)
def test_what_is_not_true_is_said_and_solved_anew(job: Job, tmp_path: Path, spoil: Any, words: str) -> None:
    plain = run(job, tmp_path)
    solved = [path for path in entries(tmp_path) if json.loads(path.read_text())["placement"]]
    for path in solved:
        entry = json.loads(path.read_text())
        spoil(entry)
        path.write_text(json.dumps(entry))
    again = run(job, tmp_path)
    assert again.plan == plain.plan
    told = [warning for warning in again.warnings if words in warning and "it is solved anew" in warning]
    assert told
    assert run(job, tmp_path).warnings == plain.warnings  # rewritten


@pytest.mark.parametrize("content", [b"", b"{", b"\x00\x01", b"[1]"])
def test_half_a_file_is_solved_anew(job: Job, tmp_path: Path, content: bytes) -> None:
    plain = run(job, tmp_path)
    for path in entries(tmp_path):
        path.write_bytes(content)
    again = run(job, tmp_path)
    assert again.plan == plain.plan
    assert any("it is solved anew" in warning for warning in again.warnings)


def test_other_code_is_not_believed(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(job, tmp_path)
    monkeypatch.setattr("mm_autoparallel.pipeline.solve.cache.solver_fingerprint", lambda: "of tomorrow")
    cache = SolvedCache(tmp_path)
    assert "was solved by other code (solved-" in cache.warnings[0]
    result = search(job, num_workers=1, cache=cache)
    assert spent_s(result) > 0.0
    assert SolvedCache(tmp_path).warnings == []  # it has some of its own now


def test_searches_at_once_share_it(job: Job, tmp_path: Path) -> None:
    plain, found = search(job, num_workers=1), []
    threads = [threading.Thread(target=lambda: found.append(run(job, tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.plan for result in found] == [plain.plan] * 3
    assert run(job, tmp_path).warnings == plain.warnings


def test_an_entry_that_cannot_be_written_ends_no_search(job: Job, tmp_path: Path) -> None:
    plain = run(job, tmp_path)
    for path in entries(tmp_path):
        path.unlink()
        path.mkdir()
    again = run(job, tmp_path)
    assert again.plan == plain.plan
    assert sum("cannot be written" in warning for warning in again.warnings) == 1


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(JobError, match="cannot be used as a folder"):
        SolvedCache(tmp_path / "cache")
