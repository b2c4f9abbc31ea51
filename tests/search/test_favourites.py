"""Of several chunks those that promise most come first: by what is met at once, or by the sizes best with one chunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.pipeline.solve.task import Task, solve
from mm_autoparallel.planner.search.agenda import Agenda
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.scouting import NUM_FIRST
from mm_autoparallel.planner.search.space import list_space


@pytest.fixture
def job(make_job):
    return make_job(memory_bytes=40e9, num_layers=8, max_vpp=2, pp=[2, 4], workload={"global_batch_size": 16})


def _to_the_first_of_several_chunks(agenda: Agenda) -> tuple[Pipeline, float]:
    """Place those of one chunk; the first of several, and the best step until then."""
    best_ms = np.inf
    while (pipeline := agenda.next_open(best_ms, 0.0, 0.0, lambda: False)) is not None and not pipeline.has_chunks:
        problem = pipeline.level.problem or pipeline.problem
        assert problem is not None
        pipeline.take(solve(Task(pipeline.number, problem, np.inf, 0.0, 60.0), lambda: False), best_ms)
        best_ms = min(best_ms, pipeline.rank_ms)
        agenda.close(pipeline, best_ms)
    assert pipeline is not None
    return pipeline, best_ms


def test_the_sizes_that_are_best_with_one_chunk_come_first(job) -> None:
    best_of_one = search(replace(job, search=job.search.model_copy(update={"max_vpp": 1}))).plan.strategy
    agenda = Agenda(CostModel(job))
    for entry in list_space(job):
        agenda.admit(entry, lambda: False)
    pipeline, best_ms = _to_the_first_of_several_chunks(agenda)
    strategy = pipeline.strategies[0]
    others = [p for p in agenda.pipelines if p.has_chunks and p is not pipeline and p.bound_ms < best_ms]
    assert pipeline.is_favoured
    assert replace(strategy, vpp=1, schedule=best_of_one.schedule) == best_of_one
    assert len({replace(p.strategies[0], vpp=1) for p in others}) > 1


def test_what_is_met_at_once_says_which_come_first(job, agenda_and_met) -> None:
    agenda, met = agenda_and_met(job)
    first, _ = _to_the_first_of_several_chunks(agenda)
    favoured = [p for p in met if p.is_favoured]
    others = [p for p in met if p.placement is not None and not p.is_favoured]
    assert first in favoured
    assert len(favoured) == NUM_FIRST
    assert others
    assert max(p.promised_ms for p in favoured) <= min(p.promised_ms for p in others)
    for pipeline in (*favoured, *others):
        assert pipeline.problem is not None
        assert pipeline.placement is not None
        assert simulate(pipeline.problem, pipeline.placement).step_ms == pytest.approx(pipeline.step_ms, rel=1e-12)
        assert pipeline.bound_ms <= pipeline.step_ms


def test_none_is_lost_on_the_way(job) -> None:
    best = search(job, num_workers=1)
    alone = [search(replace(job, search=job.search.model_copy(update={"max_vpp": 2, "pp": (pp,)}))) for pp in (2, 4)]
    assert best.figures.step_ms == pytest.approx(min(one.figures.step_ms for one in alone), rel=1e-9)
    assert not [c for c in best.candidates if c.status == "unfinished"]
