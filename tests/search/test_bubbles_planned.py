"""Encoders in bubbles of a job's decoder: found, simulated, told in the file, and why not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from two_modules import apart, make_job, shared

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.hooks.applied import apply
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.schedules.action import format_action
from mm_autoparallel.pipeline.simulate.encoders.step import part_encoders
from mm_autoparallel.pipeline.simulate.graph import full_graph
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.edits import set_order
from mm_autoparallel.planner.evaluate import evaluate, plan_from_placement
from mm_autoparallel.planner.explain.why_not import explain_why_not, parse_wish
from mm_autoparallel.planner.plan import parse_plan
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_entries
from mm_autoparallel.reports.page.pictures import map_layout

BUBBLES = Strategy(2, 2, 2, 1, arrangement=shared("bubbles", 1, 8, 1))


def test_one_strategy_placed_and_read_back() -> None:
    job = make_job()
    costs = CostModel(job)
    problem = build_problem(costs, BUBBLES)
    (beside,) = problem.encoders
    assert beside.microbatches_per_pass == 2
    assert len(beside.pipelines) == 2
    found = place(problem)
    assert found.placement is not None
    assert found.lower_bound_ms <= found.step_ms * (1 + 1e-9)
    assert found.step_ms == simulate(problem, found.placement).step_ms
    plan = plan_from_placement(problem, found.placement, BUBBLES, 24)
    estimate = evaluate(costs, plan)
    assert estimate.step_ms == found.step_ms
    assert parse_plan(estimate.plan_document(), job, "file") == plan
    # two micro-batches of a sample cross at once, each token of 512 numbers of two bytes
    drawn = map_layout(estimate, job.model)
    assert drawn is not None
    assert (drawn.per, drawn.size_bytes) == ("pass", 2 * job.workload.image_tokens_per_sample * 512 * 2)
    assert 0 < drawn.backward_ms <= drawn.forward_ms
    # phases of the same sizes do not hide what bubbles do
    phases = replace(BUBBLES, arrangement=shared("phases", 1, 8, 1))
    assert found.step_ms < place(build_problem(costs, phases)).step_ms
    timeline = estimate.timeline
    spent = timeline.busy_ms + timeline.loads.tail_ms
    for idle in ("warmup", "communication", "imbalance", "cooldown"):
        spent = spent + getattr(timeline, f"idle_{idle}_ms")
    assert spent == pytest.approx([found.step_ms] * 2)
    assert all(part.total_bytes >= peak for part, peak in zip(estimate.memory, timeline.peak_memory_bytes, strict=True))


def test_two_chunks_placed_and_read_back() -> None:
    """Beside an interleaved decoder, whose order stays its schedule's; its exporters and scripts refuse it by name."""
    job = make_job()
    costs, strategy = CostModel(job), replace(BUBBLES, vpp=2, schedule="interleaved_1f1b")
    assert unlawful_reason(job.model, job.cluster, job.workload, strategy) is None
    problem = build_problem(costs, strategy)
    found = place(problem, 20.0, gap_fraction=1e-3)
    assert found.placement is not None
    assert found.lower_bound_ms <= found.step_ms * (1 + 1e-9)
    decoder = part_encoders(problem).decoder
    graph = full_graph("interleaved_1f1b", 2, 2, decoder.num_microbatches)
    for stage, order in enumerate(found.placement.orders):
        mine = np.flatnonzero(graph.stage == stage)
        rows = zip(graph.kind[mine].tolist(), graph.place[mine].tolist(), graph.micro_batch[mine].tolist(), strict=True)
        named = [format_action(kind, place // 2, m) for kind, place, m in rows]
        assert [word for word in order.split() if "@" not in word] == named
    plan = plan_from_placement(problem, found.placement, strategy, 24)
    estimate = evaluate(costs, plan)
    assert estimate.step_ms == found.step_ms
    assert parse_plan(estimate.plan_document(), job, "file") == plan
    assert all(part.total_bytes >= peak for part, peak in zip(estimate.memory, estimate.peak_memory_bytes, strict=True))
    phases = replace(strategy, arrangement=shared("phases", 1, 8, 1))
    assert found.step_ms < place(build_problem(costs, phases)).step_ms
    with pytest.raises(PlanError, match="encoder_run is bubbles, and training scripts"):
        apply(job, plan)
    wide = make_job(layouts=["colocated"], mbs=[1], cp=[1], tp=[2], pp=[2], max_vpp=2)
    listed = [entry.strategy for entry in list_entries(wide) if entry.reason is None]
    in_chunks = {one.arrangement.encoder_run for one in listed if one.arrangement and one.vpp == 2}
    assert in_chunks == {"bubbles", "phases", "recomputed_phases"}


def test_an_order_with_passes_is_changed_by_words() -> None:
    job = make_job()
    costs = CostModel(job)
    problem = build_problem(costs, BUBBLES)
    placement = place(problem).placement
    assert placement is not None
    plan = plan_from_placement(problem, placement, BUBBLES, 24)
    words = plan.orders[0].split()
    at = next(at for at, word in enumerate(words[1:], 1) if ("@" in word) and ("@" not in words[at - 1]))
    words[at - 1 : at + 1] = words[at], words[at - 1]
    changed = set_order(plan, 0, "  ".join(words))
    assert changed.orders == (" ".join(words), plan.orders[1])
    estimate = evaluate(costs, changed)
    assert parse_plan(estimate.plan_document(), job, "file") == changed
    assert parse_plan(estimate.plan_document(), job, "file").warnings == ()
    with pytest.raises(PlanError, match=r"orders\[0\] ends without"):
        evaluate(costs, set_order(plan, 0, " ".join(words[:-1])))
    with pytest.raises(PlanError, match="no stage 2; they are 0 to 1"):
        set_order(plan, 2, "0F0")


def test_orders_that_are_wrong_are_told() -> None:
    problem = build_problem(CostModel(make_job()), BUBBLES)
    placement = place(problem).placement
    assert placement is not None
    first, second = placement.orders
    with pytest.raises(PlanError, match=r"orders\[0\] has 9F0@vision where in its turn would be"):
        simulate(problem, replace(placement, orders=(f"9F0@vision {first}", second)))
    with pytest.raises(PlanError, match=r"orders\[1\] ends without"):
        simulate(problem, replace(placement, orders=(first, " ".join(second.split()[:-1]))))
    with pytest.raises(PlanError, match="has no order, and a pipeline with encoders needs one text a stage"):
        simulate(problem, replace(placement, orders=()))


def test_laws() -> None:
    def reason(strategy: Strategy, freeze: bool = False) -> str:
        job = make_job(freeze=freeze)
        return unlawful_reason(job.model, job.cluster, job.workload, strategy) or ""

    assert not reason(BUBBLES)
    assert "leaves no bubbles" in reason(Strategy(1, 2, 4, 1, arrangement=shared("bubbles", 1, 8, 1)))
    assert "does not divide the 1 ranks" in reason(Strategy(2, 1, 4, 1, arrangement=shared("bubbles", 2, 4, 1)))
    assert "a pass of the encoder takes 10 samples" in reason(
        Strategy(2, 2, 2, 1, arrangement=shared("bubbles", 1, 8, 5))
    )
    assert "prefetch makes features in another step" in reason(
        replace(BUBBLES, arrangement=shared("prefetch", 1, 8, 1))
    )
    assert not reason(replace(BUBBLES, arrangement=shared("prefetch", 1, 8, 1)), freeze=True)
    low = replace(BUBBLES, vpp=2, schedule="interleaved_1f1b_low_memory")
    assert "and for interleaved_1f1b where the encoder runs in phases, in bubbles or as prefetch" in reason(low)
    behind = Strategy(3, 1, 2, 4, vpp=2, arrangement=apart(1, 1, 4, 2))
    assert "VPP 2: chunks go with the chain or an encoder in phases" in reason(replace(behind, schedule="1f1b"))


def test_prefetch_is_the_decoder_alone_where_there_is_time() -> None:
    costs = CostModel(make_job(freeze=True))
    prefetch = replace(BUBBLES, arrangement=shared("prefetch", 1, 8, 1))
    problem = build_problem(costs, prefetch)
    found, alone = place(problem), place(part_encoders(problem).decoder)
    assert found.step_ms >= alone.step_ms * (1 - 1e-9)
    assert found.step_ms <= place(build_problem(costs, BUBBLES)).step_ms


def test_searched_with_a_bound_and_why_not() -> None:
    limits = {"mbs": [1], "cp": [1], "tp": [2], "pp": [2, 4]}
    job = make_job(layouts=["colocated"], **limits)
    result = search(job, num_workers=1)
    assert result.stopped == "finished"
    assert result.lower_bound_ms <= result.estimates[0].step_ms * (1 + 1e-9)
    costs = CostModel(make_job(layouts=["chain"], **limits))
    chain = search(costs.job, num_workers=1).estimates[0]
    answer = explain_why_not(costs, chain, parse_wish("layout=bubbles"), 60.0)
    assert answer.outside
    assert answer.strategy.arrangement is not None
    assert answer.strategy.arrangement.encoder_run == "bubbles"
    assert answer.estimate is not None
    assert answer.estimate.step_ms >= result.lower_bound_ms * (1 - 1e-9)
    with pytest.raises(JobError, match="LAYOUT is 'bubble'"):
        parse_wish("layout=bubble")
