"""MindSpeed-MM's --hetero-parallel: an encoder with sizes of its own, written into both files and read back."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_mindspeed_mm_plan_files import changes

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import import_launch
from mm_autoparallel.errors import JobError, PlanError, PlannerError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.launch_script import read_launch_script
from mm_autoparallel.integrations.mindspeed_mm.plan_files import read_plan_back
from mm_autoparallel.integrations.mindspeed_mm.plan_law import check_plan
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.model_file import read_model
from mm_autoparallel.planner.plan import Plan


def make_plan(
    pp: int = 2, tp: int = 2, dp: int = 4, mbs: int = 2, *, encoder: tuple[int, int, int] = (1, 16, 1), **more: Any
) -> Plan:
    """encoder: TP, DP and MBS. Ten text layers on two stages."""
    layout = Arrangement("colocated", "phases" if pp > 1 else "inline", ModuleLayout("vision", 1, *encoder))
    return Plan(
        Strategy(pp=pp, tp=tp, dp=dp, mbs=mbs, arrangement=layout, **more),
        layers={"vision": (0,) * pp if pp > 1 else (6,), "text": (4, 6) if pp == 2 else (10,)},
        recompute={"vision": (0,) * pp, "text": (1, 1) if pp == 2 else (1,)},
        global_batch_size=64,
    )


def test_both_files_get_the_layout(model_json: Path, launch_script: Path) -> None:
    """Sizes of modules in model.json, 1 in the script, whose batch counts all 16 devices as replicas."""
    before = model_json.with_suffix(".before")
    before.write_text(model_json.read_text())
    plan = make_plan(encoder=(2, 8, 2))
    result = export_plan(plan, None, "mindspeed-mm", into=(launch_script, model_json))
    document = json.loads(model_json.read_text())
    assert {key: document["image_encoder"][key] for key in ("tp", "pp", "cp")} == {"tp": 2, "pp": 1, "cp": 1}
    assert {key: document["text_decoder"][key] for key in ("tp", "pp", "cp")} == {"tp": 2, "pp": 2, "cp": 1}
    assert document["image_encoder"]["vision_encoder"]["pipeline_num_layers"] == [6]
    assert document["text_decoder"]["pipeline_num_layers"] == [4, 6]
    assert len(changes(before, model_json)) < 30
    script = read_launch_script(launch_script)
    for name in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"):
        assert script.evaluate(script.values(name)[-1].text) == 1
    assert script.evaluate(script.values("--global-batch-size")[-1].text) == 64 * 4
    assert script.has_flag("--hetero-parallel")
    assert script.has_flag("--sequence-parallel")
    assert script.values("--hetero-encoder-mbs-scale")[-1].text == "2"
    assert any("needs MindSpeed-MM 26.0" in told for told in result.exported.notes)
    assert any("every sample needs exactly one" in told for told in result.exported.notes)
    assert result.exported.plan == plan
    assert read_plan_back(model_json, launch_script, 16) == plan


@pytest.mark.parametrize("encoder", [(1, 16, 1), (4, 4, 4)])
def test_beside_one_stage_it_runs_in_every_micro_batch(
    encoder: tuple[int, int, int], model_json: Path, launch_script: Path
) -> None:
    plan = make_plan(1, 2, 8, 2, encoder=encoder)
    export_plan(plan, None, "mindspeed-mm", into=(launch_script, model_json))
    assert not read_launch_script(launch_script).has_flag("--hetero-encoder-mbs-scale")
    assert read_plan_back(model_json, launch_script, 16) == plan


def test_equal_sizes_are_the_chain(model_json: Path, launch_script: Path) -> None:
    export_plan(make_plan(1, 2, 8, 2, encoder=(1, 16, 1)), None, "mindspeed-mm", into=(launch_script, model_json))
    document = json.loads(model_json.read_text())
    document["image_encoder"]["tp"] = 2
    model_json.write_text(json.dumps(document))
    assert read_plan_back(model_json, launch_script, 16).strategy.arrangement is None


def test_drawn_layouts_come_back(model_json: Path, launch_script: Path, checkout: Path) -> None:
    """Written into the files of the one before: whatever stood there is replaced."""
    rng, written = random.Random(5), 0
    for number in range(60):
        tp, width = rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
        decoder_dp, mbs, scale = 16 // (2 * tp), rng.choice((1, 2)), rng.choice((1, 2, 4))
        samples, replicas = decoder_dp * mbs * scale, 16 // width
        first = rng.randint(1, 9)
        if samples % replicas:
            continue
        plan = make_plan(2, tp, decoder_dp, mbs, encoder=(width, replicas, samples // replicas))
        plan = replace(
            plan,
            layers={**plan.layers, "text": (first, 10 - first)},
            strategy=replace(plan.strategy, zero=rng.choice((0, 1))),
        )
        out = checkout / "drawn"
        export_plan(plan, None, "mindspeed-mm", into=(launch_script, model_json), out=out, overwrite=True)
        written += 1
        assert read_plan_back(out / "model.json", out / "train.sh", 16) == plan, number
    assert written > 20


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (make_plan(1, 2, 8, 1, encoder=(1, 16, 1)), "and is 1 beside one stage"),
        (make_plan(2, 2, 4, encoder=(1, 16, 1), schedule="gpipe"), "its schedule is gpipe"),
        (make_plan(encoder=(1, 16, 3)), "makes that a whole number of the decoder's micro-batches"),
        (make_plan(encoder=(1, 16, 8)), "which divides the 8 of a step"),
        (make_plan(zero=2), "ZeRO stage 2"),
        (make_plan(1, 2, 8, 1, encoder=(1, 16, 1), zero=3), "ZeRO 3: torch FSDP2 wraps whole models"),
        (replace(make_plan(), layers={"vision": (0, 0), "text": (4, 5)}), "places 9 text layers"),
    ],
)
def test_what_cannot_run_is_refused(plan: Plan, told: str, model_json: Path, launch_script: Path) -> None:
    if "divides the 8" in told:  # 128 samples a call are 16 micro-batches, and a step has 8
        assert plan.num_microbatches == 8
    before = model_json.read_bytes(), launch_script.read_bytes()
    with pytest.raises(PlanError, match=told):
        export_plan(plan, None, "mindspeed-mm", into=(launch_script, model_json))
    assert (model_json.read_bytes(), launch_script.read_bytes()) == before


@pytest.mark.parametrize(
    "layout",
    [
        Arrangement("disaggregated", "inline", ModuleLayout("vision", 1, 1, 4, 2)),
        Arrangement("colocated", "recomputed_phases", ModuleLayout("vision", 1, 1, 16, 1)),
        Arrangement("colocated", "bubbles", ModuleLayout("vision", 1, 1, 4, 2)),
    ],
)
def test_other_layouts_are_refused_by_name(layout: Arrangement, model_json: Path, launch_script: Path) -> None:
    plan = make_plan()
    plan = replace(plan, strategy=replace(plan.strategy, arrangement=layout))
    with pytest.raises(PlanError, match=f"its layout is {layout.name}"):
        export_plan(plan, None, "mindspeed-mm", into=(launch_script, model_json))


def test_an_encoder_that_trains_is_refused(model_json: Path, launch_script: Path) -> None:
    model_json.write_text(model_json.read_text().replace('"freeze": true,', '"freeze": false,', 1))
    with pytest.raises(PlanError, match="runs encoders forward only"):
        export_plan(make_plan(), None, "mindspeed-mm", into=(launch_script, model_json))


def test_scripts_that_train_under_a_plan_are_told_of_chains_alone(model_json: Path) -> None:
    """As the hook and the YAML of all arguments ask."""
    with pytest.raises(PlanError, match="is told of the chain alone"):
        check_plan(make_plan(), read_model(model_json), model_json)


def test_a_chain_is_not_written_beside_the_switch(model_json: Path, launch_script: Path, tiny_plan: Plan) -> None:
    export_plan(make_plan(), None, "mindspeed-mm", into=(launch_script, model_json))
    with pytest.raises(JobError, match="--hetero-parallel, which gives every part"):
        export_plan(tiny_plan, None, "mindspeed-mm", into=(launch_script, model_json))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"tp": 1, "pp": 1', '"tp": 1, "pp": 2', "planned is an encoder that is whole"),
        ('"tp": 2, "pp": 2', '"tp": "2", "pp": 2', 'text_decoder.tp is "2"'),
        ('"tp": 2, "pp": 2', '"tp": 3, "pp": 2', "16 is no multiple of both"),
        ('"pipeline_num_layers": [6]', '"pipeline_num_layers": [5, 1]', r"so \[6\] is expected"),
    ],
)
def test_broken_files_are_named(old: str, new: str, told: str, model_json: Path, launch_script: Path) -> None:
    export_plan(make_plan(), None, "mindspeed-mm", into=(launch_script, model_json))
    document = json.loads(model_json.read_text())
    text = json.dumps(document)
    assert old in text
    model_json.write_text(text.replace(old, new))
    with pytest.raises(PlannerError, match=told):
        read_plan_back(model_json, launch_script, 16)


def test_a_script_is_imported_with_its_layout(model_json: Path, launch_script: Path, checkout: Path) -> None:
    """As a job whose step has the batch that MindSpeed-MM divides, and the plan that it runs under."""
    (checkout / "mindspeed_mm").mkdir()
    (checkout / "pretrain_vlm.py").touch()
    plan = make_plan()
    export_plan(plan, None, "mindspeed-mm", into=(launch_script, model_json))
    found = import_launch(launch_script, device="ascend-910b-64g", given=Given(image_tokens=256))
    assert found.job.workload.global_batch_size == 64
    assert found.job.search.layouts == ("chain", "colocated")
    assert found.estimate.plan == plan
    assert any("counts every device as a replica" in note for note in found.notes)
