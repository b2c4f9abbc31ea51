"""The error of a difference and what settles it, worked out by hand for a few sources."""

from __future__ import annotations

import math

import pytest

from mm_autoparallel.model.costs.cost_source import MEASURED_ERROR_FRACTION, BlockPoint, CostSource, MessagePoint
from mm_autoparallel.model.profiles.table import Point
from mm_autoparallel.planner.explain.settling import ALIKE_FRACTION, compare_pair

OFF = 0.25


def layer(tp: int, error_fraction: float = OFF, cause: str = "", name: str = "text_layer") -> CostSource:
    return CostSource(name, "analytic", error_fraction, cause, BlockPoint(Point(name, tp, 1, 1, 4096, 1)))


def group(num_ranks: int) -> CostSource:
    at = MessagePoint(("all_gather",), num_ranks, "node", 1, 1 << 20)
    return CostSource("tensor_parallel", "analytic", OFF, "", at)


def test_one_source() -> None:
    found = compare_pair(1, 100.0, [layer(2)], [400.0])
    assert found.error_ms == pytest.approx(100.0)
    assert found.faster_fraction == pytest.approx(0.158655, abs=1e-6)  # a standard deviation away
    assert found.within_error
    (run,) = found.settling
    assert run.error_ms == pytest.approx(400 * MEASURED_ERROR_FRACTION)
    assert run.explained_fraction == pytest.approx(1 - (MEASURED_ERROR_FRACTION / OFF) ** 2)


def test_independent_sources_are_measured_largest_first() -> None:
    found = compare_pair(1, 1000.0, [layer(2), group(2)], [300.0, 400.0])
    assert found.error_ms == pytest.approx(125.0)
    assert not found.within_error
    first, second = found.settling
    assert [one.name for one in first.sources] == ["tensor_parallel"]
    assert first.error_ms == pytest.approx(math.hypot(300 * OFF, 400 * MEASURED_ERROR_FRACTION))
    assert second.error_ms == pytest.approx(500 * MEASURED_ERROR_FRACTION)


def test_a_common_cause_cancels_and_asks_for_both_measurements() -> None:
    """Of two plans whose layers are off alike the difference is surer than a step; one measurement tells little."""
    sources = [layer(2, cause="compute"), layer(4, cause="compute")]
    found = compare_pair(1, 10.0, sources, [-400.0, 400.0])
    assert found.error_ms == pytest.approx(400 * OFF * math.sqrt(2 * (1 - ALIKE_FRACTION)))
    assert found.error_ms < compare_pair(1, 10.0, [layer(2), layer(4)], [-400.0, 400.0]).error_ms
    first, second = found.settling
    assert first.explained_fraction < 0.5
    assert second.error_ms == pytest.approx(400 * MEASURED_ERROR_FRACTION * math.sqrt(2), rel=1e-6)


def test_one_run_measures_all_blocks_of_a_division() -> None:
    sources = [layer(2), layer(2, name="vision_layer"), layer(4)]
    found = compare_pair(1, 10.0, sources, [100.0, 300.0, 200.0])
    assert [[one.name for one in run.sources] for run in found.settling] == [
        ["vision_layer", "text_layer"],
        ["text_layer"],
    ]


def test_what_was_measured_is_not_measured_again() -> None:
    measured = CostSource("text_layer", "measured", MEASURED_ERROR_FRACTION, "", layer(2).at)
    found = compare_pair(1, -3.0, [measured], [100.0])
    assert found.error_ms == pytest.approx(2.0)
    assert found.faster_fraction == pytest.approx(0.933193, abs=1e-6)
    assert found.settling == ()


@pytest.mark.parametrize(("difference_ms", "expected"), [(-1.0, 1.0), (0.0, 0.5), (1.0, 0.0)])
def test_without_errors_the_order_is_certain(difference_ms: float, expected: float) -> None:
    assert compare_pair(1, difference_ms, [layer(2)], [0.0]).faster_fraction == expected
