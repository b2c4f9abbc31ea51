"""An image rank apart: by hand on two stages, and the published gains."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.image_rank import gained_fraction


def test_by_hand() -> None:
    # together 9 x 30 + 50 = 320; apart 9 x 20 + 40 + 5 = 225
    assert gained_fraction(10, [20.0, 20.0], 10.0) == pytest.approx(1 - 225 / 320)
    # a tower that the slower second stage covers gains what it leads in less
    assert gained_fraction(10, [10.0, 20.0], 10.0) == pytest.approx(5 / (9 * 20 + 40))


def test_published_gains_within_four_points(
    published: Callable[[str], list[dict[str, str]]], write_table: Callable[..., Path]
) -> None:
    rows = [row for row in published("multimodal_published") if row["figure"] == "ratio"]
    cases, refused = read_table(write_table(rows))
    assert (len(cases), len(refused)) == (0, 12)
    told = [re.search(r"([0-9.]+) % less, and by the costs of its layers (-?[0-9.]+) %", one.reason) for one in refused]
    errors = [abs(float(found[1]) - float(found[2])) for found in told if found]
    assert len(errors) == 12
    assert sum(errors) / 12 <= 4.0
