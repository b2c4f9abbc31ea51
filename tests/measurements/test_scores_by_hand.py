"""Scores of hand-made predictions against figures worked out on paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_autoparallel.measurements.case import MeasuredCase, Refused
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.predict import Prediction, is_row, predict
from mm_autoparallel.measurements.score import score, score_document, score_table
from mm_autoparallel.model.profiles.calibration import CalibrationRow, assume_calibration

TABLE = Path(__file__).parents[2] / "examples" / "published_measurements" / "korthikanti2022.csv"


@pytest.fixture(scope="module")
def example() -> MeasuredCase:
    return read_table(TABLE)[0][0]


def changed(case: MeasuredCase, **changes: object) -> MeasuredCase:
    return MeasuredCase(**{**vars(case), **changes})


def predicted(step_ms: float = 1.0, *peaks_bytes: float, fits: bool = True, calibrated_on: bool = False) -> Prediction:
    peaks = peaks_bytes or (1.0,)
    return Prediction(step_ms, (step_ms, step_ms), peaks, tuple((p, p) for p in peaks), fits, "hand", calibrated_on)


def test_errors_and_their_summary() -> None:
    # errors: +10 %, -20 %, 0, +2 %; their sizes in order 0, 2, 10, 20
    found = score([3, 4, 5, 6], [100.0, 200.0, 300.0, 400.0], [110.0, 160.0, 300.0, 408.0])
    assert found is not None
    assert (found.num_rows, found.num_values, found.worst_row, found.pairs_ordered_fraction) == (4, 4, 4, 1.0)
    assert found.mean_abs_fraction == pytest.approx(0.08)
    assert found.bias_fraction == pytest.approx(-0.02)
    assert found.median_abs_fraction == pytest.approx(0.06)
    # place 0.95 x 3 = 2.85, between the third and the fourth
    assert found.p95_abs_fraction == pytest.approx(0.10 + 0.85 * 0.10)
    assert found.worst_fraction == pytest.approx(-0.2)


def test_pairs_that_hardly_differ_have_no_order() -> None:
    # 100 and 101 differ by 1 %: no pair; 100-110 wrong, 101-110 wrong, the three with 200 right
    found = score([0, 1, 2, 3], [100.0, 101.0, 110.0, 200.0], [107.0, 106.0, 105.0, 300.0])
    assert found is not None
    assert found.pairs_ordered_fraction == pytest.approx(3 / 5)


def test_equal_predictions_of_unequal_measurements_are_out_of_order() -> None:
    found = score([0, 1], [100.0, 150.0], [120.0, 120.0])
    assert found is not None
    assert found.pairs_ordered_fraction == 0.0


@pytest.mark.parametrize("measured", [[100.0], [100.0, 101.5]])
def test_without_a_pair_there_is_no_order(measured: list[float]) -> None:
    found = score(list(range(len(measured))), measured, measured)
    assert found is not None
    assert found.pairs_ordered_fraction is None


def test_nothing_measured_is_no_score(example: MeasuredCase) -> None:
    assert score([], [], []) is None
    table = score_table("t.csv", [(changed(example, measured_ms=None), predicted())], [Refused(1, "because")])
    assert (table.time, table.memory, table.outcomes, table.num_rows) == (None, None, None, 2)


def test_rows_that_were_calibrated_on_are_counted_and_left_out(example: MeasuredCase) -> None:
    fitted = changed(example, row=0, measured_ms=100.0)
    held_out = changed(example, row=1, measured_ms=100.0)
    found = score_table("t.csv", [(fitted, predicted(100.0, calibrated_on=True)), (held_out, predicted(130.0))], [])
    assert found.time is not None
    assert (found.time.num_rows, found.time.num_calibrated_on) == (1, 1)
    assert found.time.mean_abs_fraction == pytest.approx(0.3)
    document = score_document([found])["tables"][0]
    assert document["calibrated_on"] == 1
    assert [part["calibrated_on"] for part in document["predictions"]] == [True, False]


def test_memory_is_of_each_measured_stage_or_of_the_fullest(example: MeasuredCase) -> None:
    of_stages = changed(example, row=0, measured_bytes={0: 100.0, 2: 50.0})
    of_fullest = changed(example, row=1, measured_bytes=200.0)
    found = score_table(
        "t.csv", [(of_stages, predicted(1.0, 110.0, 999.0, 45.0)), (of_fullest, predicted(1.0, 10.0, 220.0, 30.0))], []
    )
    assert found.memory is not None
    assert (found.memory.num_rows, found.memory.num_values) == (2, 3)
    assert found.memory.mean_abs_fraction == pytest.approx(0.1)
    assert found.memory.bias_fraction == pytest.approx(0.1 / 3)
    first, second = score_document([found])["tables"][0]["predictions"]
    assert (first["measured_bytes"], first["predicted_bytes"]) == (100.0, 110.0)
    assert [part["stage"] for part in first["stages"]] == [0, 2]
    assert (second["measured_bytes"], second["predicted_bytes"], second["stages"]) == (200.0, 220.0, [])


def test_rows_that_leave_something_unstated_are_scored_apart_too(example: MeasuredCase) -> None:
    stated = changed(example, row=0, measured_bytes=100.0)
    unstated = changed(example, row=1, measured_bytes=100.0, unstated=("attention backend",))
    found = score_table("t.csv", [(stated, predicted(1.0, 101.0)), (unstated, predicted(1.0, 150.0))], [])
    assert found.memory is not None
    assert found.memory.mean_abs_fraction == pytest.approx(0.255)
    assert found.memory_stated is not None
    assert found.memory_stated.mean_abs_fraction == pytest.approx(0.01)


def test_outcomes(example: MeasuredCase) -> None:
    outcomes = [(True, False), (True, True), (False, True), (False, False), (None, False)]
    table = score_table(
        "t.csv", [(changed(example, out_of_memory=oom), predicted(fits=fits)) for oom, fits in outcomes], []
    )
    document = score_document([table])["tables"][0]
    assert document["oom"] == {"right": 2, "missed": 1, "false": 1}


def test_the_same_row_is_told_by_what_it_says() -> None:
    row = {"model": "gpt", "tp": "8", "value": "1.42", "source": "a paper", "derived_s": "1"}
    assert is_row(row, {"value": "1.42", "tp": "8", "model": "gpt", "source": "elsewhere", "derived_s": "2"})
    assert not is_row(row, row | {"value": "1.43"})
    assert not is_row(row, row | {"tp": "4"})
    assert not is_row(row, row | {"vpp": "2"})


def test_a_fitted_run_is_known_in_any_table_by_what_was_run_and_measured(example: MeasuredCase) -> None:
    base = assume_calibration("a100-80g")
    row = {
        "table": "mine.csv",
        "row": 7,
        "content": dict(example.content),
        "measured_ms": 1420.0,
        "error_fraction": 0.0,
    }
    fitted = base.model_copy(update={"fitted": (CalibrationRow.model_validate(row | {"error_fraction": 0.0}),)})
    in_other_words = changed(example, table="theirs.csv", content={"somebody": "else's words"})
    assert predict(example, fitted).calibrated_on
    assert predict(in_other_words, fitted).calibrated_on
    assert not predict(changed(in_other_words, measured_ms=1421.0), fitted).calibrated_on
    assert not predict(example, base).calibrated_on
