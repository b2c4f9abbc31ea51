"""torchtitan's published rows: the facts that are read of them, and how well nothing fitted predicts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.predict import predict_all
from mm_autoparallel.model.job.stacks import facts_of

Published = Callable[[str], list[dict[str, str]]]
WriteTable = Callable[..., Path]


@pytest.fixture
def cases(published: Published, write_table: WriteTable) -> dict[int, MeasuredCase]:
    found, _ = read_table(write_table(published("torchtitan")))
    return {case.row: case for case in found}


def test_what_a_row_says_becomes_facts_of_its_job(cases: dict[int, MeasuredCase]) -> None:
    plain, eight, long, spread, split = (cases[row].job.workload for row in (0, 2, 6, 10, 13))
    facts = facts_of("torchtitan", plain.facts)
    assert (facts.norms, facts.elementwise, facts.fused_casts) == ("operators", "operators", False)
    assert plain.recompute_operators == ("second_products",)
    facts = facts_of("torchtitan", eight.facts)
    assert (facts.norms, facts.elementwise, facts.fused_casts) == ("fused", "fused", True)
    assert (plain.precision, eight.precision) == ("bf16", "fp8_current")
    assert (long.context_parallel, long.recompute_operators) == ("all_gather", ())
    assert cases[6].plan.recompute == cases[6].plan.layers
    assert (spread.known_facts.tp_overlap, split.known_facts.tp_overlap) == ("", "asynchronous")
    assert {case.job.cluster.device.name for case in cases.values()} == {"h100-96g-500w", "h200-141g"}


def test_nothing_fitted_predicts_them(cases: dict[int, MeasuredCase]) -> None:
    predicted, refused = predict_all(list(cases.values()))
    assert not refused
    errors = {case.row: found.step_ms / (case.measured_ms or 0) - 1 for case, found in predicted}
    assert not any(found.calibrated_on for _, found in predicted)
    assert sum(map(abs, errors.values())) / len(errors) <= 0.07
    assert max(map(abs, errors.values())) <= 0.13
    # what a compiler, FP8, asynchronous tensor parallelism and eight context parallel ranks are worth
    steps = {case.row: found.step_ms for case, found in predicted}
    measured = {row: case.measured_ms or 0 for row, case in cases.items()}
    for slow, fast in ((0, 1), (1, 2), (7, 8), (8, 9), (10, 11), (12, 13), (6, 3)):
        assert steps[slow] / steps[fast] == pytest.approx(measured[slow] / measured[fast], rel=0.07)
