"""CostModel: who holds one asks for everything once, and nothing remembers a job behind its back."""

from __future__ import annotations

import gc
import weakref

import pytest

from mm_autoparallel.model.costs import cost_model as room
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.stacks import FACTS, StackFacts
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.planner import evaluate as planner

STRATEGY = Strategy(pp=2, tp=2, dp=8, mbs=1)
SMALLER = Strategy(pp=2, tp=2, dp=4, mbs=1)


def test_what_is_held_tells_what_a_new_one_tells(make_job) -> None:
    costs = CostModel(make_job())
    build_problem(costs, SMALLER)  # what it knows by now changes nothing
    assert build_problem(costs, STRATEGY) == build_problem(make_job(), STRATEGY)


def test_its_parts_are_made_once(make_job) -> None:
    costs = CostModel(make_job(), calibration := assume_calibration("ascend-910b-64g"))
    assert costs.used_by(STRATEGY) is costs
    part = costs.used_by(SMALLER)
    assert (part.job.cluster.num_devices, part.calibration) == (16, calibration)
    assert costs.used_by(SMALLER) is part
    offloading = costs.used_by(SMALLER, ("offload",))
    assert offloading is not part
    assert "offload" in offloading.modes


@pytest.mark.slow
def test_a_job_is_forgotten_with_its_costs(make_job) -> None:
    job = make_job()
    build_problem(job, STRATEGY)
    gone = weakref.ref(job)
    del job
    gc.collect()
    assert gone() is None


def test_one_is_made_for_all_steps_of_a_plan(make_job, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CostModel] = []
    init = room.CostModel.__init__

    def count(self: CostModel, *given: object) -> None:
        made.append(self)
        init(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(room.CostModel, "__init__", count)
    costs = CostModel(make_job())
    problem = build_problem(costs.used_by(SMALLER), SMALLER)
    layers = {"vision": (4, 0), "audio": (2, 0), "text": (2, 6)}
    plan = planner.Plan(SMALLER, layers, dict.fromkeys(layers, (0, 0)), problem.num_microbatches * 4)
    first, second = (planner.evaluate(costs, plan) for _ in range(2))
    assert first.step_ms == second.step_ms
    assert len(made) == 2  # the cluster's, and those of the part that the plan uses


def test_facts_that_are_all_stated_are_not_copied(make_job) -> None:
    workload = CostModel(make_job()).workload
    assert workload.facts is not None
    assert workload.known_facts is workload.facts
    assert STRATEGY.facts_of(workload) is workload.facts
    some = StackFacts(compiled=True, norms="operators")
    stated = FACTS["megatron-core"].stated(some)
    assert (stated.compiled, stated.norms, stated.fused_casts) == (True, "operators", True)
    assert stated.open_ring_fraction == FACTS["megatron-core"].open_ring_fraction
