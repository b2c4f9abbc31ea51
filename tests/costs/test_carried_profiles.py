"""Blocks that were measured under one division and are planned under another: the ratio of analytic figures carries."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.costs.stage import block_costs
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layers import Experts
from mm_autoparallel.model.job.model import Adapters
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.model.profiles.store import hash_model

MakeJob = Callable[..., Job]
MEASURED = Strategy(pp=2, tp=2, dp=2, mbs=1)
FIGURES = ("forward_ms", "backward_input_ms", "activation_bytes", "checkpoint_bytes")


def write_profile(job: Job, path: Path, kind: str, tokens: int = 4096) -> Path:
    """One kind at TP 2 and MBS 1."""
    timing = {"median_ms": 70.0, "mad_ms": 0.1, "num_samples": 9}
    entry = {"kind": kind, "tp": 2, "mbs": 1, "tokens": tokens, "activation_bytes": 900, "checkpoint_bytes": 90}
    entry |= {"forward_ms": timing, "backward_input_ms": timing, "backward_weight_ms": timing, "transient_bytes": 9}
    bare = job.model.model_copy(update={"adapters": None})
    document = {
        "schema": "mm-autoparallel/profile/1",
        "model": {"name": bare.name, "sha256": hash_model(bare)},
        "device": job.cluster.device.name,
        "software": {},
        "date": "2025-11-21",
        "command": "mm-autoparallel profile job.yaml",
        "entries": [entry],
    }
    path.write_text(json.dumps(document))
    return path


def costs(job: Job, strategy: Strategy, kind: str, path: Path | None = None) -> BlockCost:
    return block_costs(replace(job, profiles=(path,) if path else ()), strategy)[kind]


def check_carried(job: Job, bare: Job, path: Path, kind: str, plain: Strategy, strategy: Strategy) -> None:
    """Every figure is as many times the measured one as the analytic one is the analytic one there."""
    there, here = costs(bare, plain, kind), costs(job, strategy, kind)
    measured, carried = costs(bare, plain, kind, path), costs(job, strategy, kind, path)
    assert (measured.time_source, carried.time_source, carried.memory_source) == ("measured",) + ("interpolated",) * 2
    for name in FIGURES:
        ratio = getattr(here, name) / getattr(there, name)
        assert getattr(carried, name) == pytest.approx(getattr(measured, name) * ratio, rel=1e-9), name
    assert carried.parameter_count == pytest.approx(here.parameter_count)


@pytest.mark.parametrize(
    ("changed", "more"),
    [({"sequence_parallel": False}, "activation_bytes"), ({"cp": 2, "dp": 1}, ""), ({"cp": 2, "dp": 1, "pp": 2}, "")],
)
def test_divisions(make_job: MakeJob, tmp_path: Path, changed: dict[str, Any], more: str) -> None:
    job = make_job()
    path = write_profile(job, tmp_path / "profile.json", "text_layer")
    strategy = replace(MEASURED, **changed)
    check_carried(job, job, path, "text_layer", MEASURED, strategy)
    if more:
        before, after = (getattr(costs(job, one, "text_layer", path), more) for one in (MEASURED, strategy))
        assert after > before
    else:  # half of the tokens
        before_ms, after_ms = (costs(job, one, "text_layer", path).forward_ms for one in (MEASURED, strategy))
        assert after_ms < before_ms


def test_experts_that_are_dealt_out(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    layers = job.model.text.layers
    experts = Experts(num_experts=8, top_k=2, ffn_size=layers.ffn_size)
    text = job.model.text.model_copy(update={"layers": layers.model_copy(update={"experts": experts})})
    job = replace(job, model=job.model.model_copy(update={"text": text}))
    path = write_profile(job, tmp_path / "profile.json", "text_layer")
    strategy = replace(MEASURED, ep=2)
    check_carried(job, job, path, "text_layer", MEASURED, strategy)
    assert costs(job, strategy, "text_layer", path).expert_count == costs(job, strategy, "text_layer").expert_count


def test_adapters(make_job: MakeJob, tmp_path: Path) -> None:
    """The model is measured without them, all its weights training."""
    bare = make_job()
    adapters = Adapters(rank=8, targets=("qkv", "proj", "fc1", "fc2"))
    job = replace(bare, model=bare.model.model_copy(update={"adapters": adapters}))
    path = write_profile(bare, tmp_path / "profile.json", "text_layer")
    check_carried(job, bare, path, "text_layer", MEASURED, MEASURED)
    carried = costs(job, MEASURED, "text_layer", path)
    assert carried.backward_weight_ms < 0.2 * costs(bare, MEASURED, "text_layer", path).backward_weight_ms
    assert carried.trained_count == pytest.approx(costs(job, MEASURED, "text_layer").trained_count)


def test_a_profile_that_counts_other_parameters(make_job: MakeJob, tmp_path: Path) -> None:
    """What is frozen is as much of what was counted as of what sizes say."""
    bare = make_job()
    adapters = Adapters(rank=8, targets=("qkv", "proj", "fc1", "fc2"))
    job = replace(bare, model=bare.model.model_copy(update={"adapters": adapters}))
    path = write_profile(bare, tmp_path / "profile.json", "text_layer")
    document = json.loads(path.read_text())
    counted = int(0.9 * costs(bare, MEASURED, "text_layer").parameter_count)
    document["entries"][0]["parameter_count"] = counted
    path.write_text(json.dumps(document))
    carried, sizes = costs(job, MEASURED, "text_layer", path), costs(job, MEASURED, "text_layer")
    assert carried.parameter_count == pytest.approx(0.9 * sizes.parameter_count, rel=1e-6)
    assert carried.trained_count == pytest.approx(0.9 * sizes.trained_count, rel=1e-6)


def test_what_tensor_parallel_changes_is_not_carried(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    path = write_profile(job, tmp_path / "profile.json", "text_layer")
    with pytest.raises(ProfileError, match="text_layer was profiled, but not at TP 1, CP 1"):
        costs(job, replace(MEASURED, tp=1, cp=2), "text_layer", path)
