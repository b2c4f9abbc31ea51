"""ablation.py: a method is left out of the table, what that does is counted, and wrong names are refused."""

from __future__ import annotations

import pytest
from ablation import ALONE, Outcome, choose_cases, choose_methods, describe, judge, main, solve

from mm_autoparallel.errors import JobError


def test_a_method_that_is_left_out_does_not_run() -> None:
    ((_, load),) = choose_cases(["taylor-512_8k_swap"])
    whole, without = solve(load(), 60.0), solve(load(), 60.0, "pattern tree")
    assert {"annealing", "pattern tree"} == whole.spent_s.keys()
    assert "pattern tree" not in without.spent_s
    assert without.step_ms == pytest.approx(whole.step_ms, rel=1e-6)


def test_effects_are_counted_over_the_cases_that_it_ran_on() -> None:
    spent = {"annealing": 1.0}
    whole = Outcome("optimal", 100.0, 0.0, 2.0, spent)
    worse, same = Outcome("feasible", 101.0, 0.02, 5.0, {}), Outcome("optimal", 100.0, 0.0, 1.0, {})
    (header, _, line) = describe([judge("annealing", [(whole, worse), (whole, same)])])
    assert header.count("|") == line.count("|")
    assert line == "| annealing | 2 | 1 (1.00%) | 1 (1.00%, 2.00%) | 1, 0 | 4.0 → 6.0 |"


def test_jobs_of_the_examples_are_placed_too() -> None:
    names = [name for name, _ in choose_cases(["job-qwen2vl_72b/job-pp8"])]
    assert names == ["job-qwen2vl_72b/job-pp8-vpp1"]


def test_what_nobody_is_called_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="'guessing' is no method of placement"):
        choose_methods(["guessing"])
    assert ALONE not in choose_methods([])
    monkeypatch.setattr("sys.argv", ["ablation.py", "--cases", "nobody"])
    assert main() == 2
    assert "no case begins with 'nobody'" in capsys.readouterr().err
