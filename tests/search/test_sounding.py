"""Fills at which a free order is placed in turn: they find what ranks best where steps leap, and settle nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.solve.task import Answer
from mm_autoparallel.planner.search import sounding as of_sounding
from mm_autoparallel.planner.search.caution import Caution
from mm_autoparallel.planner.search.pipeline import Pipeline
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.sounding import MOST_SOUNDINGS, NARROW_FRACTION, Sounding

LAYERS = {"hidden_size": 4096, "ffn_size": 11008, "num_heads": 32, "norm": "rms"}


def make_job(num_layers: int = 12, seq_length: int = 8192):
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS | {"num_layers": num_layers}}},
        "cluster": {"num_nodes": 1, "devices_per_node": 4, "device": "h100-80g"},
        "workload": {"global_batch_size": 12, "seq_length": seq_length},
        "search": {"pp": [4], "tp": [1], "mbs": [1], "schedule": "free", "choice": "point", "failure_price": 0.1},
    }
    return parse_job(document, Path("job.json"))


def leap(fill: float, at: float, slope: float) -> float:
    """A step that falls slowly with the fill, and at one fill by five hundredths at once."""
    return (100.0 if fill >= at else 105.0) - slope * fill


@pytest.mark.parametrize("at", [0.93, 0.96, 0.983, 1.0, 1.02, 1.05])
@pytest.mark.parametrize("slope", [0.0, 1.0, 4.0])
def test_it_comes_near_the_best_rank(at: float, slope: float) -> None:
    """From what is far too full, and what hardly ever fails, as the search begins."""
    caution = Caution(make_job())
    sounding = Sounding(caution)
    tried = [1.0645, caution.fill_at(1.01)]
    for fill in tried:
        sounding.note(fill, leap(fill, at, slope))
    best_ms = min(caution.rank_ms(leap(fill, at, slope), fill) for fill in tried)
    while (fill := sounding.begin(best_ms, math.inf)) is not None:
        assert sounding.is_on
        assert sounding.end()
        sounding.note(fill, leap(fill, at, slope))
        best_ms = min(best_ms, caution.rank_ms(leap(fill, at, slope), fill))
        tried.append(fill)
    assert not sounding.is_due
    assert len(tried) <= 2 + MOST_SOUNDINGS
    grid = [0.8 + 0.001 * step for step in range(300)]
    least_ms = min(caution.rank_ms(leap(fill, at, slope), fill) for fill in grid)
    assert best_ms <= least_ms * (1.0 + 2.5 * NARROW_FRACTION)


def test_nothing_is_worth_it_where_no_stretch_may_hold_a_better_plan() -> None:
    caution = Caution(make_job())
    sounding = Sounding(caution)
    sounding.note(math.inf, 1.0)  # what keeps no limits is no plan
    assert sounding.begin(100.0, math.inf) is None  # nothing is found yet
    sounding.note(0.9, 100.0)
    assert sounding.begin(caution.rank_ms(100.0, 0.9), math.inf) is None
    sounding.note(1.06, 99.9)
    assert sounding.begin(caution.rank_ms(100.0, 0.9), math.inf) is None
    sounding.note(1.06, 90.0)
    assert sounding.look(caution.rank_ms(100.0, 0.9), 0.9) is None  # what is fuller is of no interest
    fill = sounding.look(caution.rank_ms(100.0, 0.9), math.inf)
    assert fill is not None
    assert 0.9 < fill < 1.06
    assert not sounding.is_on


def test_what_is_tried_is_no_slice_and_its_bound_is_of_its_fill(agenda_and_met) -> None:
    agenda, _ = agenda_and_met(make_job())
    pipeline: Pipeline = agenda.next_open(math.inf, 0.0, 0.0, lambda: False)
    bound_ms = pipeline.bound_ms
    pipeline.level.num_slices = pipeline.num_slices = pipeline.num_unfinished = 1
    pipeline.num_probes = 2
    pipeline.rank_ms = 1.2 * bound_ms
    pipeline.sounding.note(1.06, bound_ms)
    pipeline.sounding.note(0.8, 1.2 * bound_ms)
    pipeline.sounding.look(pipeline.rank_ms, math.inf)
    assert pipeline.rank[0] == 0
    assert pipeline.probe(pipeline.rank_ms, 0.0)
    assert pipeline.is_probing
    fill, known_ms = pipeline.probe_fill_fraction, pipeline.within_ms
    assert 0.8 < fill < 1.06
    pipeline.take(Answer(pipeline.number, None, math.inf, 1.1 * bound_ms, 1.0), 1.2 * bound_ms)
    assert (pipeline.num_slices, pipeline.num_unfinished, pipeline.level.num_slices) == (1, 1, 1)
    assert (pipeline.is_probing, pipeline.within_ms) == (False, known_ms)
    assert pipeline.floors.of(fill) == 1.1 * bound_ms


@pytest.mark.parametrize(("num_layers", "seq_length"), [(8, 28672), (12, 16384)])
def test_no_answer_hangs_on_it(num_layers: int, seq_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job, begun, begin = make_job(num_layers, seq_length), [], Sounding.begin

    def note_fill(sounding: Sounding, best_ms: float, most_fill: float) -> float | None:
        begun.append(begin(sounding, best_ms, most_fill))
        return begun[-1]

    monkeypatch.setattr(Sounding, "begin", note_fill)
    sounded = search(job, num_workers=1)
    assert any(begun)
    monkeypatch.setattr(of_sounding, "MOST_SOUNDINGS", 0)
    plain = search(job, num_workers=1)
    assert sounded.proven
    assert plain.proven
    assert sounded.objective.rank_ms == pytest.approx(plain.objective.rank_ms, rel=1e-3)


def test_the_fastest_plan_within_a_fill_is_known() -> None:
    sounding, plans = Sounding(Caution(make_job())), [Placement((), ()) for _ in range(4)]
    assert sounding.plan_within(1.0) is None
    sounding.note(0.9, 100.0, plans[0])
    sounding.note(0.95, 101.0, plans[1])  # fuller and slower
    assert sounding.plan_within(1.0) is plans[0]
    sounding.note(0.97, 90.0, plans[2])
    sounding.note(math.inf, 1.0, plans[3])
    assert sounding.plan_within(0.96) is plans[0]
    assert sounding.plan_within(0.97) is plans[2]
    sounding.note(0.8, 95.0, plans[1])  # before the first in both
    assert sounding.plan_within(0.9) is plans[1]
    assert sounding.plan_within(0.79) is None
