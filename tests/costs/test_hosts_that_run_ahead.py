"""A host that queues launches: layers wait for what it could not queue while the device worked on head and loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.planner.evaluate import evaluate

TABLE = Path(__file__).parents[2] / "examples" / "published_measurements" / "megatron_lm_readme_h100.csv"


def step_ms(launch_ms: float, runs_ahead: bool, pp: int = 1) -> float:
    """GPT 1.7B on 48 H100, whose layers take what their host takes."""
    case = read_table(TABLE)[0][0]
    strategy = replace(case.plan.strategy, pp=pp, dp=48 // pp)
    layers = (24 // pp,) * pp
    plan = replace(case.plan, strategy=strategy, layers={"text": layers}, recompute={"text": (0,) * pp})
    found = assume_calibration("h100-80g", "megatron-core")
    figures = found.figures.model_copy(update={"layer_launch_ms": launch_ms, "host_runs_ahead": runs_ahead})
    return evaluate(CostModel(case.job, found.model_copy(update={"figures": figures})), plan).step_ms


def test_what_the_device_does_between_is_caught_up() -> None:
    bare, waiting, ahead = step_ms(0.0, True), step_ms(4 / 3, False), step_ms(4 / 3, True)
    assert bare < ahead < waiting
    # a host that falls behind by more than all the device does between sets the pace of the rest
    slow, slower = step_ms(4.0, True), step_ms(5.0, True)
    assert slower - slow == pytest.approx(step_ms(5.0, False) - step_ms(4.0, False))
    assert step_ms(4.0, False) - slow == pytest.approx(waiting - ahead, rel=0.02)


def test_several_stages_wait_as_they_did() -> None:
    assert step_ms(4 / 3, True, pp=2) == step_ms(4 / 3, False, pp=2)
