"""Passes of encoders cut into pieces: of which layers, in which files, and refused where nothing is cut."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from two_modules import make_job

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.explain.nearest import nearest_strategy
from mm_autoparallel.planner.explain.why_not import parse_wish
from mm_autoparallel.planner.first_plan import first_plan
from mm_autoparallel.planner.plan import parse_plan
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.reports.trace import render_trace

JOB = make_job(layouts="all", encoder_pieces=[1, 2])


def in_bubbles(pieces: int) -> Strategy:
    layout = ModuleLayout("vision", 1, 1, 8, 1, pieces=pieces)
    return Strategy(2, 2, 2, 1, arrangement=Arrangement("colocated", "bubbles", layout))


def test_pieces_are_whole_layers_and_come_to_the_whole() -> None:
    costs = CostModel(JOB)
    (whole,) = build_problem(costs, in_bubbles(1)).encoders
    (cut,) = build_problem(costs, in_bubbles(2)).encoders
    assert cut.pipelines == ((1, 1), (0, 0))
    for name in ("forward_ms", "backward_ms", "activation_bytes"):
        (total,), parts = getattr(whole, name), getattr(cut, name)
        assert sum(parts) == pytest.approx(total)
    layer = next(block for block in build_problem(costs, Strategy(1, 1, 8, 1)).chain if block.name == "vision_layer")
    assert min(cut.forward_ms) >= layer.forward_ms  # two layers, one in each
    assert replace(build_problem(costs, in_bubbles(1)), encoders=()) == replace(
        build_problem(costs, in_bubbles(2)), encoders=()
    )


def test_plans_in_pieces_are_written_read_and_drawn() -> None:
    plan = first_plan(JOB, in_bubbles(2))
    assert "0F1@vision" in " ".join(plan.orders)
    estimate = evaluate(JOB, plan)
    document = json.loads(json.dumps(estimate.plan_document()))
    assert document["layout"]["modules"]["vision"]["pieces"] == 2
    assert parse_plan(document, JOB, "plan") == plan
    names = [event["name"] for event in render_trace(estimate.problem, estimate.timeline)["traceEvents"]]
    assert {word for word in " ".join(plan.orders).split() if "@" in word} <= set(names)
    assert sum(one.work_ms[0] for one in estimate.modules) == pytest.approx(estimate.timeline.busy_ms[0])
    document["layout"]["modules"]["vision"]["pieces"] = 3
    with pytest.raises(PlanError, match="3 pieces of a pass need a layer each, and vision has 2"):
        parse_plan(document, JOB, "plan")


def test_a_search_with_pieces_finds_no_worse_and_edits_take_them() -> None:
    limits = {"pp": [2], "tp": [2], "mbs": [1], "cp": [1], "modes": [], "layouts": ["colocated"]}
    whole = search(make_job(**limits), num_workers=1)
    cut = search(make_job(**limits, encoder_pieces=[1, 2]), num_workers=1)
    assert cut.objective.step_ms <= whole.objective.step_ms * (1.0 + whole.gap_fraction + cut.gap_fraction)
    near = nearest_strategy(JOB, in_bubbles(1), parse_wish("vision.PIECES=2", "--sizes"))
    assert near == in_bubbles(2)


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (in_bubbles(3), "3 pieces of a pass need a layer each, and vision has 2"),
        (in_bubbles(0), "vision is in 0 pieces"),
        (
            replace(
                in_bubbles(1),
                arrangement=Arrangement("colocated", "phases", ModuleLayout("vision", 1, 1, 8, 1, pieces=2)),
            ),
            "vision is in 2 pieces; passes in bubbles or as prefetch alone are cut",
        ),
    ],
)
def test_unlawful(strategy: Strategy, told: str) -> None:
    assert told in (unlawful_reason(JOB.model, JOB.cluster, JOB.workload, strategy) or "lawful")


def test_pieces_without_passes_are_refused() -> None:
    with pytest.raises(JobError, match=r"search.encoder_pieces is \[1, 2\], of passes in bubbles and as prefetch"):
        make_job(encoder_pieces=[1, 2])
    assert np.isfinite(evaluate(JOB, first_plan(JOB, in_bubbles(1))).step_ms)
