"""What tasks leave to those after them, and what a search takes up again."""

from __future__ import annotations

import numpy as np
import pytest
from two_modules import make_job

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.problem import RECOMPUTE, ChainBlock, Mode, Problem
from mm_autoparallel.pipeline.solve.known_paths import MOST_CUTS, KnownPaths
from mm_autoparallel.pipeline.solve.task import Answer, Task, solve
from mm_autoparallel.planner.search.agenda import Agenda
from mm_autoparallel.planner.search.space import SpaceEntry


def problem(limit_bytes: float = 30.0, num_microbatches: int = 6) -> Problem:
    """Two stages whose first one recomputes; unequal micro-batches, which path cuts alone prove."""
    modes = (Mode(RECOMPUTE, 0.0, 3.0),)
    scale = tuple(1.0 + 0.5 * (m % 3) for m in range(num_microbatches))
    vision = ChainBlock("vision", "vision", 2, 2.0, 3.0, activation_bytes=1.5, microbatch_scale=scale)
    text = ChainBlock("text", "text", 6, 3.0, 6.0, static_bytes=1.0, activation_bytes=2.5, modes=modes)
    zeros, hops = (0.0,) * 2, ((0.5,), (0.0,))
    return Problem(2, 1, num_microbatches, "1f1b", (vision, text), (limit_bytes,) * 2, zeros, zeros, *hops)


def test_a_later_task_begins_with_the_paths_of_an_earlier_one() -> None:
    known = KnownPaths()
    first = solve(Task(0, problem(), np.inf, 0.0, 20.0), lambda: False, known_paths=known)
    cuts = known.of(problem())
    assert cuts
    assert all(cut.placement is None for cut in cuts)
    tighter = problem(limit_bytes=22.0)
    assert known.of(tighter) == cuts
    assert known.of(problem(num_microbatches=9)) == ()
    alone = place(tighter)
    after = solve(Task(1, tighter, np.inf, 0.0, 20.0), lambda: False, known_paths=known)
    assert after.step_ms == pytest.approx(alone.step_ms, rel=1e-5)
    assert after.lower_bound_ms >= after.step_ms * (1.0 - 1e-5)
    assert first.step_ms <= after.step_ms * (1.0 + 1e-5)
    known.keep(tighter, cuts * (MOST_CUTS // len(cuts) + 1))
    assert len(known.of(tighter)) == MOST_CUTS


def test_what_was_too_much_is_looked_at_again_once_a_better_plan_is_known() -> None:
    agenda = Agenda(CostModel(make_job()))
    agenda.admit(SpaceEntry(Strategy(2, 2, 2, 1, schedule="free"), None), lambda: False)
    (pipeline,) = agenda.pipelines
    wanted = 0.0, 0.0, lambda: False
    assert agenda.next_open(np.inf, *wanted) is pipeline
    before_ms, pipeline.given_up = 2.0 * pipeline.bound_ms, True
    agenda.set_aside(pipeline, before_ms)
    assert agenda.next_open(0.9995 * before_ms, *wanted) is None
    assert pipeline.given_up
    assert agenda.next_open(0.99 * before_ms, *wanted) is pipeline
    assert not pipeline.given_up
    assert agenda.next_open(0.9 * before_ms, *wanted) is None  # it is with its solver


def test_where_all_that_was_found_in_any_order_is_too_full_a_fill_is_tried_at_once() -> None:
    """Its proof comes late, and until then a plan that is likely to fail holds nothing down."""
    agenda = Agenda(CostModel(make_job(failure_price=0.1)))
    agenda.admit(SpaceEntry(Strategy(2, 2, 2, 1, schedule="free"), None), lambda: False)
    (pipeline,) = agenda.pipelines
    wanted = 0.0, 0.0, lambda: False
    assert agenda.next_open(np.inf, *wanted) is pipeline
    bound_ms = pipeline.bound_ms
    nothing = Answer(pipeline.number, None, np.inf, bound_ms, 1.0)
    pipeline.level.step_ms, pipeline.rank_ms = 1.05 * bound_ms, 1.2 * bound_ms
    pipeline.take(nothing, np.inf)
    assert (pipeline.num_unfinished, pipeline.rank[0]) == (1, 0)
    agenda.push(pipeline)
    assert agenda.next_open(1.2 * bound_ms, *wanted) is pipeline
    assert pipeline.is_probing
    pipeline.take(nothing, 1.2 * bound_ms)
    assert (pipeline.is_probing, pipeline.num_probes, pipeline.rank[0]) == (False, 1, 2)
