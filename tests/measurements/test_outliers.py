"""Rows that a smaller micro-batch contradicts: by hand, in published tables, and in the score."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.outliers import find_outliers
from mm_autoparallel.measurements.predict import Prediction
from mm_autoparallel.measurements.score import score_document, score_table

TABLES = Path(__file__).parents[2] / "examples" / "published_measurements"


@pytest.fixture(scope="module")
def pipeline() -> MeasuredCase:
    """PP 4, DP 8, a global batch of 512 and so 64 micro-batches of one sample or 32 of two."""
    cases, _ = read_table(TABLES / "vtrain.csv")
    case = next(case for case in cases if case.plan.strategy.pp == 4)
    plan = replace(case.plan, strategy=replace(case.plan.strategy, dp=8), global_batch_size=512)
    return MeasuredCase(**{**vars(case), "plan": plan})


def timed(case: MeasuredCase, row: int, mbs: int, measured_ms: float, vpp: int = 1) -> MeasuredCase:
    plan = replace(case.plan, strategy=replace(case.plan.strategy, mbs=mbs, vpp=vpp))
    return MeasuredCase(**{**vars(case), "row": row, "plan": plan, "measured_ms": measured_ms})


@pytest.mark.parametrize(
    ("vpp", "larger_ms", "outliers"),
    [
        # without the bubble the smaller takes 670 x 64 / 67 = 640 ms, the larger as long at 700 x 32 / 35
        (1, 699.9, ()),
        (1, 700.1, (7,)),
        # in two chunks the bubble is half as long: 655 x 64 / 65.5 = 640 ms, and 670 x 32 / 33.5
        (2, 669.9, ()),
        (2, 670.1, (7,)),
    ],
)
def test_the_bubble_is_taken_out(pipeline: MeasuredCase, vpp: int, larger_ms: float, outliers: tuple[int, ...]) -> None:
    smaller_ms = {1: 670.0, 2: 655.0}[vpp]
    cases = [timed(pipeline, 3, 1, smaller_ms, vpp), timed(pipeline, 7, 2, larger_ms, vpp)]
    assert find_outliers(cases) == find_outliers(cases[::-1]) == outliers


def test_other_runs_contradict_nothing(pipeline: MeasuredCase) -> None:
    slow = timed(pipeline, 1, 2, 9000.0)
    another_stack = MeasuredCase(**{**vars(timed(pipeline, 0, 1, 670.0)), "software": "another"})
    another_shape = timed(pipeline, 2, 1, 670.0, vpp=2)
    unmeasured = MeasuredCase(**{**vars(timed(pipeline, 3, 1, 1.0)), "measured_ms": None})
    repeated = timed(pipeline, 4, 2, 670.0)
    assert find_outliers([slow, another_stack, another_shape, unmeasured, repeated]) == ()


def test_runs_on_one_node_have_none_and_runs_on_many_have_ten() -> None:
    assert find_outliers(read_table(TABLES / "vtrain_single.csv")[0]) == ()
    assert find_outliers(read_table(TABLES / "vtrain.csv")[0]) == (8, 15, 29, 30, 33, 37, 41, 55, 61, 70)


def test_the_rest_is_scored_apart_too(pipeline: MeasuredCase) -> None:
    cases = [timed(pipeline, 0, 1, 670.0), timed(pipeline, 1, 2, 1400.0)]
    found = score_table(
        "t.csv",
        [(case, Prediction(700.0, (1.0, 1.0), (1.0,), ((1.0, 1.0),), True, "hand", False)) for case in cases],
        [],
    )
    assert found.time is not None
    assert found.time_without_outliers is not None
    assert found.time.mean_abs_fraction == pytest.approx((30 / 670 + 0.5) / 2)
    assert found.time_without_outliers.mean_abs_fraction == pytest.approx(30 / 670)
    document = score_document([found])["tables"][0]
    assert (document["strays"], document["time_without_strays"]["rows"]) == ([1], 1)
    assert score_table("t.csv", found.predicted[:1], []).time_without_outliers is None
