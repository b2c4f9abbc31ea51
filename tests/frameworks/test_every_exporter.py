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
from mm_autoparallel.planner.bare_plan import read_bare_plan
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


@pytest.mark.parametrize("framework", EXPORTERS)
@pytest.mark.parametrize(
    "choice",
    [
        {"schedule": "gpipe"},
        {"schedule": "interleaved_1f1b"},
        {"schedule": "interleaved_1f1b_low_memory"},
        {"tp_overlap": "none"},
        {"tp_overlap": "user_buffers", "sequence_parallel": False},
        {"zero": 3, "shard": 1},
    ],
)
def test_a_choice_that_files_do_not_say_is_refused(framework: str, choice: dict[str, Any], tmp_path: Path) -> None:
    """Of plans that a person changed too, and that no job holds against anything."""
    rng, plans = random.Random(3), dict[int, Plan]()
    while len(plans) < 3:
        plan = draw_decoder_plan(DENSE, rng)
        if plan.strategy.vpp == 1:
            plans.setdefault(plan.strategy.pp, plan)
    for pp, plan in plans.items():
        changed = replace(plan, strategy=replace(plan.strategy, **choice))
        try:
            result = export_plan(changed, None, framework, out=tmp_path / str(pp))
        except PlanError:
            assert not (tmp_path / str(pp)).exists()
            continue
        assert result.exported.plan == changed or result.exported.approximations


@pytest.mark.parametrize(
    ("schedule", "zero", "message"),
    [("1F1B", 1, "schedule '1F1B' is not known; known are gpipe, 1f1b, "), ("1f1b", 5, "ZeRO 5 is not understood")],
)
def test_what_nobody_knows_is_named(schedule: str, zero: int, message: str, tmp_path: Path) -> None:
    """In a plan by itself too."""
    document = {
        "parallel_config": {"PP": 1, "TP": 1, "DP": 1, "MBS": 1, "ZERO": zero},
        "layer_placement": {"llm_layer_placement": [4]},
        "layer_recompute": {"llm_layer_recompute": [0]},
        "schedule": schedule,
        "global_batch_size": 4,
    }
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match=message):
        read_bare_plan(tmp_path / "plan.json")


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
