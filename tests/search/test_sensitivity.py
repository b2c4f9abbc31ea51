"""What plans owe to their sources: closed forms of straight pipelines, flips worked out by hand, and laws."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from mm_autoparallel.model.costs.cost_source import BlockPoint
from mm_autoparallel.model.costs.scales import CostScales, scale_all
from mm_autoparallel.model.costs.stage import list_sources
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.explain.causes import divide_step
from mm_autoparallel.planner.explain.sensitivity import find_root, find_sensitivity
from mm_autoparallel.planner.plan import Plan

MakeJob = Callable[..., Job]
BATCH = 16


def lay(strategy: Strategy, vision: tuple[int, ...], text: tuple[int, ...], recompute: tuple[int, ...] = ()) -> Plan:
    none = (0,) * len(text)
    return Plan(strategy, {"vision": vision, "text": text}, {"vision": none, "text": recompute or none}, BATCH)


STRAIGHT = lay(Strategy(pp=1, tp=1, dp=4, mbs=1), (2,), (4,))
DIVIDED = lay(Strategy(pp=1, tp=2, dp=2, mbs=1), (2,), (4,))
PIPED = lay(Strategy(pp=2, tp=2, dp=1, mbs=2), (2, 0), (1, 3), (1, 2))
CHUNKED = lay(Strategy(pp=2, tp=1, dp=2, mbs=1, vpp=2, zero=0), (1, 1, 0, 0), (0, 0, 2, 2))


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job(memory_bytes=80e9)


def test_the_share_of_a_straight_pipeline_is_its_elasticity(job: Job) -> None:
    """One stage: the step is M · Σ n (F + B) + tail, and a frozen encoder's part of it moves nothing else."""
    found = find_sensitivity(job, [STRAIGHT])
    estimate = found.estimates[0]
    (vision,) = [block for block in estimate.problem.chain if block.name == "vision_layer"]
    share = estimate.plan.num_microbatches * 2 * (vision.forward_ms + vision.backward_ms) / estimate.step_ms
    (one,) = [one for one in found.sources if one.source.name == "vision_layer"]
    (response,) = one.responses
    assert response.elasticity_fraction == pytest.approx(share, rel=1e-9)
    assert response.high_ms - estimate.step_ms == pytest.approx(0.05 * share * estimate.step_ms, rel=1e-9)
    assert estimate.step_ms - response.low_ms == pytest.approx(0.05 * share * estimate.step_ms, rel=1e-9)


@pytest.mark.parametrize("plan", [STRAIGHT, DIVIDED, PIPED, CHUNKED])
def test_the_sources_are_all_of_a_step(job: Job, plan: Plan) -> None:
    """If all times double so does the step; where nothing bends within the change, the shares therefore add up to 1."""
    names = [source.name for source in list_sources(job, plan.strategy)]
    step_ms = evaluate(job, plan).step_ms
    assert evaluate(job, plan, scales=scale_all(names, 2.0)).step_ms == pytest.approx(2 * step_ms, rel=1e-9)
    found = find_sensitivity(job, [plan], change_fraction=1e-4)
    total = sum(one.responses[0].elasticity_fraction for one in found.sources)
    assert total == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("plan", [STRAIGHT, DIVIDED, PIPED, CHUNKED])
def test_no_source_that_takes_longer_makes_a_step_shorter(job: Job, plan: Plan) -> None:
    for source in list_sources(job, plan.strategy):
        steps = [
            evaluate(job, plan, scales=CostScales(((source.name, factor),))).step_ms
            for factor in (0.0, 0.5, 0.95, 1.0, 1.3, 4.0)
        ]
        assert all(after >= before * (1 - 1e-12) for before, after in pairwise(steps)), source.name


def test_a_flip_is_where_hand_and_pencil_put_it(job: Job) -> None:
    """One stage and TP 1: layers take M · n (F + B) of the step, so it meets the slower plan's at Δ over that."""
    found = find_sensitivity(job, [STRAIGHT, DIVIDED])
    fast, slow = found.estimates
    assert fast.step_ms < slow.step_ms
    blocks = {block.name: block for block in fast.problem.chain}
    sources = {
        (one.source.name, one.source.at.point.tp): one for one in found.sources if isinstance(one.source.at, BlockPoint)
    }

    def expected(name: str) -> float:
        work_ms = STRAIGHT.num_microbatches * blocks[name].count * (blocks[name].forward_ms + blocks[name].backward_ms)
        return (slow.step_ms - fast.step_ms) / work_ms

    (flip,) = sources["text_layer", 1].flips
    assert flip.change_fraction == pytest.approx(expected("text_layer"), rel=1e-6)
    assert (flip.plan, flip.other, flip.within) == (0, 1, False)
    assert sources["text_layer", 1].responses[1].elasticity_fraction == 0  # the other plan has another division
    assert expected("vision_layer") > 1  # further than anybody looks
    assert sources["vision_layer", 1].flips == ()
    # from the other side: the slower plan's own layers would have to be faster
    (flip,) = sources["text_layer", 2].flips
    factor = 1 + flip.change_fraction
    assert factor < 1
    faster = evaluate(job, DIVIDED, scales=CostScales((("text_layer", factor),)))
    assert faster.step_ms == pytest.approx(fast.step_ms, rel=1e-8)
    wider = find_sensitivity(job, [STRAIGHT, DIVIDED], change_fraction=0.2)
    assert [flip.within for one in wider.sources for flip in one.flips if one.source.name == "text_layer"] == [True] * 2


def test_equal_plans_have_no_order_to_turn(job: Job) -> None:
    found = find_sensitivity(job, [STRAIGHT, STRAIGHT])
    assert all(one.flips == () for one in found.sources)
    (rival,) = found.rivals
    assert (rival.difference_ms, rival.error_ms, rival.faster_fraction) == (0.0, 0.0, 0.5)


@pytest.mark.parametrize("kink", [0.2, 0.5, 0.9])
def test_a_root_behind_a_kink_is_found(kink: float) -> None:
    def value_ms(x: float) -> float:
        return max(-1.0 + 0.1 * x, -1.0 + 0.1 * kink + 30 * (x - kink))

    root = kink + (1 - 0.1 * kink) / 30
    assert find_root(value_ms, 0.0, 1.0, 1e-12) == pytest.approx(root, rel=1e-12)


@pytest.mark.parametrize("plan", [STRAIGHT, DIVIDED, PIPED, CHUNKED])
def test_causes_add_up_to_the_step(job: Job, plan: Plan) -> None:
    parts = divide_step(job, plan)
    assert sum(parts.values()) == pytest.approx(evaluate(job, plan).step_ms, rel=1e-12)
    assert (parts["tensor parallel groups"] > 0) == (plan.strategy.tp > 1)
    assert (parts["recompute"] > 0) == (plan is PIPED)
    assert (parts["transfers between stages"] > 0) == (plan.strategy.pp > 1)
    assert min(parts.values()) >= -1e-9
