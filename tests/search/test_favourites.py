"""Several chunks are tried first at the sizes that are best with one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.pipeline.solve.task import Task, solve
from mm_autoparallel.planner.search.agenda import Agenda
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_space


def test_the_sizes_that_are_best_with_one_chunk_come_first(make_job) -> None:
    job = make_job(memory_bytes=40e9, num_layers=8, max_vpp=2, pp=[2, 4], workload={"global_batch_size": 16})
    best_of_one = search(replace(job, search=job.search.model_copy(update={"max_vpp": 1}))).plan.strategy
    agenda, best_ms = Agenda(CostModel(job)), np.inf
    for entry in list_space(job):
        agenda.admit(entry, lambda: False)
    while (pipeline := agenda.next_open(best_ms, 0.0, 0.0, lambda: False)) is not None and not pipeline.has_chunks:
        problem = pipeline.level.problem or pipeline.problem
        assert problem is not None
        pipeline.take(solve(Task(pipeline.number, problem, np.inf, 0.0, 60.0), lambda: False), best_ms)
        best_ms = min(best_ms, pipeline.rank_ms)
        agenda.close(pipeline, best_ms)
    assert pipeline is not None
    strategy = pipeline.strategies[0]
    others = [p for p in agenda.pipelines if p.has_chunks and p is not pipeline and p.bound_ms < best_ms]
    assert pipeline.is_favoured
    assert replace(strategy, vpp=1, schedule=best_of_one.schedule) == best_of_one
    assert len({replace(p.strategies[0], vpp=1) for p in others}) > 1
