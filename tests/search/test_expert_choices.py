"""Dispatcher, graphs and what hides the exchange as choices of a search: their space, costs, laws and files."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import parallel_config
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import describe_strategy, list_space

EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_size": 1024}
DEALT = Strategy(pp=1, tp=1, dp=8, mbs=1, ep=8)


def make_job(limits: dict[str, Any] | None = None, experts: dict[str, Any] | None = EXPERTS, **workload: Any) -> Job:
    layers = {"num_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 16, "norm": "rms"}
    content = {
        "model": {"text": {"vocab_size": 32000, "layers": layers | ({"experts": experts} if experts else {})}},
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": "gb200-192g"},
        "workload": {"global_batch_size": 16, "seq_length": 4096} | workload,
        "search": {"tp": [1], "cp": [1], "mbs": [1]} | (limits or {}),
    }
    return parse_job(content, Path("job.yaml"))


def reason(strategy: Strategy, experts: dict[str, Any] | None = EXPERTS, **workload: Any) -> str | None:
    job = make_job(experts=experts, **workload)
    return unlawful_reason(job.model, job.cluster, job.workload, strategy)


def test_every_choice_once_and_what_the_workload_does_anyway_left_empty() -> None:
    limits = {
        "pp": [1],
        "ep": [1, 8],
        "dispatcher": ["alltoall", "hybridep"],
        "overlap_all_to_all": ["none", "micro_batches"],
    }
    found = [entry.strategy for entry in list_space(make_job(limits, facts={"dispatcher": "alltoall"}))]
    assert len(set(found)) == len(found)
    of_ep = {(one.ep, one.dispatcher, one.overlap_all_to_all) for one in found}
    assert of_ep == {(1, "", ""), (1, "hybridep", "")} | set(product((8,), ("", "hybridep"), ("", "micro_batches")))
    plain = [entry.strategy for entry in list_space(make_job({"pp": [1]}))]
    assert {(one.dispatcher, one.graphs, one.overlap_all_to_all) for one in plain} == {("", "", "")}


@pytest.mark.parametrize(
    ("chosen", "stated"),
    [
        ({"dispatcher": "hybridep"}, {"facts": {"dispatcher": "hybridep", "graphs": "full"}}),
        ({"graphs": "none"}, {"facts": {"graphs": "none"}}),
        ({"overlap_all_to_all": "micro_batches"}, {"facts": {"graphs": "full"}, "overlap_all_to_all": "micro_batches"}),
    ],
)
def test_a_choice_costs_what_the_workload_that_states_it_costs(chosen: dict[str, Any], stated: dict[str, Any]) -> None:
    """graphs full: else all wait for the host, whatever is exchanged how."""
    job = make_job(facts={"graphs": "full"})
    by_choice, plain = build_problem(job, replace(DEALT, **chosen)), build_problem(job, DEALT)
    assert by_choice.chain == build_problem(make_job(**stated), DEALT).chain
    assert by_choice.chain != plain.chain


def test_a_search_takes_the_fastest() -> None:
    limits = {"pp": [1], "ep": [8], "dispatcher": ["alltoall", "hybridep"], "graphs": ["none", "full"]}
    best = search(make_job(limits)).plan.strategy
    assert (best.dispatcher, best.graphs) == ("hybridep", "full")
    assert describe_strategy(best) == "PP 1 TP 1 DP 8 MBS 1 EP 8 hybridep graphs full"
    assert parallel_config(best)["DISPATCHER"] == "hybridep"
    assert parallel_config(best)["GRAPHS"] == "full"


@pytest.mark.parametrize(
    ("changes", "workload", "words"),
    [
        ({"dispatcher": "deepep"}, {"stack": "mindspeed"}, "dispatcher deepep is none of workload.stack mindspeed"),
        ({}, {"stack": "mindspeed", "facts": {"dispatcher": "deepep"}}, "it has alltoall"),
        ({"graphs": "full"}, {"stack": "mindspeed"}, "graphs full is no mode of workload.stack mindspeed; it has none"),
        ({"overlap_all_to_all": "shared_experts"}, {}, "the model has no shared expert"),
        ({"overlap_all_to_all": "micro_batches", "ep": 1}, {}, "with EP 1 no token is exchanged"),
        ({"overlap_all_to_all": "micro_batches", "pp": 2, "dp": 4, "ep": 4}, {}, "asks for several chunks a stage"),
        ({"ep": 3}, {}, "EP 3 does not divide the experts of text, 8"),
        ({"dispatcher": "hybridep"}, {}, None),
        ({"graphs": "partial"}, {}, None),
    ],
)
def test_laws(changes: dict[str, Any], workload: dict[str, Any], words: str | None) -> None:
    found = reason(replace(DEALT, **changes), **workload)
    assert found is None if words is None else words in str(found)


def test_models_without_experts() -> None:
    dense = replace(DEALT, ep=1)
    assert "alltoall is of the exchange of tokens" in str(reason(replace(dense, dispatcher="alltoall"), None))
    assert reason(replace(dense, graphs="full"), None) is None
    for key, value in (("dispatcher", "alltoall"), ("overlap_all_to_all", "micro_batches")):
        with pytest.raises(JobError, match=f"search.{key} is .*the model has no experts"):
            make_job({key: [value]}, None)
    with pytest.raises(JobError, match=r"search\.graphs"):
        make_job({"graphs": ["some"]})


def test_an_early_release_computes_longer_and_launches_as_long() -> None:
    """Of layers with experts alone: their operators take 1.18 times as long."""
    plain, early = (
        build_problem(make_job(facts={"graphs": "full", "early_experts": value}), DEALT).chain
        for value in (False, True)
    )
    assert early[0].forward_ms == plain[0].forward_ms
    assert 1.1 < early[1].forward_ms / plain[1].forward_ms <= 1.18
    hosts = [build_problem(make_job(facts={"graphs": "none", "early_experts": v}), DEALT).chain for v in (False, True)]
    assert hosts[0][1].forward_ms == hosts[1][1].forward_ms


def test_facts_that_are_newer_leave_old_hashes_alone() -> None:
    """A workload that states an older fact has the hash that it had before there were newer ones."""
    stated = make_job(facts={"hides_sums": True}).sha256
    assert stated == make_job(facts={"hides_sums": True, "dispatcher": "", "early_experts": False}).sha256
    assert stated != make_job(facts={"hides_sums": True, "dispatcher": "alltoall"}).sha256
    with_groups, without = (make_job(experts=EXPERTS | {"max_groups": groups}).sha256 for groups in (2, 0))
    assert without == make_job().sha256 != with_groups
    assert with_groups == make_job(experts=EXPERTS | {"max_groups": 2, "num_groups": 0}).sha256
    assert with_groups != make_job(experts=EXPERTS | {"max_groups": 2, "num_groups": 4}).sha256
