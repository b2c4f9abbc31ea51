"""Decisions among hand-made layouts against regrets worked out on paper."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.measurements.breakdown import find_biases, find_chances, find_coverage
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.decisions import Decision, decide, price_ms, score_decisions
from mm_autoparallel.measurements.predict import UNCALIBRATED, Prediction
from mm_autoparallel.measurements.score import score_all, score_document, score_table
from mm_autoparallel.model.job.job import USUAL_FAILURE_PRICE

TABLE = Path(__file__).parents[2] / "examples" / "published_measurements" / "vtrain.csv"


@pytest.fixture(scope="module")
def cases() -> list[MeasuredCase]:
    """Six layouts of one job."""
    return [case for case in read_table(TABLE)[0] if "39.1B TP8 DP16 PP4" in case.name]


def changed(case: MeasuredCase, **changes: object) -> MeasuredCase:
    return MeasuredCase(**{**vars(case), **changes})


def predicted(step_ms: float, fits: bool = True, chance: float | None = None) -> Prediction:
    return Prediction(step_ms, (0.9 * step_ms, 1.1 * step_ms), (1.0,), ((1.0, 1.0),), fits, "hand", False, chance)


def only(cases: list[MeasuredCase], measured: list[float | None], found: list[Prediction]) -> Decision:
    """The one decision among the first of `cases`; None was measured to run out of memory."""
    rows = [
        changed(case, row=row, measured_ms=step_ms, out_of_memory=step_ms is None)
        for row, (case, step_ms) in enumerate(zip(cases, measured, strict=False))
    ]
    (decision,) = decide(list(zip(rows, found, strict=True)))
    return decision


def test_regret_is_the_pick_over_the_best(cases: list[MeasuredCase]) -> None:
    steps = [predicted(step_ms) for step_ms in (40.0, 10.0, 20.0, 30.0)]
    found = only(cases, [100.0, 120.0, 110.0, 130.0], steps)
    assert found.pick is not None
    assert (found.pick.rows, found.best.rows, found.pick_failed, found.exact) == ((1,), (0,), False, False)
    assert found.regret_fraction == found.ran_regret_fraction == pytest.approx(0.2)
    assert found.three_regret_fraction == pytest.approx(0.1)
    assert found.subset_regret_fraction == pytest.approx(0.2)  # fives of four are all of them


def test_a_pick_out_of_memory_is_a_failure_and_the_next_is_taken(cases: list[MeasuredCase]) -> None:
    steps = [predicted(step_ms) for step_ms in (10.0, 20.0, 30.0, 40.0, 50.0)]
    found = only(cases, [None, 110.0, 100.0, 120.0, 130.0], steps)
    assert (found.pick_failed, found.num_failed_picks, found.num_failed, found.num_layouts) == (True, 1, 1, 4)
    assert found.regret_fraction == pytest.approx(0.1)
    assert not found.exact


def test_what_does_not_fit_is_not_picked(cases: list[MeasuredCase]) -> None:
    steps = [predicted(10.0, fits=False), predicted(20.0), predicted(30.0), predicted(40.0)]
    found = only(cases, [100.0, 150.0, 120.0, 130.0], steps)
    assert found.regret_fraction == pytest.approx(0.5)
    assert found.ran_regret_fraction == 0.0
    none_fits = only(cases, [100.0, 150.0, 120.0, 130.0], [replace(step, fits=False) for step in steps])
    assert (none_fits.pick, none_fits.pick_failed, none_fits.regret_fraction) == (None, True, 0.0)


def test_a_failed_start_has_its_price(cases: list[MeasuredCase]) -> None:
    assert price_ms(predicted(100.0)) == 100.0
    assert price_ms(predicted(100.0, chance=0.5)) == pytest.approx(100 * (1 + USUAL_FAILURE_PRICE))
    assert price_ms(predicted(100.0, chance=1.0)) == price_ms(predicted(100.0, fits=False)) == math.inf
    steps = [predicted(100.0, chance=0.5), predicted(105.0), predicted(120.0), predicted(130.0)]
    found = only(cases, [None, 100.0, 101.0, 102.0, 103.0], [*steps, predicted(140.0)])
    assert (found.pick_failed, found.exact) == (False, True)


def test_repeats_of_a_layout_count_once_by_their_fastest(cases: list[MeasuredCase]) -> None:
    rows = [(118.0, 10.0), (110.0, 20.0), (120.0, 30.0), (130.0, 40.0)]
    pairs = [
        (changed(case, row=row, measured_ms=measured), predicted(step_ms))
        for row, (case, (measured, step_ms)) in enumerate(zip(cases, rows, strict=False))
    ]
    again = (changed(cases[0], row=4, measured_ms=115.0), predicted(10.0))
    (found,) = decide([*pairs, again])
    assert (found.num_rows, found.num_layouts) == (5, 4)
    assert found.pick is not None
    assert (found.pick.rows, found.pick.measured_ms) == ((0, 4), 115.0)
    assert found.regret_fraction == pytest.approx(115 / 110 - 1)
    assert decide(pairs[:3]) == ()


def test_runs_of_several_releases_count_by_their_median(cases: list[MeasuredCase]) -> None:
    rows = [(118.0, 10.0), (110.0, 20.0), (120.0, 30.0), (130.0, 40.0)]
    pairs = [
        (changed(case, row=row, measured_ms=measured, release="1"), predicted(step_ms))
        for row, (case, (measured, step_ms)) in enumerate(zip(cases, rows, strict=False))
    ]
    later = [(release, 4 + row, took) for row, (release, took) in enumerate([("1", 125.0), ("2", 112.0), ("3", 113.0)])]
    again = [
        (changed(cases[0], row=row, measured_ms=took, release=release), predicted(10.0)) for release, row, took in later
    ]
    (found,) = decide([*pairs, *again])
    assert found.pick is not None
    assert found.pick.measured_ms == 113.0


def test_a_layout_that_a_calibration_was_fitted_to_is_no_choice(cases: list[MeasuredCase]) -> None:
    rows = [(100.0, 10.0), (110.0, 20.0), (120.0, 30.0), (130.0, 40.0), (140.0, 50.0)]
    pairs = [
        (changed(case, row=row, measured_ms=measured), predicted(step_ms))
        for row, (case, (measured, step_ms)) in enumerate(zip(cases, rows, strict=False))
    ]
    fitted = [(pairs[0][0], replace(pairs[0][1], calibrated_on=True)), *pairs[1:]]
    (found,) = decide(fitted)
    assert (found.num_rows, found.num_layouts, found.best.measured_ms) == (4, 4, 110.0)
    again = (changed(cases[0], row=5, measured_ms=105.0), predicted(10.0))
    (found,) = decide([*fitted, again])  # one of its runs was not: it is, and lasts what its runs took
    assert (found.num_rows, found.num_layouts, found.best.measured_ms) == (5, 5, 100.0)


def test_kernels_and_software_are_no_choice_and_sequence_parallelism_is(cases: list[MeasuredCase]) -> None:
    pairs = [(case, predicted(10.0 + index)) for index, case in enumerate(cases)]
    (found,) = decide(pairs)
    assert found.num_layouts == len(cases) == 6
    others = [(changed(case, kernels="others"), step) for case, step in pairs[:2]]
    assert [decision.num_layouts for decision in decide([*pairs[2:], *others])] == [4]
    job = cases[0].job
    with_parts = replace(job, workload=job.workload.model_copy(update={"sequence_parallel": True}))
    (found,) = decide([*pairs, (changed(cases[0], job=with_parts), predicted(9.0))])
    assert found.num_layouts == 7


def test_random_fives_are_the_same_every_time(cases: list[MeasuredCase]) -> None:
    # six layouts, the fastest predicted of which is 30 % slower than the best: a five has it 5 times of 6, and 4 of 5
    # such fives have the best too; else the second, 10 % slower
    measured = [130.0, 100.0, 110.0, 150.0, 160.0, 170.0]
    steps = [predicted(10.0 + index) for index in range(6)]
    found = only(cases, list(measured), steps)
    expected = (4 * 0.3 + (130 / 110 - 1) + 0.0) / 6
    assert found.subset_regret_fraction == pytest.approx(expected, abs=0.02)
    assert found.subset_regret_fraction == only(cases, list(measured), steps).subset_regret_fraction


def test_decisions_together(cases: list[MeasuredCase]) -> None:
    steps = [predicted(step_ms) for step_ms in (40.0, 10.0, 20.0, 30.0)]
    one = only(cases, [100.0, 120.0, 110.0, 130.0], steps)
    other = only(cases, [100.0, None, 110.0, 130.0, 140.0], [*steps, predicted(5.0, fits=False)])
    found = score_decisions([one, other])
    assert found is not None
    assert (found.num_groups, found.num_rows, found.num_failed, found.exact_fraction) == (2, 9, 1, 0.0)
    assert found.mean_fraction == pytest.approx((0.2 + 0.1) / 2)
    assert (found.worst_fraction, found.ran_worst_fraction) == pytest.approx((0.2, 0.4))
    assert score_decisions([]) is None


def test_tables_together_choose_within_each(cases: list[MeasuredCase]) -> None:
    steps = [predicted(step_ms) for step_ms in (40.0, 10.0, 20.0, 30.0)]
    rows = [changed(case, row=row, measured_ms=100.0 + row) for row, case in enumerate(cases[:4])]
    pairs = list(zip(rows, steps, strict=True))
    fitted = (rows[0], replace(steps[0], calibrated_on=True))
    assumed = [(case, replace(step, calibration=UNCALIBRATED)) for case, step in pairs]
    one = score_table("one.csv", pairs, [], assumed)
    other = score_table("other.csv", [fitted, *pairs[1:]], [], assumed)
    assert one.calibrated is not None
    assert len(one.calibrated.decisions) == 1
    assert score_table("assumed.csv", assumed, []).calibrated is None
    found = score_all([one, other])
    calibrated, uncalibrated = found["calibrated"], found["uncalibrated"]
    assert calibrated is not None
    assert uncalibrated is not None
    # of the other table three layouts are left, which are no choice
    assert (len(uncalibrated.decisions), len(calibrated.decisions)) == (2, 1)
    assert calibrated.time is not None
    assert (calibrated.time.num_rows, calibrated.time.num_calibrated_on, calibrated.time.worst_row) == (7, 1, None)
    document = score_document([one, other])
    assert next(iter(document)) == "schema"
    assert document["decisions"]["uncalibrated"]["groups"] == 2
    assert document["all"]["calibrated"]["time"]["worst"]["row"] is None
    assert [len(table["uncalibrated"]["decisions"]["each"]) for table in document["tables"]] == [1, 1]


def test_intervals_biases_and_chances(cases: list[MeasuredCase]) -> None:
    pairs = [
        (changed(cases[0], measured_ms=100.0, out_of_memory=False), predicted(105.0, chance=0.04)),
        (changed(cases[1], measured_ms=100.0, out_of_memory=False), predicted(80.0, chance=0.08)),
        (changed(cases[2], measured_ms=None, out_of_memory=True), predicted(80.0, chance=1.0)),
    ]
    coverage = find_coverage(pairs)
    assert coverage is not None
    assert (coverage.num_rows, coverage.covered_fraction) == (2, 0.5)
    assert coverage.half_width_fraction == pytest.approx(0.1)
    (bias,) = find_biases(pairs)["TP"].values()
    assert (bias.num_rows, bias.bias_fraction, bias.mean_abs_fraction) == pytest.approx((2, -0.075, 0.125))
    bins = find_chances(pairs)
    assert [found.num_rows for found in bins] == [2, *[0] * 8, 1]
    assert (bins[0].told_fraction, bins[0].failed_fraction) == pytest.approx((0.06, 0.0))
    assert (bins[9].told_fraction, bins[9].failed_fraction) == (1.0, 1.0)
    assert find_chances([(case, replace(found, oom_probability=None)) for case, found in pairs]) == ()
