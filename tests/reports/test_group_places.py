"""What an estimate tells of groups and devices, on the example of a mixed cluster."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.reports.estimates import estimate_document, render_estimate

PLAN = Plan(Strategy(pp=4, tp=2, dp=4, mbs=1), {"text": (6, 6, 14, 14)}, {"text": (0,) * 4}, 256)


@pytest.fixture(scope="module")
def estimate(repository: Path) -> Estimate:
    return evaluate(read_job(repository / "examples/mixed_cluster/job.yaml"), PLAN)


def render(estimate: Estimate) -> list[list[str]]:
    console = Console(width=200, file=io.StringIO())
    console.print(render_estimate(estimate))
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_the_document_tells_groups_devices_and_limits(estimate: Estimate) -> None:
    document = estimate_document(estimate)
    groups = {group["name"]: group for group in document["provenance"]["groups"]}
    assert [(name, group["size"], group["stride"], group["level"]) for name, group in groups.items()] == [
        ("TP", 2, 1, "node"),
        ("DP", 4, 2, "node"),
        ("PP hop", 2, 8, "cluster"),
    ]
    plain, throttled, fast, other = document["provenance"]["devices"]["stage_time_factor"]
    assert (plain, throttled) == (1.0, 1.1)
    assert fast == other < 0.6
    limits = [stage["memory_limit_bytes"] for stage in document["stages"]]
    assert limits[0] == limits[1] > limits[2] == limits[3]
    assert document["replica_step_ms"] is None


def test_the_table_has_a_row_for_every_group(estimate: Estimate) -> None:
    rows = render(estimate)
    assert ["group", "ranks", "apart", "level", "GB/s", "past", "each", "how", "many"] in rows
    assert ["TP", "2", "1", "node", "240.00", "16"] in rows
    # 25 GB/s of a card, of which the calibration says 91 % is reached, for two neighbours
    assert ["PP", "hop", "2", "8", "cluster", "11.38", "3"] in rows
    assert any("a stage on h100-80g counts" in " ".join(row) for row in rows)


def test_the_rank_order_is_told_where_it_is_not_the_usual_one(repository: Path) -> None:
    nested = replace(PLAN, strategy=replace(PLAN.strategy, rank_order="tp-cp-ep-pp-dp"))
    rows = render(evaluate(read_job(repository / "examples/three_level_network/job.yaml"), _of_three_levels(nested)))
    assert "ranks tp-cp-ep-pp-dp, ZeRO 1 on 128 devices; 1f1b" in " ".join(rows[0])
    assert [row[:5] for row in rows if row[:2] == ["PP", "hop"]] == [["PP", "hop", "2", "2", "node"]]


def _of_three_levels(plan: Plan) -> Plan:
    layers = {"vision": (32, 0, 0, 0), "text": (4, 12, 12, 12)}
    strategy = replace(plan.strategy, dp=16)
    return Plan(strategy, layers, dict.fromkeys(layers, (0,) * 4), 512)
