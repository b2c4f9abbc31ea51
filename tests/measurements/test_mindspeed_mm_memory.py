"""Memory of MindSpeed-MM's continuous integration: what stays allocated, and peaks, from facts of scripts alone."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.predict import predict_all
from mm_autoparallel.measurements.score import TableScore, measured_peaks, resting_bytes, score_table
from mm_autoparallel.model.costs.uneven import longest_factor
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.units import MIB
from tests.measurements.conftest import PUBLISHED


@pytest.fixture(scope="module")
def scored() -> TableScore:
    cases, refused = read_table(PUBLISHED / "mindspeed_mm_ci.csv")
    predicted, impossible = predict_all(cases)
    return score_table("mindspeed_mm_ci.csv", predicted, [*refused, *impossible])


def test_allocated_memory_is_told_within_a_hundredth(scored: TableScore) -> None:
    assert scored.resting is not None
    assert scored.resting.num_values == 9
    assert scored.resting.mean_abs_fraction < 0.002
    assert abs(scored.resting.worst_fraction) < 0.01


def test_peaks_are_told_within_a_hundredth_in_the_mean(scored: TableScore) -> None:
    assert scored.memory is not None
    assert scored.memory.mean_abs_fraction < 0.01
    assert abs(scored.memory.worst_fraction) < 0.03


def test_peaks_lie_between_those_of_the_shortest_and_the_longest_samples(scored: TableScore) -> None:
    for case, found in scored.predicted:
        for stage, measured, _ in measured_peaks(case, found):
            low, high = found.peak_interval_bytes[stage or 0]
            assert low * 0.99 < measured < high * 1.01, (case.name, stage)
        assert all(abs(told / measured - 1) < 0.01 for _, measured, told in resting_bytes(case, found))


def test_the_first_rank_updates_the_end_of_its_stage_first(scored: TableScore) -> None:
    """Of a table of 152,064 x 3,584 at the beginning it has what the layer behind it leaves of half the parameters."""
    case = next(case for case, _ in scored.predicted if case.name.startswith("finetune_qwen2vl"))
    estimate = evaluate(case.job, case.plan)
    table, layer = 152064 * 3584, 233_057_792
    passing = estimate.first_step_allocated_bytes[0] - estimate.resting_allocated_bytes[0]
    assert passing == pytest.approx(4 * ((table + layer) / 2 - layer), rel=1e-6)
    alone = replace(case.plan, strategy=replace(case.plan.strategy, zero=0))
    whole = evaluate(case.job, alone)
    assert whole.first_step_allocated_bytes[0] - whole.resting_allocated_bytes[0] == pytest.approx(4 * table)


def test_a_loss_on_several_samples_copies_their_logits(scored: TableScore) -> None:
    case = next(case for case, _ in scored.predicted if case.name.startswith("pretrain_llava"))
    told = evaluate(case.job, case.plan).first_step_allocated_bytes[0]
    workload = case.job.workload.model_copy(update={"cross_entropy": "transformers"})
    plain = evaluate(replace(case.job, workload=workload), case.plan).first_step_allocated_bytes[0]
    # 14 bytes a logit in the forward, in place of 12 in the backward
    assert (told - plain) / MIB == pytest.approx(2 * 8 * 602 * 32000 / MIB)


@pytest.mark.parametrize("num_microbatches", [1, 2, 64, 512])
def test_the_longest_of_normal_draws(num_microbatches: int) -> None:
    """Against the integral of x over the density of the largest of n normal draws."""
    points, normal = np.linspace(-9, 9, 20001), NormalDist()
    below = np.array([normal.cdf(point) for point in points])
    deviations = float((points * np.gradient(below**num_microbatches)).sum())
    workload = Workload(global_batch_size=512, seq_length=8, length_spread_fraction=0.1)
    assert longest_factor(workload, num_microbatches) == pytest.approx(1 + 0.1 * deviations, abs=0.003)
    equal = workload.model_copy(update={"length_spread_fraction": 0.0})
    assert longest_factor(equal, num_microbatches) == 1.0
