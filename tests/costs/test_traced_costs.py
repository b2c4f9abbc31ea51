"""Whose figures count: measured ones, else traced ones, else those of the sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.costs.stage import block_costs, build_problem, describe_provenance
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.store import ProfileEntry, make_manifest, write_profile
from mm_autoparallel.model.profiles.traced import TracedEntry, trace_origin, write_trace
from mm_autoparallel.model.readers.job_file import read_job

MakeJob = Callable[..., Job]
STRATEGY = Strategy(pp=4, tp=2, dp=4, mbs=1)


def traced(kind: str, **changed: Any) -> TracedEntry:
    sizes = {
        "parameter_count": 1000,
        "parameter_bytes": 2000,
        "gradient_bytes": 2000,
        "activation_bytes": 5000,
        "checkpoint_bytes": 500,
        "output_bytes": 600,
        "forward_transient_bytes": 70,
        "backward_transient_bytes": 80,
    }
    where = {"kind": kind, "tp": 2, "sequence_parallel": True, "mbs": 1, "tokens": 4096}
    rows = [
        [phase, "mm", "matrix_product", [[8, 8]], "bf16", 3, 10**12, 10]
        for phase in ("forward", "backward_input", "backward_weight", "recompute")
    ]
    return TracedEntry.model_validate(where | sizes | {"operators": rows} | changed)


def write_traces(job: Job, path: Path, *entries: TracedEntry) -> Path:
    write_trace(path, trace_origin(job.model, job.workload, "a test", {}, "trace it"), entries)
    return path


def write_measured(job: Job, path: Path, kind: str) -> Path:
    timing = {"median_ms": 7.0, "mad_ms": 0.0, "num_samples": 9}
    times = dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms"), timing)
    sizes = {"activation_bytes": 900, "checkpoint_bytes": 90, "transient_bytes": 9}
    entry = ProfileEntry.model_validate({"kind": kind, "tp": 2, "mbs": 1, "tokens": 4096} | times | sizes)
    write_profile(path, make_manifest(job.model, job.workload, job.cluster.device.name, {}, "profile it"), [entry])
    return path


def test_measured_before_traced_before_sizes_alone(make_job: MakeJob, tmp_path: Path) -> None:
    traces = write_traces(make_job(), tmp_path / "t.json", traced("text_layer"), traced("text_post"))
    measured = write_measured(make_job(), tmp_path / "m.json", "text_layer")
    job = make_job(profiles=(traces, measured))
    found = block_costs(job, STRATEGY)
    sources = {name: (found[name].time_source, found[name].memory_source) for name in found}
    assert sources["text_layer"] == ("measured", "measured")
    assert sources["text_post"] == ("analytic", "traced")
    assert sources["text_pre"] == ("analytic", "analytic")
    assert (found["text_layer"].activation_bytes, found["text_post"].activation_bytes) == (900, 5000)
    assert describe_provenance(job, STRATEGY)["profiles"] == [str(measured), str(traces)]


def test_traced_bytes_and_the_times_of_operators_make_the_problem(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(profiles=(write_traces(make_job(), tmp_path / "t.json", traced("text_layer")),))
    cost = block_costs(job, STRATEGY)["text_layer"]
    assert cost.parameter_count == 1000
    assert (cost.checkpoint_bytes, cost.transient_bytes, cost.output_bytes) == (500, 80, 600)
    assert cost.forward_ms == cost.backward_input_ms == cost.backward_weight_ms == cost.recompute_ms
    flops_per_s = job.cluster.device.bf16_flops_per_s
    assert 3 * 10**12 / flops_per_s * 1e3 < cost.forward_ms < 3 * 10**12 / flops_per_s * 1e3 / 0.3
    block = next(block for block in build_problem(job, STRATEGY).chain if block.name == "text_layer")
    assert (block.activation_bytes, block.forward_ms) == (5000, cost.forward_ms)
    assert block.recompute
    assert (block.recompute.activation_bytes, block.recompute.extra_backward_ms) == (500, cost.recompute_ms)
    assert describe_provenance(job, STRATEGY)["blocks"]["text_layer"] == {
        "time": "analytic",
        "memory": "traced",
        "recompute": "analytic",
    }


def test_a_frozen_part_has_no_backward_whatever_was_traced(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(profiles=(write_traces(make_job(), tmp_path / "t.json", traced("vision_layer")),))
    cost = block_costs(job, STRATEGY)["vision_layer"]
    assert cost.forward_ms > 0
    assert (cost.backward_input_ms, cost.backward_weight_ms, cost.activation_bytes) == (0.0, 0.0, 0.0)


def test_what_was_not_traced_at_a_division_is_an_error(make_job: MakeJob, tmp_path: Path) -> None:
    traces = write_traces(make_job(), tmp_path / "t.json", traced("text_layer"))
    with pytest.raises(ProfileError, match=r"text_layer was traced, but not at TP 4.*`trace it`"):
        block_costs(make_job(profiles=(traces,)), Strategy(pp=4, tp=4, dp=2, mbs=1))
    with pytest.raises(ProfileError, match="without sequence parallel"):
        block_costs(make_job(profiles=(traces,), sequence_parallel=False), STRATEGY)


def test_the_examples_can_be_costed_from_what_is_shipped(repository: Path) -> None:
    job = read_job(repository / "examples/qwen2vl_72b_h200/job.yaml")
    plain = block_costs(job, Strategy(pp=8, tp=4, dp=2, mbs=1))
    shipped = Job(**(vars(job) | {"profiles": (job.path.parent / "traced",)}))
    found = block_costs(shipped, Strategy(pp=8, tp=4, dp=2, mbs=1))
    assert {cost.memory_source for cost in found.values()} == {"traced"}
    # the classes of transformers keep more than Megatron's fused layers, and run the same products
    assert found["text_layer"].activation_bytes > 1.2 * plain["text_layer"].activation_bytes
    assert found["text_layer"].forward_ms == pytest.approx(plain["text_layer"].forward_ms, rel=0.25)
    assert found["text_layer"].parameter_count == plain["text_layer"].parameter_count
    files = describe_provenance(shipped, Strategy(pp=8, tp=4, dp=2, mbs=1))["profiles"]
    assert all(name.startswith("subgraph_profiles/shipped/traced/qwen2_vl-qwen2vl_72b_h200-") for name in files)
