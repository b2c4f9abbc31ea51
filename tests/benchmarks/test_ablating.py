"""ablate_costs.py: each term that it takes out changes something, and nothing else is changed."""

from __future__ import annotations

import dataclasses

import pytest
from ablate_costs import (
    LEAST_OF_MODERN,
    MODERN_TABLES,
    MODERN_TERMS,
    PUBLISHED,
    TABLES,
    TERMS,
    Term,
    choose_terms,
    describe,
    judge,
    list_effects,
    predict_without,
)

from mm_autoparallel.errors import JobError
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table

HOSTS = "hosts that launch layers"


@pytest.fixture(scope="module")
def cases() -> list[MeasuredCase]:
    """A few rows of each table."""
    rows = (read_table(PUBLISHED / f"{table}.csv")[0] for table in TABLES)
    return [case for table in rows for case in (*table[:2], *table[len(table) // 2 :][:3], table[-1])]


@pytest.mark.nightly
def test_every_term_moves_some_published_step(cases: list[MeasuredCase]) -> None:
    effects = list_effects(cases, TERMS)
    assert [effect.name for effect in effects] == [term.name for term in TERMS]
    assert effects[0].moved == 0
    assert [effect.name for effect in effects[1:] if not effect.moved] == [HOSTS]


@pytest.mark.nightly
def test_every_modern_term_moves_some_published_step() -> None:
    cases = [case for table in MODERN_TABLES for case in read_table(PUBLISHED / f"{table}.csv")[0]]
    effects = list_effects(cases, MODERN_TERMS, LEAST_OF_MODERN)
    assert [effect.name for effect in effects if not effect.moved] == ["nothing"]


def test_a_modern_term_is_taken_out_of_the_job() -> None:
    cases = read_table(PUBLISHED / "megatron_bridge_performance.csv")[0][1:3]
    found = list_effects(cases, choose_terms(["power (all of the clock)", "dropped tokens"], MODERN_TERMS))
    assert [effect.moved for effect in found] == [0, 2, 0]
    assert found[1].bias_fraction < found[0].bias_fraction


def test_hosts_decide_what_is_too_small_for_their_device() -> None:
    cases = read_table(PUBLISHED / "multimodal_published.csv")[0]
    (_, without) = list_effects(cases, choose_terms([HOSTS]))
    assert without.moved > 0


def test_what_is_taken_out_is_the_term_alone(cases: list[MeasuredCase]) -> None:
    some = cases[:8]
    whole = predict_without(some, TERMS[0])
    nothing = Term("nothing again", facts={}, figures={})
    assert judge("again", whole, predict_without(some, nothing)) == dataclasses.replace(
        judge("nothing", whole, whole), name="again"
    )
    job = some[0].job
    assert TERMS[0].job_of(job) is job
    changed = next(term for term in TERMS if term.name == "gathered logits").job_of(job)
    assert changed.workload.facts
    assert not changed.workload.facts.gathered_logits
    assert changed.workload.model_copy(update={"facts": job.workload.facts}) == job.workload


def test_an_unknown_term_is_refused() -> None:
    with pytest.raises(JobError, match=r"'wave of tiles' is no term \(did you mean"):
        choose_terms(["wave of tiles"])


def test_a_line_a_term(cases: list[MeasuredCase]) -> None:
    lines = describe(list_effects(cases[:6], choose_terms(["scale of ranks"])), 6)
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| nothing", "| scale of ranks"]
