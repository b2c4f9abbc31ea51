"""unequal_batches.py: a short run of it on four processes takes as many steps as it has batches, none faster than its
sleeps allow."""

from __future__ import annotations

import pytest
from unequal_batches import describe, draw, run

from mm_autoparallel.pipeline.simulate.unequal import prepare


def test_draws_are_uneven_and_the_same_each_time() -> None:
    factors = draw(50, 8)
    assert factors.tolist() == draw(50, 8).tolist()
    ready = prepare(*describe(8, 1.0))
    steps = ready.play(factors)
    assert steps.mean() > ready.play(factors.mean(axis=0, keepdims=True))[0] * 1.05
    assert steps.max() > 1.2 * steps.min()


@pytest.mark.nightly
def test_processes_sleep_as_long_as_is_predicted_at_least() -> None:
    pytest.importorskip("torch")
    predicted, measured = run(draw(2, 4), 1.0)
    assert len(measured) == len(predicted) == 2
    assert all(taken >= told * 0.999 for taken, told in zip(measured, predicted, strict=True))
