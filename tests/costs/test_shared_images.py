"""Several encoders of the same images: what each is given to do, what comes of it, and who refuses them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.torch.read import PLANNED, read_planned
from mm_autoparallel.model.blocks.tokens import count_tokens
from mm_autoparallel.model.costs.away import handed_on_bytes
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan, decision_document, parse_plan

WIDTH = 512
_LAYERS = {"num_layers": 2, "hidden_size": WIDTH, "ffn_size": 2048, "num_heads": 8}


def tower(name: str, merge_tokens: int = 1, **layers: Any) -> dict[str, Any]:
    return {
        "name": name,
        "stem": {"type": "patches", "in_features": 588},
        "layers": _LAYERS | {"norm": "layer"} | layers,
        "projector": {"merge_tokens": merge_tokens, "layer_sizes": [WIDTH * merge_tokens, WIDTH]},
        "freeze": False,
    }


def content(*towers: dict[str, Any], image_tokens: int = 256, **workload: Any) -> dict[str, Any]:
    return {
        "model": {"encoders": [*towers], "text": {"vocab_size": 4096, "layers": _LAYERS | {"norm": "rms"}}},
        "cluster": {"num_nodes": 1, "devices_per_node": 4, "device": "a100-80g"},
        "workload": {"global_batch_size": 8, "seq_length": 1024, "image_tokens_per_sample": image_tokens} | workload,
        "search": {"failure_price": 0.0, "choice": "point"},
    }


def read(document: dict[str, Any]) -> Job:
    return parse_job(copy.deepcopy(document), Path("job.yaml"))


CLIP, SAM = tower("clip"), tower("sam", merge_tokens=4, num_layers=3)
BESIDE = {"clip": 192, "sam": 64}
PLAN = Plan(
    Strategy(2, 1, 2, 1),
    {"clip": (2, 0), "sam": (3, 0), "text": (0, 2)},
    {"clip": (0, 0), "sam": (0, 0), "text": (0, 0)},
    8,
)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clap": 192, "sam": 64}, 'clap names no encoder .did you mean "clip"'),
        ({"clip": 192}, "names clip and not sam; name all encoders of images"),
        ({"clip": 192, "sam": 65}, r"192 \+ 65 = 257 tokens of images.*is 256"),
        ({"clip": 253, "sam": 3}, "sam is 3, fewer than images_per_sample, 4"),
    ],
)
def test_tokens_that_do_not_part_an_image_are_refused(given: dict[str, int], words: str) -> None:
    with pytest.raises(JobError, match=words):
        read(content(CLIP, SAM, images_per_sample=4, encoder_tokens_per_sample=given))


def test_the_only_encoder_of_images_has_all_their_tokens() -> None:
    with pytest.raises(JobError, match="clip, the only encoder of images"):
        read(content(CLIP, encoder_tokens_per_sample={"clip": 256}))


def test_samples_say_patches_of_one_encoder() -> None:
    lengths = {"text_tokens": {"constant": 512}, "images": {"constant": 1}, "patches": {"constant": 256}}
    with pytest.raises(JobError, match="clip and sam encode the same images; leave samples out"):
        read(content(CLIP, SAM, samples=lengths))


def test_tokens_are_added_or_stand_side_by_side() -> None:
    added, beside = read(content(CLIP, SAM)), read(content(CLIP, SAM, encoder_tokens_per_sample=BESIDE))
    for job, clip, sam in ((added, 256, 256), (beside, 192, 64)):
        counts = [count_tokens(encoder, job.workload) for encoder in job.model.encoders]
        assert [(one.output_tokens, one.layer_tokens) for one in counts] == [(clip, clip), (sam, 4 * sam)]
        assert count_tokens(job.model.text, job.workload).layer_tokens == 1024


@pytest.mark.parametrize("strategy", [Strategy(1, 1, 4, 1), Strategy(2, 2, 1, 2), Strategy(1, 2, 2, 2)])
def test_each_block_is_that_of_a_model_with_one_of_them(strategy: Strategy) -> None:
    both = build_problem(CostModel(read(content(CLIP, SAM, encoder_tokens_per_sample=BESIDE))), strategy)
    alone = [
        build_problem(CostModel(read(content(one, image_tokens=BESIDE[one["name"]]))), strategy) for one in (CLIP, SAM)
    ]
    for problem, name in zip(alone, BESIDE, strict=True):
        mine = [block for block in problem.chain if block.modality == name]
        theirs = [block for block in both.chain if block.modality == name]
        assert mine
        for own, found in zip(mine, theirs, strict=True):
            for figure in ("forward_ms", "backward_ms", "static_bytes", "activation_bytes", "transient_bytes"):
                assert getattr(found, figure) == pytest.approx(getattr(own, figure)), (name, figure)
    # what crosses a cut between encoders and decoder is all that both made
    ready = [
        next(b.output_bytes for b in p.chain if b.name == f"{name}_post") for p, name in zip(alone, BESIDE, strict=True)
    ]
    last = next(block for block in both.chain if block.name == "sam_post")
    assert last.output_bytes == pytest.approx(sum(ready))


def test_what_each_module_hands_on() -> None:
    for given, tokens in (({}, {"clip": 256, "sam": 256}), ({"encoder_tokens_per_sample": BESIDE}, BESIDE)):
        costs = CostModel(read(content(CLIP, SAM, **given)))
        for name, number in tokens.items():
            alone = Arrangement("colocated", "phases", ModuleLayout(name, 1, 1, 4, 1))
            assert handed_on_bytes(costs, Strategy(2, 1, 2, 1, arrangement=alone)) == 2.0 * WIDTH * number


def test_a_plan_is_written_and_read(tmp_path: Path) -> None:
    job = read(content(CLIP, SAM))
    assert evaluate(job, PLAN).fits
    assert parse_plan(decision_document(PLAN), job, "plan").layers == PLAN.layers
    export_plan(PLAN, job, "torch", out=tmp_path)
    again = read_planned(read_document(tmp_path / PLANNED, "plan"), PLANNED)
    assert (again.layers, again.strategy) == (PLAN.layers, PLAN.strategy)


def test_encoders_named_out_of_turn_come_back_too(tmp_path: Path) -> None:
    """The file of a plan has vision first, whatever stands before it in the chain."""
    plan = replace(
        PLAN,
        layers={"sam": (3, 0), "vision": (1, 1), "text": (0, 2)},
        recompute={"sam": (0, 0), "vision": (0, 0), "text": (0, 0)},
    )
    export_plan(plan, None, "torch", out=tmp_path)
    again = read_planned(read_document(tmp_path / PLANNED, "plan"), PLANNED)
    assert list(again.layers) == ["sam", "vision", "text"]


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("torchtitan", "torchtitan's models have one vision_encoder"),
        ("megatron-core", "pipelines of megatron-core hold a decoder alone"),
        ("megatron-bridge", "pipelines of megatron-core hold a decoder alone"),
    ],
)
def test_frameworks_of_one_encoder_refuse_them(framework: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        export_plan(PLAN, read(content(CLIP, SAM)), framework, out=tmp_path)
    assert not [*tmp_path.iterdir()]
