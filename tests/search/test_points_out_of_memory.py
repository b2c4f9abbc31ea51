"""Points that ran out of memory when they were profiled throw their strategies away, with the reason, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import NoFeasiblePlan, ProfileError
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job, SearchSpace
from mm_autoparallel.model.profiles.store import ProfileEntry, Timing, file_name, make_manifest, write_profile
from mm_autoparallel.planner.search.candidate import candidate_rows
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_space

LIMITS: dict[str, Any] = {"tp": (1, 2), "cp": (1,), "mbs": (1, 2)}


def entry(tp: int, mbs: int, out_of_memory: bool) -> ProfileEntry:
    point: dict[str, Any] = {"kind": "text_layer", "tp": tp, "mbs": mbs, "tokens": 4096}
    if out_of_memory:
        return ProfileEntry(**point, out_of_memory=True)
    timing = Timing(median_ms=3.0 * mbs / tp, mad_ms=0.0, num_samples=9)
    times = dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms"), timing)
    figures = {"activation_bytes": 100_000_000 * mbs, "checkpoint_bytes": 10_000_000 * mbs, "transient_bytes": 0}
    return ProfileEntry(**point, **times, **figures)


@pytest.fixture
def profiled(make_job: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    """A job with a profile of every TP and MBS of LIMITS; those of `overfull` ran out of memory."""

    def make(overfull: set[tuple[int, int]], only: set[tuple[int, int]] | None = None, **changed: Any) -> Job:
        job = make_job(**(LIMITS | changed))
        manifest = make_manifest(job.model, job.workload, job.cluster.device.name, {}, "python pretrain.py")
        for tp in (1, 2):
            for mbs in (1, 2):
                if only is None or (tp, mbs) in only | overfull:
                    path = tmp_path / file_name(tp, 1, mbs, job.workload)
                    write_profile(path, manifest, [entry(tp, mbs, (tp, mbs) in overfull)])
        return replace(job, profiles=(tmp_path,))

    return make


def test_they_are_infeasible_and_the_rest_is_searched(profiled: Callable[..., Job], tmp_path: Path) -> None:
    job = profiled({(1, 2)})
    result = search(job, num_workers=1)
    assert result.stopped == "finished"
    assert (result.plan.strategy.tp, result.plan.strategy.mbs) != (1, 2)
    thrown = [c for c in result.candidates if (c.strategy.tp, c.strategy.mbs) == (1, 2) and c.status != "unlawful"]
    assert thrown
    path = tmp_path / file_name(1, 1, 2, job.workload)
    expected = f"TP 1, CP 1, MBS 2, 4096 tokens: text_layer ran out of memory when it was profiled (file {path})"
    assert {(c.status, c.reason) for c in thrown} == {("infeasible", expected)}
    others = [c for c in result.candidates if c not in thrown]
    assert all("ran out of memory" not in c.reason for c in others)
    rows = candidate_rows(result.candidates)
    assert len(rows) == len(list_space(job))
    assert sum(row["reason"] == expected for row in rows) == len(thrown)


def test_the_best_of_the_rest_is_what_a_narrower_search_finds(profiled: Callable[..., Job]) -> None:
    job = profiled({(1, 1), (1, 2)})
    narrow = replace(job, search=SearchSpace(**(LIMITS | {"tp": (2,)})))
    wide, narrowed = search(job, num_workers=1), search(narrow, num_workers=1)
    assert wide.plan == narrowed.plan
    assert wide.lower_bound_ms == pytest.approx(narrowed.lower_bound_ms, rel=1e-3)  # either ends within its gap


def test_where_all_ran_out_nothing_fits(profiled: Callable[..., Job]) -> None:
    job = profiled({(1, 1), (1, 2), (2, 1), (2, 2)})
    with pytest.raises(NoFeasiblePlan, match=r"none of the \d+ lawful strategies fits; for .* ran out of memory"):
        search(job, num_workers=1)


def test_a_heavier_point_need_not_be_measured(profiled: Callable[..., Job]) -> None:
    """A profiler may stop at the first size that does not fit."""
    job = profiled({(1, 1)}, only={(2, 1), (2, 2)})
    assert search(job, num_workers=1).plan.strategy.tp == 2


def test_a_point_that_nobody_knows_still_ends_the_search(profiled: Callable[..., Job]) -> None:
    with pytest.raises(ProfileError, match="text_layer was profiled, but not at TP 1, CP 1, MBS 2"):
        search(profiled(set(), only={(1, 1), (2, 1), (2, 2)}), num_workers=1)


def test_what_was_not_profiled_is_not_offered_where_nothing_fits(profiled: Callable[..., Job]) -> None:
    """The way out of too little memory is looked for among strategies whose costs are known."""
    job = profiled(set(), only={(1, 1)}, memory_bytes=2e9, tp=(1,), mbs=(1,))
    with pytest.raises(NoFeasiblePlan, match="is closest") as told:
        search(job, num_workers=1)
    assert "which search leaves out" not in str(told.value)
    outside = [e.strategy for e in list_space(replace(job, search=SearchSpace())) if e.reason is None]
    with pytest.raises(ProfileError):
        build_problem(job, outside[-1])
