"""The search as a whole: against brute force over strategies and placements, and by what must not happen."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import brute_force

from mm_autoparallel.errors import Interrupted, NoFeasiblePlan, Unfinished
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.solve.engines import local_processes
from mm_autoparallel.pipeline.solve.engines.local_processes import LocalProcesses
from mm_autoparallel.pipeline.solve.task import Answer
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.search.candidate import Progress, candidate_rows, progress_line
from mm_autoparallel.planner.search.planner import examine, search
from mm_autoparallel.planner.search.relaxation import raise_no_plan
from mm_autoparallel.planner.search.result import SearchResult
from mm_autoparallel.planner.search.space import list_space

PIPELINES = {"tp": (1,), "cp": (1,)}
"""Limits that leave pipelines and replicas."""


def brute_search(job: Job) -> dict[Strategy, float]:
    """The least step of every lawful strategy, infinite where nothing fits."""
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    return {strategy: brute_force(build_problem(job, strategy))[0] for strategy in lawful}


CASES: list[dict[str, Any]] = [
    PIPELINES | {"memory_bytes": memory, "max_vpp": max_vpp, "freeze_vision": frozen}
    for memory, max_vpp, frozen in itertools.product((4e9, 5e9, 6e9, 9e9), (1, 2), (True, False))
]
CASES += [
    {"bandwidth_scale": 0.002, "memory_bytes": 6e9},
    {"bandwidth_scale": 0.02, "memory_bytes": 4.5e9, "max_vpp": 2, "pp": (2, 4)},
    PIPELINES | {"memory_bytes": 5e9, "workload": {"micro_batch_scale": {"vision": (0.5, 1.5)}}, "pp": (2, 4)},
    PIPELINES | {"memory_bytes": 5e9, "schedule": "gpipe"},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_best_plan_equals_brute_force(case: dict[str, Any], make_job, monkeypatch) -> None:
    """And every candidate's end is true: what was ruled out was not better, what does not fit does not fit."""
    monkeypatch.setattr("mm_autoparallel.planner.search.planner.EXACT_S", float("inf"))  # also on a busy machine
    job = make_job(**case)
    steps = brute_search(job)
    best_ms = min(steps.values())
    if best_ms == float("inf"):
        with pytest.raises(NoFeasiblePlan, match="is closest"):
            search(job, num_workers=1)
        return
    result = search(job, num_workers=1)
    assert result.proven
    assert result.stopped == "finished"
    assert result.figures.step_ms == pytest.approx(best_ms, rel=1e-5)
    assert result.lower_bound_ms <= best_ms * (1 + 1e-9)
    assert [c.strategy for c in result.candidates] == [entry.strategy for entry in list_space(job)]
    for candidate in result.candidates:
        assert candidate.reason
        if candidate.status == "unlawful":
            assert candidate.strategy not in steps
            continue
        truth_ms = steps[candidate.strategy]
        if candidate.status == "infeasible":
            assert truth_ms == float("inf")
            continue
        assert candidate.bound_ms is not None
        assert candidate.bound_ms <= truth_ms * (1 + 1e-9)
        if candidate.status == "dominated":
            assert truth_ms >= best_ms * (1 - 1e-5)
        else:
            assert candidate.status == "solved"
            assert candidate.step_ms == pytest.approx(truth_ms, rel=1e-5)


def test_the_figures_are_those_of_evaluate(make_job) -> None:
    job = make_job(memory_bytes=5e9, **PIPELINES)
    result = search(job, num_workers=1)
    estimate = evaluate(job, result.plan)
    assert estimate.fits
    assert estimate.step_ms == result.figures.step_ms
    assert result.estimates[0].placement == estimate.placement
    assert result.figures.gap_fraction == pytest.approx(1 - result.lower_bound_ms / estimate.step_ms, abs=1e-12)


def test_the_best_k_are_the_best_k(make_job) -> None:
    """One for each pipeline: strategies of equal numbers count once."""
    job = make_job(memory_bytes=7e9, freeze_vision=False, **PIPELINES)
    steps = brute_search(job)
    problems = {build_problem(job, strategy): step for strategy, step in steps.items()}
    expected = sorted(problems.values())[:3]
    result = search(job, top_k=3, num_workers=1)
    assert [e.step_ms for e in result.estimates] == pytest.approx(expected, rel=1e-5)
    assert result.figures.step_ms == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    memory_bytes=st.floats(3e9, 12e9),
    more_factor=st.floats(1.0, 1.5),
    max_vpp=st.sampled_from([1, 2]),
    num_layers=st.sampled_from([4, 7]),
)
def test_more_memory_never_makes_a_plan_slower(
    make_job, memory_bytes: float, more_factor: float, max_vpp: int, num_layers: int
) -> None:
    def best_ms(memory_bytes: float) -> float:
        job = make_job(memory_bytes=memory_bytes, max_vpp=max_vpp, num_layers=num_layers, tp=(1, 2), pp=(2, 4))
        try:
            return search(job, num_workers=1).figures.step_ms
        except NoFeasiblePlan:
            return float("inf")

    assert best_ms(memory_bytes * more_factor) <= best_ms(memory_bytes) * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    bandwidth_scale=st.floats(0.001, 1.0),
    more_factor=st.floats(1.0, 4.0),
    num_nodes=st.sampled_from([1, 2]),
    max_vpp=st.sampled_from([1, 2]),
)
def test_more_bandwidth_never_makes_a_step_longer(
    make_job, bandwidth_scale: float, more_factor: float, num_nodes: int, max_vpp: int
) -> None:
    def best_ms(bandwidth_scale: float) -> float:
        job = make_job(
            bandwidth_scale=bandwidth_scale, num_nodes=num_nodes, memory_bytes=6e9, max_vpp=max_vpp, mbs=(1, 2)
        )
        return search(job, num_workers=1).figures.step_ms

    assert best_ms(bandwidth_scale * more_factor) <= best_ms(bandwidth_scale) * (1 + 1e-9)


def same_end(one: SearchResult, other: SearchResult) -> bool:
    return one.plan == other.plan and one.figures == other.figures


@pytest.mark.slow
def test_the_same_job_gives_the_same_plan_in_one_process_or_several(make_job, spread_at_once: None) -> None:
    job = make_job(memory_bytes=5e9, num_layers=8, max_vpp=2, **PIPELINES)
    alone = search(job, num_workers=1)
    assert same_end(alone, search(job, num_workers=1))
    assert same_end(alone, search(job, num_workers=2))


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_changes_nothing(make_job, spread_at_once: None, monkeypatch) -> None:
    lost: list[int] = []

    class Losing(LocalProcesses):
        def wait(self) -> Answer | None:
            if not lost:
                lost.append(self.process_ids[0])
                os.kill(lost[0], signal.SIGKILL)
            return super().wait()

    monkeypatch.setattr("mm_autoparallel.planner.search.planner.LocalProcesses", Losing)
    job = make_job(memory_bytes=5e9, num_layers=8, max_vpp=2, **PIPELINES)
    alone, together = search(job, num_workers=1), search(job, num_workers=2)
    assert lost
    assert same_end(alone, together)
    (told,) = set(together.warnings) - set(alone.warnings)
    # another one takes its place if anything is left for it by then
    assert re.match("1 of [23] processes that place problems died; the last one was killed by signal 9", told)


def test_workers_that_all_die_are_told(make_job, spread_at_once: None, monkeypatch) -> None:
    monkeypatch.setattr(local_processes, "python_command", lambda _: ["sh", "-c", "echo no room >&2; exit 7"])
    result = search(make_job(memory_bytes=5e9, num_layers=8, max_vpp=2, **PIPELINES), num_workers=2)
    assert result.stopped == "processes died"
    (told,) = [warning for warning in result.warnings if "died" in warning]
    assert re.fullmatch(r"all \d+ processes .* ended with exit code 7, and its last words were: no room", told)


def test_strategies_whose_layers_have_other_modes_are_no_hint(make_job, monkeypatch) -> None:
    """Modes that another undercuts are dropped in some strategies and not in others of as many stages."""
    calls = itertools.count()

    def drop_in_turn(problem: Problem) -> Problem:
        kept = slice(next(calls) % 2, None)
        return replace(problem, chain=tuple(replace(block, modes=block.modes[kept]) for block in problem.chain))

    monkeypatch.setattr("mm_autoparallel.planner.search.agenda.drop_dominated_modes", drop_in_turn)
    job = make_job(memory_bytes=6e9, num_layers=8, modes=("recompute", "selective"), **PIPELINES)
    result = search(job, num_workers=1, top_k=6)  # several are placed
    assert sum(candidate.was_placed for candidate in result.candidates) > 1
    assert result.proven


def hard_job(make_job) -> Job:
    """Its chunked strategies take far longer to settle than any test waits; those of one chunk do not."""
    return make_job(num_layers=60, num_nodes=2, memory_bytes=40e9, pp=(8,), max_vpp=4, mbs=(1, 2), tp=(1,))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_time_limit_ends_it_with_the_best_so_far(make_job, monkeypatch, num_workers: int) -> None:
    monkeypatch.setattr("mm_autoparallel.planner.search.slices.PROCESSES_WORTH_S", -1.0)
    began = time.monotonic()
    result = search(hard_job(make_job), time_limit_s=4.0, num_workers=num_workers)
    print(f"a limit of 4 s ended it after {time.monotonic() - began:.1f} s")
    assert result.stopped == "time limit"
    assert result.lower_bound_ms <= result.figures.step_ms
    unfinished = [c for c in result.candidates if c.status == "unfinished"]
    assert unfinished
    assert all("time limit" in c.reason for c in unfinished)
    assert min(c.bound_ms for c in unfinished if c.bound_ms) >= result.lower_bound_ms * (1 - 1e-9)


@pytest.mark.slow
def test_an_interrupt_ends_it_with_the_best_so_far(make_job) -> None:
    stop = threading.Event()
    seen: list[Progress] = []
    threading.Timer(3.0, stop.set).start()
    began = time.monotonic()
    result = search(hard_job(make_job), should_stop=stop.is_set, on_progress=seen.append, num_workers=1)
    print(f"a stop after 3 s ended it after {time.monotonic() - began:.1f} s")
    assert result.stopped == "interrupted"
    assert result.figures.step_ms == min(progress.best_ms for progress in seen)
    assert "best so far" in progress_line(seen[-1])


def test_progress_is_told_before_anything_is_placed(make_job) -> None:
    seen: list[Progress] = []
    search(make_job(memory_bytes=5e9), on_progress=seen.append, num_workers=1)
    assert seen[0].best_ms == math.inf
    assert 0 < seen[0].lower_bound_ms < math.inf
    assert seen[0].num_done < seen[0].num_candidates
    assert seen[-1].num_done == seen[-1].num_candidates


def test_progress_in_words() -> None:
    """Best so far, bound, gap and what is left of the time limit, which goes on between two reports."""
    found = Progress(84_530.0, 84_190.0, 12, 330, 18.6, 41.4)
    told = "12 of 330 strategies, best so far 84.53 s, bound 84.19 s, gap 0.4 %"
    assert progress_line(found) == f"{told}, 41 s left"
    assert progress_line(found, since_s=3.0) == f"{told}, 38 s left"
    assert progress_line(found, since_s=100.0) == f"{told}, 0 s left"
    assert progress_line(replace(found, left_s=math.inf)) == told
    nothing = Progress(math.inf, 12.5, 0, 330, 0.1, 60.0)
    assert progress_line(nothing) == "0 of 330 strategies, nothing found so far, bound 12.50 ms, 60 s left"
    assert progress_line(replace(nothing, lower_bound_ms=math.inf, left_s=math.inf)).endswith("nothing found so far")


def test_stopped_before_anything_was_found_is_not_called_infeasible(make_job) -> None:
    with pytest.raises(Interrupted, match="interrupted") as caught:
        search(make_job(), should_stop=lambda: True)
    assert caught.value.exit_code == 130
    with pytest.raises(Unfinished, match="came to its time limit before it") as late:
        search(make_job(), time_limit_s=0.01)
    assert late.value.exit_code == 124


def test_a_relaxation_is_looked_for_while_there_is_time(make_job) -> None:
    job = make_job(memory_bytes=3e9, mbs=(2,), pp=(4,), tp=(1,))
    _, candidates = examine(job, list_space(job), time_limit_s=60.0)
    with pytest.raises(NoFeasiblePlan, match=r"would do, or .*, which search leaves out"):
        raise_no_plan(job, candidates, {}, "finished", lambda: False)
    with pytest.raises(NoFeasiblePlan, match=r"would do$"):
        raise_no_plan(job, candidates, {}, "finished", lambda: True)


def test_what_would_do_would_do(make_job) -> None:
    """The smallest relaxation that the message names: such devices, or such sizes, and nothing much smaller."""
    job = make_job(memory_bytes=3e9, mbs=(2,), pp=(4,), tp=(1,))
    with pytest.raises(NoFeasiblePlan) as caught:
        search(job, num_workers=1)
    message = str(caught.value)
    assert "PP 4 TP 1 DP 1 MBS 2 is closest" in message
    assert "stage 3 is" in message
    would_do = float(message.split("devices of ")[1].split(" GB")[0])
    assert search(make_job(memory_bytes=would_do * 1e9, mbs=(2,), pp=(4,), tp=(1,)), num_workers=1).estimates[0].fits
    with pytest.raises(NoFeasiblePlan):
        search(make_job(memory_bytes=(would_do - 0.15) * 1e9, mbs=(2,), pp=(4,), tp=(1,)), num_workers=1)
    outside = message.split(", or ")[1].split(", which search leaves out")[0].split()
    sizes = {name.lower(): (int(size),) for name, size in zip(outside[::2], outside[1::2], strict=True)}
    limits = {"pp": (4,), "tp": (1,), "mbs": (2,)} | sizes
    assert search(make_job(memory_bytes=3e9, **limits), num_workers=1).estimates[0].fits


def test_rows_for_reports_say_everything(make_job) -> None:
    job = make_job(memory_bytes=5e9, max_vpp=2)
    result = search(job, num_workers=1)
    rows = candidate_rows(result.candidates)
    assert len(rows) == len(result.candidates)
    best = rows[[c.strategy for c in result.candidates].index(result.plan.strategy)]
    assert best["status"] == "solved"
    assert best["e2e_time"] == pytest.approx(result.figures.step_ms)
    assert {row["status"] for row in rows} >= {"solved", "dominated", "infeasible", "unlawful"}
    for row in rows:
        assert (row["lower_bound_ms"] is None) == (row["status"] in ("infeasible", "unlawful"))


def test_a_candidate_s_peak_is_what_evaluate_says(make_job) -> None:
    result = search(make_job(memory_bytes=5e9, max_vpp=2), num_workers=1, top_k=4)
    peaks = {c.strategy: c.peak_bytes for c in result.candidates}
    assert len(result.estimates) == 4
    for estimate in result.estimates:
        limits = estimate.problem.memory_limit_bytes
        fullest = max(range(len(limits)), key=lambda stage: estimate.peak_memory_bytes[stage] / limits[stage])
        assert peaks[estimate.plan.strategy] == estimate.peak_memory_bytes[fullest]
    for candidate in result.candidates:
        assert (candidate.peak_bytes is None) == (candidate.step_ms is None)


def test_placing_what_was_ruled_out_finds_nothing_better(make_job) -> None:
    """On a job too large for brute force."""
    job = make_job(memory_bytes=9e9, num_layers=24, num_nodes=2, max_vpp=2, cp=(1,))
    result = search(job, num_workers=1)
    assert result.proven
    placed = 0
    for candidate in result.candidates:
        if candidate.status == "dominated" and placed < 12:
            placed += 1
            found = place(build_problem(job, candidate.strategy), time_limit_s=1.0)
            assert found.step_ms >= result.figures.step_ms * (1 - 1e-5)
    assert placed
