"""`export --to mindspeed-mm --into model.json script`: both files get the plan, and nothing that they cannot say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from featured_plans import NEED_EXPERTS, PLANS
from test_mindspeed_mm_plan_files import changes

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.features import FEATURES
from mm_autoparallel.integrations.mindspeed_mm.plan_files import read_plan_back
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan


def test_both_files_get_the_plan_in_place(model_json: Path, launch_script: Path, tiny_plan: Plan) -> None:
    before = model_json.with_suffix(".before")
    before.write_text(model_json.read_text())
    result = export_plan(tiny_plan, None, "mindspeed-mm", into=(launch_script, model_json))
    assert set(result.files) == {model_json, launch_script}
    assert changes(before, model_json)[2:4] == [
        '+        "pipeline_num_layers": [4, 6],',
        '+        "pipeline_recompute_num_layers": [4, 1],',
    ]
    assert result.exported.plan.recompute["text"] == (4, 4)
    assert any("recompute of text differs" in told for told in result.exported.approximations)
    again = read_plan_back(model_json, launch_script, tiny_plan.strategy.world_size)
    assert (again.layers, again.recompute) == (tiny_plan.layers, tiny_plan.recompute)
    assert "./examples/tiny/model.json" in launch_script.read_text()


def test_elsewhere_the_script_names_the_planned_model(
    model_json: Path, launch_script: Path, checkout: Path, tiny_plan: Plan
) -> None:
    out = checkout / "planned"
    result = export_plan(tiny_plan, None, "mindspeed-mm", into=(model_json, launch_script), out=out)
    assert result.files == (out / "model.json", out / "train.sh")
    assert 'MM_MODEL="./planned/model.json"' in (out / "train.sh").read_text()
    assert 'MM_MODEL="./examples/tiny/model.json"' in launch_script.read_text()


def test_new_files_are_not_made_up(tiny_plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"--into model\.json pretrain\.sh"):
        export_plan(tiny_plan, None, "mindspeed-mm", out=tmp_path / "out")


def test_a_plan_of_another_model_changes_nothing(model_json: Path, launch_script: Path, tiny_plan: Plan) -> None:
    before = model_json.read_bytes(), launch_script.read_bytes()
    other = replace(tiny_plan, layers={**tiny_plan.layers, "text": (4, 5)})
    with pytest.raises(PlannerError):
        export_plan(other, None, "mindspeed-mm", into=(model_json, launch_script))
    assert (model_json.read_bytes(), launch_script.read_bytes()) == before


def test_every_feature_is_accounted_for(model_json: Path, launch_script: Path, checkout: Path) -> None:
    """As test_every_exporter has it, for a model with the layers of these plans."""
    provider = frameworks()["mindspeed-mm"].exporter
    assert provider is not None
    exporter, found = provider(), {}
    whole = model_json.read_text()
    for feature, plan in PLANS.items():
        if feature in NEED_EXPERTS:  # which this model has none of
            continue
        text = whole.replace('"num_layers": 10', '"num_layers": 24').replace('"num_layers": 6', '"num_layers": 4')
        model_json.write_text(text.replace('"pipeline_num_layers": [6, 0]', '"pipeline_num_layers": [4]'))
        vision = plan.layers.get("vision", (4, *[0] * (len(plan.layers["text"]) - 1)))
        layers = {"vision": vision, "text": plan.layers["text"]}
        recompute = {"vision": (0,) * len(vision), "text": plan.recompute["text"]}
        shown = replace(plan, layers=layers, recompute=recompute)
        if feature == "layout":  # the one that MindSpeed-MM runs
            encoder = Arrangement("colocated", "phases", ModuleLayout("vision", 1, 1, 2, 1))
            nothing = {"vision": (0, 0), "text": (0, 0)}
            shown = Plan(Strategy(2, 1, 1, 1, arrangement=encoder), nothing | {"text": (12, 12)}, nothing, 16)
        try:
            exported = export_plan(
                shown, None, "mindspeed-mm", into=(model_json, launch_script), out=checkout / feature
            ).exported
        except PlannerError:
            found[feature] = "refused"
            continue
        found[feature] = "written" if exported.plan == shown else "rounded"
    assert found == {feature: exporter.handling(feature) for feature in FEATURES if feature not in NEED_EXPERTS}


def test_the_verb_takes_both_files(
    model_json: Path, launch_script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path / "none.json"), "--to", "mindspeed-mm", "--into", str(model_json)]) == 2
    assert "none.json" in capsys.readouterr().err
