"""A host that runs the passes of several chunks a stage: their layers wait for that too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.pipeline.problem import ChainBlock

TABLE = Path(__file__).parents[2] / "examples" / "published_measurements" / "megatron_lm_readme_h100.csv"
LAYERS = 24


def layer(launch_ms: float, vpp: int, pp: int = 4) -> ChainBlock:
    """One of GPT 1.7B on 48 H100, whose host needs `launch_ms` for its forward and twice that for its backward."""
    case = read_table(TABLE)[0][0]
    strategy = replace(
        case.plan.strategy, pp=pp, dp=48 // pp, vpp=vpp, schedule="interleaved_1f1b" if vpp > 1 else "1f1b"
    )
    found = assume_calibration("h100-80g", "megatron-core")
    figures = found.figures.model_copy(update={"layer_launch_ms": launch_ms, "layer_gap_ms": 0.0})
    known = CostModel(case.job, found.model_copy(update={"figures": figures}))
    return next(block for block in build_problem(known, strategy).chain if block.layer)


def test_passes_are_shared_by_the_layers_of_a_chunk() -> None:
    one, three, six = layer(10.0, 1), layer(10.0, 3), layer(10.0, 6)
    assert one.forward_ms == pytest.approx(10.0)
    for chunked, vpp in ((three, 3), (six, 6)):  # a fifth of a layer's launches for each of 4 x vpp passes
        more = 1.0 + 0.2 * 4 * vpp / LAYERS
        assert chunked.forward_ms == pytest.approx(one.forward_ms * more)
        assert chunked.backward_ms == pytest.approx(one.backward_ms * more)


def test_a_device_that_keeps_its_host_waiting_takes_no_longer() -> None:
    assert layer(1e-3, 3).forward_ms == layer(1e-3, 1).forward_ms
    assert layer(1e-3, 3).backward_ms == layer(1e-3, 1).backward_ms


def test_a_host_that_comes_late_by_its_passes_alone_sets_the_pace() -> None:
    device_ms = layer(1e-3, 6).forward_ms
    assert layer(device_ms, 6).forward_ms == pytest.approx(1.2 * device_ms)
    assert layer(0.9 * device_ms, 6).forward_ms == pytest.approx(1.08 * device_ms)
    assert layer(0.9 * device_ms, 1).forward_ms == device_ms
