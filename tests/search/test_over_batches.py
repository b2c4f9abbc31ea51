"""Plans ranked by their steps over drawn batches: the same draws for all, an order that turns, and a bound that
holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import BatchObjective, Job
from mm_autoparallel.model.job.sample_source import SampleSource
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.drawn_batches import draw_batches
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.over_batches import describe_longest, least_mean_fraction
from mm_autoparallel.planner.plan import Plan, plan_document
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.watched import describe_end
from mm_autoparallel.samples.draw import draw_table, lognormal, mixture

MakeJob = Callable[..., Job]

BATCHES = 64


def sampled(job: Job, **limits: object) -> Job:
    """`job` with two images a sample, small and large ones, and texts of many lengths; their means are its
    workload's."""
    quantities = {
        "images": lognormal(2.0, 0.8),
        "patches": mixture((256.0, 3840.0)),
        "text_tokens": lognormal(3072.0, 1.0),
    }
    source = SampleSource.model_validate({"text_tokens": 3072, "batches": BATCHES})
    return replace(
        job,
        workload=job.workload.model_copy(update={"samples": source, "images_per_sample": 2}),
        search=job.search.model_copy(update=limits),
        samples=draw_table(quantities, seed=5, count=4000),
    )


def plan_of(job: Job, pp: int, dp: int, mbs: int) -> Plan:
    layers = {1: ((2,), (4,)), 2: ((2, 0), (1, 3))}[pp]
    return Plan(
        strategy=Strategy(pp=pp, tp=1, dp=dp, mbs=mbs),
        layers={"vision": layers[0], "text": layers[1]},
        recompute={"vision": (0,) * pp, "text": (0,) * pp},
        global_batch_size=job.workload.global_batch_size,
    )


@pytest.fixture(scope="module")
def estimate(make_job: MakeJob) -> Estimate:
    job = sampled(make_job(memory_bytes=70e9))
    return evaluate(job, plan_of(job, 2, 2, 2))


def test_batches_are_dealt_in_the_order_in_which_they_come(estimate: Estimate) -> None:
    """Each replica's pipeline, played by `simulate` with its own micro-batches' loads; the longest is the step."""
    assert estimate.sampled is not None
    drawn, over = draw_batches(estimate.sampled), estimate.over_batches
    assert over is not None
    steps = []
    for batch in drawn.batches:
        of_replicas = []
        for replica in range(2):
            mine = [[(j * 2 + replica) * 2 + i for i in range(2)] for j in range(4)]
            relative = [(name, drawn.factors(name, 2)) for name in drawn.load_factor]
            scale = {name: tuple(np.mean(loads[batch[some]]) for some in mine) for name, loads in relative}
            chain = tuple(replace(block, microbatch_scale=scale[block.modality]) for block in estimate.problem.chain)
            of_replicas.append(simulate(replace(estimate.problem, chain=chain), estimate.placement).step_ms)
        steps.append(max(of_replicas))
    ranked = sorted(steps)
    assert over.mean_ms == pytest.approx(np.mean(steps))
    assert over.error_ms == pytest.approx(np.std(steps, ddof=1) / 8)
    assert over.p95_ms == pytest.approx(ranked[60])
    assert over.p99_ms == pytest.approx(ranked[63])
    assert over.cvar95_ms == pytest.approx(np.mean(ranked[-3:]))
    assert over.at_mean_ms <= over.mean_ms + 3 * over.error_ms
    assert over.mean_ms <= over.p95_ms <= over.p99_ms


def test_every_plan_meets_the_same_batches(estimate: Estimate) -> None:
    assert estimate.sampled is not None
    other = evaluate(estimate.sampled, plan_of(estimate.sampled.job, 1, 4, 1))
    assert other.sampled is not None
    assert draw_batches(other.sampled) is draw_batches(estimate.sampled)
    assert evaluate(estimate.sampled.job, estimate.plan).over_batches == estimate.over_batches


def test_the_result_file_has_the_step_over_batches(estimate: Estimate, make_job: MakeJob) -> None:
    document = estimate.plan_document()["step_over_batches"]
    assert {"mean_ms", "p95_ms", "p99_ms", "cvar95_ms", "batches", "policy"} <= document.keys()
    assert (document["batches"], document["policy"]) == (BATCHES, "arrival")
    plain = make_job(memory_bytes=70e9)
    assert "step_over_batches" not in evaluate(plain, plan_of(plain, 2, 2, 2)).plan_document()


def test_a_stage_that_long_samples_overfill_is_told(estimate: Estimate) -> None:
    assert estimate.sampled is not None
    drawn, peaks = draw_batches(estimate.sampled), estimate.timeline.peak_memory_bytes
    tight = replace(estimate.problem, memory_limit_bytes=tuple(1.001 * peaks))
    of = (estimate.placement, estimate.plan.strategy, peaks)
    assert describe_longest(drawn, replace(tight, memory_limit_bytes=(1e13, 1e13)), *of) is None
    told = describe_longest(drawn, tight, *of)
    assert told is not None
    assert "would peak at" in told
    assert drawn.longest(Strategy(pp=2, tp=1, dp=2, mbs=1))["text"] > drawn.longest(estimate.plan.strategy)["text"] > 1


@pytest.mark.parametrize("objective", ["mean", "p95", "cvar"])
def test_the_order_turns_and_the_bound_holds(make_job: MakeJob, objective: BatchObjective) -> None:
    """Against every plan of a small space, evaluated one by one."""
    limits = {"pp": (1, 2), "tp": (1,), "dp": (2, 4), "mbs": (1, 2, 4)}
    job = sampled(make_job(memory_bytes=70e9, **limits), objective=objective)
    found = search(job, 60.0, num_workers=1)
    ranking = found.batch_ranking
    assert ranking is not None
    costs = CostModel(job)
    splits = {1: [((2,), (4,))], 2: [((2, 0), (n, 4 - n)) for n in range(4)] + [((1, 1), (0, 4))]}
    overs = []
    sizes = [(1, 4, mbs) for mbs in (1, 2, 4)] + [(pp, 2, mbs) for pp in (1, 2) for mbs in (1, 2, 4)]
    for pp, dp, mbs in sizes:
        for vision, text in splits[pp]:
            plan = replace(plan_of(job, pp, dp, mbs), layers={"vision": vision, "text": text})
            overs.append(evaluate(costs, plan).over_batches)
    values = [over.of(objective) for over in overs if over is not None]
    assert ranking.rank_ms <= min(values) * 1.05  # of each strategy the best by mean samples alone was played
    assert found.estimates[0].over_batches is not None
    assert ranking.rank_ms == pytest.approx(found.estimates[0].over_batches.of(objective))
    assert len({*ranking.orders}) == len(ranking.orders) > 1
    if objective == "p95":
        assert ranking.bound_ms is None
        assert "of p95 nothing is proven" in describe_end(found)
    else:
        assert ranking.bound_ms is not None
        assert ranking.bound_ms <= min(values)
        fraction = least_mean_fraction(draw_batches(costs))
        assert ranking.bound_ms == pytest.approx(found.objective.rank_bound_ms * fraction)
    document = plan_document(found.plan, found.figures)
    assert document["step_over_batches"]["ranking"] == ranking.document()
    assert document["lower_bound_ms"] <= document["e2e_time"]
