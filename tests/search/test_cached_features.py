"""Cached features: a frozen encoder that no step runs, of which features are read that were made once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from two_modules import make_job, shared

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.arrangement_law import encoders_train
from mm_autoparallel.model.job.cached_law import cached_reasons
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan, parse_plan
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_entries
from mm_autoparallel.reports.page.pictures import map_layout

TOKENS, WIDTH, MERGED = 256, 512, 4


def make_cached(trains: bool, **search: Any) -> Job:
    """The job of `two_modules` with its tower frozen, whose features may be read. trains: its projector does."""
    job = make_job(freeze=True, **{"layouts": "all", **search})
    (tower,) = job.model.encoders
    tower = tower.model_copy(update={"projector": tower.projector.model_copy(update={"freeze": not trains})})
    workload = job.workload.model_copy(update={"cached_features": ("vision",)})
    return replace(job, model=job.model.model_copy(update={"encoders": (tower,)}), workload=workload)


def beside(pp: int, tp: int, dp: int, mbs: int, /, **changes: Any) -> Strategy:
    one = shared("cached", tp, dp, mbs)
    return Strategy(pp, tp, dp, mbs, arrangement=replace(one, encoder=replace(one.encoder, **changes)))


@pytest.mark.parametrize("trains", [False, True])
def test_the_pipeline_is_the_decoder_s_with_what_is_read_and_a_projector_that_trains(trains: bool) -> None:
    costs = CostModel(make_cached(trains))
    strategy = beside(2, 2, 2, 3)
    problem, whole = build_problem(costs, strategy), build_problem(costs, strategy.of_decoder())
    assert [block.name for block in problem.chain] == (["vision_post"] if trains else []) + [
        block.name for block in whole.chain if block.modality == "text"
    ]
    assert problem.chain == whole.chain[-len(problem.chain) :]  # each at its price in the chain
    read_bytes = 3 * TOKENS * 2 * (MERGED * WIDTH if trains else WIDTH)  # what the projector takes in, or makes
    first, second = problem.stage_static_bytes
    assert first - second == read_bytes
    assert problem.stage_tail_ms == whole.stage_tail_ms


def test_it_is_planned_written_read_and_told() -> None:
    job = make_cached(True)
    result = search(job, time_limit_s=20.0)
    best = result.estimates[0]
    assert result.proven
    assert best.plan.strategy.arrangement is not None
    assert best.plan.strategy.arrangement.is_cached  # nothing of it is done that another layout would not do
    document = best.plan_document()
    assert document["layout"]["encoder_run"] == "cached"
    again = evaluate(job, parse_plan(document, job, "plan"))
    assert (again.plan, again.step_ms) == (best.plan, best.step_ms)
    (told,) = [line for line in again.warnings if line.startswith("features of vision are read in every step")]
    assert "1.0 MiB a sample" in told  # 256 tokens of 2,048 in BF16
    assert f"all {best.plan.strategy.of_decoder().dp} replicas" in told
    vision = again.modules[0]
    assert sum(vision.work_ms) > 0.0  # of the projector
    assert vision.kept_bytes[0] >= best.plan.strategy.mbs * 2**20
    drawn = map_layout(again, job.model)
    assert drawn is not None
    assert (drawn.encoder.num_layers, drawn.forward_ms, drawn.size_bytes) == (0, 0.0, best.plan.strategy.mbs * 2**20)


BROKEN = [
    (beside(2, 2, 2, 3, tp=1), "have TP 1 beside a decoder of TP 2"),
    (beside(2, 2, 2, 3, dp=4), "have DP 4 beside a decoder of DP 2"),
    (beside(2, 2, 2, 3, mbs=1), "have MBS 1 beside a decoder of MBS 3"),
    (beside(2, 2, 2, 3, pp=2), "are read by the ranks of one stage"),
    (beside(2, 2, 2, 3, rank_offset=4), "begins at rank 4"),
    (beside(2, 2, 2, 3, pieces=2), "is in 2 pieces"),
    (replace(beside(2, 2, 2, 3), schedule="gpipe"), "schedule gpipe: arrangements are planned for"),
]


@pytest.mark.parametrize(("strategy", "told"), BROKEN)
def test_law(strategy: Strategy, told: str) -> None:
    job = make_cached(False)
    assert told in (unlawful_reason(job.model, job.cluster, job.workload, strategy) or "lawful")


def test_the_job_must_say_that_features_may_be_kept() -> None:
    job, plan = make_job(freeze=True), Plan(beside(2, 2, 2, 3), {"text": (2, 2)}, {"text": (0, 0)}, 24)
    with pytest.raises(PlanError, match=r"cached_features does not name vision: features are made once"):
        evaluate(job, plan)
    assert not any(c.strategy.arrangement.is_cached for c in search(job).candidates if c.strategy.arrangement)


def _document(freeze: bool, named: list[str], **changes: Any) -> dict[str, Any]:
    job = make_job(freeze=freeze)
    return {
        "model": job.model.model_dump(mode="json", exclude_none=True),
        "cluster": {"num_nodes": 2, "devices_per_node": 4, "device": "a100-80g"},
        "workload": {"global_batch_size": 24, "seq_length": 1024, "image_tokens_per_sample": 256}
        | {"cached_features": named}
        | changes.get("workload", {}),
        "search": changes.get("search", {"layouts": "all"}),
    }


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (_document(True, ["vison"]), r'cached_features: the model has no encoder vison \(did you mean "vision"'),
        (_document(False, ["vision"]), "cached_features names vision, which trains"),
        (_document(True, ["vision"], search={}), "search.layouts has none; name colocated, or leave it out"),
        (
            _document(True, ["vision"], workload={"stack": "megatron-te"}),
            "cannot be used: colocated cached: no layout that workload.stack megatron-te runs",
        ),
        (
            _document(True, ["vision"], workload={"micro_batch_scale": {"vision": [1.0, 2.0]}}),
            "planned for equal micro-batches",
        ),
    ],
)
def test_jobs_that_cannot_have_them_are_refused(content: dict[str, Any], told: str, tmp_path: Any) -> None:
    with pytest.raises(JobError, match=told):
        parse_job(content, tmp_path / "job.yaml")


def test_a_projector_that_trains_is_refused_where_ranks_share_a_sample() -> None:
    one = shared("cached", 1, 2, 3, cp=2)
    strategy = Strategy(2, 1, 2, 3, cp=2, arrangement=one)
    for trains, told in (
        (True, "the projector of vision trains on the stages of a decoder of CP 2, and needs CP 1"),
        (False, ""),
    ):
        job = make_cached(trains)
        assert told == (unlawful_reason(job.model, job.cluster, job.workload, strategy) or "")


def test_features_of_one_encoder_are_read_beside_another_that_runs() -> None:
    job = make_job(freeze=True, hears=True, layouts=["colocated"], mbs=[1], cp=[1], pp=[2], tp=[2])
    job = replace(job, workload=job.workload.model_copy(update={"cached_features": ("vision",)}))
    told = [
        entry.strategy.arrangement for entry in list_entries(job) if not entry.reason and entry.strategy.arrangement
    ]
    runs = {tuple((one.encoder.name, one.encoder_run) for one in each.each) for each in told}
    assert {("vision", "cached"), ("audio", "phases")} in map(set, runs)
    assert not any(("audio", "cached") in each or ("vision+audio", "cached") in each for each in runs)


def tower_of(**changes: Any) -> Model:
    """The model of `two_modules`, its tower frozen and its projector too, changed."""
    model = make_job(freeze=True).model
    return model.model_copy(update={"encoders": (model.encoders[0].model_copy(update=changes),)})


def test_positions_that_train_are_an_encoder_that_trains() -> None:
    """Its features are others in every step: neither cached nor prefetched, and it has a backward to run for."""
    job = make_job(freeze=True, layouts="all", mbs=[1], tp=[1, 2], pp=[1, 2])
    moved = replace(job, model=tower_of(train_positions=True))
    runs = {c.strategy.arrangement.encoder_run for c in search(moved, 20.0).candidates if c.strategy.arrangement}
    assert "prefetch" not in runs
    workload = job.workload.model_copy(update={"cached_features": ("vision",)})
    assert encoders_train(moved.model)
    assert [*cached_reasons(moved.model, workload)] == [
        "cached_features names vision, whose positions train (train_positions), so that its features are others in "
        "every step; freeze it (its projector may train), or leave it out"
    ]


def test_an_inner_projector_that_trains_counts_and_stays_as_the_model_has_it() -> None:
    main = make_job(freeze=True).model.encoders[0].projector
    inner = tower_of(deepstack=main.model_copy(update={"freeze": False}), num_deepstack=1)
    assert encoders_train(inner)
    assert encoders_train(inner.with_freeze({}))  # a job that says nothing of it changes nothing
    assert not encoders_train(inner.with_freeze({"vision_projector": True}))


def test_beside_adapters_nothing_else_trains() -> None:
    document = make_job().model.model_dump(mode="json", exclude_none=True)
    document["encoders"][0]["freeze"] = True
    adapted = Model.model_validate(document | {"adapters": {"rank": 8, "targets": ["qkv", "proj"]}})
    assert not adapted.encoders[0].projector.freeze
    assert not encoders_train(adapted)
    assert not any(block.has_backward for block in expand(adapted).blocks if block.modality == "vision")


def test_no_file_says_that_features_are_read(tmp_path: Path) -> None:
    plan = Plan(beside(2, 2, 2, 3), {"text": (2, 2)}, {"text": (0, 0)}, 24)
    with pytest.raises(PlanError, match=r"no file of torch says that features are read; plan without workload\.cached"):
        export_plan(plan, make_cached(False), "torch", out=tmp_path)
