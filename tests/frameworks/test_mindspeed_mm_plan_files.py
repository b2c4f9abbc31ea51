"""A plan in MindSpeed-MM's files: only what it decides changes, and it is read back as it was."""

from __future__ import annotations

import difflib
import itertools
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import write_text_atomically
from mm_autoparallel.integrations import export
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.json_text import set_json_value
from mm_autoparallel.integrations.mindspeed_mm.model_json import read_model_json
from mm_autoparallel.integrations.mindspeed_mm.plan_files import read_plan_back, write_plan
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

FIXTURES = Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_models"
DrawPlan = Callable[[Model, Strategy, int, random.Random], Plan]


def changes(before: Path, after: Path) -> list[str]:
    """Lines taken out and put in."""
    lines = difflib.unified_diff(before.read_text().splitlines(), after.read_text().splitlines(), n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]


def test_what_is_written(model_json: Path, launch_script: Path, checkout: Path, tiny_plan: Plan) -> None:
    written = write_plan(tiny_plan, model_json, launch_script, checkout / "planned")
    placed, script = written.files
    assert changes(model_json, placed) == [
        '-        "pipeline_num_layers": [4,',
        "-                                6],",
        '+        "pipeline_num_layers": [4, 6],',
        '+        "pipeline_recompute_num_layers": [4, 1],',
        '-        "recompute_method": "uniform",',
        '-        "recompute_num_layers": 1',
        '+        "recompute_method": "block",',
        '+        "recompute_num_layers": 4',
    ]
    assert changes(launch_script, script) == [
        '-MM_MODEL="./examples/tiny/model.json"',
        '+MM_MODEL="./planned/model.json"',
        "-TP=4",
        "+TP=2",
        "-MBS=1   # samples",
        "-GRAD_ACC_STEP=96",
        "+MBS=2   # samples",
        "+GRAD_ACC_STEP=8",
        "-    --pipeline-model-parallel-size ${PP} \\",
        "+    --pipeline-model-parallel-size ${PP} --sequence-parallel --variable-seq-lengths \\",
    ]
    assert script.stat().st_mode == launch_script.stat().st_mode
    gradients, approximation = written.approximations
    assert "MindSpeed-MM sums gradients" in gradients
    assert approximation.startswith("recompute of text differs between stages")


def test_the_written_script_passes_the_plan_to_the_trainer(
    model_json: Path, launch_script: Path, checkout: Path, tiny_plan: Plan
) -> None:
    """What the shell itself makes of the script, with a stand-in for torchrun."""
    (_, script) = write_plan(tiny_plan, model_json, launch_script, checkout / "planned").files
    fake = checkout / "bin" / "torchrun"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$@" > arguments.txt\n')
    fake.chmod(0o755)
    (checkout / "logs").mkdir()
    subprocess.run(
        ["bash", str(script)], cwd=checkout, env={"PATH": f"{fake.parent}:/usr/bin:/bin"}, check=True, timeout=30
    )
    words = (checkout / "arguments.txt").read_text().split()
    flags = {flag: value for flag, value in itertools.pairwise(words) if flag.startswith("--")}
    assert flags["--tensor-model-parallel-size"] == "2"
    assert flags["--micro-batch-size"] == "2"
    assert flags["--global-batch-size"] == "64"
    assert "--sequence-parallel" in words
    assert (checkout / flags["--mm-model"]).resolve() == (checkout / "planned" / "model.json").resolve()


@pytest.mark.parametrize("name", sorted(path.stem for path in FIXTURES.glob("*.json")))
@pytest.mark.parametrize("vpp", [1, 2])
def test_round_trip(
    name: str, vpp: int, launch_script: Path, checkout: Path, tmp_path: Path, draw_plan: DrawPlan
) -> None:
    """Plan → files → plan is the identity, and writing it once more changes nothing."""
    model_json = checkout / "examples" / "tiny" / f"{name}.json"
    shutil.copy(FIXTURES / f"{name}.json", model_json)
    model, rng = read_model_json(model_json), random.Random(name)
    sizes = [each for each in itertools.product((1, 2, 4), (1, 2), (1, 2), (0, 1)) if each[0] > 1 or vpp == 1]
    for pp, tp, mbs, zero in rng.sample(sizes, 6):
        plan = draw_plan(model, Strategy(pp=pp, tp=tp, dp=2, mbs=mbs, vpp=vpp, zero=zero), 64, rng)
        out = tmp_path / f"{pp}-{tp}-{mbs}-{zero}"
        first = write_plan(plan, model_json, launch_script, out)
        assert read_plan_back(*first.files, world_size=plan.strategy.world_size) == plan
        texts = [path.read_bytes() for path in first.files]
        again = write_plan(plan, *first.files, out)
        assert [path.read_bytes() for path in again.files] == texts
        before, after = (json.loads(path.read_text()) for path in (model_json, first.files[0]))
        for document in (before, after):
            for part in (document["image_encoder"]["vision_encoder"], document["text_decoder"]):
                for key in [key for key in part if key.startswith(("pipeline_", "recompute_"))]:
                    del part[key]
            audio = document.get("audio_encoder", {}).get("audio_encoder", {})
            for key in [key for key in audio if key.startswith(("pipeline_", "recompute_"))]:
                del audio[key]
        assert after == before
        assert list(after) == list(before)


def test_a_plan_that_was_edited_reads_back_edited(
    model_json: Path, launch_script: Path, checkout: Path, tiny_plan: Plan
) -> None:
    """The files are the truth: what stands in them is read, not what was written."""
    placed, script = write_plan(tiny_plan, model_json, launch_script, checkout / "planned").files
    placed.write_text(placed.read_text().replace("[4, 6]", "[5, 5]"))
    script.write_text(script.read_text().replace("GRAD_ACC_STEP=8", "GRAD_ACC_STEP=16"))
    found = read_plan_back(placed, script)
    assert found == replace(tiny_plan, layers=dict(tiny_plan.layers) | {"text": (5, 5)}, global_batch_size=128)


def test_preference_training_is_not_one_model(model_json: Path, launch_script: Path, tiny_plan: Plan) -> None:
    launch_script.write_text(launch_script.read_text().replace("--bf16", "--bf16 --dpo-beta 0.1"))
    with pytest.raises(JobError, match=r"train\.sh: it passes --dpo-beta, which belongs to preference training"):
        write_plan(tiny_plan, model_json, launch_script, launch_script.parent, overwrite=True)


def test_experts_whose_exchange_takes_no_stages(model_json: Path, launch_script: Path, tiny_plan: Plan) -> None:
    document = json.loads(model_json.read_text())
    document["text_decoder"] |= {"num_moe_experts": 4}
    model_json.write_text(json.dumps(document))
    text = launch_script.read_text()
    launch_script.write_text(text.replace(" --moe-token-dispatcher-type alltoall", ""))
    with pytest.raises(PlanError, match="their token dispatcher is allgather, and Megatron refuses it"):
        write_plan(tiny_plan, model_json, launch_script, launch_script.parent, overwrite=True)
    launch_script.write_text(text)
    written = write_plan(tiny_plan, model_json, launch_script, launch_script.parent, overwrite=True)
    assert "--variable-seq-lengths" in written.files[1].read_text()


def test_the_untouched_files_are_a_plan_as_well(model_json: Path, launch_script: Path) -> None:
    found = read_plan_back(model_json, launch_script)
    assert found.strategy == Strategy(pp=2, tp=4, dp=2, mbs=1, sequence_parallel=False)  # its flag is not there
    assert found.layers == {"vision": (6, 0), "text": (4, 6)}
    assert found.recompute == {"vision": (0, 0), "text": (4, 6)}
    assert found.global_batch_size == 192


def test_a_stage_without_anything_to_train_gets_an_empty_optimizer(
    model_json: Path, launch_script: Path, checkout: Path, tiny_plan: Plan
) -> None:
    alone = replace(tiny_plan, layers={"vision": (6, 0), "text": (0, 10)}, recompute={"vision": (0, 0), "text": (0, 0)})
    _, script = write_plan(alone, model_json, launch_script, checkout / "alone").files
    assert "--enable-dummy-optimizer" in script.read_text()
    model_json.write_text(
        model_json.read_text().replace(
            '"hidden_size": 64,\n                             "freeze": true', '"hidden_size": 64'
        )
    )
    _, script = write_plan(alone, model_json, launch_script, checkout / "projector").files
    assert "--enable-dummy-optimizer" not in script.read_text()


def test_in_place_only_where_asked(model_json: Path, launch_script: Path, tiny_plan: Plan) -> None:
    before = launch_script.read_text()
    with pytest.raises(JobError, match=r"model\.json is there already and holds something else"):
        write_plan(tiny_plan, model_json, launch_script, model_json.parent)
    assert launch_script.read_text() == before
    write_plan(tiny_plan, model_json, launch_script, model_json.parent, overwrite=True)
    assert 'MM_MODEL="./examples/tiny/model.json"' in launch_script.read_text()
    assert read_plan_back(model_json, launch_script) == tiny_plan
    assert sorted(path.name for path in model_json.parent.iterdir()) == ["model.json", "train.sh"]


@pytest.mark.parametrize("in_place", [False, True])
def test_both_files_or_neither(
    model_json: Path,
    launch_script: Path,
    tmp_path: Path,
    tiny_plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    in_place: bool,
) -> None:
    """The disk is full when the second file is written."""

    def write(path: Path, text: str, mode: int | None = None) -> None:
        if path.name == "train.sh":
            raise OSError(28, "No space left on device")
        write_text_atomically(path, text, mode)

    monkeypatch.setattr(export, "write_text_atomically", write)
    before = [path.read_text() for path in (model_json, launch_script)]
    out = model_json.parent if in_place else tmp_path / "out"
    with pytest.raises(OSError, match="No space left"):
        write_plan(tiny_plan, model_json, launch_script, out, overwrite=True)
    assert [path.read_text() for path in (model_json, launch_script)] == before
    assert in_place or not list(out.iterdir())


def test_a_folder_outside_the_checkout_is_named_whole(
    model_json: Path, launch_script: Path, tmp_path: Path, tiny_plan: Plan
) -> None:
    placed, script = write_plan(tiny_plan, model_json, launch_script, tmp_path / "elsewhere").files
    assert f'MM_MODEL="{placed}"' in script.read_text()


@pytest.mark.parametrize("sign", list(" ;&|()<>*?#~!{}[]^'\"$`\\\t\n\r\x1b\x7f\u00a0\u009b\u202e"))
def test_a_folder_that_a_shell_would_take_apart(
    model_json: Path, launch_script: Path, tmp_path: Path, tiny_plan: Plan, sign: str
) -> None:
    with pytest.raises(JobError, match="which a shell would take apart"):
        write_plan(tiny_plan, model_json, launch_script, tmp_path / f"my{sign}id")
    assert not (tmp_path / f"my{sign}id").exists()


def test_a_folder_of_other_letters(model_json: Path, launch_script: Path, tmp_path: Path, tiny_plan: Plan) -> None:
    placed, script = write_plan(tiny_plan, model_json, launch_script, tmp_path / "计划-1.0").files
    assert f'MM_MODEL="{placed}"' in script.read_text()


def test_another_family_of_model_files(tmp_path: Path, launch_script: Path, tiny_plan: Plan) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen2_vl"}')
    with pytest.raises(JobError, match=r"config\.json: it has no text_decoder, so it is no model\.json"):
        write_plan(tiny_plan, config, launch_script, tmp_path / "out")


def test_a_model_json_of_another_model(model_json: Path, launch_script: Path, tmp_path: Path, tiny_plan: Plan) -> None:
    model_json.write_text(model_json.read_text().replace('"num_layers": 10', '"num_layers": 12'))
    with pytest.raises(PlanError, match=r"places 10 text layers, and .* has 12; give the model\.json"):
        write_plan(tiny_plan, model_json, launch_script, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[4,\n                                6]",
            "[4, 6, 0]",
            r"pipeline_num_layers is a list of 3; a list of 2 whole",
        ),
        ("[4,\n                                6]", "[4, 7]", r"pipeline_num_layers sums to 11, and num_layers .* 10"),
        ('"full"', '"selective"', 'recomputes with granularity "selective"'),
        ('"recompute_num_layers": 1', '"recompute_num_layers": 2', 'method "uniform" and 2 layers'),
    ],
)
def test_files_that_are_no_plan(model_json: Path, launch_script: Path, old: str, new: str, message: str) -> None:
    assert old in model_json.read_text()
    model_json.write_text(model_json.read_text().replace(old, new))
    with pytest.raises(PlanError, match=message):
        read_plan_back(model_json, launch_script)


def test_a_world_that_only_the_machine_knows(model_json: Path, launch_script: Path, tiny_plan: Plan) -> None:
    launch_script.write_text(launch_script.read_text().replace("NNODES=2", "NNODES=$(cat hostfile | wc -l)"))
    with pytest.raises(JobError, match="give the world size"):
        read_plan_back(model_json, launch_script)
    assert read_plan_back(model_json, launch_script, world_size=32).strategy.dp == 4
    with pytest.raises(PlanError, match="12 devices are no whole number"):
        read_plan_back(model_json, launch_script, world_size=12)


def test_the_catalog_finds_it() -> None:
    files = frameworks()["mindspeed-mm"].plan_files()
    assert (files.model_file, files.write_plan, files.read_plan) == ("model.json", write_plan, read_plan_back)


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ('{"a": {"b": [1, [2]], "c": "}"}}', ("a", "b"), '{"a": {"b": 7, "c": "}"}}'),
        ('{"a": {"b": {}, "c": []}}', ("a", "new"), '{"a": {"b": {}, "new": 7, "c": []}}'),
        (
            '{\r\n  "a": {\r\n    "b": 1\r\n  }\r\n}',
            ("a", "n"),
            '{\r\n  "a": {\r\n    "b": 1,\r\n    "n": 7\r\n  }\r\n}',
        ),
        ('\ufeff{"a": {"b": -1e3, "x": "\\"{"}}', ("a", "x"), '\ufeff{"a": {"b": -1e3, "x": 7}}'),
    ],
)
def test_edits_of_json_text(text: str, path: tuple[str, ...], expected: str) -> None:
    assert set_json_value(text, path, 7, after="b") == expected
