"""Rounds, warm-up and the figures made of samples. No test asserts how long anything takes."""

from __future__ import annotations

import itertools
import time

import pytest

torch = pytest.importorskip("torch")

from mm_autoparallel.model.profiles.store import Timing  # noqa: E402
from mm_autoparallel.profilers.clock import Effort, Stopwatch, collect_samples, summarize, time_callable  # noqa: E402

CPU = torch.device("cpu")


def test_median_and_deviation() -> None:
    assert summarize([1.0, 2.0, 3.0, 4.0, 100.0]) == Timing(median_ms=3.0, mad_ms=1.0, num_samples=5)


def test_a_difference_below_nothing_is_nothing() -> None:
    assert summarize([-0.5, -0.1, 0.2]).median_ms == 0.0


def test_marks_lie_on_one_line() -> None:
    stopwatch = Stopwatch(CPU)
    marks = [stopwatch.mark()]
    for _ in range(2):
        time.sleep(0.001)
        marks.append(stopwatch.mark())
    stopwatch.settle()
    first, second = (stopwatch.between_ms(*pair) for pair in itertools.pairwise(marks))
    assert first >= 1.0
    assert stopwatch.between_ms(marks[0], marks[2]) == pytest.approx(first + second)


def test_rounds_before_the_times_settle_do_not_count() -> None:
    numbers = itertools.count()

    def run_round() -> dict[str, float]:
        number = next(numbers)
        time.sleep(0.05 if number == 0 else 0.002)  # as first runs are: the second one cannot look settled
        return {"step": float(number)}

    effort = Effort(budget_s=60, min_rounds=4, max_rounds=4, max_warm_up=3)
    samples = collect_samples(run_round, effort)["step"]
    assert len(samples) == 4
    assert samples[0] >= 2.0


def test_a_spent_budget_still_gives_the_least_samples() -> None:
    samples = collect_samples(lambda: {"step": 1.0}, Effort(budget_s=0.0, min_rounds=3, max_rounds=9))
    assert samples == {"step": [1.0, 1.0, 1.0]}


def test_a_round_need_not_give_everything() -> None:
    numbers = itertools.count()

    def run_round() -> dict[str, float]:
        return {"always": 1.0} | ({"even": 2.0} if next(numbers) % 2 == 0 else {})

    samples = collect_samples(run_round, Effort(budget_s=60, min_rounds=4, max_rounds=4, max_warm_up=1))
    assert {name: len(values) for name, values in samples.items()} == {"always": 4, "even": 2}


def test_a_callable_is_timed() -> None:
    timing = time_callable(lambda: time.sleep(0.002), CPU, Effort(budget_s=0.1, min_rounds=3, max_rounds=5))
    assert timing.median_ms >= 2.0
    assert 3 <= timing.num_samples <= 5
