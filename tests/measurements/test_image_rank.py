"""An image rank apart: the published gains, with nothing fitted, and the layout that the planner takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.image_rank import image_rank_apart, price
from mm_autoparallel.measurements.table import Row
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.search.planner import examine
from mm_autoparallel.planner.search.space import list_space

Published = Callable[[str], list[dict[str, str]]]


def _ratios(published: Published) -> list[dict[str, str]]:
    return [row for row in published("multimodal_published") if row["figure"] == "ratio"]


def test_published_gains_within_four_points(published: Published, write_table: Callable[..., Path]) -> None:
    cases, refused = read_table(write_table(_ratios(published)))
    assert (len(cases), len(refused)) == (0, 12)
    told = [re.search(r"([0-9.]+) % less, and by the costs of its layers (-?[0-9.]+) %", one.reason) for one in refused]
    pairs = [(float(found[1]), float(found[2])) for found in told if found]
    assert len(pairs) == 12
    assert all(predicted > 0 for _, predicted in pairs)  # so is every measured one
    assert sum(abs(measured - predicted) for measured, predicted in pairs) / 12 <= 4.0


def test_planner_takes_the_image_rank(published: Published) -> None:
    costs = price(Row("published", 0, 1, _ratios(published)[0]))
    limits = costs.job.search.model_copy(
        update={"devices": (16, 17), "layouts": "all", "tp": (4,), "cp": (1,), "dp": (2,), "mbs": (1,)}
    )
    job = replace(costs.job, search=limits)
    found, candidates = examine(CostModel(job, costs.calibration), list_space(job), time_limit_s=60.0)
    assert found is not None
    assert found.plan.strategy == image_rank_apart(job, Strategy(2, 4, 2, 1))
    assert found.plan.strategy.world_size == 17
    chains = [c for c in candidates if c.strategy.arrangement is None and c.status != "unlawful"]
    assert {c.strategy.world_size for c in chains} == {16}
    # per device too: 16 ranks of the chain at best, by its bound, against the 17
    best_ms = min(c.bound_ms for c in chains if c.bound_ms is not None)
    assert found.step_ms * 17 < best_ms * 16
