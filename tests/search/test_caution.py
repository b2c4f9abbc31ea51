"""What plans are ranked by where they may run out of memory: against brute force over strategies and placements."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import brute_force as oracle
import numpy as np
import pytest
from expert_jobs import random_job
from nouns import placement_of

import mm_autoparallel as mmap
from mm_autoparallel.errors import JobError, NoFeasiblePlan, Unfinished
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job, SearchSpace
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.problem_file import problem_document
from mm_autoparallel.pipeline.schedules.action import format_order
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.pipeline.solve.cache import SolvedCache
from mm_autoparallel.pipeline.solve.engines.in_process import InProcess
from mm_autoparallel.planner.evaluate import Estimate, evaluate, plan_from_placement
from mm_autoparallel.planner.explain.why_not import explain_why_not
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.check import check_eliminated
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_entries, list_space
from mm_autoparallel.planner.search.watched import describe_end
from mm_autoparallel.validation import parse_record

SMALL: dict[str, Any] = {"tp": (1,), "cp": (1,), "pp": (2, 4), "mbs": (1, 2)}


def placements_of(problem: Problem) -> Iterator[Placement]:
    """Every placement that the chain allows, whether it fits or not."""
    document = problem_document(problem)
    for cut in oracle.cuts(document):
        layers = [oracle.held_between(document, *ends) for ends in itertools.pairwise(cut)]
        for modes in itertools.product(*(oracle.mode_counts(document, held) for held in layers)):
            yield placement_of({"layers": layers, "modes": list(modes)})


def estimates_of(job: Job) -> Iterator[tuple[Strategy, Estimate]]:
    """Every plan of the job that keeps all limits."""
    for entry in list_space(job):
        if entry.reason is not None:
            continue
        problem = build_problem(job, entry.strategy)
        for placement in placements_of(problem):
            plan = plan_from_placement(problem, placement, entry.strategy, job.workload.global_batch_size)
            estimate = evaluate(job, plan)
            if estimate.fits:
                yield entry.strategy, estimate


def rank_ms(estimate: Estimate, price: float) -> float:
    probability = estimate.oom_probability
    return estimate.step_ms * (1 + price * probability / (1 - probability))


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [5.2e9, 6.5e9, 9e9])
def test_the_least_expected_time_equals_brute_force(make_job, no_clock, memory_bytes: float) -> None:
    """At two prices and under a threshold; what is proven holds for every plan."""
    job = make_job(memory_bytes=memory_bytes, **SMALL)
    known = [estimate for _, estimate in estimates_of(job)]
    for price in (0.1, 1.0):
        found = search(make_job(memory_bytes=memory_bytes, failure_price=price, **SMALL), num_workers=1)
        least_ms = min(rank_ms(estimate, price) for estimate in known)
        assert found.objective.rank_ms == pytest.approx(least_ms, rel=1e-5)
        assert found.objective.rank_bound_ms <= least_ms * (1 + 1e-9)
        assert rank_ms(found.estimates[0], price) == pytest.approx(found.objective.rank_ms, rel=1e-9)
        assert found.figures.gap_fraction == pytest.approx(
            1 - found.objective.rank_bound_ms / found.objective.rank_ms, abs=1e-9
        )
    for share in (0.9, 0.999):
        safe = [estimate.step_ms for estimate in known if estimate.oom_probability <= 1 - share]
        threshold = make_job(memory_bytes=memory_bytes, fit_probability=share, failure_price=None, **SMALL)
        if not safe:
            with pytest.raises((NoFeasiblePlan, Unfinished)):
                search(threshold, num_workers=1)
            continue
        found = search(threshold, num_workers=1)
        assert found.estimates[0].oom_probability <= (1 - share) * (1 + 1e-6)
        assert found.figures.step_ms == pytest.approx(min(safe), rel=1e-5)
        assert found.objective.rank_bound_ms <= min(safe) * (1 + 1e-9)


def test_a_limited_problem_leaves_no_emptier_placement_out(make_job) -> None:
    """What it counts of a placement is never more than the device's own peak."""
    for frozen, max_vpp in ((True, 1), (False, 2)):
        job = make_job(memory_bytes=6e9, freeze_vision=frozen, max_vpp=max_vpp, num_layers=5, **SMALL)
        caution, memory_bytes = Caution(job), job.cluster.device.memory_bytes
        for entry in list_space(job):
            if entry.reason is not None:
                continue
            problem = build_problem(job, entry.strategy)
            limited = caution.limited(problem, 1.0, entry.strategy)
            assert limited.memory_limit_bytes[0] == pytest.approx(memory_bytes)
            for placement in itertools.islice(placements_of(problem), 0, 1000, 41):
                counted = simulate(limited, placement).peak_memory_bytes
                estimate = evaluate(job, plan_from_placement(problem, placement, entry.strategy, 16))
                assert all(counted <= np.array(estimate.device_peak_bytes) * (1 + 1e-9))
                if estimate.fits:
                    fill = max(estimate.device_peak_bytes) / memory_bytes
                    assert caution.fill_of(problem, placement, entry.strategy) == pytest.approx(fill, rel=1e-9)


def test_a_price_of_nothing_is_the_fastest_that_fits(make_job, no_clock) -> None:
    """And far from full the price decides nothing."""
    free = search(make_job(memory_bytes=80e9, failure_price=0.0, **SMALL), num_workers=1)
    usual = search(make_job(memory_bytes=80e9, failure_price=0.1, **SMALL), num_workers=1)
    assert usual.plan == free.plan
    assert usual.figures.lower_bound_ms == pytest.approx(free.figures.lower_bound_ms, rel=2e-5)
    assert free.objective.fastest_ms is None
    assert usual.objective.caution_fraction == 0.0


def test_what_is_told_of_all_plans_is_true_of_each(make_job, no_clock) -> None:
    """A faster plan that fails more often is in the space, so no step is told that none undercuts."""
    job = make_job(memory_bytes=6.5e9, failure_price=0.5, **SMALL)
    found = search(job, num_workers=1)
    fits = [estimate for _, estimate in estimates_of(job) if estimate.fits]
    assert min(estimate.step_ms for estimate in fits) < 0.999 * found.figures.lower_bound_ms
    told = re.search(
        r"proven: no plan of this space ranks below ([\d.]+) ms, this one ranks at ([\d.]+) ms", describe_end(found)
    )
    assert told
    assert float(told[1]) <= min(rank_ms(estimate, 0.5) for estimate in fits) + 0.01
    assert float(told[2]) == pytest.approx(rank_ms(found.estimates[0], 0.5), abs=0.01)
    free = search(make_job(memory_bytes=6.5e9, failure_price=0.0, **SMALL), num_workers=1)
    told = re.search(r"proven: no plan of this space is below ([\d.]+) ms", describe_end(free))
    assert told
    assert float(told[1]) <= min(estimate.step_ms for estimate in fits) + 0.01


@pytest.mark.slow
def test_the_best_k_are_those_of_least_expected_time(make_job, no_clock) -> None:
    """One of each strategy, in their order."""
    limits: dict[str, Any] = {"memory_bytes": 9e9, "failure_price": 0.5} | SMALL
    job = make_job(**limits)
    least: dict[Strategy, float] = {}
    for strategy, estimate in estimates_of(job):
        least[strategy] = min(least.get(strategy, float("inf")), rank_ms(estimate, 0.5))
    found = search(job, num_workers=1, top_k=3)
    ranks = [rank_ms(estimate, 0.5) for estimate in found.estimates]
    assert ranks == pytest.approx(sorted(least.values())[:3], rel=1e-5)
    check = check_eliminated(job, found, 10, InProcess(lambda: False))
    assert not check.mistakes


@pytest.mark.parametrize("memory_bytes", [4.6e9, 5.2e9, 6.5e9])
def test_what_is_kept_serves_limited_problems_too(make_job, no_clock, tmp_path, memory_bytes: float) -> None:
    """A second search solves nothing and says the same, fills that were tried included."""
    limits: dict[str, Any] = {"memory_bytes": memory_bytes, "failure_price": 1.0, "choice": "point"} | SMALL
    first = search(make_job(**limits), num_workers=1, cache=SolvedCache(tmp_path))
    cache = SolvedCache(tmp_path)
    second = search(make_job(**limits), num_workers=1, cache=cache)
    assert not cache.warnings
    assert sum(candidate.solve_s for candidate in first.candidates) > 0.0
    assert sum(candidate.solve_s for candidate in second.candidates) == 0.0
    assert second.plan == first.plan
    assert second.objective.rank_ms == first.objective.rank_ms
    assert second.objective.rank_bound_ms >= first.objective.rank_bound_ms * (1 - 1e-5)


@pytest.mark.parametrize(("cp", "dp", "mbs"), [(1, 8, 1), (2, 4, 2)])
def test_a_limited_problem_counts_what_a_device_holds(cp: int, dp: int, mbs: int) -> None:
    """But for the micro-batch itself: kinds of communicators, the last block's working set, what is shelved beside the
    head."""
    job = read_job(Path(__file__).parents[2] / "examples" / "qwen2vl_72b" / "job.yaml")
    strategy = Strategy(pp=2, tp=8, dp=dp, mbs=mbs, cp=cp)
    problem = build_problem(job, strategy)
    modes = ((), (), (), ())
    placement = Placement(((1, 32, 1, 1, 38, 0), (0, 0, 0, 0, 42, 1)), ((*modes, (2,), ()), (*modes, (0,), ())))
    counted = simulate(Caution(job).limited(problem, 1.0, strategy), placement).peak_memory_bytes
    estimate = evaluate(job, plan_from_placement(problem, placement, strategy, job.workload.global_batch_size))
    assert counted == pytest.approx(estimate.device_peak_bytes, rel=1e-5)


def test_kinds_of_communicators_tell_strategies_apart(make_job, no_clock) -> None:
    """Pipelines of equal numbers are not equally full where one computes in more kinds of groups."""
    limits: dict[str, Any] = {"memory_bytes": 7e9, "tp": (1,), "cp": (1, 2), "pp": (1, 2), "mbs": (1, 2)}
    known = list(estimates_of(make_job(**limits)))
    for price in (0.1, 1.0):
        job = make_job(failure_price=price, choice="point", **limits)
        least: dict[Strategy, float] = {}
        for strategy, estimate in known:
            least[strategy] = min(least.get(strategy, float("inf")), rank_ms(estimate, price))
        found = search(job, num_workers=1)
        assert found.objective.rank_ms == pytest.approx(min(least.values()), rel=1e-5)
        for candidate in found.candidates:
            if candidate.strategy in least and candidate.bound_ms is not None:
                assert candidate.bound_ms <= least[candidate.strategy] * (1 + 1e-9)


def test_why_not_says_how_likely_it_fails(make_job, no_clock) -> None:
    job = make_job(memory_bytes=5.2e9, failure_price=0.1, **SMALL)
    best = search(job, num_workers=1).estimates[0]
    answer = explain_why_not(job, best, {"pp": best.plan.strategy.pp}, 60.0)
    assert answer.estimate is not None
    assert answer.estimate.plan == best.plan
    assert ("out of memory with probability" in answer.reason) == (best.oom_probability >= 0.01)


def test_a_price_and_a_chance_are_checked() -> None:
    for key, value in (("failure_price", -0.1), ("failure_price", "0.1"), ("fit_probability", 1.0)):
        with pytest.raises(JobError, match=key):
            parse_record(SearchSpace, {key: value}, "job file", "job.yaml")
    assert SearchSpace().price == 0.1
    assert SearchSpace(fit_probability=0.95).price == 0.0
    assert SearchSpace(fit_probability=0.95, failure_price=0.3).price == 0.3


def test_a_limited_problem_counts_the_working_sets_of_experts() -> None:
    """A stage before the last ends with a layer, however little the head works with, and holds once what layers with
    experts do; the last stage counts its own."""
    job = read_job(Path(__file__).parents[2] / "examples" / "deepseek_v3" / "job.yaml")
    strategy = Strategy(pp=16, tp=2, dp=64, mbs=1, ep=8, etp=1)
    problem = build_problem(job, strategy)
    assert [block.count for block in problem.chain] == [1, 3, 58, 1, 1]  # embedding, dense, experts, MTP, head
    rows = ((1, 3, 1, 0, 0), *((0, 0, 4, 0, 0),) * 14, (0, 0, 1, 1, 1))
    placement = Placement(rows, tuple(tuple((0,) * len(block.modes) for block in problem.chain) for _ in rows))
    counted = simulate(Caution(job).limited(problem, 1.0, strategy), placement).peak_memory_bytes
    estimate = evaluate(job, plan_from_placement(problem, placement, strategy, job.workload.global_batch_size))
    assert counted[1:15] == pytest.approx(estimate.device_peak_bytes[1:15], rel=1e-8)
    assert all(counted <= np.array(estimate.device_peak_bytes) * (1 + 1e-9))


@pytest.mark.slow
def test_no_job_with_experts_is_counted_fuller_than_it_is() -> None:
    """Whatever lies where, in whatever modes, with chunks too."""
    num_seen = 0
    for seed in range(20):
        if num_seen > 60:
            break
        _, job, strategies = random_job(seed, most=600)
        for strategy in strategies:
            if strategy.pp > 1:
                problem = build_problem(job, strategy)
                counts_no_more(job, strategy, itertools.islice(placements_of(problem), 0, 40, 3))
                num_seen += 1
    assert num_seen > 15


def counts_no_more(job: Job, strategy: Strategy, placements: Iterable[Placement]) -> None:
    """What a limited problem counts of each stage is never more than the device holds."""
    problem, caution = build_problem(job, strategy), Caution(job)
    limited = caution.limited(problem, 1.0, strategy)
    for placement in placements:
        counted = simulate(limited, placement).peak_memory_bytes / np.array(limited.memory_limit_bytes)
        timeline = simulate(problem, placement)
        fills = np.array(caution.list_fills(problem, placement, strategy, timeline.graph, timeline.peak_memory_bytes))
        assert (counted <= fills * (1 + 1e-8)).all(), f"{strategy.schedule}: {counted} of {fills}"


def drawn_placement(problem: Problem, rng: np.random.Generator) -> Placement:
    """Any placement of a layer in each virtual stage at least, in any modes."""
    segments, num_virtual = cut_into_segments(problem), problem.num_virtual_stages
    while True:
        inner = np.sort(rng.choice(np.arange(1, segments.num_segments), num_virtual - 1, replace=False))
        cut = np.array([0, *inner, segments.num_segments])
        has_layers = (np.diff(segments.layers[segments.start[cut]]) > 0).all()
        if has_layers and (segments.first <= cut).all() and (cut <= segments.last).all():
            break
    held = np.diff(segments.before[:, segments.start[cut]]).T
    return segments.placement(cut.tolist(), rng.integers(0, held + 1).tolist())  # a mode a group here


@pytest.mark.parametrize(
    ("schedule", "vpp"),
    [
        ("zb_h1", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_zb", 2),
        ("zbv", 2),
        ("v_half", 2),
        ("dualpipev", 2),
        ("free", 1),
        ("free", 2),
    ],
)
@pytest.mark.parametrize("model", ["kimi-vl-a3b", "qwen3-vl-30b-a3b", "qwen2.5-vl-7b"])
@pytest.mark.parametrize("frozen", [True, False])
def test_no_order_is_counted_fuller_than_it_is(schedule: str, vpp: int, model: str, frozen: bool) -> None:
    """Weight gradients by themselves keep a layer's moment as full as the head's; the head of a V is on stage 0."""
    workload = {"global_batch_size": 64, "seq_length": 4096}
    job = mmap.Job(model, {"device": "h100-80g", "num_nodes": 2}, workload, freeze={"vision": frozen})
    strategy = Strategy(pp=2, tp=1, dp=2, mbs=2, cp=4, vpp=vpp, schedule=schedule)
    problem = build_problem(job, strategy)
    rng = np.random.default_rng(1)
    placements = [drawn_placement(problem, rng) for _ in range(30)]
    if schedule == "free":
        known = find_schedule("zb_h2" if vpp == 1 else "zbv", vpp)
        sizes = problem.num_stages, vpp, problem.num_microbatches
        orders = tuple(format_order(known.order(*sizes, stage)) for stage in range(problem.num_stages))
        placements = [replace(placement, orders=orders) for placement in placements]
    counts_no_more(job, strategy, placements)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["qwen2.5-omni-7b", "qwen3-vl-30b-a3b", "kimi-vl-a3b", "internvl3-8b"])
@pytest.mark.parametrize("frozen", [True, False])
def test_no_strategy_is_counted_fuller_than_it_is(model: str, frozen: bool) -> None:
    """Of all layouts and orders but those that placements give."""
    limits = {
        "pp": [2, 3, 4],
        "tp": [1, 2],
        "cp": [1],
        "mbs": [1, 2],
        "schedule": "all",
        "layouts": "all",
        "max_vpp": 2,
    }
    workload = {"global_batch_size": 24, "seq_length": 4096, "image_tokens_per_sample": 1024, "images_per_sample": 4}
    job = mmap.Job(model, {"device": "h100-80g", "num_nodes": 1}, workload, freeze={"vision": frozen}, search=limits)
    rng, num_seen = np.random.default_rng(2), 0
    lawful = [entry.strategy for entry in list_entries(job) if entry.reason is None]
    for strategy in (lawful[k] for k in rng.choice(len(lawful), 300, replace=False)):
        problem = build_problem(job, strategy)
        if not problem.encoders and strategy.schedule != "free":
            counts_no_more(job, strategy, [drawn_placement(problem, rng) for _ in range(8)])
            num_seen += 1
    assert num_seen > 100


@pytest.mark.parametrize(
    ("memory_bytes", "pp", "share"), [(5.6e9, 1, 0.9), (6.3e9, 1, 0.9), (5.6e9, 4, 0.999), (7.2e9, 2, 0.999)]
)
def test_what_few_placements_keep_is_settled(make_job, no_clock, memory_bytes: float, pp: int, share: float) -> None:
    """Where what placement limits is less than what a device holds, each of few placements is judged by itself."""
    limits: dict[str, Any] = SMALL | {"pp": (pp,), "mbs": (1,), "memory_bytes": memory_bytes}
    known = [e.step_ms for _, e in estimates_of(make_job(**limits)) if e.oom_probability <= 1 - share]
    job = make_job(fit_probability=share, failure_price=None, choice="point", **limits)
    if known:
        found = search(job, num_workers=1)
        assert found.proven
        assert found.figures.step_ms == pytest.approx(min(known), rel=1e-5)
    else:
        with pytest.raises(NoFeasiblePlan):
            search(job, num_workers=1)
