"""Jobs whose nodes have so much memory for their hosts: what a device has of it, plans within it, and what is told."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from nouns import brute_force
from rich.console import Console

from mm_autoparallel.errors import NoFeasiblePlan
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.costs.topology import stage_host_limits
from mm_autoparallel.model.job.cluster import Cluster, NodeGroup
from mm_autoparallel.model.job.hashing import describe_cluster, hash_job
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.solve.families import content_key, figures_of
from mm_autoparallel.pipeline.solve.task import Task, decode_task, encode
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import plan_document
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_space
from mm_autoparallel.reports.estimates import estimate_document, render_estimate

SMALL = {"tp": (1,), "cp": (1,), "mbs": (1,), "workload": {"attention": "unfused", "seq_length": 2048}}
MODES = ("offload", "recompute")


def with_hosts(job: Job, host_memory_bytes: float | None, **more: Any) -> Job:
    changes = {"host_memory_bytes": None if host_memory_bytes is None else int(host_memory_bytes), **more}
    return replace(job, cluster=Cluster(**(dict(job.cluster) | changes)))


@pytest.mark.parametrize("limits", [{"pp": (2, 4)}, {"pp": (2,), "max_vpp": 2}])
def test_the_best_plan_within_the_hosts_equals_brute_force(make_job, limits: dict[str, Any]) -> None:
    job = make_job(memory_bytes=4.6e9, modes=MODES, host_link_bytes_per_s=150e9, **(SMALL | limits))
    free = search(job, num_workers=1)
    asked_bytes = max(free.estimates[0].host_bytes)
    assert asked_bytes > 0
    assert "nothing here knows how much a host has" in free.estimates[0].warnings[-1]
    steps = [free.figures.step_ms]
    for share in (1.001, 0.6, 0.0):
        limited = with_hosts(job, 4 * share * asked_bytes / 0.8)
        result = search(limited, num_workers=1)
        estimate = result.estimates[0]
        lawful = [entry.strategy for entry in list_space(limited) if entry.reason is None]
        truth_ms = min(brute_force(build_problem(limited, strategy))[0] for strategy in lawful)
        assert result.proven
        assert result.figures.step_ms == pytest.approx(truth_ms, rel=1e-5)
        assert estimate.fits
        assert max(estimate.host_bytes) <= share * asked_bytes
        steps.append(truth_ms)
    assert steps[1] == pytest.approx(steps[0], rel=1e-5)
    assert steps[0] < steps[2] <= steps[3]


def test_a_plan_above_its_host_is_told_and_marked(make_job) -> None:
    limits = SMALL | {"pp": (2,), "host_link_bytes_per_s": 150e9}
    job = make_job(memory_bytes=4.6e9, modes=MODES, **limits)
    found = search(job, num_workers=1)
    asked_bytes = found.estimates[0].host_bytes
    assert "host_limit_bytes" not in plan_document(found.plan, found.figures)
    over = evaluate(with_hosts(job, 4 * 0.5 * max(asked_bytes) / 0.8), found.plan)
    assert not over.fits
    assert over.step_ms == found.figures.step_ms
    assert " on its host for each of its devices, above its limit of " in over.warnings[-1]
    stage = asked_bytes.index(max(asked_bytes))
    document = estimate_document(over)
    assert json.dumps(document)
    assert document["stages"][stage]["host_bytes"] > document["stages"][stage]["host_limit_bytes"] > 0
    assert max(document["host_bytes"]) > document["host_limit_bytes"]
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(render_estimate(over))
    text = console.export_text()
    assert "host limit, GiB" in text
    assert "OVER" in text


def test_optimizer_states_on_the_host_count(make_job) -> None:
    """18 bytes a parameter: states, and gradients and weights on their way; over the ranks that share them."""
    job = with_hosts(make_job(pp=(2,), tp=(1,), cp=(1,), mbs=(1,)), 1e9)
    strategy = Strategy(pp=2, tp=1, dp=2, mbs=1, zero=1, optimizer_offload=True)
    problem = build_problem(job, strategy)
    assert problem.host_limit_bytes == (1e9 * 0.8 / 4,) * 2
    for block in problem.chain:
        assert block.footprint is not None
        gradient_bytes = block.footprint.gradient_bytes
        of_one = job.workload.optimizer_bytes + job.workload.gradient_bytes + job.workload.weight_bytes
        assert block.host_static_bytes == pytest.approx(gradient_bytes / job.workload.gradient_bytes / 2 * of_one)
    on_device = build_problem(job, replace(strategy, optimizer_offload=False))
    assert on_device.host_limit_bytes == ()  # nothing goes there
    task = Task(1, problem, 1e9, 0.0, 1.0)
    assert decode_task(encode(task)) == task  # a worker gets the limits too
    unlimited = build_problem(with_hosts(job, None), strategy)
    assert unlimited == replace(problem, host_limit_bytes=())
    # what lies on hosts makes two problems differ only where it is limited
    nothing = replace(unlimited, chain=tuple(replace(block, host_static_bytes=0.0) for block in unlimited.chain))
    keys = [
        content_key(*figures_of(p)) for p in (unlimited, nothing, problem, replace(nothing, host_limit_bytes=(1.0,)))
    ]
    assert len(set(keys)) == 3
    assert keys[0] == keys[1]


def test_why_nothing_fits_names_the_key(make_job) -> None:
    limits = SMALL | {"pp": (1,), "host_link_bytes_per_s": 150e9}
    job = make_job(memory_bytes=5.9e9, modes=("offload",), **limits)
    assert search(job, num_workers=1).plan.modes
    with pytest.raises(NoFeasiblePlan, match=r"host memory: .*cluster\.host_memory_bytes.* might fit"):
        search(with_hosts(job, 1e6), num_workers=1)


def test_devices_share_their_nodes_host() -> None:
    base = {"num_nodes": 2, "devices_per_node": 8, "host_memory_bytes": 1_000_000, "host_memory_fraction": 0.5}
    cluster = Cluster(device=_device(), **base)
    strategy = Strategy(pp=2, tp=1, dp=8, mbs=1)
    assert stage_host_limits(cluster, strategy) == (62_500.0, 62_500.0)
    assert stage_host_limits(cluster.resized(4), replace(strategy, dp=2)) == (62_500.0, 62_500.0)
    assert stage_host_limits(Cluster(device=_device(), num_nodes=2, devices_per_node=8), strategy) == ()
    groups = (NodeGroup(num_nodes=1), NodeGroup(num_nodes=1, host_memory_bytes=4_000_000))
    mixed = Cluster(device=_device(), **base, node_groups=groups)
    assert stage_host_limits(mixed, strategy) == (62_500.0, 250_000.0)
    assert stage_host_limits(mixed.resized(4), replace(strategy, dp=2)) == (62_500.0, 62_500.0)
    astride = replace(strategy, pp=1, dp=16)
    assert stage_host_limits(mixed, astride) == (62_500.0,)
    with pytest.raises(ValueError, match=r"node_groups\[0\] has no host_memory_bytes and others have some"):
        Cluster(device=_device(), num_nodes=2, devices_per_node=8, node_groups=groups)


def test_a_job_that_says_nothing_of_hosts_keeps_its_hash(make_job) -> None:
    job = make_job()
    plain, limited = (with_hosts(job, size) for size in (None, 1e9))
    document = describe_cluster(plain.cluster)
    assert not any("host_memory" in key and "per_s" not in key for key in document)
    assert hash_job(plain.model, plain.cluster, plain.workload) != hash_job(job.model, limited.cluster, job.workload)


def _device() -> Any:
    from mm_autoparallel.model.job.devices import DEVICES

    return DEVICES["a100-80g"]
