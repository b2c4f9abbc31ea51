"""The memory of an estimate for people and for programs: every part is told, and they add up."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.reports.estimates import estimate_document, render_estimate
from mm_autoparallel.units import GIB

STRATEGY = Strategy(pp=4, tp=8, dp=4, mbs=1)


@pytest.fixture(scope="module")
def estimate(repository: Path) -> Estimate:
    layers = {"vision": (32, 0, 0, 0), "text": (14, 23, 23, 20)}
    plan = Plan(STRATEGY, layers, {"vision": (0,) * 4, "text": (14, 0, 0, 0)}, 512)
    return evaluate(read_job(repository / "examples/qwen2vl_72b/job.yaml"), plan)


def test_the_document_tells_every_stage(estimate: Estimate) -> None:
    document = estimate_document(estimate)
    assert len(document["stages"]) == 4
    for stage, told in enumerate(document["stages"]):
        assert set(told["memory"]) == set(vars(estimate.memory[stage]))
        assert sum(told["memory"].values()) == pytest.approx(told["peak_memory_bytes"], rel=1e-6)
        assert told["peak_allocated_bytes"] == document["peak_allocated_bytes"][stage]
        assert told["peak_allocated_bytes"] < told["peak_memory_bytes"]


def test_the_table_adds_up_as_printed(estimate: Estimate) -> None:
    console = Console(width=200, file=io.StringIO())
    console.print(render_estimate(estimate))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    rows = text.split("memory of stage, GiB")[1].splitlines()[2:6]
    for stage, row in enumerate(rows):
        number, *parts = (float(cell) for cell in re.findall(r"[\d.]+", row))
        assert number == stage
        *inside, allocated, communicators, context, reserve, peak = parts
        assert sum(inside) == pytest.approx(allocated, abs=0.05)
        assert allocated + communicators + context + reserve == pytest.approx(peak, abs=0.03)
        assert peak == pytest.approx(estimate.peak_memory_bytes[stage] / GIB, abs=0.006)
    assert estimate.memory[0].restored_bytes > 0.0 == estimate.memory[1].restored_bytes
