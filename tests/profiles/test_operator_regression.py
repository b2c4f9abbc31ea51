"""Times between timed operators: on the line or in the plane of what was measured, and nowhere else."""

from __future__ import annotations

import pytest

from mm_autoparallel.model.profiles.operators.regression import Point, regress_us

CUBES: list[Point] = [
    (2 * rows * inner * columns, 4 * (rows * inner + inner * columns + rows * columns), rows * inner * columns / 1e3)
    for rows in (64, 256)
    for inner in (64, 128, 512)
    for columns in (64, 512)
]


def test_bytes_are_interpolated_between_neighbours() -> None:
    points: list[Point] = [(0, 100, 1.0), (0, 300, 5.0), (0, 300, 3.0), (0, 300, 4.0)]
    assert regress_us(points, 0, 100) == 1.0
    assert regress_us(points, 0, 200) == 2.5
    assert regress_us(points, 0, 300) == 4.0
    assert regress_us(points, 0, 99) is None
    assert regress_us(points, 0, 301) is None


def test_products_keep_their_rate_inside_the_hull() -> None:
    flops, moved_bytes = 2 * 128 * 64 * 256, 4 * (128 * 64 + 64 * 256 + 128 * 256)
    assert regress_us(CUBES, flops, moved_bytes) == pytest.approx(128 * 64 * 256 / 1e3)
    assert regress_us(CUBES, 2 * 1024**3, 4 * 3 * 1024**2) is None
    assert regress_us(CUBES, CUBES[-1][0], CUBES[-1][1] // 2) is None  # no measured one does so much with so few bytes
    assert regress_us(CUBES, CUBES[0][0], 100 * CUBES[0][1]) is None
    assert regress_us(CUBES[:1], *CUBES[0][:2]) == pytest.approx(CUBES[0][2])
    assert regress_us(CUBES[:2], *CUBES[1][:2]) == pytest.approx(CUBES[1][2])  # two points are a line


def test_one_size_that_changes_is_a_line() -> None:
    line: list[Point] = [(2 * rows * 64 * 64, 4 * (2 * rows * 64 + 64 * 64), float(rows)) for rows in (8, 32, 128)]
    assert regress_us(line, 2 * 64 * 64 * 64, 4 * 3 * 64 * 64) == pytest.approx(64.0)
    assert regress_us(line, 2 * 4 * 64 * 64, 4 * (2 * 4 * 64 + 64 * 64)) is None


def test_nothing_is_regressed_from_nothing() -> None:
    assert regress_us([], 10, 10) is None
    assert regress_us([], 0, 10) is None
    assert regress_us([(0, 0, 5.0)], 0, 0) is None  # of which neither FLOPs nor bytes are known
