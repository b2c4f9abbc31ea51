"""Published runs that ended out of memory or did not, and what is told of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.predict import Prediction, predict_all

LLAMA = ("aleph_alpha_llama_2k_a100.csv", "aleph_alpha_llama_8k_a100.csv")

Told = list[tuple[MeasuredCase, Prediction]]


def predicted(repository: Path, *names: str) -> Told:
    cases = [case for name in names for case in read_table(repository / "examples/published_measurements" / name)[0]]
    found, refused = predict_all([case for case in cases if case.out_of_memory is not None])
    assert not refused
    return found


@pytest.fixture(scope="module")
def llama(repository: Path) -> Told:
    return predicted(repository, *LLAMA)


def test_llama_is_told_right_and_seldom_missed(llama: Told) -> None:
    failed = [found for case, found in llama if case.out_of_memory]
    assert (len(llama), len(failed)) == (284, 149)
    assert sum(found.fits != case.out_of_memory for case, found in llama) >= 0.96 * len(llama)
    assert sum(found.fits for found in failed) <= 0.035 * len(failed)


def test_the_chance_is_honest(llama: Told) -> None:
    """Of runs told almost surely to fit almost none failed, of those told almost surely to fail almost all did."""
    chances = np.array([found.oom_probability for _, found in llama])
    failed = np.array([bool(case.out_of_memory) for case, _ in llama])
    assert failed[chances < 0.1].mean() < 0.03
    assert 0.2 < failed[(chances >= 0.2) & (chances < 0.8)].mean() < 0.8
    assert failed[chances > 0.9].mean() > 0.97
    assert chances.mean() == pytest.approx(failed.mean(), abs=0.02)


def test_failures_of_bloom_stand_apart_from_its_runs(repository: Path) -> None:
    told = predicted(repository, "bloom_network.csv")
    failed = [found.oom_probability or 0.0 for case, found in told if case.out_of_memory]
    ran = [found.oom_probability or 0.0 for case, found in told if not case.out_of_memory]
    assert len(failed) == 3
    assert min(failed) > 0.2
    assert max(ran) < 0.1
