"""A scaled source re-prices exactly what it prices, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.model.costs.scales import (
    AFTER_BACKWARD,
    CONTEXT_PARALLEL,
    EXPERT_EXCHANGE,
    GRADIENT_REDUCTION,
    OPTIMIZER,
    PARAMETER_GATHER,
    PIPELINE,
    TENSOR_PARALLEL,
    TIED_TABLE,
    CostScales,
    scale_all,
    scale_group,
)
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.cluster import Level
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.collectives import form_group
from mm_autoparallel.model.profiles.network import Fit, NetworkProfile
from mm_autoparallel.model.profiles.store import ProfileEntry, Timing, make_manifest, write_profile
from mm_autoparallel.pipeline.problem import ChainBlock, Problem

MakeJob = Callable[..., Job]
STRATEGY = Strategy(pp=4, tp=2, dp=4, mbs=1)
NODE = Level(name="node", num_devices=8, bandwidth_bytes_per_s=1e11, latency_ms=0.01)


def block(problem: Problem, name: str = "text_layer") -> ChainBlock:
    return next(block for block in problem.chain if block.name == name)


def scaled(job: Job, strategy: Strategy, **factors: float) -> Problem:
    return build_problem(job, strategy, scales=CostScales(tuple(factors.items())))


def test_factors_of_one_change_no_digit(make_job: MakeJob) -> None:
    job = make_job(tied=True)
    names = (
        TENSOR_PARALLEL,
        CONTEXT_PARALLEL,
        EXPERT_EXCHANGE,
        PIPELINE,
        *AFTER_BACKWARD,
        "text_layer",
        "vision_layer",
    )
    assert build_problem(job, STRATEGY, scales=scale_all(names, 1.0)) == build_problem(job, STRATEGY)


def test_a_block_alone_takes_so_many_times_as_long(make_job: MakeJob) -> None:
    job, alone = make_job(), replace(STRATEGY, tp=1, dp=8)
    plain, slow = build_problem(job, alone), scaled(job, alone, text_layer=3.0)
    before, after = block(plain), block(slow)
    assert after.forward_ms == pytest.approx(3 * before.forward_ms, rel=1e-12)
    assert after.backward_ms == pytest.approx(3 * before.backward_ms, rel=1e-12)
    assert before.recompute
    assert after.recompute
    assert after.recompute.extra_backward_ms == pytest.approx(3 * before.recompute.extra_backward_ms, rel=1e-12)
    assert (after.activation_bytes, after.static_bytes) == (before.activation_bytes, before.static_bytes)
    assert block(slow, "vision_layer") == block(plain, "vision_layer")


def test_a_block_and_its_group_together_are_all_of_its_time(make_job: MakeJob) -> None:
    job = make_job()
    before = block(build_problem(job, STRATEGY))
    both = block(scaled(job, STRATEGY, text_layer=2.0, tensor_parallel=2.0))
    assert both.forward_ms == pytest.approx(2 * before.forward_ms, rel=1e-12)
    assert both.backward_ms == pytest.approx(2 * before.backward_ms, rel=1e-12)
    compute = block(scaled(job, STRATEGY, tensor_parallel=0.0)).forward_ms
    traffic = block(scaled(job, STRATEGY, text_layer=0.0)).forward_ms
    assert 0 < traffic < compute
    assert compute + traffic == pytest.approx(before.forward_ms, rel=1e-12)


def test_a_measured_block_has_its_collectives_inside(make_job: MakeJob, tmp_path: Path) -> None:
    def timing(median_ms: float) -> Timing:
        return Timing(median_ms=median_ms, mad_ms=0.0, num_samples=9)

    entry = ProfileEntry(
        kind="text_layer",
        tp=2,
        mbs=1,
        tokens=4096,
        forward_ms=timing(7.0),
        backward_input_ms=timing(8.0),
        backward_weight_ms=timing(6.0),
        activation_bytes=900,
        checkpoint_bytes=90,
        transient_bytes=9,
        recompute_ms=timing(6.5),
        optimizer_ms=timing(40.0),
    )
    plain = make_job()
    manifest = make_manifest(plain.model, plain.workload, plain.cluster.device.name, {}, "profile it")
    write_profile(tmp_path / "p.json", manifest, [entry])
    job = make_job(profiles=(tmp_path / "p.json",))
    before = block(build_problem(job, STRATEGY))
    assert block(scaled(job, STRATEGY, **{TENSOR_PARALLEL: 5.0})) == before
    slow = block(scaled(job, STRATEGY, text_layer=2.0))
    assert (slow.forward_ms, slow.backward_ms) == (14.0, 28.0)
    assert slow.recompute
    assert slow.recompute.extra_backward_ms == 13.0
    later = block(scaled(job, STRATEGY, **{OPTIMIZER: 2.0}))
    assert later.tail_ms - before.tail_ms == pytest.approx(40.0 / 4)  # ZeRO 1 shards it over DP


@pytest.mark.parametrize("zero", [0, 1])
def test_the_tail_is_the_sum_of_its_sources(make_job: MakeJob, zero: int) -> None:
    job, strategy = (
        make_job(overlap_grad_reduce=False, overlap_param_gather=False, tied=True),
        replace(STRATEGY, zero=zero),
    )
    whole_ms = block(build_problem(job, strategy), "text_pre").tail_ms
    alone_ms = {}
    for name in (GRADIENT_REDUCTION, PARAMETER_GATHER, TIED_TABLE, OPTIMIZER):
        others = {other: 0.0 for other in AFTER_BACKWARD if other != name}
        alone_ms[name] = block(scaled(job, strategy, **others), "text_pre").tail_ms
        twice_ms = block(scaled(job, strategy, **others, **{name: 2.0}), "text_pre").tail_ms
        assert twice_ms == pytest.approx(2 * alone_ms[name], rel=1e-12)
    assert sum(alone_ms.values()) == pytest.approx(whole_ms, rel=1e-12)
    assert (alone_ms[PARAMETER_GATHER] > 0) == (zero == 1)
    assert all(alone_ms[name] > 0 for name in (GRADIENT_REDUCTION, TIED_TABLE, OPTIMIZER))


def test_hops_are_the_pipelines(make_job: MakeJob) -> None:
    job = make_job()
    plain, slow = build_problem(job, STRATEGY), scaled(job, STRATEGY, pipeline=4.0)
    assert slow.p2p_ms == tuple(4 * ms for ms in plain.p2p_ms)
    assert slow.p2p_ms_per_byte == tuple(4 * ms for ms in plain.p2p_ms_per_byte)
    assert slow.chain == plain.chain


@pytest.mark.parametrize("measured", [False, True])
def test_every_operation_of_a_group_is_scaled(measured: bool) -> None:
    fits = tuple(
        Fit(
            operation=operation,
            num_ranks=4,
            level="node",
            latency_ms=0.5,
            bandwidth_bytes_per_s=1e9,
            residual_fraction=0,
        )
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    )
    network = NetworkProfile(
        schema="mm-autoparallel/network/1", device="d", software={}, date="today", command="c", fits=fits
    )
    group = form_group([NODE], 4, 1, network if measured else None)
    slow = scale_group(group, 2.5)
    for ask in ("all_gather_ms", "reduce_scatter_ms", "all_reduce_ms", "all_to_all_ms", "pass_on_ms"):
        assert getattr(slow, ask)(1e6) == pytest.approx(2.5 * getattr(group, ask)(1e6), rel=1e-12)
