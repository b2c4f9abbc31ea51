"""What `export` promises of every framework: a drawn plan is written and `import` gives it back, or it is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drawn_decoder_plans import DENSE, EXPERTS, draw_decoder_plan, make_job
from featured_plans import NEED_EXPERTS
from featured_plans import PLANS as FEATURED

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import find_kind
from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.features import FEATURES, list_features
from mm_autoparallel.integrations.framework import Exporter
from mm_autoparallel.planner.plan import Plan

EXPORTERS = sorted(name for name, one in frameworks().items() if one.exporter and one.exporter().write)
"""Those that write new files; a plan for MindSpeed-MM goes into a person's (test_mindspeed_mm_export.py)."""
PLANS = 40


def exporter_of(framework: str) -> Exporter:
    """How `framework` takes plans."""
    provider = frameworks()[framework].exporter
    assert provider is not None
    return provider()


def test_every_feature_has_a_plan() -> None:
    assert list(FEATURED) == list(FEATURES)


@pytest.mark.parametrize("framework", EXPORTERS)
def test_every_feature_is_accounted_for(framework: str, tmp_path: Path) -> None:
    """What a framework says of each feature is what becomes of a plan that has it."""
    exporter, found = exporter_of(framework), {}
    assert not exporter.rounded & exporter.refused
    assert exporter.rounded | exporter.refused <= set(FEATURES)
    for feature, featured in FEATURED.items():
        plan = featured
        if exporter.handling("zero_1") != "written" and feature != "zero_1" and plan.strategy.zero == 1:
            # so that the feature alone decides
            plan = replace(plan, strategy=replace(plan.strategy, zero=3 if plan.strategy.pp == 1 else 0))
        sizes, more = (
            EXPERTS if feature in NEED_EXPERTS else DENSE,
            {"dealing_ranks": 2} if feature == "hierarchical" else {},
        )
        job = None if "vision" in plan.layers else make_job(sizes, plan, **more)
        version = (exporter.by_module or None) if feature == "layout" else None
        try:
            exported = export_plan(plan, job, framework, out=tmp_path / feature, version=version).exported
        except PlanError:
            found[feature] = "refused"
            continue
        assert (exported.plan == plan) is not bool(exported.approximations), feature
        found[feature] = "written" if exported.plan == plan else "rounded"
    assert found == {feature: exporter.handling(feature) for feature in FEATURES}


@pytest.mark.parametrize("framework", EXPORTERS)
def test_a_drawn_plan_comes_back_or_is_refused_by_name(framework: str, tmp_path: Path) -> None:
    """Layers, recompute, sizes and batch of what the files are said to run; what is refused leaves no file."""
    exporter = exporter_of(framework)
    rng, written = random.Random(framework), 0
    for number in range(PLANS):
        sizes = rng.choice((DENSE, EXPERTS))
        plan = draw_decoder_plan(sizes, rng)
        out = tmp_path / str(number)
        try:
            result = export_plan(plan, make_job(sizes, plan), framework, out=out)
        except PlanError:
            assert not out.exists()
            continue
        written += 1
        run = result.exported.plan
        assert run == plan or result.exported.approximations
        path = out / exporter.read_back
        _, kind = find_kind(path, framework)
        again = kind.read_plan(path, make_given(kind.takes, plan, sizes, tmp_path))
        assert again.layers == run.layers
        assert again.recompute == run.recompute
        assert again.global_batch_size == run.global_batch_size
        for name in ("pp", "tp", "dp", "cp", "ep", "vpp", "mbs", "zero", "schedule", "optimizer_offload"):
            assert getattr(again.strategy, name) == getattr(run.strategy, name), (name, number)
    assert written, f"no plan was written for {framework}"


def make_given(takes: frozenset[str], plan: Plan, sizes: dict[str, Any], folder: Path) -> Given:
    """What a person says beside the files: the model, the devices, and what the files leave to the training's code."""
    model = folder / "model.json"
    kept = {
        key: value for key, value in sizes.items() if key not in ("seq-length", "hidden-dropout", "attention-dropout")
    }
    model.write_text(json.dumps(kept | {"padded-vocab-size": 512}))
    beside = {
        "seq_length": sizes["seq-length"],
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.strategy.mbs,
    }
    said = {key: value for key, value in beside.items() if key in takes}
    return Given(model, world_size=plan.strategy.world_size, **said)


@pytest.mark.parametrize("framework", EXPORTERS)
def test_the_files_of_a_plan_tell_its_step_and_peak(framework: str, tmp_path: Path) -> None:
    """With --job, of what the files do by themselves."""
    rng = random.Random(7)
    for number in range(PLANS):
        plan = draw_decoder_plan(DENSE, rng)
        try:
            result = export_plan(plan, make_job(DENSE, plan), framework, out=tmp_path / str(number))
        except PlanError:
            continue
        assert "ms a step" in result.header[0]
        assert any(result.header[0] in path.read_text() for path in result.files)
        return
    pytest.fail(f"none of {PLANS} plans was written for {framework}")


@pytest.mark.parametrize("feature", FEATURES)
def test_a_plan_is_said_to_have_its_feature(feature: str) -> None:
    plan = FEATURED[feature]
    found = list_features(plan, None)
    assert feature in found
    assert set(found) <= set(FEATURES)
