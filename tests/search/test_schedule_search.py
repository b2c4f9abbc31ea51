"""Schedules as a dimension of the search: which are looked at, that the best of all is found, and what rules out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import generate_free
import numpy as np
import pytest
from compare import read

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job, SearchSpace
from mm_autoparallel.model.job.schedule_law import RUNS, searched_schedules
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.placement.orders.bounds import bound_stages
from mm_autoparallel.pipeline.placement.orders.levels import least_excess_bytes, options_below
from mm_autoparallel.pipeline.placement.orders.options import least_overflow, list_options
from mm_autoparallel.pipeline.placement.result import PlacementResult
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import has_same_counts
from mm_autoparallel.pipeline.schedules.catalog import OF_JOBS, SCHEDULES
from mm_autoparallel.pipeline.solve.cache import SolvedCache
from mm_autoparallel.pipeline.solve.families import content_key, figures_of
from mm_autoparallel.planner.explain.variables import list_variables
from mm_autoparallel.planner.explain.why_not import explain_why_not, parse_wish
from mm_autoparallel.planner.plan import read_plan, write_result
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.result import SearchResult
from mm_autoparallel.planner.search.space import list_space

pytestmark = pytest.mark.usefixtures("no_clock")
LAYERS = {"num_layers": 6, "hidden_size": 2048, "ffn_size": 5504, "num_heads": 16, "norm": "rms"}


def job_of(schedule: Any, workload: dict[str, Any] | None = None, **limits: Any) -> Job:
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS}},
        "cluster": {"num_nodes": 1, "devices_per_node": 2, "device": "h100-80g"},
        "workload": {"global_batch_size": 6, "seq_length": 2048, **(workload or {})},
        "search": {"pp": [1, 2], "tp": [1], "mbs": [1, 3], "max_vpp": 2, "modes": [], "schedule": schedule} | limits,
    }
    return parse_job(document, Path("job.json"))


def run(job: Job, cache: SolvedCache | None = None) -> SearchResult:
    return search(job, num_workers=1, cache=cache)


class TestNames:
    @pytest.mark.parametrize(
        ("named", "stack", "expected"),
        [
            (None, "megatron-te", ("",)),
            ("zb_h1", None, ("zb_h1",)),
            (["zb_h1", "free"], None, ("zb_h1", "free")),
            ("all", None, OF_JOBS),
            (["all"], "megatron-te", ("1f1b", "interleaved_1f1b")),
            ("all", "megatron-deepspeed", ("1f1b",)),
            ("all", "transformers", OF_JOBS),
        ],
    )
    def test_a_name_a_list_or_all_that_the_stack_runs(self, named: Any, stack: Any, expected: tuple[str, ...]) -> None:
        workload = Workload(global_batch_size=1, seq_length=8, **({"stack": stack} if stack else {}))
        assert searched_schedules(SearchSpace(schedule=named).schedule, workload) == expected

    def test_every_framework_has_its_schedules_and_where_that_was_read(self) -> None:
        for runs in RUNS.values():
            assert runs.schedules
            assert set(runs.schedules) <= set(OF_JOBS)
            assert len(runs.source) > 20

    @pytest.mark.parametrize(
        ("schedule", "changes", "words"),
        [
            ("zb_h3", {}, "search.schedule: 'zb_h3' is no schedule (did you mean \"zb_h2\"?); known are gpipe"),
            (["1f1b", "alll"], {}, "'alll' is no schedule (did you mean \"all\"?)"),
            (["all", "1f1b"], {}, "all stands there beside others, and stands for every schedule; name it alone"),
            ([], {}, "search.schedule is empty; it must hold at least 1"),
            (["1f1b", 3], {}, "search.schedule[1] is 3"),
            (["1f1b", "zbv"], {"max_vpp": 1}, "names zbv, and no strategy can run it: it runs 2 chunks a stage"),
            (["1f1b", "zb_h1"], {"workload": {"stack": "megatron-te"}}, "names zb_h1, and no strategy can run it"),
            (
                ["1f1b", "free"],
                {"workload": {"micro_batch_scale": {"text": [1.0, 2.0]}}},
                "schedule free takes equal micro-batches, and workload.micro_batch_scale makes those of text unequal",
            ),
        ],
    )
    def test_what_no_strategy_can_run_is_refused(self, schedule: Any, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(JobError) as refused:
            job_of(schedule, **changes)
        assert words in str(refused.value)


class TestSpace:
    def test_lawful_combinations_and_the_reason_of_the_others(self) -> None:
        entries = list_space(job_of("all", pp=[2], mbs=[1], max_vpp=3))
        assert len(entries) == 3 * len(OF_JOBS)
        for entry in entries:
            schedule, vpp = SCHEDULES[entry.strategy.schedule], entry.strategy.vpp
            chunks = {2} if schedule.v_shaped else {1, 2, 3} if schedule.interleaved else {1}
            chunks -= {1} if schedule.splits and schedule.interleaved else set()
            chunks |= {2} if schedule.given_by == "placement" else set()  # there and back
            assert (entry.reason is None) == (vpp in chunks), entry
            assert entry.reason is None or f"and VPP is {vpp}" in entry.reason

    def test_one_stage_has_one_order(self) -> None:
        entries = list_space(job_of("all", pp=[1], mbs=[1], max_vpp=1, tp=[1, 2]))
        assert {entry.strategy.schedule for entry in entries} == {"1f1b"}
        assert {entry.strategy.schedule for entry in list_space(job_of(["zb_h1", "free"], pp=[1]))} >= {"zb_h1", "free"}

    def test_it_is_told_as_searched(self) -> None:
        found = {one.where: one for one in list_variables(job_of("all"))}["search.schedule"]
        assert found.searched
        assert {"free", "zbv", "1f1b"} <= set(found.values.split(", "))
        assert not {one.where: one for one in list_variables(job_of("1f1b"))}["search.schedule"].searched

    def test_unequal_micro_batches_leave_out_a_found_order_alone(self) -> None:
        job = job_of("all", workload={"micro_batch_scale": {"text": [1.0, 2.0]}})
        lawful = {entry.strategy.schedule for entry in list_space(job) if entry.reason is None}
        assert lawful == set(OF_JOBS) - {"free"}


@pytest.mark.parametrize(
    ("names", "limits"),
    [
        (["gpipe", "1f1b", "zb_h1", "free"], {"max_vpp": 1}),
        (["1f1b", "zb_h1", "interleaved_1f1b", "zbv"], {}),
        (["1f1b", "zb_h2", "free"], {"max_vpp": 1, "modes": ["recompute"], "failure_price": 0.0}),
    ],
    ids=str,
)
def test_the_best_of_all_is_the_best_of_each(names: list[str], limits: dict[str, Any]) -> None:
    """And what was ruled out is not better: each schedule by itself, against what is said of it among the others."""
    together = run(job_of(names, **limits))
    assert together.proven
    alone = {name: run(job_of(name, **limits)) for name in names}
    best_ms = min(result.objective.rank_ms for result in alone.values())
    assert together.objective.rank_ms == pytest.approx(best_ms, rel=1e-5)
    assert len({candidate.strategy for candidate in together.candidates}) == len(together.candidates)
    for result in alone.values():
        for candidate in result.candidates:
            if candidate.rank_ms is None or (candidate.strategy.pp == 1 and candidate.strategy.schedule != "1f1b"):
                continue
            (same,) = (one for one in together.candidates if one.strategy == candidate.strategy)
            assert same.status in ("solved", "dominated"), same
            assert same.bound_ms is not None
            assert same.bound_ms <= candidate.rank_ms * (1.0 + 1e-9)
            assert best_ms * (1.0 - 1e-5) <= candidate.rank_ms


class TestDominance:
    @pytest.mark.parametrize("modes", [[], ["recompute"]])
    def test_costs_differ_by_the_order_and_its_parts_alone(self, modes: list[str]) -> None:
        job = job_of("all", modes=modes)
        lawful = [e.strategy for e in list_space(job) if e.reason is None and e.strategy.vpp == 1 and e.strategy.pp > 1]
        for strategy in lawful:
            named, free = (build_problem(job, replace(strategy, schedule=name)) for name in (strategy.schedule, "free"))
            chain = (
                free.chain
                if named.splits
                else tuple(replace(block, backward_weight_ms=0.0, kept_for_weight_bytes=None) for block in free.chain)
            )
            assert replace(free, schedule=named.schedule, chain=chain) == named

    def test_no_named_order_of_one_chunk_beats_the_one_found(self) -> None:
        """On random problems: memory that binds, hops, frozen parts, splits that cost."""
        compared = 0
        for seed in range(14):
            problem = read(generate_free.problem(f"{generate_free.MOODS[seed % len(generate_free.MOODS)]}-{seed}"))
            if problem.num_stages * problem.num_microbatches > 8:
                continue
            free = place(problem, gap_fraction=1e-6)
            for name in ("gpipe", "zb_h1", "zb_h2", "interleaved_1f1b"):
                found = place(replace(problem, schedule=name), gap_fraction=1e-6)
                if found.placement is not None:
                    compared += 1
                    assert free.lower_bound_ms <= found.step_ms * (1.0 + 1e-9), (seed, name)
        assert compared > 10

    def test_they_wait_for_it_and_are_never_placed(self) -> None:
        result = run(job_of(["gpipe", "1f1b", "zb_h1", "free"], pp=[2], max_vpp=1))
        for candidate in result.candidates:
            if candidate.strategy.schedule != "free":
                assert (candidate.status, candidate.bounded_by) == ("dominated", "another strategy")
                assert not candidate.was_placed
                assert "its order is one of those that" in candidate.reason or "no time or byte" in candidate.reason

    def test_the_second_best_may_be_one_of_them(self) -> None:
        result = search(job_of(["zb_h1", "free"], pp=[2], mbs=[1], max_vpp=1), num_workers=1, top_k=2)
        assert [one.plan.strategy.schedule for one in result.estimates] == ["free", "zb_h1"]

    def test_they_are_placed_where_no_order_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Three times nothing is found, and then the ways to fill a stage are too many: the search ends even so."""
        calls = itertools.count()

        def find_nothing(*_: Any, **__: Any) -> PlacementResult:
            reason = "the ways to fill a stage are too many to be listed" if next(calls) > 2 else ""
            return PlacementResult("unknown", None, None, np.inf, 0.0, 0.0, reason=reason)

        monkeypatch.setattr("mm_autoparallel.pipeline.placement.orders.placing.place_orders", find_nothing)
        result = run(job_of(["1f1b", "free"], pp=[2], mbs=[1], max_vpp=1, choice="point"))
        monkeypatch.undo()
        assert next(calls) == 4
        assert result.plan.strategy.schedule == "1f1b"
        assert result.stopped == "finished"
        alone = run(job_of("1f1b", pp=[2], mbs=[1], max_vpp=1))
        assert result.figures.step_ms == pytest.approx(alone.figures.step_ms, rel=1e-9)


class TestLevels:
    def test_a_bound_by_levels_is_the_bound(self) -> None:
        """What is not listed below a step has no part in any placement of at most that step; nor is a bound lost."""
        checked = infeasible = 0
        for seed in range(60):
            problem = read(generate_free.problem(f"{generate_free.MOODS[seed % len(generate_free.MOODS)]}-{seed}"))
            try:
                segments = cut_into_segments(problem)
                options = list_options(segments, lambda: False)
            except JobError:
                continue
            whole = bound_step(problem)
            overflow_bytes, reason = least_overflow(options)
            assert least_excess_bytes(segments) <= overflow_bytes * (1.0 + 1e-9)
            if reason:
                infeasible += 1
                assert whole.reason
                continue
            if not np.isfinite(whole.step_ms):
                continue
            least_ms = bound_stages(options).least_ms
            assert whole.step_ms >= least_ms * (1.0 - 1e-9)
            for factor in (0.9, 0.999, 1.0, 1.001, 1.3):
                most_ms = factor * least_ms
                below = options_below(segments, most_ms, lambda: False, only_bounds=True)
                found_ms = most_ms if below is None else min(most_ms, bound_stages(below).least_ms)
                assert found_ms == pytest.approx(min(most_ms, least_ms), rel=1e-8), (seed, factor)
            known_ms, bound = 0.0, bound_step(problem, known_ms=0.0)
            while bound.is_partial:
                assert known_ms < bound.step_ms <= whole.step_ms * (1.0 + 1e-9)
                known_ms = bound.step_ms
                bound = bound_step(problem, known_ms=known_ms)
            assert bound.step_ms == pytest.approx(whole.step_ms, rel=1e-8)
            enough = bound_step(problem, enough_ms=0.5 * whole.step_ms)
            assert 0.5 * whole.step_ms * (1.0 - 1e-9) <= enough.step_ms <= whole.step_ms * (1.0 + 1e-8)
            checked += 1
        assert checked > 20
        assert infeasible > 2


def test_a_placement_with_its_order_is_gone_on_with() -> None:
    """A hint is taken as it is, and one of other micro-batches or of a named order is none."""
    problem = build_problem(
        job_of("free"), next(e.strategy for e in list_space(job_of("free", pp=[2])) if not e.reason)
    )
    first = place(problem, gap_fraction=1e-6)
    again = place(problem, gap_fraction=1e-6, hint=first.placement, time_limit_s=30.0)
    assert again.step_ms == pytest.approx(first.step_ms, rel=1e-6)
    assert again.lower_bound_ms >= again.step_ms * (1.0 - 1e-5)
    assert has_same_counts(problem, problem)
    assert not has_same_counts(problem, replace(problem, schedule="zb_h1"))
    assert not has_same_counts(problem, replace(problem, num_microbatches=problem.num_microbatches + 1))
    named = replace(problem, schedule="1f1b")
    assert has_same_counts(named, replace(named, num_microbatches=problem.num_microbatches + 1))


def test_schedules_are_not_confused(tmp_path: Path) -> None:
    """Each has a key of its own, and what a cache knows of one is not said of another."""
    job = job_of("all")
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None and entry.strategy.pp == 2]
    keys: dict[str, set[str]] = {}
    for strategy in lawful:
        keys.setdefault(content_key(*figures_of(build_problem(job, strategy))), set()).add(strategy.schedule)
    assert all(len(names) == 1 for names in keys.values())
    plain = {name: run(job_of(name, pp=[2], max_vpp=1)) for name in ("1f1b", "zb_h1", "free")}
    for name, result in plain.items():
        again = run(job_of(name, pp=[2], max_vpp=1), SolvedCache(tmp_path))
        assert again.figures.step_ms == pytest.approx(result.figures.step_ms, rel=1e-9)
        assert again.plan.strategy.schedule == name
    together = run(job_of([*plain], pp=[2], max_vpp=1), SolvedCache(tmp_path))
    assert together.plan.strategy.schedule == "free"
    assert together.figures.step_ms == pytest.approx(plain["free"].figures.step_ms, rel=1e-9)


def test_the_result_says_it_and_why_not_another(tmp_path: Path) -> None:
    job = job_of(["1f1b", "zb_h1", "free"], pp=[2], max_vpp=1)
    result = run(job)
    write_result(tmp_path / "plan.json", result.plan, result.figures)
    assert read_plan(tmp_path / "plan.json", job).strategy.schedule == "free"
    estimate = result.estimates[0]
    for word, outside in (("zb_h1", False), ("gpipe", True)):
        found = explain_why_not(job, estimate, parse_wish(f"schedule={word}"), 60.0)
        assert (found.status, found.outside, found.strategy.schedule) == ("solved", outside, word)
        assert found.estimate is not None
        assert found.estimate.step_ms >= estimate.step_ms * (1.0 - 1e-9)
    unknown = explain_why_not(job, estimate, parse_wish("schedule=zb_h9"), 60.0)
    assert unknown.reason.startswith("schedule 'zb_h9' is not known; known are gpipe")
    assert "there and back" in explain_why_not(job, estimate, parse_wish("schedule=zbv"), 60.0).reason
