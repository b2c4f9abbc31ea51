"""What a page draws of a layout and of drawn batches: ranks and pairs by hand, and bars that hold every batch."""

from __future__ import annotations

import numpy as np
import pytest
from two_modules import APART, PHASES, apart, make_job

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.over_batches import StepOverBatches
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.reports.page.pictures import map_layout, spread_steps

JOB = make_job()


def test_an_encoder_on_ranks_of_its_own() -> None:
    """Four replicas of the encoder, behind a decoder of two stages of two ranks, share each of its micro-batches."""
    found = map_layout(evaluate(JOB, APART), JOB.model)
    assert found is not None
    assert found.words == "disaggregated"
    assert found.encoder.replicas == (("4",), ("5",), ("6",), ("7",))
    assert found.decoder.replicas == (("0–1", "2–3"),)
    assert (found.encoder.first_stage, found.decoder.first_stage) == (0, 1)
    assert (found.encoder.num_layers, found.decoder.num_layers) == (2, 4)
    assert found.encoder.sizes == {"PP": 1, "TP": 1, "CP": 1, "DP": 4, "MBS": 1}
    assert found.pairs == ((0, 0), (1, 0), (2, 0), (3, 0))
    assert found.per == "micro_batch"
    # four samples of 256 patches, 64 of which make a token of 512 numbers of two bytes
    tokens = JOB.workload.image_tokens_per_sample
    assert found.size_bytes == 4 * tokens * 512 * 2


def test_an_encoder_in_phases_is_on_the_decoders_ranks() -> None:
    estimate = evaluate(JOB, PHASES)
    found = map_layout(estimate, JOB.model)
    assert found is not None
    assert found.words == "colocated in phases"
    assert found.encoder.replicas == tuple((str(rank),) for rank in range(8))
    assert found.decoder.replicas == (("0–1", "4–5"), ("2–3", "6–7"))
    assert found.pairs == tuple((rank, rank // 4) for rank in range(8))
    assert found.per == "step"
    assert found.size_bytes == 12 * JOB.workload.image_tokens_per_sample * 512 * 2
    assert found.forward_ms == estimate.provenance["crossing"]["forward_ms"] > 0


def test_one_encoder_for_several_decoders() -> None:
    none = dict.fromkeys(("vision", "text"), (0, 0))
    one = Strategy(2, 1, 4, 2, arrangement=apart(1, 1, 1, 8))
    found = map_layout(evaluate(JOB, Plan(one, {"vision": (2, 0), "text": (0, 4)}, none, 24)), JOB.model)
    assert found is not None
    assert found.pairs == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_the_chain_has_no_layout() -> None:
    chain = Plan(Strategy(1, 1, 4, 2), {"vision": (2,), "text": (4,)}, dict.fromkeys(("vision", "text"), (0,)), 24)
    assert map_layout(evaluate(JOB, chain), JOB.model) is None


def test_every_drawn_batch_is_in_a_bar() -> None:
    steps_ms = np.sort(np.random.default_rng(1).lognormal(5.0, 0.2, 256))
    over = StepOverBatches(150.0, 2.0, 200.0, 230.0, 220.0, 3.0, 140.0, tuple(steps_ms.tolist()))
    found = spread_steps(over)
    assert found is not None
    assert sum(found.counts) == 256 == over.batches
    assert (found.low_ms, found.high_ms) == pytest.approx((steps_ms[0], steps_ms[-1]))
    assert found.marks_ms == {"at_mean": 140.0, "mean": 150.0, "p95": 200.0, "p99": 230.0, "cvar95": 220.0}
    assert "steps_ms" not in over.document()
    assert spread_steps(None) is None


def test_equal_steps_are_drawn_too() -> None:
    """Steps of equal samples, which rounding alone parts."""
    steps = tuple(100.0 + 1e-13 * at for at in range(50))
    found = spread_steps(StepOverBatches(100.0, 0.0, 100.0, 100.0, 100.0, 0.0, 100.0, steps))
    assert found is not None
    assert sum(found.counts) == 50 == sum(sorted(found.counts)[-2:])
