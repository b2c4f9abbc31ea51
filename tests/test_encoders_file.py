"""`encoders` of a PROBLEM.json: what is accepted, what it means, and how a mistake is told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.encoders_file import read_any_problem
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.problem_file import problem_document, read_problem

Document = dict[str, Any]


@pytest.fixture
def write(repository: Path, tmp_path: Path) -> Callable[..., Path]:
    """The example with its encoder, or its only one's keys, changed."""

    def written(*encoders: Document, **changes: Any) -> Path:
        document = json.loads((repository / "examples" / "place" / "encoders.json").read_text())
        if encoders:
            document["encoders"] = [document["encoders"][0] | each for each in encoders]
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(document | changes))
        return path

    return written


def test_the_guide_shows_the_example(repository: Path) -> None:
    page = (repository / "docs" / "guide" / "bubbles.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert json.loads(shown) == json.loads((repository / "examples" / "place" / "encoders.json").read_text())


def test_devices_of_encoders(write: Callable[..., Path]) -> None:
    """On the decoder's devices from the last back, the next encoder one further on; own ones lie behind."""
    own = {"name": "own", "devices": "own", "num_stages": 2, "num_pipelines": 2, "forward_ms": [1.0, 2.0]}
    problem = read_any_problem(write({}, {"name": "audio", "num_stages": 2}, own, own | {"name": "more"}))
    assert isinstance(problem, EncodedProblem)
    vision, audio, first, second = problem.encoders
    assert vision.pipelines == ((3,), (2,), (1,), (0,))
    assert audio.pipelines == ((0, 1), (2, 3))
    assert (first.pipelines, second.pipelines) == (((6, 7), (4, 5)), ((10, 11), (8, 9)))
    assert (audio.forward_ms, first.forward_ms) == ((12.0, 12.0), (1.0, 2.0))
    assert problem.num_devices == 12


def test_a_file_without_encoders_is_what_it_was(write: Callable[..., Path], repository: Path) -> None:
    path = repository / "examples" / "place" / "problem.json"
    assert read_any_problem(path) == read_problem(path)
    assert isinstance(read_any_problem(path), Problem)
    with pytest.raises(JobError, match="has encoders, and `place` alone plans these"):
        read_problem(write())


def test_a_job_with_encoders_is_a_document_too(write: Callable[..., Path], tmp_path: Path) -> None:
    """As planning has it: a Problem with passes beside it. Its document reads back as the same numbers."""
    read = read_any_problem(write({}, {"name": "audio", "run": "prefetch", "backward_ms": 0.0}))
    assert isinstance(read, EncodedProblem)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(problem_document(replace(read.decoder, encoders=read.encoders))))
    assert read_any_problem(path) == read


@pytest.mark.parametrize("more", [{"pieces": 3}, {"first_stage": 2}, {"pieces": 2, "first_stage": 1}])
def test_pieces_and_the_stage_that_is_met_read_back(write: Callable[..., Path], tmp_path: Path, more: Document) -> None:
    read = read_any_problem(write(more))
    assert isinstance(read, EncodedProblem)
    (encoder,) = read.encoders
    pieces, first = more.get("pieces", 1), more.get("first_stage", 0)
    assert encoder.pipelines == tuple((device,) * pieces for device in range(3, first - 1, -1))
    assert sum(encoder.forward_ms) == pytest.approx(12.0)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(problem_document(replace(read.decoder, encoders=read.encoders))))
    assert read_any_problem(path) == read


def test_encoders_meet_one_stage(write: Callable[..., Path]) -> None:
    path = write({}, {"name": "audio", "first_stage": 1})
    with pytest.raises(JobError, match=r"meet the decoder at the stages 0 and 1; encoders .* need one first_stage"):
        read_any_problem(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forward_ms": -1.0}, r"encoders\[0\].forward_ms"),
        ({"forwards_ms": 1.0}, "forward_ms"),
        ({"num_stages": 3}, "does not divide the decoder's num_stages, 4"),
        ({"num_stages": 2, "forward_ms": [1.0]}, r"encoders\[0\].forward_ms has 1 entries"),
        ({"num_pipelines": 2}, r'num_pipelines is of encoders with devices "own"'),
        ({"memory_limit_bytes": 1e9}, "memory_limit_bytes is of encoders"),
        ({"devices": "own", "num_pipelines": 9}, "num_pipelines is 9, and it runs 8 passes a step"),
        ({"prefetch_depth": 2}, 'prefetch_depth is of run "prefetch"'),
        ({"read_ms_per_byte": 1e-9}, 'read_ms_per_byte is of run "cached"'),
        ({"run": "prefetch"}, "freeze it"),
        ({"follows": "audio"}, "follows 'audio'; other encoders are none"),
        ({"most_ahead": 0}, "most_ahead"),
        ({"first_stage": 4}, r"first_stage is 4; stages of the decoder are 0 to 3"),
        ({"first_stage": 1, "num_stages": 2}, "does not divide the 3 stages of the decoder from first_stage 1 on"),
        ({"pieces": 2, "num_stages": 2}, "passes of one stage on the decoder's devices are cut into pieces"),
        ({"pieces": 2, "devices": "own"}, "passes of one stage on the decoder's devices are cut into pieces"),
        ({"pieces": 2, "forward_ms": [1.0, 2.0, 3.0]}, "forward_ms has 3 entries; pieces is 2"),
    ],
)
def test_mistakes_in_an_encoder(changes: Document, words: str, write: Callable[..., Path]) -> None:
    path = write(changes)
    with pytest.raises(JobError, match=words) as failure:
        read_any_problem(path)
    assert str(path) in str(failure.value)
    assert "\n" not in str(failure.value)


def test_mistakes_among_encoders(write: Callable[..., Path]) -> None:
    a, b = {"name": "a", "follows": "b"}, {"name": "b", "follows": "a"}
    for encoders, words in (
        ([{}, {}], "two encoders are called 'vision'"),
        ([a, b], "never ends at a first one"),
        ([{}, {"name": "a", "follows": "vision", "microbatches_per_pass": 2}], "one microbatches_per_pass"),
        ([{}, {"name": "a", "follows": "vision", "backward_ms": 0.0}], "gradients pass through it"),
        ([{}, {"name": "a", "follows": "vision", "most_ahead": 1}], "cap them there"),
        ([{}, *({"name": name, "follows": "vision"} for name in "ab")], "both follow"),
    ):
        with pytest.raises(JobError, match=words):
            read_any_problem(write(*encoders))
    with pytest.raises(JobError, match="schedule zb_h1 parts or pairs backwards"):
        read_any_problem(write(schedule="zb_h1"))
    with pytest.raises(JobError, match="encoders"):
        read_any_problem(write(encoders=[]))
