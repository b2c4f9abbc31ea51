"""calibrate against rows that a known calibration made: what it finds again, what it keeps, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.measurements.calibrate import FREE, Target, calibrate, interval_of
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.fit import rates_of
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.profiles.calibration import (
    Calibration,
    assume_calibration,
    calibration_document,
    find_calibration,
)
from mm_autoparallel.model.profiles.figures import Figures
from mm_autoparallel.planner.evaluate import evaluate

PUBLISHED = Path(__file__).parents[2] / "examples" / "published_measurements"


def with_figures(**figures: float) -> Calibration:
    assumed = assume_calibration("a100-80g")
    return assumed.model_copy(update={"figures": assumed.figures.model_copy(update=figures)})


BASE = with_figures(tensor_launch_factor=1.0).model_copy(update={"device": "b200-192g"})


def measured_under(calibration: Calibration, table: str = "korthikanti2022") -> list[MeasuredCase]:
    """The cases of a published table as that calibration predicts them."""
    cases, _ = read_table(PUBLISHED / f"{table}.csv")
    return [replace(case, measured_ms=evaluate(CostModel(case.job, calibration), case.plan).step_ms) for case in cases]


@pytest.fixture(scope="module")
def made() -> list[MeasuredCase]:
    return measured_under(with_figures(matrix_fraction=0.6, memory_fraction=0.5))


class TestFit:
    def test_it_finds_what_made_the_rows(self, made: list[MeasuredCase]) -> None:
        found = calibrate(made[:4], made[4:], Target("x", "a100-80g", "s", free=["matrix", "memory"]))
        figures = found.calibration.figures
        assert figures.matrix_fraction == pytest.approx(0.6, rel=0.03)
        assert figures.memory_fraction == pytest.approx(0.5, rel=0.1)
        assert figures.grouped_matrix_fraction == pytest.approx(figures.matrix_fraction)
        assert max(abs(row.error_fraction) for row in found.held_out) < 0.02

    @pytest.mark.nightly
    def test_a_figure_that_no_row_tells_is_kept_and_named(self, made: list[MeasuredCase]) -> None:
        found = calibrate(made, [], Target("x", "a100-80g", "s"))
        kept = {part.name: part.reason for part in found.kept}
        assert "do not tell" in kept["grouped_matrix"]
        assert set(found.fitted) | set(kept) == set(rates_of(found.calibration.figures, [case.job for case in made]))
        before, after = assume_calibration("a100-80g").figures, found.calibration.figures
        for name in kept:
            still = [figure for figure in FREE[name].figures if figure not in ("grouped_matrix_fraction",)]
            assert [getattr(after, figure) for figure in still] == [getattr(before, figure) for figure in still]

    @pytest.mark.parametrize("spread_factor", [0.5, 2.0])
    def test_what_a_row_narrows_is_told_by_the_prior_that_it_had(
        self, made: list[MeasuredCase], spread_factor: float
    ) -> None:
        target = Target("x", "a100-80g", "s", free=["matrix", "grouped_matrix"], spread_factor=spread_factor)
        (part,) = calibrate(made[:1], [], target).kept
        assert part.reason == "the rows do not tell it (they narrow it by 0.0 %)"

    def test_no_more_figures_than_rows(self, made: list[MeasuredCase]) -> None:
        free = ["matrix", "memory", "node", "unfused_attention"]
        assert len(calibrate(made[:1], [], Target("x", "a100-80g", "s", free=free)).fitted) == 1
        assert len(calibrate(made[:2], [], Target("x", "a100-80g", "s", free=free)).fitted) == 2

    @pytest.mark.slow
    def test_a_straggler_counts_less(self, made: list[MeasuredCase]) -> None:
        straggler = replace(made[0], measured_ms=2 * (made[0].measured_ms or 0))
        found = calibrate(
            [straggler, *made[1:]], [], Target("x", "a100-80g", "s", free=["matrix"], given={"memory_fraction": 0.5})
        )
        assert found.calibration.figures.matrix_fraction == pytest.approx(0.6, rel=0.03)
        assert found.calibration.fitted[0].error_fraction == pytest.approx(-0.5, abs=0.02)

    @pytest.mark.nightly
    def test_what_is_given_stays(self, made: list[MeasuredCase]) -> None:
        found = calibrate(
            made, [], Target("x", "a100-80g", "s", given={"memory_fraction": 0.9, "hidden_fraction": 0.0})
        )
        figures = found.calibration.figures
        assert (figures.memory_fraction, figures.hidden_fraction) == (0.9, 0.0)
        assert "memory" not in found.fitted
        assert found.calibration.sources["hidden_fraction"] == "given"

    def test_latency_and_launch_are_found_from_nothing(self) -> None:
        """B200 is fast enough to wait for its host, and its tensor-parallel groups for each other."""
        true = {"layer_launch_ms": 2.2, "node_latency_ms": 0.1}
        rows = measured_under(with_figures(tensor_launch_factor=1.0, **true), "simumax_b200")
        found = calibrate(
            rows[:4], rows[4:12], Target("x", "b200-192g", "s", free=["layer_launch", "node_latency"], base=BASE)
        )
        assert found.calibration.figures.layer_launch_ms == pytest.approx(2.2, rel=0.02)
        assert 0.02 < found.calibration.figures.node_latency_ms < 0.1  # drawn to the truth, as far as rows tell

    def test_a_base_brings_its_rows_along(self, made: list[MeasuredCase]) -> None:
        base = find_calibration("a100-80g")
        found = calibrate(made[2:4], [], Target("x", "a100-80g", "s", free=["memory"], base=base)).calibration
        # row 3 stands in both: it is told once, with its new error
        assert [(row.row, row.error_fraction) for row in found.fitted[:2]] == [
            (row.row, row.error_fraction) for row in base.fitted if row.row != 3
        ]
        assert [row.row for row in found.fitted[2:]] == [2, 3]
        assert found.figures.matrix_fraction == base.figures.matrix_fraction
        assert found.sources["matrix_fraction"] == base.sources["matrix_fraction"]

    def test_what_the_base_was_fitted_to_is_not_held_out(self, made: list[MeasuredCase]) -> None:
        base = find_calibration("a100-80g")
        found = calibrate(made[2:3], made[3:], Target("x", "a100-80g", "s", free=["memory"], base=base))
        fitted = {row.row for row in base.fitted}
        assert {row.row for row in found.held_out} == {3, 4, 5, 6, 7} - fitted

    def test_rows_keep_their_content_and_residual(self, made: list[MeasuredCase]) -> None:
        found = calibrate(made[:3], made[3:], Target("x", "a100-80g", "s", free=["matrix"]))
        calibration = found.calibration
        assert [row.row for row in calibration.fitted] == [0, 1, 2]
        assert calibration.fitted[0].content == made[0].content
        for case, row in zip((*made[:3], *made[3:]), (*calibration.fitted, *found.held_out), strict=True):
            step_ms = evaluate(CostModel(case.job, calibration), case.plan).step_ms
            assert row.error_fraction == pytest.approx(step_ms / (case.measured_ms or 0) - 1, abs=1e-4)
        errors = {str(row.row): row.error_fraction for row in found.held_out}
        assert calibration.held_out == {made[3].table: errors}

    def test_its_document_reads_back(self, made: list[MeasuredCase]) -> None:
        found = calibrate(made[:2], made[2:], Target("x", "a100-80g", "s", note="n", command="c")).calibration
        assert Calibration.model_validate(calibration_document(found)) == found


class TestInterval:
    def test_it_holds_more_than_nine_of_ten(self) -> None:
        errors = list(np.linspace(-0.2, 0.1, 101))
        near = interval_of(errors)
        measured = [1 / (1 + error) for error in errors]
        inside = [near.low_factor <= step <= near.high_factor for step in measured]
        assert sum(inside) == pytest.approx(94, abs=1)
        assert "101 rows" in near.source

    def test_few_rows_make_a_wide_one(self) -> None:
        assert (interval_of([]).low_factor, interval_of([]).high_factor) == (0.9091, 1.1)
        assert interval_of([0.01] * 3).low_factor == 0.9091
        assert interval_of([0.01] * 30).low_factor == 0.9709

    def test_rows_that_were_fitted_tell_how_far_off_it_is_at_least(self) -> None:
        found = interval_of([], [0.01, -0.5])
        assert found.low_factor < 0.6
        assert "2 rows that it was fitted to" in found.source
        assert interval_of([0.01] * 30, [-0.5]) == interval_of([0.01] * 30)


class TestRefused:
    @pytest.mark.slow
    def test_rows_that_tell_nothing(self, made: list[MeasuredCase]) -> None:
        with pytest.raises(JobError, match="these rows tell none of layer_launch"):
            calibrate(made, [], Target("x", "a100-80g", "s", free=["layer_launch"]))

    def test_nothing_to_fit_to(self) -> None:
        with pytest.raises(JobError, match="no row is left to fit to"):
            calibrate([], [], Target("x", "a100-80g", "s"))

    def test_more_rows_than_can_be_simulated(self, made: list[MeasuredCase]) -> None:
        with pytest.raises(JobError, match=r"1,000 rows are to be fitted to.*at most 200"):
            calibrate(made[:1] * 1000, [], Target("x", "a100-80g", "s"))

    def test_a_row_of_another_unit(self, made: list[MeasuredCase]) -> None:
        with pytest.raises(JobError, match="more than 1000 times off is another run or another unit"):
            calibrate(made[:1], [replace(made[1], measured_ms=1e-3)], Target("x", "a100-80g", "s", free=["matrix"]))

    def test_a_row_without_a_time(self, made: list[MeasuredCase]) -> None:
        with pytest.raises(JobError, match=r"table korthikanti2022\.csv: row 0 has no step time"):
            calibrate([replace(made[0], measured_ms=None)], [], Target("x", "a100-80g", "s"))

    def test_a_row_of_another_device(self, made: list[MeasuredCase]) -> None:
        with pytest.raises(JobError, match="row 0 was measured on a100-80g, and h100-80g is calibrated"):
            calibrate(made[:1], [], Target("x", "h100-80g", "s"))

    def test_a_name_that_is_no_figure(self, made: list[MeasuredCase]) -> None:
        with pytest.raises(JobError, match=r"'matrx' cannot be fitted.*matrix"):
            calibrate(made, [], Target("x", "a100-80g", "s", free=["matrx"]))

    def test_a_given_figure_that_is_none(self, made: list[MeasuredCase]) -> None:
        with pytest.raises(JobError, match=r"--set: matrix_fraction is 2\.0; it must be at most 1"):
            calibrate(made, [], Target("x", "a100-80g", "s", given={"matrix_fraction": 2.0}))
        with pytest.raises(JobError, match="matrix is not a key known here"):
            calibrate(made, [], Target("x", "a100-80g", "s", given={"matrix": 0.5}))

    def test_every_figure_of_a_group_is_one(self) -> None:
        assert {figure for rate in FREE.values() for figure in rate.figures} <= set(Figures.model_fields)
