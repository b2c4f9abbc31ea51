"""A job that leaves out what decides its step is answered twice, and one that states it once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job, read_job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.twice import answer_twice

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen2vl_7b_h200" / "job.yaml"
WORKLOAD = {"global_batch_size": 32, "seq_length": 4096, "image_tokens_per_sample": 2048, "length_spread_fraction": 0.0}
FREEZE = {"vision": True, "vision_projector": False, "text": False}
PLAN = Plan(
    Strategy(pp=2, tp=1, dp=4, mbs=1), {"vision": (32, 0), "text": (13, 15)}, {"vision": (0, 0), "text": (0, 0)}, 32
)


def make_job(freeze: dict[str, bool] | None, **workload: Any) -> Job:
    given = {name: value for name, value in (WORKLOAD | workload).items() if value is not None}
    document = {
        "model": "config.json",
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": "h200-141g"},
        "workload": given,
    }
    return parse_job(document if freeze is None else document | {"freeze": freeze}, EXAMPLE)


def test_what_is_stated_is_answered_once() -> None:
    job = make_job(FREEZE)
    assert job.unstated == ()
    assert answer_twice(job, evaluate(job, PLAN)) == ()


@pytest.mark.parametrize(
    ("job", "stated", "key"),
    [
        (make_job(None), make_job(FREEZE | {"vision": False}), "freeze.vision"),
        (
            make_job(FREEZE, image_tokens_per_sample=None),
            make_job(FREEZE, image_tokens_per_sample=2048),
            "workload.image_tokens_per_sample",
        ),
        (
            make_job(FREEZE, length_spread_fraction=None),
            make_job(FREEZE, length_spread_fraction=0.15),
            "workload.length_spread_fraction",
        ),
    ],
)
def test_the_other_answer_is_that_of_a_job_that_states_it(job: Job, stated: Job, key: str) -> None:
    (answer,) = answer_twice(job, evaluate(job, PLAN))
    other = evaluate(stated, PLAN)
    assert answer.key == key
    assert (answer.step_ms, answer.fits) == (other.step_ms, other.fits)
    assert answer.peak_memory_bytes == max(other.peak_memory_bytes)
    assert answer.words.startswith(f"{key} is not stated: taken is ")


def test_a_plan_that_cannot_run_under_the_other_reading_says_why() -> None:
    job = make_job(None)
    trained = replace(job, model=job.model.with_freeze({"vision": False}))
    estimate = evaluate(trained, replace(PLAN, recompute={"vision": (1, 0), "text": (0, 0)}))
    (answer,) = answer_twice(trained, estimate)
    assert (answer.taken, answer.other) == ("trained", "frozen")
    assert answer.step_ms is None
    assert "this plan cannot run" in answer.words


def test_costs_that_were_recorded_of_one_reading_alone_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(None)
    estimate = evaluate(job, PLAN)

    def refuse(*_: Any) -> None:
        raise ProfileError("model.sha256 is 656d2c12da0f…")

    monkeypatch.setattr("mm_autoparallel.planner.twice.evaluate", refuse)
    (answer,) = answer_twice(job, estimate)
    assert answer.step_ms is None
    assert answer.words == (
        "freeze.vision is not stated: taken is frozen; if trained: not known, for the costs that the job has are of "
        "frozen alone"
    )


def test_a_model_json_states_it_and_a_text_model_has_nothing_to_state() -> None:
    examples = EXAMPLE.parents[1]
    assert read_job(examples / "qwen2vl_72b" / "job.yaml").unstated == ("workload.length_spread_fraction",)
    assert read_job(examples / "moonlight_16b" / "job.yaml").unstated == ()


def test_the_hash_of_a_job_knows_nothing_of_it() -> None:
    assert make_job(None).sha256 == make_job({"vision": True}).sha256
