"""`verify` against the oracle where the order is to be found: true bounds are confirmed, false ones never."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import compare
import free_orders
import generate_free
import mutate_free
import pytest
from semantics import Document

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.certify.certificate import Certificate, Unconfirmed
from mm_autoparallel.pipeline.certify.confirm_orders import confirm_orders
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.step import simulate

LIMIT_S = 20.0
TOO_HIGH = 1e-3


def solved(first: int) -> Iterator[tuple[str, Document, Problem, free_orders.Best]]:
    """Seeded problems with a best step above nothing."""
    for seed in range(first, first + 100_000):
        for mood in generate_free.MOODS:
            document = generate_free.problem(f"{mood}-{seed}")
            try:
                best = free_orders.best_free(document)
            except free_orders.TooLarge:
                continue
            if best.placement is not None and best.step_ms > 0.0:
                yield f"{mood}-{seed}", document, compare.read(document), best


def placement_of(placement: Document, order: list[list[str]] | list[str]) -> Placement:
    return Placement(
        tuple(tuple(row) for row in placement["layers"]),
        tuple(tuple(tuple(counts) for counts in row) for row in placement["modes"]),
        tuple(word if isinstance(word, str) else " ".join(word) for word in order),
    )


def claim(problem: Problem, placement: Placement, bound_ms: float) -> Certificate:
    step_ms = simulate(problem, placement).step_ms
    return Certificate(problem, placement, step_ms, bound_ms, max(0.0, 1.0 - bound_ms / step_ms), "orders")


PARTS = [(0, 20), *(pytest.param(first, 300, marks=pytest.mark.nightly) for first in range(20, 5020, 500))]


@pytest.mark.parametrize(("first", "number"), PARTS)
def test_false_claims_are_never_confirmed(first: int, number: int) -> None:
    """Of the best placement the slowest order, and a bound between its step and the best of all."""
    answers: Counter[str] = Counter()
    for name, document, problem, best in solved(first):
        worse = placement_of(best.placement, mutate_free.one_by_one(document))
        bound_ms = best.step_ms * (1.0 + TOO_HIGH)
        if simulate(problem, worse).step_ms <= bound_ms:
            continue
        with pytest.raises(PlanError) as refused:
            verify(claim(problem, worse, bound_ms), LIMIT_S)
        told = str(refused.value)
        assert "but another placement takes" in told or "bound not confirmed" in told, (name, told)
        answers["open" if "bound not confirmed" in told else "refuted"] += 1
        if answers.total() == number:
            break
    assert answers["refuted"] >= 0.95 * number, answers


@pytest.mark.parametrize(("first", "number"), PARTS)
def test_best_steps_are_confirmed(first: int, number: int) -> None:
    for name, document, problem, best in islice(solved(first), number):
        found = verify(claim(problem, placement_of(best.placement, best.placement["order"]), best.step_ms), LIMIT_S)
        assert found.method == "orders", name
        assert found.lower_bound_ms == best.step_ms, (name, document)


def test_what_is_below_a_bound_fits_and_is_below_it() -> None:
    for name, _, problem, best in islice(solved(200), 60):
        for factor in (1.0 + 1e-5, 1.2):
            bound_ms = best.step_ms * factor
            try:
                below = confirm_orders(problem, bound_ms, lambda: False)
            except Unconfirmed:
                continue
            assert below is not None, name
            timeline = simulate(problem, below)
            assert best.step_ms * (1.0 - 1e-9) <= timeline.step_ms < bound_ms, name
            assert not find_misfits(problem, timeline.peak_memory_bytes, timeline.peak_host_bytes), name
            assert math.isfinite(timeline.step_ms)


def test_nothing_is_found_where_nothing_fits() -> None:
    checked = 0
    for seed in range(100):
        for mood in generate_free.MOODS:
            document = generate_free.problem(f"{mood}-{seed}")
            try:
                impossible = free_orders.best_free(document).placement is None
                problem = compare.read(document)
            except (free_orders.TooLarge, PlanError):
                continue
            if impossible:
                assert confirm_orders(problem, 1e5, lambda: False) is None, f"{mood}-{seed}"
                checked += 1
    assert checked > 20
