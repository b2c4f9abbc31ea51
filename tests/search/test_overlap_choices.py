"""Overlaps of gradients, weights and transfers as a choice: what a space has, what each costs, who refuses which."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.api import explain
from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.overlaps import AS_SAID, OVERLAPS, Overlaps
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.explain.variables import list_variables
from mm_autoparallel.planner.plan import Plan, parallel_config, parse_strategy
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_space

LAYERS = {"num_layers": 8, "hidden_size": 2048, "ffn_size": 8192, "num_heads": 16, "norm": "rms"}
BOTH = {name: [True, False] for name in OVERLAPS}


def job_of(limits: dict[str, Any] | None = None, device: Any = "h100-80g", **said: Any) -> Job:
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS}},
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": device},
        "workload": {"global_batch_size": 16, "seq_length": 2048, **said},
        "search": {"pp": [1, 4], "tp": [1], "cp": [1], "mbs": [1], "max_vpp": 2} | (limits or {}),
    }
    return parse_job(document, Path("job.json"))


CHUNKED = Strategy(pp=4, tp=1, dp=2, mbs=1, vpp=2)


def step_ms(overlaps: Overlaps, **said: Any) -> float:
    plan = Plan(replace(CHUNKED, overlaps=overlaps), {"text": (1,) * 8}, {"text": (0,) * 8}, 16)
    return evaluate(job_of(**said), plan).step_ms


def lawful(job: Job) -> set[tuple[int, int, int, Overlaps]]:
    found = [entry.strategy for entry in list_space(job) if entry.reason is None]
    assert len({*found}) == len(found)
    return {(one.pp, one.vpp, one.zero, one.overlaps) for one in found}


def test_a_space_has_each_where_it_means_something() -> None:
    found = lawful(job_of({**BOTH, "zero": [0, 1]}))
    pairs = [(True, True), (True, False), (False, False)]  # weights are gathered behind reductions that hide alone
    assert {one for *sizes, one in found if tuple(sizes) == (4, 1, 1)} == {Overlaps(*pair, None) for pair in pairs}
    assert {one for *sizes, one in found if tuple(sizes) == (4, 2, 1)} == {
        Overlaps(*pair, beside) for pair, beside in product(pairs, (True, False))
    }
    assert {one for *sizes, one in found if tuple(sizes) == (4, 1, 0)} == {
        Overlaps(reduces, None, None) for reduces in (True, False)
    }
    assert lawful(job_of({"dp": [1], "pp": [8], **BOTH})) == {
        (8, 1, 1, AS_SAID),
    }
    assert {one for *_, one in lawful(job_of({"overlap_grad_reduce": [False]}))} == {Overlaps(False, False, None)}
    assert {one for *_, one in lawful(job_of())} == {AS_SAID}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", OVERLAPS)
def test_a_choice_costs_what_the_workload_would_and_never_less_in_the_open(name: str, zero: int) -> None:
    strategy = replace(CHUNKED, zero=zero)
    if name == "overlap_param_gather" and not zero:
        return
    beside, open_ = (replace(strategy, overlaps=Overlaps(**{name: value})) for value in (True, False))
    gathers = {"overlap_param_gather": False}  # which goes with the first alone
    job, stated = job_of(**gathers), job_of(**gathers | {name: False})
    job = job_of() if name == "overlap_param_gather" else job
    assert build_problem(job, open_) == build_problem(stated, strategy)
    assert build_problem(stated, beside) == build_problem(job, strategy) != build_problem(stated, strategy)


def test_no_overlap_ever_lengthens_a_step_where_nothing_slows() -> None:
    """Of all three, in every combination, on or off besides."""
    steps = {each: step_ms(Overlaps(*each)) for each in product((True, False), repeat=3) if each[0] or not each[1]}
    for each, least_ms in steps.items():
        for at in range(3):
            other = tuple(value or index == at for index, value in enumerate(each))
            assert other not in steps or steps[other] <= least_ms
    assert steps[True, True, True] < steps[False, False, True] < steps[False, False, False]


def test_a_search_takes_them_where_they_hide_something() -> None:
    best = search(job_of(BOTH), num_workers=1).plan
    assert set(best.strategy.overlaps.chosen.values()) == {True}
    config = parallel_config(best.strategy)
    assert config["OVERLAP_GRAD_REDUCE"] is True
    assert parse_strategy({"parallel_config": config}).overlaps == best.strategy.overlaps
    assert "reductions overlapped" in best.strategy.choices


def test_a_search_leaves_open_what_takes_longer_at_once_than_in_turn() -> None:
    """And `explain` says by how much, and why."""
    found = {}
    for factor in (1.0, 1.9, 2.5):
        device = {"based_on": "h100-80g", "slowdown_factors": {"data": factor}, "sources": {"slowdown_factors": "mine"}}
        job = job_of({**BOTH, "pp": [1]}, device=device)
        best = search(job, num_workers=1)
        found[factor] = best.plan.strategy.overlaps, best.figures.step_ms
        told = explain(job, best.plan)
        assert told.overlaps is not None
        steps = {other.words: other.step_ms for other in told.overlaps.others if other.step_ms is not None}
        assert len(steps) == 2
        assert min(steps.values()) >= best.figures.step_ms
        text = told.table()
        assert "not reductions open, gathers overlapped: overlap_param_gather goes with" in text
        assert f"overlaps taken: {', '.join(best.plan.strategy.overlaps.words)}" in text
        assert f"beside traffic of replicas both take {factor:g} times as long while both run (mine; above 2" in text
        assert told.document()["overlaps"]["slowdowns"]["data"] == {"factor": factor, "source": "mine"}
    assert found[1.0][0] == found[1.9][0] == Overlaps(True, True)
    assert found[2.5][0] == Overlaps(False, False)
    assert found[1.0][1] < found[1.9][1] < found[2.5][1]
    assert explain(job_of(), search(job_of(), num_workers=1).plan).overlaps is None


def test_the_variables_of_a_job_say_who_decides_them() -> None:
    found = {one.name: one for one in list_variables(job_of({"overlap_p2p": [True, False]}, overlap_grad_reduce=False))}
    reduced, beside = (
        found[name] for name in ("gradients reduced behind the backward", "transfers between stages beside compute")
    )
    assert (reduced.where, reduced.values, reduced.searched) == ("search.overlap_grad_reduce", "off", False)
    assert (beside.where, beside.values, beside.searched) == ("search.overlap_p2p", "off, on", True)


@pytest.mark.parametrize(
    ("limits", "said", "told"),
    [
        ({"overlap_grad_reduce": [True]}, {"stack": "transformers"}, "overlap_grad_reduce is a choice where a launch"),
        ({"overlap_param_gather": [True], "zero": [0]}, {}, r"weights are gathered from ZeRO 1 on"),
        ({"overlap_p2p": [False], "max_vpp": 1}, {}, r"search\.max_vpp is 1"),
    ],
)
def test_what_no_strategy_could_choose_is_refused(limits: dict[str, Any], said: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        job_of(limits, **said)


@pytest.mark.parametrize(
    ("strategy", "said", "told"),
    [
        (replace(CHUNKED, overlaps=Overlaps(False, True)), {}, "goes with overlap_grad_reduce alone"),
        (replace(CHUNKED, overlaps=Overlaps(False)), {}, "goes with overlap_grad_reduce alone"),
        (replace(CHUNKED, zero=0, overlaps=Overlaps(None, True)), {}, "with ZeRO 0 no weights are gathered"),
        (Strategy(2, 1, 4, 1, vpp=2, overlaps=Overlaps(overlap_p2p=False)), {}, "VPP 2 with PP 2 needs"),
        (Strategy(4, 1, 2, 1, overlaps=Overlaps(overlap_p2p=False)), {}, "several chunks a stage, and VPP is 1"),
        (
            replace(CHUNKED, schedule="dualpipev", overlaps=Overlaps(True)),
            {"stack": "mindspeed"},
            "MindSpeed refuses beside its schedule dualpipev",
        ),
        (Strategy(4, 1, 2, 1, overlaps=Overlaps(True)), {"stack": "galvatron"}, "stack is galvatron"),
        (Strategy(1, 1, 8, 1, zero=3, overlaps=Overlaps(True)), {"stack": "mindspeed"}, "torch FSDP2 (ZeRO 3)"),
    ],
)
def test_what_a_framework_refuses_is_unlawful(strategy: Strategy, said: dict[str, Any], told: str) -> None:
    job = job_of(**said)
    assert told in (unlawful_reason(job.model, job.cluster, job.workload, strategy) or "")
