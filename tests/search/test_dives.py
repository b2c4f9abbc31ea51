"""Where bounds take long, what promises most is placed before them; no answer hangs on that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mm_autoparallel.planner.search import agenda as of_agenda
from mm_autoparallel.planner.search.planner import search

AT_ONCE_S = -1.0


@pytest.fixture
def job(make_job):
    limits = {"schedule": ["all"], "pp": [1, 2, 4]}
    return make_job(memory_bytes=30e9, num_layers=8, workload={"global_batch_size": 16}, **limits)


def test_what_promises_most_is_placed_before_all_are_bounded(
    job, agenda_and_met, monkeypatch: pytest.MonkeyPatch
) -> None:
    agenda, met = agenda_and_met(job)
    first = agenda.next_open(np.inf, 0.0, 0.0, lambda: False)
    assert not met
    unbounded = [p for p in agenda.pipelines if p.twin is None and not p.is_waiting and p.num_refinements == 0]
    assert all(p.bound_ms >= first.bound_ms for p in unbounded)
    monkeypatch.setattr(of_agenda, "DIVE_S", AT_ONCE_S)
    agenda, met = agenda_and_met(job)
    dived = agenda.next_open(np.inf, 0.0, 0.0, lambda: False)
    planned = [p for p in met if p.placement is not None]
    assert planned
    sizes = {(p.strategies[0].pp, p.strategies[0].tp, p.strategies[0].cp, p.strategies[0].mbs): p for p in planned}
    strategy = dived.strategies[0]
    kin = sizes[strategy.pp, strategy.tp, strategy.cp, strategy.mbs]
    assert kin.fastest_ms == min(p.fastest_ms for p in planned)


def test_no_answer_hangs_on_it(job, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = search(job, num_workers=1)
    for name in ("DIVE_S", "PATIENCE_S"):
        monkeypatch.setattr(of_agenda, name, AT_ONCE_S)
    dived = search(job, num_workers=1)
    assert dived.objective.rank_ms == pytest.approx(plain.objective.rank_ms, rel=1e-3)
    assert dived.proven == plain.proven
    strategies = [candidate.strategy for candidate in dived.candidates]
    assert len(set(strategies)) == len(strategies)
    assert set(strategies) == {candidate.strategy for candidate in plain.candidates}


def test_then_what_was_placed_has_its_fills_tried_and_neighbours_of_the_best_plan_are_placed(
    job, agenda_and_met, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_agenda, "DIVE_S", AT_ONCE_S)
    monkeypatch.setattr(of_agenda, "PATIENCE_S", AT_ONCE_S)
    agenda, _ = agenda_and_met(job)
    wanted = 0.0, 0.0, lambda: False
    first = agenda.next_open(np.inf, *wanted)
    assert agenda.has_dived
    first.placement, first.num_slices = first.placement or object(), 1
    first.rank_ms = first.step_ms = 3.0 * first.bound_ms
    second = agenda.next_open(first.rank_ms, *wanted)
    near = list(of_agenda.list_neighbours(first.strategies[0]))
    assert len({(s.pp * s.tp * s.cp * s.dp) for s in near}) == 1
    assert second.strategies[0].schedule == "free"
    assert any((s.pp, s.tp, s.dp, s.mbs) == _sizes(second) for s in near)
    orders = {replace(strategy, schedule="free") for strategy in near}
    others = [p for p in agenda.pipelines if p.num_refinements >= 2 and p.strategies[0] in orders and not p.infeasible]
    assert second.bound_ms == min(p.bound_ms for p in others if not p.is_waiting)
    agenda.push(first)
    first.sounding.is_due = True
    assert agenda._dive(first.rank_ms, lambda: False) is first


def _sizes(pipeline) -> tuple[int, int, int, int]:
    strategy = pipeline.strategies[0]
    return strategy.pp, strategy.tp, strategy.dp, strategy.mbs


def test_an_answer_that_has_arrived_is_taken_first(job, agenda_and_met) -> None:
    agenda, _ = agenda_and_met(job)
    assert agenda.next_open(np.inf, 0.0, 0.0, lambda: False, lambda: True) is None
    assert agenda.next_open(np.inf, 0.0, 0.0, lambda: False) is not None
