"""Layouts in a search: what asks for them, what stays without, why not, and how many devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from two_modules import APART, make_job

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.least_step import LeastSteps
from mm_autoparallel.model.costs.stage import build_decoder, build_problem
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.problem import has_same_counts
from mm_autoparallel.planner.explain.why_not import explain_why_not, match_strategies, parse_wish
from mm_autoparallel.planner.search.branches import Branches, _Open
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import judge, list_all_boughs, list_entries


def test_nothing_but_the_chain_unless_asked() -> None:
    assert not any(entry.strategy.arrangement for entry in list_entries(make_job()))
    every = [entry.strategy.arrangement for entry in list_entries(make_job(layouts="all", mbs=[1]))]
    kinds = {arrangement.kind for arrangement in every if arrangement}
    assert kinds == {"colocated", "disaggregated"}
    # a stack that runs none of them has the chain alone, whoever asks for all
    named = list_entries(make_job(stack="mindspeed", layouts="all", mbs=[1]))
    assert named
    assert not any(entry.strategy.arrangement for entry in named)
    frozen = list_entries(make_job(stack="mindspeed-mm", freeze=True, layouts="all", mbs=[1]))
    found = [e.strategy.arrangement for e in frozen if e.strategy.arrangement and e.reason is None]
    assert {(one.kind, one.encoder_run) for one in found} == {("colocated", "phases"), ("colocated", "inline")}


def test_one_bound_for_all_kinds() -> None:
    limits = {"mbs": [1], "cp": [1]}
    each = {kind: search(make_job(layouts=[kind], **limits), num_workers=1) for kind in ("chain", "disaggregated")}
    every = search(make_job(layouts=["chain", "disaggregated"], **limits), num_workers=1)
    best_ms = min(result.estimates[0].step_ms for result in each.values())
    assert every.estimates[0].step_ms == pytest.approx(best_ms)
    assert every.proven
    assert every.lower_bound_ms <= min(result.estimates[0].step_ms for result in each.values()) * (1 + 1e-9)
    costs = CostModel(make_job(layouts=["chain"], **limits))
    answer = explain_why_not(costs, each["chain"].estimates[0], parse_wish("layout=disaggregated"), 60.0)
    assert answer.outside
    assert answer.estimate is not None
    assert answer.estimate.step_ms == pytest.approx(each["disaggregated"].estimates[0].step_ms)


def test_a_decoder_by_itself_bounds_all_layouts_beside_it() -> None:
    job = make_job(layouts="all", mbs=[1], cp=[1], tp=[1, 2])
    costs = CostModel(job)
    steps, num_bounded = LeastSteps(costs), 0
    branches = [branch for bough in list_all_boughs(job) for branch in bough.branches()]
    for branch in branches[::2]:
        for strategy in [one for one in branch.strategies() if judge(job, one).reason is None][:1]:
            whole, alone = bound_step(build_problem(costs, strategy)), bound_step(build_decoder(costs, strategy))
            assert alone.step_ms <= whole.step_ms * (1 + 1e-9)
            assert steps.least_decoder_ms(branch.decoder) <= steps.least_ms(strategy) * (1 + 1e-9)
            num_bounded += 1
    assert num_bounded > 5


def test_boughs_hold_all_decoders_and_are_bounded_by_less_than_each() -> None:
    job = make_job(layouts="all", cp=[1, 2], max_vpp=2)
    costs, boughs = CostModel(job), list_all_boughs(job)
    waiting = Branches(costs, LeastSteps(costs), boughs)
    least_ms = [one.bound_ms for one in waiting._open]
    assert len(boughs) == len(least_ms) > 2
    lawful, seen = {one.strategy for one in list_entries(job) if one.reason is None and one.strategy.arrangement}, set()
    for bough, bound_ms in zip(boughs, least_ms, strict=True):
        assert bound_ms > 0.0
        for branch in bough.branches():
            assert (branch.kind, branch.num_devices, branch.num_apart) == (
                bough.kind,
                bough.num_devices,
                bough.num_apart,
            )
            assert (branch.decoder.tp, branch.decoder.cp, branch.decoder.mbs) in bough.shapes
            beside = [one for one in branch.strategies() if judge(job, one).reason is None]
            seen.update(beside)
            waiting._push(_Open(branch, bound_ms))
            assert waiting._first_of(waiting._open[-1]) == next(iter(beside), None)
            assert all(waiting._bound_branch(branch) <= LeastSteps(costs).least_ms(one) * (1 + 1e-9) for one in beside)
            assert bound_ms <= waiting._bound_branch(branch) * (1 + 1e-9)
    assert seen == lawful


def test_layouts_beside_a_slow_decoder_are_one_candidate() -> None:
    job = make_job(layouts="all", mbs=[1], cp=[1])
    result = search(job, num_workers=1)
    together = [one for one in result.candidates if one.reason.startswith("all ")]
    assert together
    assert all(one.status in ("dominated", "infeasible") and not one.was_placed for one in together)
    assert all((one.bound_ms or 0.0) >= result.objective.rank_bound_ms * (1 - 1e-9) for one in together)
    assert len(result.candidates) < len(list_entries(job))


def test_placements_of_a_chain_are_no_hint_where_ranks_are_apart() -> None:
    apart = build_problem(CostModel(make_job()), APART.strategy)
    chain = replace(apart, chain=tuple(replace(block, within=None) for block in apart.chain))
    assert has_same_counts(apart, replace(apart, p2p_ms=(1.0, 1.0)))
    assert not has_same_counts(apart, chain)


def test_layouts_and_schedules_together() -> None:
    """Orders that are found go with the chain alone; a layout's own schedules are the others."""
    compile_orders()
    limits = {"mbs": [1], "cp": [1], "tp": [1, 2], "pp": [1, 2]}
    schedules = ["1f1b", "zb_h1", "free"]
    named = [search(make_job(layouts="all", schedule=name, **limits), num_workers=1) for name in schedules]
    every = search(make_job(layouts="all", schedule=schedules, **limits), num_workers=1)
    assert every.estimates[0].step_ms == pytest.approx(min(result.estimates[0].step_ms for result in named))
    assert every.proven
    lawful = [entry.strategy for entry in list_entries(make_job(layouts="all", schedule="all")) if entry.reason is None]
    found = {one.schedule for one in lawful if one.arrangement}
    assert found == {"1f1b", "interleaved_1f1b"} & {one.schedule for one in lawful}
    assert {"free", "zb_h1"} < {one.schedule for one in lawful}


def test_uneven_micro_batches_go_with_the_chain_alone() -> None:
    job = make_job(layouts="all", mbs=[1])
    uneven = replace(job, workload=job.workload.model_copy(update={"micro_batch_scale": {"vision": (1.0, 2.0)}}))
    assert not any(entry.strategy.arrangement for entry in list_entries(uneven))


def test_wishes_that_cannot_be() -> None:
    with pytest.raises(JobError, match=r"LAYOUT is 'beside'"):
        parse_wish("layout=beside")
    with pytest.raises(
        JobError, match=r"no such strategy: disaggregated: no layout that workload.stack mindspeed runs"
    ):
        match_strategies(make_job(stack="mindspeed"), parse_wish("layout=disaggregated"))


def test_runs_by_name_are_of_shared_devices() -> None:
    job = make_job(layouts="all", mbs=[1, 4], cp=[1], tp=[1, 2])
    lawful = [entry.strategy for entry in list_entries(job) if entry.reason is None]
    told_of = {"inline": "", "phases": " in phases", "recomputed_phases": " in recomputed phases"}
    for run, told in told_of.items():
        found, _, _ = match_strategies(job, parse_wish(f"layout={run}"))
        meant = {one for one in lawful if one.arrangement and one.arrangement.words == f"colocated{told}"}
        assert meant == {entry.strategy for entry in found if entry.reason is None}
        assert meant


def test_what_keeps_nothing_for_a_backward_is_not_run_again() -> None:
    frozen = make_job(freeze=True, layouts="all")
    for word, what in (("layout", "the encoder"), ("vision.LAYOUT", "vision")):
        with pytest.raises(JobError, match=f"nothing of {what} trains, so nothing of it is run again; ask for phases"):
            match_strategies(frozen, parse_wish(f"{word}=recomputed_phases"))
    assert match_strategies(make_job(layouts="all", mbs=[1]), parse_wish("layout=recomputed_phases"))[0]


def test_several_numbers_of_devices() -> None:
    entries = list_entries(make_job(devices=[4, 8], mbs=[1], layouts="all"))
    lawful = [entry.strategy for entry in entries if entry.reason is None]
    assert {strategy.world_size for strategy in lawful} == {4, 8}
    assert len(lawful) == len({*lawful})
    best = search(make_job(devices=[4, 8], mbs=[1], cp=[1]), num_workers=1).plan.strategy
    assert best.world_size == 8
