"""`place` of decoders with encoders against every order of small problems. A failing one by itself:
`python tests/oracle/compare_encoders.py --problems 1 --seed SEED`, with `--chunks 2` where its stages have two, and
`--first-stage 1` where encoders meet the second, `--pieces` where passes are cut."""

from __future__ import annotations

import math

import compare_encoders
import encoder_orders
import pytest


@pytest.mark.parametrize(
    ("first", "number", "chunks", "first_stage"),
    [
        (0, 30, 1, 0),
        (0, 8, 2, 0),
        (0, 12, 1, 1),
        pytest.param(1_000, 500, 1, 0, marks=pytest.mark.nightly),
        pytest.param(1_000, 500, 2, 0, marks=pytest.mark.nightly),
        pytest.param(1_000, 300, 1, 1, marks=pytest.mark.nightly),
    ],
    ids=["some", "some in chunks", "some behind others", "many", "many in chunks", "many behind others"],
)
def test_place_against_every_order(first: int, number: int, chunks: int, first_stage: int) -> None:
    seeds = range(first, first + number)
    found = [(seed, compare_encoders.compare(encoder_orders.problem(seed, chunks, first_stage))) for seed in seeds]
    assert not [(seed, outcome.wrong) for seed, outcome in found if outcome.wrong]
    met = [math.isclose(outcome.result.step_ms, outcome.best_ms, rel_tol=1e-9) for _, outcome in found]
    proven = [outcome.result.status == "optimal" for _, outcome in found]
    assert sum(met) >= 0.95 * number, "the best order is missed too often"
    assert sum(proven) >= 0.95 * number, "the best order is proven too seldom"


@pytest.mark.parametrize(
    ("first", "number"), [(0, 8), pytest.param(1_000, 150, marks=pytest.mark.nightly)], ids=["some", "many"]
)
def test_passes_in_pieces_against_every_order(first: int, number: int) -> None:
    seeds = range(first, first + number)
    found = [(seed, compare_encoders.compare(encoder_orders.in_pieces(seed))) for seed in seeds]
    assert not [(seed, outcome.wrong) for seed, outcome in found if outcome.wrong]
    met = [math.isclose(outcome.result.step_ms, outcome.best_ms, rel_tol=1e-9) for _, outcome in found]
    assert sum(met) >= 0.95 * number


def test_the_oracle_counts_by_hand() -> None:
    """One stage, one micro-batch: encoder 2, way 1, decoder 3 and 5, way 1, encoder 4. Another encoder on the same
    device runs before and after it."""
    document = encoder_orders.problem(0) | {
        "num_stages": 1,
        "num_microbatches": 1,
        "stage_tail_ms": 0.0,
        "memory_limit_bytes": 100.0,
        "chain": [{"name": "text", "modality": "text", "count": 1, "forward_ms": 3.0, "backward_ms": 5.0}],
        "encoders": [{"name": "a", "forward_ms": 2.0, "backward_ms": 4.0, "feed_ms": 1.0}],
    }
    assert encoder_orders.best_step(encoder_orders.work_of(document, [1]), math.inf) == 16.0
    document["encoders"].append({"name": "b", "forward_ms": 2.0, "backward_ms": 4.0, "feed_ms": 1.0})
    assert encoder_orders.best_step(encoder_orders.work_of(document, [1]), math.inf) == 2 * 6 + 8 + 2
