"""Python collects no garbage while samples are dealt, and goes on as it was told to."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from dealt import COST, draw_samples, plan_document

from mm_autoparallel import BatchBalancer, PlanError


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """What was collected, of which every allocation reminds Python."""
    noted: list[str] = []

    def note(phase: str, _: object) -> None:
        noted.append(phase)

    before, was_enabled = gc.get_threshold(), gc.isenabled()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    yield noted
    gc.callbacks.remove(note)
    gc.set_threshold(*before)
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_none_while_samples_are_dealt(collections: list[str], is_enabled: bool) -> None:
    balancer = BatchBalancer(plan_document([2, 0], [1, 3]), micro_batches=4, token_cap=40_000, cost=COST)
    samples = draw_samples(np.random.default_rng(0), 64)
    gc.enable()
    number = []
    for assign in (
        balancer.assign,
        lambda of: BatchBalancer.assign.__wrapped__(balancer, of),
    ):  # the second: no waiting
        assign(samples)  # compiles
        collections.clear()
        assign(samples)
        number.append(len(collections))
    assert number[0] < 0.2 * number[1]  # none but those on the way in and out
    (gc.enable if is_enabled else gc.disable)()
    balancer.assign(samples)
    assert gc.isenabled() == is_enabled


def test_a_refusal_leaves_it_as_it_was(collections: list[str]) -> None:
    gc.enable()
    balancer = BatchBalancer(plan_document([2, 0], [1, 3]), micro_batches=4, token_cap=10, cost=COST)
    with pytest.raises(PlanError):
        balancer.assign(draw_samples(np.random.default_rng(0), 64))
    assert gc.isenabled()
