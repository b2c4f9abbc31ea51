"""Recompute and depth on configuration objects: attributes for model.json's keys, as MindSpeed-MM makes them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.mindspeed_mm.arguments import (
    find_argument,
    find_count,
    planned_arguments,
    profile_arguments,
)
from mm_autoparallel.integrations.mindspeed_mm.live_config import cut_model, recompute_of_stage
from mm_autoparallel.integrations.mindspeed_mm.plan_files import model_json_with_plan
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan


class Config:
    """Keys as attributes, mappings as further objects of the kind, null as None; to_dict gives all of it back."""

    def __init__(self, content: dict[str, Any]) -> None:
        for key, value in content.items():
            setattr(self, key, Config(value) if isinstance(value, dict) else value)

    def to_dict(self) -> dict[str, Any]:
        return {key: value.to_dict() if isinstance(value, Config) else value for key, value in vars(self).items()}


def settings(part: Any) -> tuple[Any, ...]:
    """Settings that a part lacks are off, as null is."""
    return tuple(getattr(part, f"recompute_{key}", None) for key in ("granularity", "method", "num_layers"))


@pytest.fixture
def config(model_json: Path) -> Config:
    return Config(json.loads(model_json.read_text()))


@pytest.mark.parametrize(("stage", "text"), [(0, ("full", "block", 4)), (1, ("full", "block", 1))])
@pytest.mark.parametrize("written", [False, True])
def test_each_stage_gets_its_own_number(
    config: Config, model_json: Path, tiny_plan: Plan, stage: int, text: tuple[Any, ...], written: bool
) -> None:
    """From the plan, and from the model.json that it was written into."""
    if written:
        config = Config(json.loads(model_json_with_plan(tiny_plan, model_json)))
    before = settings(config.text_decoder)
    with recompute_of_stage(config, stage, plan=None if written else tiny_plan) as numbers:
        built = copy.deepcopy(config)
    assert settings(built.text_decoder) == text
    assert settings(built.image_encoder.vision_encoder) == (None, None, None)
    assert numbers == ({"text": text[2]} if written else {"vision": 0, "text": text[2]})
    assert settings(config.text_decoder) == before


def test_each_chunk_gets_its_own_number(config: Config, model_json: Path) -> None:
    plan = Plan(
        Strategy(pp=2, tp=1, dp=1, mbs=1, vpp=2),
        layers={"vision": (3, 3, 0, 0), "text": (0, 1, 4, 5)},
        recompute={"vision": (1, 2, 0, 0), "text": (0, 1, 3, 4)},
        global_batch_size=4,
    )
    written = Config(json.loads(model_json_with_plan(plan, model_json)))
    for model, given in ((config, plan), (written, None)):
        found = {}
        for stage in (0, 1):
            for chunk in (0, 1):
                with recompute_of_stage(model, stage, chunk, given) as numbers:
                    found[chunk, stage] = (numbers["vision"], numbers["text"])
        assert found == {(0, 0): (1, 0), (0, 1): (2, 1), (1, 0): (0, 3), (1, 1): (0, 4)}


def test_without_a_plan_nothing_is_touched(config: Config) -> None:
    before = copy.deepcopy(config).to_dict()
    with recompute_of_stage(config, 5, 7) as numbers:
        assert numbers == {}
        assert config.to_dict() == before
    assert config.to_dict() == before


def test_what_was_there_comes_back_after_a_failure(config: Config, tiny_plan: Plan) -> None:
    with pytest.raises(ZeroDivisionError), recompute_of_stage(config, 1, plan=tiny_plan):
        _ = 1 / 0
    assert settings(config.text_decoder) == ("full", "uniform", 1)


@pytest.mark.parametrize(("stage", "chunk"), [(2, 0), (0, 1), (-1, 0)])
def test_a_stage_that_the_plan_lacks(config: Config, tiny_plan: Plan, stage: int, chunk: int) -> None:
    with (
        pytest.raises(PlanError, match=f"builds stage {stage}, chunk {chunk}, and the plan has 2 stages of 1 chunks"),
        recompute_of_stage(config, stage, chunk, tiny_plan),
    ):
        raise AssertionError


def test_parts_that_are_not_there(tiny_plan: Plan) -> None:
    config = Config({"image_encoder": None, "text_decoder": {"num_layers": 10}})
    with recompute_of_stage(config, 1, plan=tiny_plan) as numbers:
        assert numbers == {"text": 1}


def test_a_model_that_is_cut(config: Config) -> None:
    cut_model(config, {"vision": 2, "text": 3})
    vision, text = config.image_encoder.vision_encoder, config.text_decoder
    assert (vision.num_layers, vision.pipeline_num_layers) == (2, [2])
    assert (text.num_layers, text.pipeline_num_layers) == (3, [3])
    assert settings(text) == (None, None, None)
    cut_model(config, {"text": 1})
    assert (vision.num_layers, text.num_layers) == (2, 1)


ARGUMENTS = [
    *("--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size=8", "--micro-batch-size", "1", "--bf16"),
    *("--global-batch-size", "16", "--mm-model", "old.json", "--use-distributed-optimizer", "--load", "checkpoint"),
    *("--virtual-pipeline-model-parallel-size", "2", "--lora-target-modules", "a", "b"),
]


def test_arguments_under_a_plan(tiny_plan: Plan) -> None:
    found = planned_arguments(ARGUMENTS, tiny_plan, Path("new.json"), frozen_stage=True)
    values = {flag: find_argument(found, flag) for flag in found if flag.startswith("--") and "size" in flag}
    assert values == {
        "--pipeline-model-parallel-size": "2",
        "--tensor-model-parallel-size": "2",
        "--context-parallel-size": "1",
        "--micro-batch-size": "2",
        "--global-batch-size": "64",
    }
    assert find_argument(found, "--mm-model") == "new.json"
    assert found[:6] == ["--bf16", "--load", "checkpoint", "--lora-target-modules", "a", "b"]
    assert found[-4:] == [
        "--use-distributed-optimizer",
        "--sequence-parallel",
        "--variable-seq-lengths",
        "--enable-dummy-optimizer",
    ]
    with pytest.raises(JobError, match="--hetero-parallel, which gives every part"):
        planned_arguments([*ARGUMENTS, "--hetero-parallel"], tiny_plan, Path("new.json"), frozen_stage=False)


def test_arguments_of_a_profile() -> None:
    found = profile_arguments([*ARGUMENTS, "--sequence-parallel"], world_size=3)
    assert find_count(found, "--global-batch-size") == 3
    assert find_count(found, "--train-iters") == 5
    assert find_argument(found, "--eval-iters") == "0"
    assert find_count(found, "--pipeline-model-parallel-size") == 1
    assert not {"--load", "checkpoint", "--virtual-pipeline-model-parallel-size", "--sequence-parallel"} & set(found)


def test_arguments_that_are_looked_up() -> None:
    assert find_argument(["--a", "1", "--a=2"], "--a") == "2"
    assert find_argument(["--ab", "1"], "--a") is None
    for arguments, message in (([], "--n is missing"), (["--n", "0"], "--n is 0"), (["--n", "x"], "--n is x")):
        with pytest.raises(JobError, match=message):
            find_count(arguments, "--n")
    with pytest.raises(JobError, match="is the last of the script's arguments"):
        find_argument(["--n"], "--n")
