"""Named orders beside one that is to be found: when they have a turn, what the next begins with, what ends them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.placement.result import PlacementResult
from mm_autoparallel.pipeline.problem import Mode, Placement, Problem
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.search.agenda import Agenda
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.level import Level
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import SpaceEntry
from mm_autoparallel.planner.search.starts import best_start

pytestmark = pytest.mark.usefixtures("no_clock")
LAYERS = {"num_layers": 6, "hidden_size": 2048, "ffn_size": 5504, "num_heads": 16, "norm": "rms"}


def job_of(schedule: Any) -> Job:
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS}},
        "cluster": {"num_nodes": 1, "devices_per_node": 2, "device": "h100-80g"},
        "workload": {"global_batch_size": 6, "seq_length": 2048},
        "search": {"pp": [2], "tp": [1], "mbs": [1], "modes": [], "schedule": schedule, "choice": "point"},
    }
    return parse_job(document, Path("job.json"))


def test_a_turn_without_proof_lets_a_named_order_have_one_and_the_next_begins_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first turns find one micro-batch after the other, or what they are handed, and prove nothing."""
    hints: list[Placement | None] = []

    def find_little(problem: Problem, *others: Any) -> PlacementResult:
        hint = others[5]
        hints.append(hint)
        named = place(replace(problem, schedule="1f1b")).placement
        assert named is not None
        one_by_one = " ".join(f"{m}F0 {m}B0" for m in range(problem.num_microbatches))
        found = replace(named, orders=(one_by_one,) * problem.num_stages) if hint is None else hint
        step_ms = simulate(problem, found).step_ms
        return PlacementResult("feasible", found, None, step_ms, step_ms if len(hints) > 2 else 0.0, 0.0)

    monkeypatch.setattr("mm_autoparallel.pipeline.placement.orders.placing.place_orders", find_little)
    result = search(job_of(["1f1b", "free"]), num_workers=1)
    monkeypatch.undo()
    named = search(job_of("1f1b"), num_workers=1)
    assert result.figures.step_ms == pytest.approx(named.figures.step_ms, rel=1e-9)
    assert hints[0] is None
    assert hints[1] is not None
    assert hints[1].orders[0].startswith("0F0 1F0 0B0")
    assert next(one for one in result.candidates if one.strategy.schedule == "1f1b").was_placed


def test_modes_of_a_start_go_by_name() -> None:
    """What one problem keeps of a block's modes may be the second that another one keeps, or none of them."""
    job = job_of(["1f1b", "free"])
    known, own = (pipeline_of(job, *of) for of in (("1f1b", "a", "b", "c"), ("free", "a", "c")))
    assert known.problem is not None
    held = known.placement = with_modes(known.problem, (2, 0, 1))
    known.step_ms = 1.0
    start = best_start(own, [known], None)
    assert start is not None
    at = next(e for e, block in enumerate(known.problem.chain) if block.modes)
    assert [rows[at] for rows in held.modes] == [(2, 0, 1)] * 2
    assert [rows[at] for rows in start.modes] == [(2, 1)] * 2
    assert len(start.orders) == 2
    known.placement = with_modes(known.problem, (0, 1, 2))
    assert best_start(own, [known], None) is None


def test_what_cannot_beat_what_is_over_is_over() -> None:
    """Nothing of a free order is left to be looked at, though its bound is a little below the best: then a named one of
    the same sizes has that bound, and is not looked at either; where the best of the two is wanted too, it is."""
    job = job_of(["1f1b", "free"])
    for own_rank_ms, is_next in ((np.inf, False), (0.9e9, True)):
        agenda = Agenda(CostModel(job))
        for name in ("free", "1f1b"):
            agenda.admit(SpaceEntry(Strategy(2, 1, 1, 1, schedule=name), None), lambda: False)
        free, named = agenda.pipelines
        free.num_refinements, free.within_ms, free.elsewhere_ms, free.rank_ms = 2, np.inf, 0.996e9, own_rank_ms
        found = agenda.next_open(1e9, 0.001, 0.0, lambda: False)
        assert (found is named) == is_next
        assert named.is_closed(1e9, 0.001) != is_next
        if not is_next:
            assert named.bound_ms == 0.996e9


def pipeline_of(job: Job, schedule: str, *names: str) -> Pipeline:
    """One of two stages whose layers have modes of these names."""
    strategy = Strategy(2, 1, 1, 1, schedule=schedule)
    problem = build_problem(job, strategy)
    modes = tuple(Mode(name, 1e6, 0.1, 0.1) for name in names)
    chain = tuple(replace(block, modes=modes) if block.count == 6 else block for block in problem.chain)
    caution = Caution(job)
    made = Pipeline(0, [strategy], 6, 0.0, caution, Level(caution.most_fill))
    made.problem = replace(problem, chain=chain)
    return made


def with_modes(problem: Problem, counts: tuple[int, ...]) -> Placement:
    layers = tuple(
        tuple(3 if block.count == 6 else int(stage == (0 if e == 0 else 1)) for e, block in enumerate(problem.chain))
        for stage in range(2)
    )
    modes = tuple(tuple(counts if block.modes else () for block in problem.chain) for _ in range(2))
    return Placement(layers, modes)
