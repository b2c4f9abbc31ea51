"""Which sources a strategy has, where each would be measured, and how far off it may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.model.costs.cost_source import (
    MEASURED_ERROR_FRACTION,
    BlockPoint,
    CostSource,
    MessagePoint,
    UpdatePoint,
    analytic_error_fraction,
)
from mm_autoparallel.model.costs.stage import list_sources
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import calibration_of
from mm_autoparallel.model.profiles.interval import Interval
from mm_autoparallel.model.profiles.network import Fit, Operation, write_network
from mm_autoparallel.model.profiles.store import Origin, ProfileEntry, Timing, make_manifest, write_profile

MakeJob = Callable[..., Job]
STRATEGY = Strategy(pp=4, tp=2, dp=4, mbs=1)


def by_name(job: Job, strategy: Strategy) -> dict[str, CostSource]:
    return {source.name: source for source in list_sources(job, strategy)}


def test_blocks_that_take_time_and_groups_of_several_ranks(make_job: MakeJob) -> None:
    job = make_job(tied=True)
    groups = {"tensor_parallel", "pipeline", "gradient_reduction", "parameter_gather", "tied_table", "optimizer"}
    found = by_name(job, STRATEGY)
    assert {name for name in found if not name.startswith(("text", "vision", "audio"))} == groups
    assert {"text_pre", "text_layer", "text_post", "vision_layer", "audio_layer"} <= found.keys()
    alone = by_name(job, Strategy(pp=1, tp=1, dp=1, mbs=1))
    assert alone.keys() & groups == {"optimizer"}
    no_image = by_name(make_job(image_tokens_per_sample=0), STRATEGY)
    assert "vision_layer" not in no_image
    assert "parameter_gather" not in by_name(job, replace(STRATEGY, zero=0))


def test_where_each_would_be_measured(make_job: MakeJob) -> None:
    found = by_name(make_job(), STRATEGY)  # nodes of 8 devices: a stage is one of them
    layer, group, reduction = found["text_layer"].at, found["tensor_parallel"].at, found["gradient_reduction"].at
    assert isinstance(layer, BlockPoint)
    point = layer.point
    assert (point.kind, point.tp, point.cp, point.mbs, point.tokens) == ("text_layer", 2, 1, 1, 4096)
    # the widest message of a layer: one sample's 4096 tokens of 2048 numbers in bf16
    assert group == MessagePoint(("all_gather", "reduce_scatter"), 2, "node", 1, 0)
    assert isinstance(group, MessagePoint)
    assert group.size_bytes == 4096 * 2048 * 2
    assert isinstance(reduction, MessagePoint)
    assert reduction == MessagePoint(("reduce_scatter",), 4, "node", 1, 0)
    assert reduction.size_bytes == (32000 / 2 + 1) * 2048 * 4  # fp32 gradients of half a head and of its norm
    assert found["pipeline"].at == MessagePoint(("send_recv",), 2, "cluster", 1, 0)
    assert found["optimizer"].at == UpdatePoint(2, 1, 4)
    wide = by_name(make_job(), Strategy(pp=1, tp=2, dp=16, mbs=1))["gradient_reduction"].at
    assert wide == MessagePoint(("reduce_scatter",), 16, "cluster", 4, 0)


def test_an_analytic_time_is_as_far_off_as_its_interval_says(make_job: MakeJob) -> None:
    job = make_job()
    calibration = calibration_of(job)
    assert calibration.calibrated
    layer = by_name(job, STRATEGY)["text_layer"]
    assert (layer.time_source, layer.cause) == ("analytic", "")
    assert layer.error_fraction == analytic_error_fraction(calibration.interval)
    # 90 of 100 errors of a normal distribution lie within 1.645 deviations
    interval = Interval(low_factor=math.exp(-0.1645), high_factor=math.exp(0.1645), source="")
    assert analytic_error_fraction(interval) == pytest.approx(0.1)


def test_uncalibrated_errors_have_a_common_cause(make_job: MakeJob) -> None:
    job = make_job(cluster=Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["ascend-910b-64g"]))
    found = by_name(job, STRATEGY)
    assert found["text_layer"].cause == found["vision_layer"].cause == "compute"
    assert found["tensor_parallel"].cause == "network node"
    assert found["pipeline"].cause == "network cluster"


def test_a_measured_time_is_off_by_its_standard_error_and_some(make_job: MakeJob, tmp_path: Path) -> None:
    plain = make_job()
    entry = ProfileEntry(
        kind="text_layer",
        tp=2,
        mbs=1,
        tokens=4096,
        forward_ms=Timing(median_ms=10.0, mad_ms=0.5, num_samples=4),
        backward_input_ms=Timing(median_ms=10.0, mad_ms=0.0, num_samples=4),
        backward_weight_ms=Timing(median_ms=0.0, mad_ms=0.0, num_samples=4),
        activation_bytes=900,
        checkpoint_bytes=90,
        transient_bytes=9,
    )
    device = plain.cluster.device.name
    manifest = make_manifest(plain.model, plain.workload, device, {}, "profile it")
    write_profile(tmp_path / "p.json", manifest, [entry])
    operations: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
    fits = [
        Fit(
            operation=name, num_ranks=2, level="node", latency_ms=0.1, bandwidth_bytes_per_s=1e9, residual_fraction=0.04
        )
        for name in operations
    ]
    origin = Origin(device=device, software={}, date="today", command="c")
    write_network(tmp_path / "network.json", origin, fits, [])
    found = by_name(make_job(profiles=(tmp_path / "p.json", tmp_path / "network.json")), STRATEGY)
    layer, group = found["text_layer"], found["tensor_parallel"]
    assert layer.time_source == group.time_source == "measured"
    repeats = 1.2533 * 1.4826 * 0.5 / 2 / 20  # one of three medians moves, of a sum of 20 ms
    assert layer.error_fraction == pytest.approx(math.hypot(MEASURED_ERROR_FRACTION, repeats))
    assert group.error_fraction == pytest.approx(math.hypot(MEASURED_ERROR_FRACTION, 0.04 * math.sqrt(math.pi / 2)))
    assert found["vision_layer"].time_source == "analytic"
