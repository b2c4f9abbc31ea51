"""The log of bounds is true, and placing what bounds eliminated contradicts none of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mm_autoparallel.pipeline.solve.engines.in_process import InProcess
from mm_autoparallel.planner.search.candidate import bound_rows
from mm_autoparallel.planner.search.check import check_eliminated
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.result import SearchResult


@pytest.fixture(scope="module")
def searched(make_job, no_clock: None):
    job = make_job(memory_bytes=6e9, num_layers=12, max_vpp=2, zero=(0, 1), num_nodes=2)
    return job, search(job, num_workers=1)


def test_most_is_eliminated_and_every_row_says_by_what(searched) -> None:
    _, result = searched
    rows = bound_rows(result.candidates)
    lawful = [c for c in result.candidates if c.status != "unlawful"]
    assert len(rows) == len(lawful)
    assert sum(c.is_eliminated for c in lawful) >= 0.95 * len(lawful)
    assert {row["by"] for row in rows} >= {"block costs", "paths", "another strategy", "memory", "placing"}
    for row in rows:
        if row["status"] == "dominated":
            assert row["cutoff_ms"] >= result.figures.step_ms * (1 - 1e-9)
            assert row["bound_ms"] >= row["cutoff_ms"] * (1 - 1e-5)
        if row["by"] == "another strategy":
            assert "no time or byte of it is below that of" in row["reason"] or "needs no more bytes" in row["reason"]


def test_none_of_a_sample_beats_the_answer(searched) -> None:
    job, result = searched
    check = check_eliminated(job, result, 15, InProcess(lambda: False))
    assert check.mistakes == ()
    assert check.num_checked == 15
    assert check.num_settled >= 10
    assert check.fastest_ms is None or check.fastest_ms >= result.lower_bound_ms


def test_a_false_bound_is_found(searched) -> None:
    """One that claims too much, and one that claims that nothing fits."""
    job, result = searched
    best = next(c for c in result.candidates if c.strategy == result.plan.strategy)
    for lie in (
        replace(best, status="dominated", was_placed=False, bound_ms=best.bound_ms * 1.01),
        replace(best, status="infeasible", was_placed=False, bound_ms=None),
    ):
        lied: SearchResult = replace(result, candidates=(lie,))
        (mistake,) = check_eliminated(job, lied, 1, InProcess(lambda: False)).mistakes
        assert "and a placement of" in mistake
