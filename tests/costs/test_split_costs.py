"""What splitting a backward costs and keeps, from profiles into problems, and what is assumed where none says it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.model.costs.stage import build_problem, describe_provenance
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.store import hash_model
from mm_autoparallel.pipeline.problem import ChainBlock

STRATEGY = Strategy(pp=2, tp=2, dp=2, mbs=1, schedule="zb_h1")


def text_layer(job: Job, strategy: Strategy) -> ChainBlock:
    return next(block for block in build_problem(job, strategy).chain if block.name == "text_layer")


def profiled(job: Job, path: Path, **more: object) -> Job:
    """The job with a profile of its text layer at TP 2, which says more of it."""
    timing = {"median_ms": 70.0, "mad_ms": 0.1, "num_samples": 9}
    entry = {"kind": "text_layer", "tp": 2, "mbs": 1, "tokens": 4096, "activation_bytes": 900, "checkpoint_bytes": 90}
    entry |= {"forward_ms": timing, "backward_input_ms": timing, "backward_weight_ms": timing, "transient_bytes": 9}
    document = {
        "schema": "mm-autoparallel/profile/1",
        "model": {"name": job.model.name, "sha256": hash_model(job.model)},
        "device": job.cluster.device.name,
        "software": {},
        "date": "2025-11-21",
        "command": "mm-autoparallel profile job.yaml",
        "entries": [entry | more],
    }
    path.write_text(json.dumps(document))
    return replace(job, profiles=(path,))


def measured(job: Job, path: Path) -> Job:
    """The job with a profile whose text layer was measured in two parts too."""
    timing = {"median_ms": 7.0, "mad_ms": 0.1, "num_samples": 9}
    return profiled(job, path, split_extra_ms=timing, kept_for_weight_bytes=600)


def test_measured_figures_take_the_place_of_what_is_assumed(make_job: Callable[..., Job], tmp_path: Path) -> None:
    job = make_job()
    whole = profiled(job, tmp_path / "whole.json")
    parted = measured(job, tmp_path / "parted.json")
    before, after = text_layer(whole, STRATEGY), text_layer(parted, STRATEGY)
    assert (before.split_extra_ms, before.kept_for_weight_bytes) == (0.0, None)
    assert (after.split_extra_ms, after.kept_for_weight_bytes) == (7.0, 600.0)
    assert replace(after, split_extra_ms=0.0, kept_for_weight_bytes=None) == before
    assert describe_provenance(parted, STRATEGY)["blocks"]["text_layer"]["split"] == "measured"
    assert describe_provenance(whole, STRATEGY)["blocks"]["text_layer"]["split"].startswith("assumed: ")


def test_schedules_of_whole_backwards_know_nothing_of_it(make_job: Callable[..., Job], tmp_path: Path) -> None:
    parted = measured(make_job(), tmp_path / "parted.json")
    strategy = replace(STRATEGY, schedule="1f1b")
    assert text_layer(parted, strategy).split_extra_ms == 0.0
    assert "split" not in describe_provenance(parted, strategy)["blocks"]["text_layer"]


def test_another_division_carries_them(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """What is kept goes by what a layer keeps, what it costs by the gradients of weights."""
    parted = measured(make_job(), tmp_path / "parted.json")
    strategy = replace(STRATEGY, cp=2, dp=1)
    here, there = text_layer(parted, strategy), text_layer(parted, STRATEGY)
    assert here.kept_for_weight_bytes is not None
    assert there.kept_for_weight_bytes is not None
    kept_factor = here.activation_bytes / there.activation_bytes
    assert abs(here.kept_for_weight_bytes / there.kept_for_weight_bytes - kept_factor) < 1e-9
    assert abs(here.split_extra_ms / there.split_extra_ms - here.backward_weight_ms / there.backward_weight_ms) < 1e-9
