"""Why not another strategy: what a search of it alone finds, the law it breaks, or the memory that it lacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.planner.explain.why_not import explain_why_not, parse_wish
from mm_autoparallel.planner.search.planner import search

MakeJob = Callable[..., Job]


@pytest.fixture(scope="module")
def job(make_job: MakeJob) -> Job:
    return make_job(memory_bytes=12e9, cp=[1], mbs=[1, 2])


@pytest.fixture(scope="module")
def estimate(job: Job) -> Estimate:
    return search(job, num_workers=1).estimates[0]


def test_the_best_of_what_matches_is_what_a_search_of_it_finds(make_job: MakeJob, job: Job, estimate: Estimate) -> None:
    for wish, limits in (
        ("PP=4", {"pp": [4]}),
        ("pp=2, tp=2", {"pp": [2], "tp": [2]}),
        ("PP=2,MBS=2", {"pp": [2], "mbs": [2]}),
    ):
        alone = search(make_job(**({"memory_bytes": 12e9, "cp": [1], "mbs": [1, 2]} | limits)), num_workers=1)
        found = explain_why_not(job, estimate, parse_wish(wish), 60.0)
        assert found.estimate
        assert (found.status, found.outside) == ("solved", False)
        assert found.estimate.step_ms == pytest.approx(alone.estimates[0].step_ms, rel=2e-4)
        assert sum(found.counts.values()) == len(alone.candidates)
        assert found.counts["solved"] >= 1
        difference_ms = sum(cause.other_ms - cause.plan_ms for cause in found.causes)
        assert difference_ms == pytest.approx(found.estimate.step_ms - estimate.step_ms, abs=1e-6)


def test_the_law_that_it_breaks(job: Job, estimate: Estimate) -> None:
    found = explain_why_not(job, estimate, parse_wish("EP=2"), 10.0)
    assert (found.status, found.outside, found.estimate) == ("unlawful", True, None)
    assert found.reason == "EP 2 needs experts, and the model has none"
    assert (
        explain_why_not(job, estimate, parse_wish("TP=2,ETP=1"), 10.0).reason
        == "ETP 1 needs experts, and the model has none"
    )
    assert found.counts.keys() == {"unlawful"}


def test_shards_of_fewer_ranks_are_a_strategy_too(job: Job, estimate: Estimate) -> None:
    found = explain_why_not(job, estimate, parse_wish("PP=1,ZERO=3,SHARD=2"), 10.0)
    assert found.outside
    assert (found.strategy.pp, found.strategy.zero, found.strategy.shard_ranks) == (1, 3, 2)


def test_the_memory_that_it_lacks(make_job: MakeJob, job: Job, estimate: Estimate) -> None:
    tight = make_job(memory_bytes=5e9, cp=[1], mbs=[1, 2])
    found = explain_why_not(tight, estimate, parse_wish("PP=1,TP=1"), 10.0)
    assert (found.status, found.estimate) == ("infeasible", None)
    assert "GB over" in found.reason


def test_what_the_jobs_limits_leave_out_is_told_all_the_same(job: Job, estimate: Estimate) -> None:
    found = explain_why_not(job, estimate, parse_wish("PP=2,VPP=2,MBS=1"), 60.0)
    assert found.outside
    assert found.estimate
    assert found.estimate.plan.strategy.vpp == 2
    assert explain_why_not(job, estimate, parse_wish("CP=2,PP=2"), 60.0).outside


def test_sizes_that_make_no_cluster(job: Job, estimate: Estimate) -> None:
    with pytest.raises(JobError, match="4 is no multiple of 3"):
        explain_why_not(job, estimate, parse_wish("TP=3"), 10.0)


def test_more_chunks_than_layers(job: Job, estimate: Estimate) -> None:
    with pytest.raises(JobError, match="each of a stage's chunks holds a layer"):
        explain_why_not(job, estimate, parse_wish("VPP=99999999999"), 10.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("QP=3", "'QP=3' names no size of a strategy"),
        ("PP=8,TP", "'TP' names no size"),
        ("PP=x", "PP is 'x'; a whole number of at least 1 is expected"),
        ("MBS=0", "MBS is '0'; a whole number of at least 1"),
        ("PP=2,pp=4", "PP stands there twice"),
        ("", "'' names no size"),
        ("SHEDULE=gpipe", "SCHEDULE"),
    ],
)
def test_words_that_are_not_understood(text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        parse_wish(text)
